"""Everything that needs no GPU: ./bench reproduce.  Wiring only; the logic is in src/rematbench."""

from snakemake.utils import min_version

min_version("9.0")


configfile: "config/workflow.yaml"


include: "workflows/common.smk"
include: "workflows/records.smk"
include: "workflows/campaigns.smk"
include: "workflows/targets.smk"
include: "workflows/published.smk"
include: "workflows/figures.smk"
include: "workflows/executed.smk"
include: "workflows/measured.smk"
include: "workflows/drawn.smk"


report: "workflows/report.rst"


rule all:
    default_target: True
    input:
        "results/index.html",
        "results/paper/documents.txt",
        f"results/paper/retraced/baselines/{RETRACED_POINT}.txt",


rule measure:
    input:
        measure_targets("measure"),
