"""Committed searches and their tables: a plan that has a command is simulated again before its table is made.

The searches themselves take an hour and run where they are asked for: ./bench reproduce --full.
"""

SEARCHED = ["layouts", "cells", "sweeps", "spaces"]
SEARCHED_TABLES = [f"searched_{name}" for name in SEARCHED]


rule searched_layouts:
    input:
        sheet=PUBLISHED,
    output:
        "build/searched/layouts.csv",
    log:
        "build/searched/layouts.log",
    localrule: True
    conda:
        "../environment.yml"
    threads: 2
    shell:
        "rematbench layouts {input.sheet} --table 'Figure 9' -o {output}"
        " --processes 2 > {log} 2>&1"


rule searched_cells:
    input:
        suite="config/paper.yaml",
        listed="results/paper/tables/matrix_best_layout.csv",
    output:
        "build/searched/cells.csv",
    log:
        "build/searched/cells.log",
    localrule: True
    conda:
        "../environment.yml"
    threads: 2
    shell:
        "rematbench search-cells {input.suite} {input.listed} -o {output}"
        " --processes 2 > {log} 2>&1"


rule searched_sweeps:
    input:
        "results/paper/predictions.csv",
        "results/paper/predictions_more.csv",
    output:
        "build/searched/sweeps.csv",
    log:
        "build/searched/sweeps.log",
    localrule: True
    conda:
        "../environment.yml"
    threads: 2
    shell:
        "rematbench search-sweeps {input} -o {output} --processes 2 > {log} 2>&1"


rule searched_spaces:
    input:
        "config/searched.yaml",
    output:
        "build/searched/spaces.csv",
    log:
        "build/searched/spaces.log",
    localrule: True
    conda:
        "../environment.yml"
    threads: 2
    shell:
        "rematbench search-spaces {input} -o {output} --processes 2 > {log} 2>&1"


rule searched:
    input:
        expand("build/searched/{name}.csv", name=SEARCHED),


rule searched_tables:
    input:
        expand("results/searched/{name}.csv", name=SEARCHED),
    output:
        expand(
            "results/paper/tables/{table}{suffix}",
            table=SEARCHED_TABLES,
            suffix=SUFFIXES,
        ),
    log:
        "results/paper/logs/searched_tables.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("searched"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench searched-tables results/searched -o {params.folder} > {log} 2>&1"
