"""Committed searches and their tables: every plan is simulated again before its table is made.

The searches take ten minutes and run only on request: ./bench reproduce --full.
"""

SEARCHES = {
    "layouts": (PUBLISHED, "layouts --table 'Figure 9' --within 0.1"),
    "cells": ("config/paper.yaml", "search-cells"),
    "sweeps": (
        ["results/paper/predictions.csv", "results/paper/predictions_more.csv"],
        "search-sweeps",
    ),
    "spaces": ("config/searched.yaml", "search-spaces"),
}
OWN_TABLES = [name for name in SEARCHES if name != "cells"]  # the matrix has the cells


rule search_of_many:
    input:
        lambda wildcards: SEARCHES[wildcards.name][0],
    output:
        "build/searched/{name}.csv",
    log:
        "build/searched/{name}.log",
    wildcard_constraints:
        name="|".join(SEARCHES),
    localrule: True
    conda:
        "../environment.yml"
    threads: 2
    params:
        engine=code("searched", METHODS),
        command=lambda wildcards: SEARCHES[wildcards.name][1],
    shell:
        "rematbench {params.command} {input} -o {output} --processes 2 > {log} 2>&1"


rule searched:
    input:
        expand("build/searched/{name}.csv", name=SEARCHES),


rule searched_tables:
    input:
        expand("results/searched/{name}.csv", name=OWN_TABLES),
    output:
        expand(
            "results/paper/tables/searched_{name}{suffix}",
            name=OWN_TABLES,
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
