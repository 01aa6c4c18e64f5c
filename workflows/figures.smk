"""Figures (PDF and PNG) from the records and timelines of single runs."""


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


rule methods_timeline:
    input:
        script="figures/timeline.py",
        style=STYLE,
        traces=method_traces,
    output:
        pdf="results/paper/figures/methods_timeline.pdf",
        png=report("results/paper/figures/methods_timeline.png", category="timelines"),
    log:
        "results/paper/logs/methods_timeline.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.traces} {output.pdf} > {log} 2>&1"


rule picture:
    input:
        "results/paper/figures/timeline.png",
    output:
        "docs/timeline.png",  # committed for the README, not a target of `all`
    log:
        "results/paper/logs/picture.log",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "cp {input} {output} > {log} 2>&1"
