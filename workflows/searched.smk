"""Searches, which take ten minutes and run only on request: ./bench reproduce --full."""

SEARCHES = {
    "layouts": (PUBLISHED, "--table 'Figure 9' --within 0.1"),
    "cells": ("config/paper.yaml", ""),
    "sweeps": (
        [
            "results/paper/tables/predictions.csv",
            "results/paper/predictions_more.csv",
        ],
        "--within 1",
    ),
    "spaces": ("config/searched.yaml", ""),
    "experts": ("config/searched_experts.yaml", ""),
}
KINDS = {"experts": "spaces"}


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
        engine=code("searches", METHODS),
        options=lambda wildcards: SEARCHES[wildcards.name][1],
        kind=lambda wildcards: KINDS.get(wildcards.name, wildcards.name),
    shell:
        "rematbench searches {params.kind} {input} {params.options} -o {output} --processes 2"
        " > {log} 2>&1"


rule searched:
    input:
        expand("build/searched/{name}.csv", name=SEARCHES),
