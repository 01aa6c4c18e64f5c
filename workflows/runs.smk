"""Suites: one job per method and world over all problems -> records -> tidy tables."""


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


rule collect:
    input:
        suite="config/{suite}.yaml",
        records=lambda wildcards: expand(
            "results/{suite}/records/simulated/{method}",
            suite=wildcards.suite,
            method=suite_methods(wildcards.suite),
        ),
    output:
        report("results/{suite}/runs.csv", category="simulated"),
        "results/{suite}/measurements.csv",
        multiext("results/{suite}/tables/methods", *SUFFIXES),
    log:
        "results/{suite}/logs/collect.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench collect {input.suite} {input.records} -o {params.folder} > {log} 2>&1"


rule smoke:
    input:
        "results/smoke/runs.csv",
        figures("smoke"),
