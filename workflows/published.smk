"""Whether the promises on published cells are kept."""


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
