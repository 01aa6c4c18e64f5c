"""Whether the promises on published cells are kept."""


rule validate:
    input:
        cells="results/paper/tables/predictions.csv",
    log:
        "results/paper/logs/validate.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "rematbench validate --predictions {input.cells} 2>&1 | tee {log}"
