"""Executed cells: a Slurm job per bundle (snakemake --profile slurm), or one cell after the other
on this machine."""


rule executed:
    input:
        suite=ancient("config/{measured}.yaml"),
    output:
        "results/{measured}/bundles/{bundle}.json",
    log:
        "results/{measured}/logs/{bundle}.log",
    conda:
        "../environment.yml"
    resources:
        **{key: from_center(key) for key in KEYS},
    params:
        cells=bundle_keys,  # replaces file times as the reason to rerun
        # Snakemake does not compare params that use `resources`: another module line reruns no job.
        setup=lambda wildcards, resources: shell_setup(wildcards),
        cluster=lambda wildcards, resources: cluster_option(wildcards),
    shell:
        "{params.setup}rematbench run-cells {input.suite} --bundle {wildcards.bundle} -o {output}"
        " --store results/{wildcards.measured}/cells {params.cluster}"
        " ${{SLURM_JOB_ID:+--job-id $SLURM_JOB_ID}} >> {log} 2>&1"


rule executed_table:
    input:
        suite="config/{measured}.yaml",
        bundles=lambda wildcards: expand(
            "results/{measured}/bundles/{bundle}.json",
            measured=wildcards.measured,
            bundle=campaign(wildcards).bundles,
        ),
    output:
        report(
            "results/{measured}/executed.csv",
            category="executed",
            labels={"table": "cells"},
        ),
    log:
        "results/{measured}/logs/executed.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("cells"),
        cluster=cluster_option,
    shell:
        "rematbench cells {input.suite} --store results/{wildcards.measured}/cells"
        " {params.cluster} -o {output} > {log} 2>&1"


rule measured_speed_figure:
    input:
        script="figures/measured_speed.py",
        style=STYLE,
        table="results/{measured}/tables/measured_speed.csv",
    output:
        "results/{measured}/figures/measured_speed.txt",
    log:
        "results/{measured}/logs/measured_speed_figure.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        # The figure is no output: without seconds of a GPU it is not drawn.
        figure=lambda wildcards, output: Path(output[0]).with_suffix(".pdf"),
    shell:
        "python {input.script} {input.table} {params.figure} > {output} 2> {log}"
