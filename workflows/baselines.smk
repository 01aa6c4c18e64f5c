"""Traced baselines: tables of the committed records, and, where the packages are installed, one
point traced again."""


rule baseline_tables:
    input:
        records=expand(f"{TRACED_BASELINES}/{{point}}.json", point=BASELINE_POINTS),
        points="config/baseline_points.yaml",
        agreement=AGREEMENT,
        baselines=sorted(Path("baselines").glob("*/*.py")),
    output:
        multiext("results/paper/tables/agreement", *SUFFIXES),
        multiext("results/paper/tables/baselines_traced", *SUFFIXES),
        multiext("results/paper/tables/baselines_tensors", *SUFFIXES),
    log:
        "results/paper/logs/baseline_tables.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("points"),
        records=lambda wildcards, input: Path(input.records[0]).parent,
        agreement=lambda wildcards, input: Path(input.agreement[0]).parent,
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench baseline tables {params.records} --agreement {params.agreement}"
        " -o {params.folder} > {log} 2>&1"


rule retrace_baseline:
    input:
        record=f"{TRACED_BASELINES}/{{point}}.json",
        points="config/baseline_points.yaml",
        baselines=RETRACED_WITH,
    output:
        "results/paper/retraced/baselines/{point}.txt",
    log:
        "results/paper/logs/retrace_baseline_{point}.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=lambda wildcards: code("points", RETRACED_WITH),
        installed=HAS_BASELINES,
        into=lambda wildcards, output: Path(output[0]).parent,
        committed=lambda wildcards, input: Path(input.record).parent,
    shell:
        "rematbench baseline again {wildcards.point} -o {params.into}"
        " --compare {params.committed} > {output} 2> {log} || {{ cat {output}; false; }}"


rule baselines_again:
    input:
        expand("results/paper/retraced/baselines/{point}.txt", point=BASELINE_POINTS),
