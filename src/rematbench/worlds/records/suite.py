"""Suites: problems, and the methods to run on each. The runs of one method form a bundle."""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import evaluate_method
from rematbench.inputs.configfile import (
    ConfigError,
    closest,
    convert,
    read_mapping,
    require_among,
    require_unique,
)
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition, Registry, Value
from rematbench.problem import Problem
from rematbench.worlds.records.digests import code_digest, method_digest
from rematbench.worlds.records.record import (
    Record,
    content_hash,
    encode_record,
    make_record,
    read_record,
    run_spec,
    write_record,
)
from rematbench.worlds.records.store import Store


class NamedProblem(Job, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One problem of a suite file, by names only.  `why`: the reason to include the problem."""

    name: str
    why: str
    model: str
    cluster: str
    system: str

    def problem(self) -> Problem:
        """The problem; ConfigError if the layout breaks a rule."""
        try:
            return make_problem(self)
        except (LayoutError, RateError) as error:
            raise ConfigError("", self.name, str(error)) from error


class Variant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: str
    name: str = ""
    settings: dict[str, Any] = {}
    problems: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The variant's name in tables: `name`, or the method with its settings."""
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return self.name or (f"{self.method} ({settings})" if settings else self.method)

    def to_arguments(self, spec: Job) -> list[str]:
        """The command-line arguments that run the variant on a problem: METHOD and options."""
        words = [self.method, *spec.to_arguments()]
        for key, value in self.settings.items():
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            words += ["--set", f"{key}={text}"]
        return words


class Suite(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems and variants.  Every discovered method and every variant runs on every problem.
    `matrix`: the paper's table of models x lengths x clusters, if the suite declares it
    (paper/matrix/spec.py reads it)."""

    problems: tuple[NamedProblem, ...]
    variants: tuple[Variant, ...] = ()
    matrix: dict[str, Any] | None = None


AnySuite = TypeVar("AnySuite", bound=Suite)


def load_suite(path: Path) -> Suite:
    """A suite from YAML; ConfigError with the path for an unknown key or a wrong type."""
    return read_suite(path, Suite)


def read_suite(path: Path, kind: type[AnySuite]) -> AnySuite:
    """Like `load_suite`, for a kind of suite with additional keys.  ConfigError also for two
    problems with one name, or a variant of an unknown problem."""
    label = str(path)
    suite = convert(read_mapping(path, label), kind, label)
    names = [problem.name for problem in suite.problems]
    require_unique(names, label, "problems")
    for variant in suite.variants:
        require_among(variant.problems, names, (label, f"variants: {variant.method}", "problem"))
    return suite


def bundles(suite: Suite, registry: Registry) -> dict[str, list[Variant]]:
    """Variants by bundle (a method or `a+b`): every method of activation memory with its defaults,
    then the suite's variants. Methods that place training states or move passes need a host rate or
    a stack with that order, so they run only if the suite names them."""
    plain = [name for name, entry in registry.methods.items() if not entry.waits]
    found = {name: [Variant(method=name)] for name in plain}
    for variant in suite.variants:
        found.setdefault(variant.method, []).append(variant)
    return found


def run_bundle(
    suite: Suite, method: str, registry: Registry, folder: Path, store: Store | None = None
) -> list[Record]:
    """Run one bundle on every problem, write each record under `folder`, and return the records;
    ConfigError for an unknown bundle.

    With a `store`, a run that the same code has finished is read from the store.
    """
    known = bundles(suite, registry)
    if method not in known:
        hint = closest(method, known)
        text = f"unknown bundle {method!r}{hint} (known: {', '.join(known)})"
        raise ConfigError("", "method", text)
    records = []
    for spec in suite.problems:
        problem = spec.problem()
        for number, variant in enumerate(known[method]):
            if variant.problems and spec.name not in variant.problems:
                continue
            record = _from_store(store, problem, variant, registry, spec.name)
            write_record(record, folder / f"{spec.name}.{number}.json")
            records.append(record)
    return records


def _from_store(
    store: Store | None, problem: Problem, variant: Variant, registry: Registry, name: str
) -> Record:
    if store is None:
        return run_variant(problem, variant, registry)
    method = registry.resolve(variant.method, dict(variant.settings), problem)
    origins = [registry.methods[part.name].origin for part in method.methods]
    code = [code_digest("simulated"), method_digest(origins)]
    key = f"{name}.{variant.method}.{content_hash([run_spec(problem, method), code])}"
    if store.read(key) is None:
        store.write(key, encode_record(run_variant(problem, variant, registry)))
    return read_record(store.path(key))


def run_variant(problem: Problem, variant: Variant, registry: Registry) -> Record:
    settings: dict[str, Value] = dict(variant.settings)
    method: Composition = registry.resolve(variant.method, settings, problem)
    return make_record(evaluate_method(problem, method), method)


def labels(suite: Suite, registry: Registry) -> dict[str, str]:
    found = {}
    for variants in bundles(suite, registry).values():
        for variant in variants:
            settings: dict[str, Value] = dict(variant.settings)
            method = registry.resolve(variant.method, settings)
            found[label_key(method.name, method.parameters)] = variant.label
    return found


def label_key(method: str, parameters: dict[str, dict[str, Any]]) -> str:
    """A method and its parameters as one text, the key of `labels`."""
    return method + msgspec.json.encode(parameters, order="sorted").decode()


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    return {name: entry.parameters for name, entry in discover().methods.items()}


def record_label(record: Record) -> str:
    defaults = _defaults()
    named = [
        f"{key}={value if isinstance(value, str | int | float) else ' '.join(map(str, value))}"
        for method, parameters in record.spec.parameters.items()
        for key, value in parameters.items()
        if value != msgspec.json.decode(msgspec.json.encode(defaults.get(method, {}).get(key)))
    ]
    return f"{record.spec.method} ({', '.join(named)})" if named else record.spec.method
