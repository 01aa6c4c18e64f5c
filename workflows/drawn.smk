"""Figures that are drawn from one table each."""

DRAWN_FROM = {
    "matrix_bytes": "matrix_same_layout",
    "matrix_context": "matrix_best_layout",
    "matrix_longest": "matrix_longest",
    "matrix_parts": "matrix_fastest",
    "pareto": "pareto",
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
