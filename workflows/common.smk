"""Shared by all files: what Snakemake cannot detect, and figures."""

from pathlib import Path

from rematbench.worlds.records.digests import module_digest
from rematbench.plugins.discover import discover
from rematbench.paper import catalog
from rematbench.paper.targets import facts
from rematbench.paper.targets import figures as paper_figures

REGISTRY = discover()
STYLE = ["figures/style.py", "src/rematbench/host/chart_style.py"]

for path, reason in REGISTRY.broken.items():
    logger.warning(f"method left out: {path}: {reason}")


wildcard_constraints:
    suite="|".join(catalog.suites()),  # results/ holds committed folders too
    measured="|".join(catalog.suites()),
    method="[a-z0-9_+]+",
    study="|".join(catalog.studies()),
    part="|".join(catalog.matrix_parts()),
    bundle=r"[a-z0-9_+]+\.\d+x\d+\.\d+",


def code(command, methods=()):
    """A parameter that reruns a rule: digests of the code behind the rule's command (a module of
    `cli/`), of the imports of its method files, and of models, clusters, systems and constants.
    Snakemake keeps no parameter that is made from a rule's input, so a change of such a one reruns
    nothing: give the files themselves.
    """
    return f"{module_digest(f'rematbench.cli.{command}', map(Path, methods))} {facts()}"


def inputs_of(target):
    """A function that gives the files behind the inputs of a target, by name."""
    return lambda wildcards: target.files(dict(wildcards.items()))


def digest_of(target):
    """A parameter that reruns a rule where the code or the facts behind its target change."""
    return lambda wildcards: target.digest(dict(wildcards.items()))


def traces(wildcards):
    """The timelines that a figure draws, from top to bottom."""
    names = config["looked_into"][wildcards.suite]["traces"]
    return [f"results/{wildcards.suite}/traces/{name}.json" for name in names]


def figures(suite):
    """The figures of a suite: those of single runs, and for the paper all others."""
    if suite == catalog.PAPER:
        return paper_figures()
    return [
        f"results/{suite}/figures/{name}.pdf" for name in ("stage_memory", "timeline")
    ]
