"""A rule for each file of src/rematbench/paper/tables, with the inputs that the file declares."""


def suite_of(wildcards):
    """The suite whose tables are made."""
    return wildcards.get("suite", catalog.PAPER)


def inputs_of(file):
    """A function that gives the files behind the inputs of a file of tables."""
    return lambda wildcards: file.files(suite_of(wildcards))


def paper_tables():
    """Every table of the paper."""
    files = [
        file for file in catalog.table_files().values() if file.name != "measured_speed"
    ]
    return [path for file in files for path in file.outputs("results/paper/tables")]


for FILE in catalog.table_files().values():
    SUITE = catalog.SUITE if FILE.of_any_suite else catalog.PAPER

    rule:
        name:
            f"table_{FILE.name}"
        input:
            unpack(inputs_of(FILE)),
        output:
            FILE.outputs(f"results/{SUITE}/tables"),
        log:
            f"results/{SUITE}/logs/table_{FILE.name}.log",
        localrule: True
        conda:
            "../environment.yml"
        params:
            engine=code("table", loaded=[FILE.module]),
            names=FILE.names,
            suite=suite_of,
        shell:
            "rematbench table {params.names} --suite {params.suite} > {log} 2>&1"
