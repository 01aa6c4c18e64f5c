"""Studies: claims of papers other than step times -> answers -> the table of claims."""

STUDY_TABLES = [
    "claims",
    "lynx_ladder",
    "lynx_layouts",
    "memo_average",
    "memo_fragmentation",
    "memo_lengths",
    "memo_longest",
    "mst_longest",
    "mst_memory",
]


rule study:
    input:
        study="config/study/{study}.yaml",
        methods=study_methods,
    output:
        "results/paper/studies/{study}.json",
    log:
        "results/paper/logs/study_{study}.log",
    priority: 2  # the longest jobs of all
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=lambda wildcards: code("study", study_methods(wildcards)),
    shell:
        "rematbench study {input.study} -o {output} > {log} 2>&1"


rule claims:
    input:
        answers=expand("results/paper/studies/{study}.json", study=STUDIES),
        predictions="results/paper/predictions.csv",
        claims="config/claims.yaml",
        published="results/published/claims.csv",
    output:
        expand(
            "results/paper/tables/{table}{suffix}",
            table=STUDY_TABLES,
            suffix=SUFFIXES,
        ),
    log:
        "results/paper/logs/claims.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench claims {input.answers} --predictions {input.predictions} -o {params.folder}"
        " > {log} 2>&1"
