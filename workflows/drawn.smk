"""Figures that are drawn from tables alone."""

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
