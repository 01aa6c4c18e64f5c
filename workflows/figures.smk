"""Figures (PDF and PNG) from the tables and from a look into one run."""


rule table_figure:
    input:
        script="figures/{figure}.py",
        style="figures/style.py",
        cells="results/{suite}/tables/cells.csv",
    output:
        pdf="results/{suite}/figures/{figure}.pdf",
        png=report("results/{suite}/figures/{figure}.png", category="figures"),
    log:
        "results/{suite}/logs/{figure}.log",
    wildcard_constraints:
        figure="figure7_memory|figure9_scaling|accuracy",
    localrule: True
    conda:
        "../environment.yml"
    shell:
        "python {input.script} {input.cells} {output.pdf} > {log} 2>&1"


rule calibrated_figure:
    input:
        script="figures/calibrated.py",
        style="figures/style.py",
        table="results/{suite}/tables/calibrated.csv",
    output:
        pdf="results/{suite}/figures/calibrated.pdf",
        png=report("results/{suite}/figures/calibrated.png", category="figures"),
    log:
        "results/{suite}/logs/calibrated.log",
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
    localrule: SIMULATE_HERE
    conda:
        "../environment.yml"
    wildcard_constraints:
        hosts="|_instant_hosts",
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
        engine=code("tables"),
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
        style="figures/style.py",
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
        style="figures/style.py",
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
