"""Committed records made again: where torch and the packages are installed, one cell and one point
of a baseline."""


rule retrace:
    input:
        suite="config/traced.yaml",
        method=RETRACED_METHOD,
        record=f"results/measured/traced/{RETRACED}.json",
    output:
        "results/paper/retraced.txt",
    log:
        "results/paper/logs/retrace.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=lambda wildcards: code("verify", [RETRACED_METHOD]),
        torch=HAS_TORCH,
    shell:
        "rematbench verify {input.record} --suite {input.suite} --if-installed"
        " > {output} 2> {log} || {{ cat {output}; false; }}"


rule retrace_baseline:
    input:
        record=f"{TRACED_BASELINES}/{{point}}.json",
        baselines=RETRACED_WITH,
    output:
        "results/paper/retraced/baselines/{point}.txt",
    log:
        "results/paper/logs/retrace_baseline_{point}.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=lambda wildcards: code("verify", RETRACED_WITH),
        installed=HAS_BASELINES,
    shell:
        "rematbench verify {input.record} --if-installed"
        " > {output} 2> {log} || {{ cat {output}; false; }}"


rule baselines_again:
    input:
        expand("results/paper/retraced/baselines/{point}.txt", point=BASELINE_POINTS),
