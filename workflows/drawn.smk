"""Figures that are drawn from tables alone, and the figure of small models on one node."""

DRAWN_FROM = {
    "accuracy": ["cells"],
    "calibrated": ["calibrated"],
    "convergence": ["convergence"],
    "fastest": ["matrix_fastest"],
    "figure7_memory": ["cells"],
    "figure9_scaling": ["cells"],
    "gpu_steps": ["gpu_layers", "gpu_ratios"],
    "matrix_bytes": ["matrix_same_layout"],
    "matrix_context": ["matrix_best_layout"],
    "matrix_longest": ["matrix_longest"],
    "matrix_parts": ["matrix_fastest"],
    "pareto": ["pareto"],
    "searched_layouts": ["searched_layouts"],
    "waterfall": ["atc24_table8_waterfall"],
}


rule drawn_tables:
    input:
        script="figures/draw.py",
        scripts=expand("figures/{figure}.py", figure=DRAWN_FROM),
        style="figures/style.py",
        tables=expand(
            "results/paper/tables/{table}.csv",
            table=sorted(set(sum(DRAWN_FROM.values(), []))),
        ),
    output:
        pdf=expand("results/paper/figures/{figure}.pdf", figure=DRAWN_FROM),
        png=report(
            expand("results/paper/figures/{figure}.png", figure=DRAWN_FROM),
            category="figures",
        ),
    log:
        "results/paper/logs/drawn_tables.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        drawn=[
            f"{figure}={','.join(f'results/paper/tables/{table}.csv' for table in tables)}"
            for figure, tables in DRAWN_FROM.items()
        ],
    shell:
        "python {input.script} results/paper/figures {params.drawn} > {log} 2>&1"


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
        style="figures/style.py",
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
