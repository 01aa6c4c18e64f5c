"""Figures (PDF and PNG) from the records and timelines of single runs."""


rule stages:
    input:
        records=looked_into,
    output:
        "results/{suite}/stages.csv",
    log:
        "results/{suite}/logs/stages.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("stages"),
        record=lambda wildcards: config["looked_into"][wildcards.suite]["stages"],
    shell:
        "rematbench stages {input.records}/{params.record}.json -o {output} > {log} 2>&1"


rule trace:
    input:
        records=looked_into,
    output:
        "results/{suite}/traces/{record}.json",
    log:
        "results/{suite}/logs/trace_{record}.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("plan"),
    shell:
        "rematbench timeline {input.records}/{wildcards.record}.json -o {output} > {log} 2>&1"


rule stage_figure:
    input:
        script="figures/stage_memory.py",
        style=STYLE,
        stages="results/{suite}/stages.csv",
    output:
        pdf="results/{suite}/figures/stage_memory.pdf",
        png=report("results/{suite}/figures/stage_memory.png", category="figures"),
    log:
        "results/{suite}/logs/stage_memory.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.stages} {output.pdf} > {log} 2>&1"


rule timeline_figure:
    input:
        script="figures/timeline.py",
        style=STYLE,
        traces=traces,
    output:
        pdf="results/{suite}/figures/timeline.pdf",
        png=report("results/{suite}/figures/timeline.png", category="figures"),
    log:
        "results/{suite}/logs/timeline.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.traces} {output.pdf} > {log} 2>&1"
