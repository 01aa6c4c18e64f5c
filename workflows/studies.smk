"""Studies: claims of papers other than step times -> answers."""


rule study:
    input:
        study="config/study/{study}.yaml",
        methods=study_methods,
    output:
        "results/paper/studies/{study}.json",
    log:
        "results/paper/logs/study_{study}.log",
    priority: 2  # the longest jobs of all
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    resources:
        **SIMULATED,
    params:
        engine=lambda wildcards: code("study", study_methods(wildcards)),
    shell:
        "rematbench study {input.study} -o {output} > {log} 2>&1"
