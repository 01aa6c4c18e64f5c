"""Shared by all files: bundles by method, and inputs that Snakemake cannot detect."""

from pathlib import Path

from rematbench.worlds.records.record import content_hash
from rematbench.worlds.records.digests import command_digest, digest
from rematbench.plugins.discover import discover
from rematbench.paper import catalog
from rematbench.paper.studies.study import load_study

PUBLISHED = "results/published/runs.csv"
METHODS = sorted(str(path) for path in Path("methods").glob("*.py"))
FACTS = digest([*Path("config").glob("*s/*.yaml"), Path("config/calibration.yaml")])
REGISTRY = discover()
FIGURES = catalog.figures(Path("figures"))
STYLE = ["figures/style.py", "src/rematbench/host/chart_style.py"]

for path, reason in REGISTRY.broken.items():
    logger.warning(f"method left out: {path}: {reason}")


wildcard_constraints:
    suite="|".join(catalog.suites()),  # results/ holds committed folders too
    measured="|".join(catalog.suites()),
    method="[a-z0-9_+]+",
    study="|".join(catalog.studies()),
    bundle=r"[a-z0-9_+]+\.\d+x\d+\.\d+",


def code(command, methods=(), loaded=()):
    """A parameter that reruns a rule: digests of the code behind the rule's command (a module of
    `cli/`), of modules that it loads by name, of the imports of its method files, and of models,
    clusters, systems and constants.
    Snakemake keeps no parameter that is made from a rule's input, so a change of such a one reruns
    nothing: give the files themselves.
    """
    return f"{command_digest(command, map(Path, methods), loaded)} {FACTS}"


def method_files(wildcards):
    """The files of a composed method's parts: an edit of a file reruns the bundles of the part."""
    origins = [
        Path(REGISTRY.methods[name].origin) for name in wildcards.method.split("+")
    ]
    here = Path.cwd()
    return [
        str(path.relative_to(here)) for path in origins if path.is_relative_to(here)
    ]


def study_methods(wildcards):
    """The files of the methods in a study's questions: an edit of a file reruns the study."""
    questions = load_study(Path(f"config/study/{wildcards.study}.yaml")).questions
    names = {m.method for question in questions for m in question.methods}
    origins = {
        Path(REGISTRY.methods[part].origin)
        for name in names
        for part in name.split("+")
    }
    here = Path.cwd()
    return sorted(
        str(path.relative_to(here)) for path in origins if path.is_relative_to(here)
    )


def looked_into(wildcards):
    """The folder of the records behind a suite's stage and timeline figures."""
    method = config["looked_into"][wildcards.suite]["method"]
    return f"results/{wildcards.suite}/records/simulated/{method}"


def traces(wildcards):
    """The timelines that a figure draws, from top to bottom."""
    names = config["looked_into"][wildcards.suite]["traces"]
    return [f"results/{wildcards.suite}/traces/{name}.json" for name in names]


def figures(suite):
    """The figures of a suite: those of single runs, and for the paper all others."""
    names = ["stage_memory", "timeline"]
    if suite == catalog.PAPER:
        names += [*FIGURES, "small_models", "methods_timeline"]
    return [f"results/{suite}/figures/{name}.pdf" for name in names]
