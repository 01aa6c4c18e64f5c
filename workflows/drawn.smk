"""Figures that are drawn from one table each, and the one of small models on one node."""

DRAWN_FROM = {
    "calibrated": "calibrated",
    "fastest": "matrix_fastest",
    "matrix_bytes": "matrix_same_layout",
    "matrix_context": "matrix_best_layout",
    "matrix_longest": "matrix_longest",
    "matrix_parts": "matrix_fastest",
    "pareto": "pareto",
    "searched_layouts": "searched_layouts",
    "waterfall": "atc24_table8_waterfall",
}


rule drawn_table:
    input:
        script="figures/{figure}.py",
        style="figures/style.py",
        table=lambda wildcards: f"results/paper/tables/{DRAWN_FROM[wildcards.figure]}.csv",
    output:
        pdf="results/paper/figures/{figure}.pdf",
        png=report("results/paper/figures/{figure}.png", category="matrix"),
    log:
        "results/paper/logs/{figure}.log",
    wildcard_constraints:
        figure="|".join(DRAWN_FROM),
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.table} {output.pdf} > {log} 2>&1"


rule predict_more:
    input:
        sheet="results/published/runs_more.csv",
        bands="config/left_out.csv",
    output:
        "results/paper/predictions_more{hosts}.csv",
    log:
        "results/paper/logs/predict_more{hosts}.log",
    wildcard_constraints:
        hosts="|_instant_hosts",
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=code("sheet"),
        hosts=lambda wildcards: wildcards.hosts.replace("_", "-").replace("-", "--", 1),
    shell:
        "rematbench predict {input.sheet} -o {output} --processes 1 {params.hosts} > {log} 2>&1"


rule small_models_figure:
    input:
        script="figures/small_models.py",
        style="figures/style.py",
        cells=[
            "results/paper/predictions_more.csv",
            "results/paper/predictions_more_instant_hosts.csv",
        ],
    output:
        pdf="results/{suite}/figures/small_models.pdf",
        png=report("results/{suite}/figures/small_models.png", category="figures"),
    log:
        "results/{suite}/logs/small_models.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.cells} {output.pdf} > {log} 2>&1"
