"""The grand matrix: two jobs per model, each with half of the lengths."""


include: "searched.smk"


rule matrix:
    input:
        suite="config/paper.yaml",
        cells="results/searched/cells.csv",
        policies="config/compare.yaml",
        methods=METHODS,
    output:
        results="results/paper/matrix/{part}.csv",
    log:
        "results/paper/logs/matrix_{part}.log",
    wildcard_constraints:
        part="|".join(catalog.matrix_parts()),
    priority: 2  # the longest jobs of all
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=code("matrix", METHODS),
        cells=lambda wildcards: catalog.matrix_parts()[wildcards.part],
    shell:
        "rematbench matrix {input.suite} --cells {input.cells} {params.cells} -o {output.results}"
        " > {log} 2>&1"
