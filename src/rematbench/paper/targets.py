"""The targets of the workflow: what is made, from what, and by which code.

`rematbench make TARGET` makes one target from inputs that exist. Snakemake has a rule for each
target (workflows/targets.smk), which also makes the inputs. A digest of the code behind a target is
a parameter of its rule, so that an edit reruns what it touches and nothing else.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import read_mapping
from rematbench.paper import catalog
from rematbench.paper.studies.study import load_study
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.worlds.records.digests import digest, module_digest
from rematbench.worlds.records.record import content_hash

Values = Mapping[str, str]
"""The text behind each placeholder of a target's path."""
METHODS = ("methods/*.py",)
BUILDERS = "rematbench.paper.builders"
PAPER = f"results/{catalog.PAPER}"
PUBLISHED = "results/published"
LEFT_OUT = "config/left_out.csv"
"""The rows from which bands of predictions are learnt."""
WORDS = "config/rows.yaml"
TEXTS = "config/tables.yaml"
PAGE = ("config/report.yaml", "src/rematbench/paper/page.html.jinja")


def _nothing(_: Values) -> tuple[str, ...]:
    return ()


class Target(Struct, frozen=True, kw_only=True):
    """One target.

    `outputs`: patterns of its files, all with the same placeholders. `inputs`: a pattern for each
    argument of `build`, as in catalog.py. `module`: the module whose `build(output, values,
    **inputs)` writes the first output and returns a line about it, or the module of a table file.
    `reads`: patterns of the files that the code opens by itself, method files among them.
    `content`: a value whose change makes the target due, besides the files. `derived`: further
    values of placeholders. `simulates`: whether the job may run on another machine. `folder`:
    whether the output is a folder.
    """

    name: str
    outputs: tuple[str, ...]
    module: str
    inputs: Mapping[str, str] = {}
    reads: Callable[[Values], Iterable[str]] = _nothing
    content: Callable[[Values], object] = _nothing
    derived: Callable[[Values], Values] = lambda _: {}
    simulates: bool = False
    folder: bool = False
    priority: int = 0
    threads: int = 1
    table: catalog.TableFile | None = None

    @property
    def log(self) -> str:
        """The pattern of the log's path, with the placeholders of the outputs."""
        names = catalog.PLACEHOLDER.findall(self.outputs[0])
        words = [self.name, *(f"{{{name}}}" for name in names if name != "suite")]
        folder = "results/{suite}" if "suite" in names else PAPER
        return f"{folder}/logs/{'_'.join(words)}.log"

    def files(self, values: Values) -> dict[str, list[str]]:
        """The files of all inputs, by the input's name, and those of `reads`."""
        every = {**values, **self.derived(values)}
        found = {name: catalog.files([path], every) for name, path in self.inputs.items()}
        return found | {"reads": catalog.files(self.reads(every), every)}

    def digest(self, values: Values) -> str:
        """A text whose change makes the target due, like a change of its files: the code, the
        methods' imports, the facts of models, clusters, stacks and constants."""
        methods = [Path(path) for path in self.files(values)["reads"] if path.endswith(".py")]
        return f"{module_digest(self.module, methods)} {facts()} {self.content(values)}"

    def make(self, values: Values) -> str:
        """Make the target and return a line about it. CommandError for a missing input."""
        output = self.outputs[0].format(**values)
        if self.table is not None:
            suite, folder = values.get("suite", catalog.PAPER), Path(output).parent
            first, *_ = self.table.write(self.table.names, folder, suite)
            return f"{output}: {len(first.rows)} rows"
        every = {**values, **self.derived(values)}
        given = catalog.arguments(self.inputs, every, output)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        return str(importlib.import_module(self.module).build(Path(output), every, **given))


@cache
def facts() -> str:
    """The digest of the files of models, clusters, stacks and constants."""
    return digest([*Path("config").glob("*s/*.yaml"), Path("config/calibration.yaml")])


def _method_files(values: Values) -> list[str]:
    return _files_of(values["method"].split("+"))


def _study_methods(values: Values) -> list[str]:
    questions = load_study(Path(f"config/study/{values['study']}.yaml")).questions
    names = {m.method for question in questions for m in question.methods}
    return _files_of({part for name in names for part in name.split("+")})


def _files_of(names: Iterable[str]) -> list[str]:
    """The files of the methods that lie in the checkout, relative to it."""
    origins = {Path(_registry().methods[name].origin) for name in names}
    here = Path.cwd()
    return sorted(str(path.relative_to(here)) for path in origins if path.is_relative_to(here))


@cache
def _registry() -> Registry:
    return discover()


@cache
def workflow() -> dict[str, Any]:
    """The contents of config/workflow.yaml."""
    path = Path("config/workflow.yaml")
    return dict(read_mapping(path, str(path)))


def _looked_into(values: Values) -> Values:
    """The method whose records the stage and timeline figures of a suite show, and the record."""
    shown = workflow()["looked_into"][values["suite"]]
    return {"shown": shown["method"], "record": values.get("record", shown["stages"])}


def _part(values: Values) -> Values:
    model, lengths = catalog.matrix_parts()[values["part"]]
    return {"model": model, "seq_lens": " ".join(map(str, lengths))}


def _tables() -> list[str]:
    files = [file for file in catalog.table_files().values() if file.name != "measured_speed"]
    return [path for file in files for path in file.outputs(f"{PAPER}/tables")]


def figures() -> list[str]:
    names = ["stage_memory", "timeline", "methods_timeline"]
    names += catalog.figures(Path("figures"))
    return [f"{PAPER}/figures/{name}.pdf" for name in names]


def _table(file: catalog.TableFile) -> Target:
    suite = catalog.SUITE if file.of_any_suite else catalog.PAPER
    return Target(
        name=f"table_{file.name}",
        outputs=tuple(file.outputs(f"results/{suite}/tables")),
        module=file.module,
        inputs=file.inputs,
        reads=lambda _: [TEXTS, *file.reads],
        table=file,
    )


def _searched(name: str, kind: str, within: str = "", **inputs: str) -> Target:
    return Target(
        name=f"search_{name}",
        outputs=(f"build/searched/{name}.csv",),
        module=f"{BUILDERS}.searched",
        inputs=inputs,
        reads=lambda _: METHODS,
        derived=lambda _: {"kind": kind, "within": within},
        threads=2,
    )


@cache
def targets() -> tuple[Target, ...]:
    records = "records/simulated/{method}"
    looked_into = {"records": "results/{suite}/records/simulated/{shown}"}
    return (
        *map(_table, catalog.table_files().values()),
        Target(
            name="bundle",
            outputs=(f"results/{{suite}}/{records}",),
            module=f"{BUILDERS}.records",
            inputs={"suite": "config/{suite}.yaml"},
            reads=_method_files,
            simulates=True,
            folder=True,
        ),
        Target(
            name="predict",
            outputs=(f"{PAPER}/predictions/{{method}}.csv",),
            module=f"{BUILDERS}.predictions",
            reads=lambda values: [LEFT_OUT, WORDS, *_method_files(values)],
            # Only a change of this bundle's rows makes the target due.
            content=lambda values: content_hash(catalog.sheets()[values["method"]]),
            simulates=True,
            priority=1,
        ),
        Target(
            name="study",
            outputs=(f"{PAPER}/studies/{{study}}.json",),
            module=f"{BUILDERS}.answers",
            inputs={"study": "config/study/{study}.yaml"},
            reads=_study_methods,
            simulates=True,
            priority=2,  # studies take longest, so they start first
        ),
        Target(
            name="matrix",
            outputs=(f"{PAPER}/matrix/{{part}}.csv",),
            module=f"{BUILDERS}.matrix",
            inputs={"suite": "config/paper.yaml", "cells": "results/searched/cells.csv"},
            reads=lambda _: ["config/compare.yaml", *METHODS],
            derived=_part,
            simulates=True,
            priority=2,
        ),
        _searched("layouts", "layouts", "0.1", sheet=f"{PUBLISHED}/runs.csv"),
        _searched("cells", "cells", suite="config/paper.yaml"),
        _searched("sweeps", "sweeps", "1", sheet=f"{PAPER}/tables/predictions.csv"),
        _searched("spaces", "spaces", jobs="config/searched.yaml"),
        _searched("experts", "spaces", jobs="config/searched_experts.yaml"),
        Target(
            name="stages",
            outputs=("results/{suite}/stages.csv",),
            module=f"{BUILDERS}.stages",
            inputs=looked_into,
            derived=_looked_into,
        ),
        Target(
            name="trace",
            outputs=("results/{suite}/traces/{record}.json",),
            module=f"{BUILDERS}.timeline",
            inputs=looked_into,
            derived=_looked_into,
        ),
        Target(
            name="method_trace",
            outputs=(f"{PAPER}/method_traces/{{method}}/{{record}}.json",),
            module=f"{BUILDERS}.timeline",
            inputs={"records": f"{PAPER}/{records}"},
        ),
        Target(
            name="page",
            outputs=("results/index.html",),
            module=f"{BUILDERS}.page",
            inputs={"suite": "config/paper.yaml"},
            reads=lambda _: [*PAGE, *_tables(), *figures()],
        ),
        Target(
            name="documents",
            outputs=(f"{PAPER}/documents.txt",),
            module=f"{BUILDERS}.documents",
            reads=lambda _: ["*.md", "docs/*.md", "config/artifact.yaml", *_tables()],
        ),
    )


def find_target(path: str) -> tuple[Target, Values]:
    """The target of a path, and the values of its placeholders; CommandError if there is none."""
    for target in targets():
        for output in target.outputs:
            parts = catalog.PLACEHOLDER.split(output)
            pattern = "".join(
                f"(?P<{part}>[^/]+)" if index % 2 else re.escape(part)
                for index, part in enumerate(parts)
            )
            if match := re.fullmatch(pattern, path):
                return target, match.groupdict()
    raise CommandError(f"{path}: no such target (see --list)")
