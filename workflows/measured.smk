"""The table of the worlds from committed records; where torch is installed, one retraced cell."""


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
        cell=RETRACED,
        committed=lambda wildcards, input: Path(input.record).parent,
    shell:
        "rematbench retrace {input.suite} {params.cell} --committed {params.committed}"
        " -o {output} > {log} 2>&1"


rule worlds:
    input:
        records=MEASURED["executed"] + MEASURED["traced"],
        methods=METHODS,  # the table reads the parameters of the methods
        again=rules.retrace.output[0],
    output:
        multiext("results/paper/tables/worlds", *SUFFIXES),
    log:
        "results/paper/logs/worlds.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench worlds results/measured/executed results/measured/traced"
        " --again {input.again} -o {params.folder} > {log} 2>&1"


rule gpu:
    input:
        records=ON_GPU,
        suite="config/gpu_layers.yaml",
        methods=METHODS,
        published="results/published/kernels.csv",
    output:
        expand(
            "results/paper/tables/gpu_{table}{suffix}",
            table=(
                *("checks", "rates", "layers", "ratios"),
                *("actions", "advice", "searched"),
            ),
            suffix=SUFFIXES,
        ),
    log:
        "results/paper/logs/gpu.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("gpu"),
        folder=lambda wildcards, output: Path(output[0]).parent,
        runs=GPU_RUNS,
    shell:
        "rematbench gpu-tables {params.runs} -o {params.folder} > {log} 2>&1"


rule curves:
    input:
        records=MEASURED["convergence"],
    output:
        lines="results/paper/tables/convergence.csv",
        tables=multiext("results/paper/tables/convergence_deviation", *SUFFIXES),
    log:
        "results/paper/logs/curves.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output.lines).parent,
    shell:
        "rematbench curves results/measured/convergence -o {params.folder} > {log} 2>&1"
