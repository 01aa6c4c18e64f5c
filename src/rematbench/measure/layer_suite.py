"""The suite of `measure-gpu`'s part `layers`: its problems, and the cells that run there."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError, require_among
from rematbench.measure.records import Means
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.suite import Suite, bundles, read_suite
from rematbench.worlds.records.suite_cells import Cell, cells, is_selected


class ByHand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step written by hand with torch's means to save activation memory, on the named
    problems."""

    means: Means
    problems: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"torch by hand, {self.means}"


class LayerSuite(Suite, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems on one GPU each, and the steps that run there: `methods` with their defaults, the
    variants, and steps written `by_hand`. `references`: by problem, the cell METHOD.NUMBER to whose
    speed others are compared. `half_width`: a problem has no further turns once the half-width of
    every ratio's 95 % interval, divided by the ratio, is this small. `alone`: problems with a
    pipeline, of which only the first rank runs, without its neighbours."""

    methods: tuple[str, ...]
    references: dict[str, str]
    half_width: float = 0.01
    by_hand: tuple[ByHand, ...] = ()
    alone: tuple[str, ...] = ()


class HandCell(Cell, frozen=True, kw_only=True):
    """A step written by hand. It has no prediction; `plan` is keep_all's."""

    means: Means


def load_layers(path: Path) -> LayerSuite:
    """The suite of a file; ConfigError of one line for a wrong entry."""
    suite, label = read_suite(path, LayerSuite), str(path)
    require_among(suite.methods, list(discover().methods), (label, "methods", "method"))
    known = [problem.name for problem in suite.problems]
    require_among(suite.alone, known, (label, "alone", "problem"))
    for one in suite.by_hand:
        require_among(one.problems, known, (label, f"by_hand: {one.means}", "problem"))
    names = layer_names(suite)
    for problem in suite.problems:
        reference = f"{problem.name}.{suite.references.get(problem.name, '')}"
        if reference not in names:
            raise ConfigError(
                label, f"references: {problem.name}", f"no cell of the suite is named {reference!r}"
            )
        layout = problem.layout
        if layout.gpus > 1 and (problem.name not in suite.alone or layout.gpus > layout.pp):
            text = "expected one GPU, or a pipeline of single GPUs that is listed under `alone`"
            raise ConfigError(label, f"problems: {problem.name}", f"{layout.gpus} GPUs: {text}")
    return suite


def layer_names(suite: LayerSuite) -> dict[str, str]:
    return _planned(suite) | by_hand_names(suite)


def by_hand_names(suite: LayerSuite) -> dict[str, str]:
    return {name: one.label for name, _, one in _by_hand(suite)}


def layer_cells(suite: LayerSuite, only: Sequence[str] = ()) -> list[Cell]:
    """Return the planned cells of the suite; `only`: the names of the problems or cells to take."""
    names = [name for name in _planned(suite) if is_selected(name, only)]
    found = cells(suite, [], names) if names else []
    keep_all = discover().resolve(IDENTITY, {})
    specs = {spec.name: spec for spec in suite.problems}
    for name, at, one in _by_hand(suite):
        if is_selected(name, only):
            problem = specs[at].problem()
            found.append(HandCell(name, problem, keep_all, problem.base_plan, means=one.means))
    if not found:
        raise CommandError(f"--only {', '.join(only)}: the suite has no such cell")
    return found


def _planned(suite: LayerSuite) -> dict[str, str]:
    every = bundles(suite, discover())
    return {
        f"{problem.name}.{bundle}.{number}": variant.label
        for problem in suite.problems
        for bundle, variants in every.items()
        for number, variant in enumerate(variants)
        if variant in suite.variants or (number == 0 and bundle in suite.methods)
        if not variant.problems or problem.name in variant.problems
    }


def _by_hand(suite: LayerSuite) -> Iterator[tuple[str, str, ByHand]]:
    """Yield (cell name, problem name, step) of each step written by hand."""
    for one in suite.by_hand:
        for problem in one.problems:
            yield f"{problem}.torch.{one.means}", problem, one
