"""The grand matrix: two jobs per model, each with half of the lengths -> tables with bands."""


include: "searched.smk"


MATRIX = load_suite(Path("config/paper.yaml")).matrix
MATRIX_MODELS = [work.model for work in MATRIX.works]
HALF = len(MATRIX.seq_lens) // 2
MATRIX_PARTS = {"short": MATRIX.seq_lens[:HALF], "long": MATRIX.seq_lens[HALF:]}
MATRIX_TABLES = [
    "matrix_best_layout",
    "matrix_fastest",
    "matrix_longest",
    "matrix_same_layout",
    "pareto",
]


rule matrix:
    input:
        suite="config/paper.yaml",
        cells="results/searched/cells.csv",
        policies="config/compare.yaml",
        methods=METHODS,
    output:
        results="results/paper/matrix/{model}.{part}.csv",
    log:
        "results/paper/logs/matrix_{model}_{part}.log",
    wildcard_constraints:
        model="|".join(MATRIX_MODELS),
        part="|".join(MATRIX_PARTS),
    priority: 2  # the longest jobs of all
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=code("matrix", METHODS),
        lengths=lambda wildcards: [
            f"--seq-len {n}" for n in MATRIX_PARTS[wildcards.part]
        ],
    shell:
        "rematbench matrix {input.suite} --cells {input.cells} --model {wildcards.model}"
        " {params.lengths} -o {output.results}"
        " > {log} 2>&1"


rule matrix_tables:
    input:
        suite="config/paper.yaml",
        results=expand(
            "results/paper/matrix/{model}.{part}.csv",
            model=MATRIX_MODELS,
            part=MATRIX_PARTS,
        ),
        bands="config/left_out.csv",
    output:
        expand(
            "results/paper/tables/{table}{suffix}",
            table=MATRIX_TABLES,
            suffix=SUFFIXES,
        ),
    log:
        "results/paper/logs/matrix_tables.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("tables"),
        folder=lambda wildcards, output: Path(output[0]).parent,
    shell:
        "rematbench matrix-tables {input.suite} {input.results} -o {params.folder}"
        " > {log} 2>&1"
