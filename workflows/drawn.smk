"""Figures that are drawn from tables alone, and the figure of small models on one node."""

for FIGURE, FROM in catalog.figures(Path("figures")).items():

    rule:
        name:
            f"figure_{FIGURE}"
        input:
            script=f"figures/{FIGURE}.py",
            style=STYLE,
            tables=[f"results/paper/tables/{table}.csv" for table in FROM],
        output:
            pdf=f"results/paper/figures/{FIGURE}.pdf",
            png=report(f"results/paper/figures/{FIGURE}.png", category="figures"),
        log:
            f"results/paper/logs/figure_{FIGURE}.log",
        localrule: True
        conda:
            "../environment.yml"
        shell:
            "python {input.script} {input.tables} {output.pdf} > {log} 2>&1"


rule small_models:
    input:
        script="figures/small_models.py",
        style=STYLE,
        cells="results/paper/tables/predictions.csv",
        instant="results/paper/predictions_instant_hosts.csv",
    output:
        pdf="results/paper/figures/small_models.pdf",
        png=report("results/paper/figures/small_models.png", category="figures"),
    log:
        "results/paper/logs/small_models.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.cells} {input.instant} {output.pdf} > {log} 2>&1"
