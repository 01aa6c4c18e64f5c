"""Figures that are drawn from tables alone, and the figure of small models on one node."""

for FIGURE, FROM in FIGURES.items():

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


rule predict_more:
    input:
        sheet="results/published/runs_more.csv",
        bands="config/left_out.csv",
    output:
        "results/paper/predictions_more.csv",
    log:
        "results/paper/logs/predict_more.log",
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=code("sheet"),
    shell:
        "rematbench predict {input.sheet} -o {output} --processes 1 > {log} 2>&1"


rule small_models:
    input:
        script="figures/small_models.py",
        style=STYLE,
        sheet="results/published/runs_more.csv",
        cells="results/paper/predictions_more.csv",
    output:
        instant="results/paper/predictions_instant_hosts.csv",
        pdf="results/paper/figures/small_models.pdf",
        png=report("results/paper/figures/small_models.png", category="figures"),
    log:
        "results/paper/logs/small_models.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("sheet"),
        only="--only system=megatron-deepspeed --only layers=24 --only pp=1",
    shell:
        "(rematbench predict {input.sheet} -o {output.instant} --processes 1 {params.only}"
        " --instant-hosts && python {input.script} {input.cells} {output.instant} {output.pdf})"
        " > {log} 2>&1"
