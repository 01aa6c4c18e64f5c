"""A rule for each target of src/rematbench/paper/targets.py, with its files and a digest of its code."""

from rematbench.paper.targets import targets


include: "placement.smk"


for TARGET in targets():

    rule:
        name:
            TARGET.name
        input:
            unpack(inputs_of(TARGET)),
        output:
            directory(TARGET.outputs[0]) if TARGET.folder else TARGET.outputs,
        log:
            TARGET.log,
        priority: TARGET.priority
        localrule: SIMULATE_HERE or not TARGET.simulates
        conda:
            "../environment.yml"
        threads: TARGET.threads
        resources:
            **(SIMULATED if TARGET.simulates else {}),
        params:
            engine=digest_of(TARGET),
        shell:
            "rematbench make {output} > {log} 2>&1"


rule smoke:
    input:
        "results/smoke/tables/runs.csv",
        figures("smoke"),


rule searched:
    input:
        [path for target in targets() for path in target.outputs if "searched/" in path],
