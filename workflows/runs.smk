"""Suites: one job per method and world over all problems -> records."""


rule bundle:
    input:
        suite="config/{suite}.yaml",
        methods=method_files,
    output:
        directory("results/{suite}/records/simulated/{method}"),
    log:
        "results/{suite}/logs/bundle_{method}.log",
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=lambda wildcards: code("run", method_files(wildcards)),
    shell:
        "rematbench run {input.suite} --method {wildcards.method} -o {output}"
        " --store results/{wildcards.suite}/cells > {log} 2>&1"


rule smoke:
    input:
        "results/smoke/tables/runs.csv",
        figures("smoke"),
