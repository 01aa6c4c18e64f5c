"""Executed cells: a Slurm job per bundle (snakemake --profile slurm), or one by one here."""

from rematbench.digests import code_digest


rule submissions:
    input:
        suite="config/{measured}.yaml",
        methods=campaign_files,
    output:
        "results/{measured}/submissions.csv",
    log:
        "results/{measured}/logs/submissions.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=lambda wildcards: code_digest("executed"),
        site=lambda wildcards: repr(campaign(wildcards).site),
        cluster=cluster_option,
        limit=config["max_gpu_hours"],
        ask="" if config["ask_slurm"] else "--no-slurm",
    shell:
        "rematbench submit-plan {input.suite} --store results/{wildcards.measured}/cells"
        " {params.cluster} --max-gpu-hours {params.limit} {params.ask} -o {output} 2>&1 | tee {log}"


rule executed:
    input:
        suite="config/{measured}.yaml",
        methods=bundle_files,
        plan=ancient("results/{measured}/submissions.csv"),
    output:
        "results/{measured}/bundles/{bundle}.json",
    log:
        "results/{measured}/logs/{bundle}.log",
    conda:
        "../environment.yml"
    resources:
        **{key: from_site(key) for key in KEYS},
    params:
        engine=lambda wildcards: code_digest("executed"),
        setup=lambda wildcards: campaign(wildcards).site.slurm.shell_setup(),
        cluster=cluster_option,
    shell:
        "{params.setup}rematbench run-cells {input.suite} --bundle {wildcards.bundle} -o {output}"
        " --store results/{wildcards.measured}/cells {params.cluster}"
        " ${{SLURM_JOB_ID:+--job-id $SLURM_JOB_ID --minutes {resources.runtime}}} >> {log} 2>&1"


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
        cluster=cluster_option,
    shell:
        "rematbench collect-cells {input.suite} --store results/{wildcards.measured}/cells"
        " {params.cluster} -o {output} > {log} 2>&1"
