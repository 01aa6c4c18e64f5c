"""Published cells: a job per bundle -> predictions, and whether their promises are kept."""


rule predict:
    input:
        sheet=ancient(PUBLISHED),
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
        # A change of other rows reruns nothing.
        rows=lambda wildcards: content_hash(catalog.sheets()[wildcards.method]),
    shell:
        "rematbench predict {input.sheet} --bundle {wildcards.method} -o {output} --processes 1"
        " > {log} 2>&1"


rule validate:
    input:
        cells="results/paper/tables/predictions.csv",
        more="results/paper/predictions_more.csv",
    log:
        "results/paper/logs/validate.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "rematbench validate --predictions {input.cells} --more {input.more} 2>&1 | tee {log}"
