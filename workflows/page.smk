"""The timelines of the methods on one step, and the page with all tables and figures."""


rule method_trace:
    input:
        records="results/paper/records/simulated/{method}",
    output:
        "results/paper/method_traces/{method}/{record}.json",
    log:
        "results/paper/logs/trace_{method}_{record}.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("plan"),
    shell:
        "rematbench timeline {input.records}/{wildcards.record}.json -o {output} > {log} 2>&1"


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


rule page:
    input:
        suite="config/paper.yaml",
        texts="config/report.yaml",
        template="src/rematbench/paper/page.html.jinja",
        tables=paper_tables(),
        figures=figures("paper"),
    output:
        page="results/index.html",
        markdown="results/REPORT.md",
    log:
        "results/paper/logs/page.log",
    localrule: True
    conda:
        "../environment.yml"
    params:
        engine=code("report"),
    shell:
        "rematbench report {input.suite} > {log} 2>&1"


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
