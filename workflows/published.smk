"""Published cells: a sheet per bundle -> predictions -> the papers' tables and their errors."""

TABLES = [
    "accuracy_by_source",
    "atc24_abstract_layouts",
    "atc24_figure7_memory",
    "atc24_figure9_scaling",
    "atc24_table8_waterfall",
    "bands",
    "calibrated",
    "cells",
    "decisions",
    "evidence",
    "fujii_80_percent_rule",
    "oom_verdicts",
    "promises",
    "regret",
]


rule sheets:
    input:
        PUBLISHED,
    output:
        expand("results/paper/sheets/{method}.csv", method=SHEETS),
    log:
        "results/paper/logs/sheets.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench sheets {input} -o {params.folder} > {log} 2>&1"


rule predict:
    input:
        sheet="results/paper/sheets/{method}.csv",
        methods=method_files,
        bands="config/left_out.csv",
    output:
        "results/paper/predictions/{method}.csv",
    log:
        "results/paper/logs/predict_{method}.log",
    priority: 1  # the longest jobs first
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=lambda wildcards: code("sheet", method_files(wildcards)),
    shell:
        "rematbench predict {input.sheet} -o {output} --processes 1 > {log} 2>&1"


rule tables:
    input:
        predictions=expand("results/paper/predictions/{method}.csv", method=SHEETS),
        more="results/paper/predictions_more.csv",
        accuracy=["config/accuracy.yaml", "config/left_out.csv"],
    output:
        cells="results/paper/predictions.csv",
        tables=expand(
            "results/paper/tables/{table}{suffix}",
            table=TABLES,
            suffix=SUFFIXES,
        ),
    log:
        "results/paper/logs/tables.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output.tables[0]).parent,
    shell:
        "rematbench tables {input.predictions} -o {params.folder} --joined {output.cells}"
        " --more {input.more} > {log} 2>&1"


rule validate:
    input:
        cells="results/paper/predictions.csv",
        more="results/paper/predictions_more.csv",
    log:
        "results/paper/logs/validate.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "rematbench validate --predictions {input.cells} --more {input.more} 2>&1 | tee {log}"
