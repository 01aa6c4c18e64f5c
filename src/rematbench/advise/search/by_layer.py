"""Tunes plans layer by layer, starting from the fastest plans of a search: layers move between
stages, and each stage recomputes the fewest layers with which it fits.

What a rank holds depends only on its own layers, so each rank's list is found separately.  Lists
begin with the first layers of a chunk, because their backward comes last, when the fewest bytes are
live.  Every plan is simulated; no plan has a lower bound.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise, product
from math import comb, inf, prod

from msgspec.structs import replace

from rematbench.advise.candidates.layouts import LayoutChoice, ended
from rematbench.advise.candidates.trials import LayoutTrials, Trial, planned_at
from rematbench.advise.search.job import SearchSpace
from rematbench.engine.lowering.lower import lower, rank_orders
from rematbench.evaluate.evaluation import program_bytes
from rematbench.evaluate.evaluator import rank_reserved
from rematbench.evaluate.result import Result
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.plan import PlanError
from rematbench.plugins.registry import IDENTITY, Registry, changed_settings, method_text
from rematbench.solve.recompute_modules import layers_text
from rematbench.solve.search import first_true

EVERY = 64
"""The most partitions of a layout that are all tried; with more partitions, layers only move at the
ends and between neighbours as long as the step becomes shorter."""
STARTS = 2
"""The number of a search's layouts from which the tuning starts."""
LEFT_OVER = 3
"""The most layers that the end chunks together may lack compared with the others: embedding, loss
and a prediction layer count as one each."""
NEIGHBOURS = 16
"""The most chunks of a layout with which layers also move between neighbours."""
MOST = 60
"""The most layouts at which plans are simulated."""
VECTORS, FEW = 256, 6
"""If a rank's chunks have at most VECTORS combinations of numbers of recomputed layers, the best
FEW of each sum are tried; otherwise chunks with the most passes in flight come first."""
TIGHTER = 3
"""How often lists are made again for less room, because the end of a step needs more bytes than
its passes."""

Counts = tuple[int, ...]


class LayerLists:
    """The lists of layers for a method to recompute, at the layout of `trials`.  `text`: a method
    with a parameter `layers`."""

    def __init__(self, trials: LayoutTrials, text: str, registry: Registry) -> None:
        self.trials, self.problem, self.registry = trials, trials.problem, registry
        self._partition = trials.job.base.partition
        (method,) = registry.resolve(text, None, trials.problem).methods
        self._entry, self._settings = registry.entry(method.name), changed_settings(method)
        self._known: dict[tuple[int, tuple[int, ...], int], bool] = {}

    def text(self, layers: Sequence[int]) -> str:
        """The method's text for some layers; for none, that of the plan that keeps everything."""
        if not layers:
            return IDENTITY
        return method_text(self._entry, {**self._settings, "layers": layers_text(layers)})

    def fewest(self, room_bytes: int) -> tuple[int, ...] | None:
        """The fewest recomputed layers with which the passes of all ranks fit; None if a rank does
        not fit."""
        found: list[int] = []
        for rank in range(self.problem.layout.pp):
            own = self.fewest_of(rank, room_bytes)
            if own is None:
                return None
            found += own
        return tuple(sorted(found))

    def fewest_of(self, rank: int, room_bytes: int) -> tuple[int, ...] | None:
        """The fewest recomputed layers with which a rank's passes fit; None if they never fit."""
        listed: dict[int, tuple[int, ...]] = {}

        def holds(total: int) -> bool:
            for counts in self._counts(rank, total):
                layers = self._first(rank, counts)
                if self.fits(rank, layers, room_bytes):
                    listed[total] = layers
                    return True
            return False

        most = sum(map(len, self._partition[rank]))
        if holds(0):
            return ()
        return listed[first_true(holds, 0, most)] if most and holds(most) else None

    def fits(self, rank: int, layers: tuple[int, ...], room_bytes: int) -> bool:
        """Whether a rank's passes fit, by reserved bytes, if these of its layers are recomputed."""
        key = (rank, layers, room_bytes)
        if key not in self._known:
            self._known[key] = self._reserved(rank, layers, room_bytes) <= room_bytes
        return self._known[key]

    def _reserved(self, rank: int, layers: tuple[int, ...], room_bytes: int) -> float:
        method = self.trials.named(self.text(layers))
        plan = planned_at(self.trials.job, method, self.registry)
        if isinstance(plan, str):
            return inf
        try:
            program = lower(plan, self.problem, (rank,), partly=True)
        except (PlanError, LayoutError):
            return inf
        held = program_bytes(self.problem, plan, program)[rank]
        if held.device_peak > room_bytes:
            return inf
        return rank_reserved(program, rank, held, self.problem.usable_bytes).nbytes

    def _first(self, rank: int, counts: Counts) -> tuple[int, ...]:
        chunks = zip(self._ordered[rank], counts, strict=True)
        return tuple(sorted(layer for chunk, n in chunks for layer in chunk[:n]))

    @cached_property
    def _ordered(self) -> list[list[list[int]]]:
        """The layers of every chunk of every rank, those that save the most bytes first, then in
        order."""

        def saved(layer: int) -> tuple[int, int]:
            return -self.problem.layer(layer).saved_bytes, layer

        return [[sorted(chunk, key=saved) for chunk in rank] for rank in self._partition]

    def _counts(self, rank: int, total: int) -> list[Counts]:
        """The ways to distribute `total` recomputed layers over a rank's chunks, without those that
        keep at least as much as another way at every time."""
        sizes = [len(chunk) for chunk in self._ordered[rank]]
        if prod(size + 1 for size in sizes) > VECTORS:
            return [self._in_order(rank, total)]
        every = [c for c in product(*(range(n + 1) for n in sizes)) if sum(c) == total]
        loads = {counts: self._loads(rank, counts) for counts in every}
        kept: dict[tuple[int, ...], Counts] = {}
        for counts, load in sorted(loads.items(), key=lambda item: (sum(item[1]), item[0])):
            if not any(all(a <= b for a, b in zip(one, load, strict=True)) for one in kept):
                kept[load] = counts
        return list(kept.values())[:FEW]

    def _in_order(self, rank: int, total: int) -> Counts:
        counts, flights = [0] * len(self._ordered[rank]), max(self._flights(rank), key=sum)
        for chunk in sorted(range(len(counts)), key=lambda chunk: -flights[chunk]):
            counts[chunk] = min(total, len(self._ordered[rank][chunk]))
            total -= counts[chunk]
        return tuple(counts)

    def _loads(self, rank: int, counts: Counts) -> tuple[int, ...]:
        """Bytes that the kept layers of a rank hold, for each set of passes in flight."""
        kept = [
            sum(self.problem.layer(layer).saved_bytes for layer in chunk[n:])
            for chunk, n in zip(self._ordered[rank], counts, strict=True)
        ]
        return tuple(
            sum(n * nbytes for n, nbytes in zip(flight, kept, strict=True))
            for flight in self._flights(rank)
        )

    def _flights(self, rank: int) -> list[Counts]:
        """The passes in flight of each chunk, at the times that no other time exceeds in every
        chunk."""
        live = [0] * len(self._ordered[rank])
        found: set[Counts] = set()
        for item in rank_orders(self.trials.job.base, self.problem)[rank]:
            live[item.chunk] += item.forward - item.last
            found.add(tuple(live))

        def less(one: Counts, other: Counts) -> bool:
            return one != other and all(a <= b for a, b in zip(one, other, strict=True))

        return [one for one in sorted(found) if not any(less(one, other) for other in found)]


class ByLayer:
    """Tunes plans of a search's job layer by layer.  `trials`: the number of plans tried so far."""

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.trials = space, 0
        self._known: dict[LayoutChoice, Result | None] = {}
        self._texts: tuple[str, ...] = ()

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """The texts of the search's methods that take lists of layers."""
        registry, found = self.space.registry, []
        for variant in self.space.variants:
            if variant.scalar is None and not self.space.package:
                methods = registry.resolve(variant.text).methods
                if len(methods) == 1 and "layers" in registry.entry(methods[0].name).parameters:
                    found.append(variant.text)
        return tuple(dict.fromkeys(found))

    def fastest(self, results: Sequence[Result]) -> Result | None:
        """The fastest plan reached from the results of a search, which are sorted fastest first;
        None if none fits."""
        self._texts = tuple(dict.fromkeys(item.method for item in results[:STARTS]))
        starts = dict.fromkeys(self.space.choice(item) for item in results)
        found = [self._from(choice) for choice in [*starts][:STARTS]]
        tuned = (item for item in found if item is not None)
        return min(tuned, key=lambda item: item.fitting_s, default=None)

    def stated(self) -> tuple[Result, ...]:
        """The plans that fit at layouts whose stages the job states and no bound covers, fastest
        first. They keep everything, or apply the listed methods to all layers or to lists of
        layers."""
        self._texts = self.listed
        tried = map(self._trials, self.space.space.choices[:MOST])
        fits = [trial.result for trials in tried for trial in trials if trial.result.fits]
        return tuple(sorted(fits, key=lambda item: item.fitting_s))

    def _from(self, start: LayoutChoice) -> Result | None:
        """The fastest plan that tuning reaches from a layout."""
        best, at = None, start
        for choice in self._interleaved(start):
            here = self._least(choice, self._every(choice))
            if here is not None and (best is None or here.fitting_s < best.fitting_s):
                best, at = here, self.space.choice(here)
        while best is not None:
            further = self._least(at, self._moved(at))
            if further is None or further.fitting_s >= best.fitting_s:
                break
            best, at = further, self.space.choice(further)
        return best

    def _least(self, at: LayoutChoice, choices: Iterator[LayoutChoice]) -> Result | None:
        found = [self.at(choice) for choice in (at, *choices)]
        fits = [item for item in found if item is not None]
        return min(fits, key=lambda item: item.fitting_s, default=None)

    def _interleaved(self, start: LayoutChoice) -> Iterator[LayoutChoice]:
        """The layout, and its variants with other numbers of chunks, whose end chunks are smaller
        if layers do not divide evenly."""
        yield start
        lay, work = start.layout, self.space.request.spec.workload(self.space.model)
        fixed = self.space.request.fixed.vpp is not None or bool(lay.stages)
        layers = self.space.model.num_layers
        for vpp in () if fixed or lay.pp == 1 else range(1, -(-layers // lay.pp) + 1):
            other = replace(lay, vpp=vpp)
            each = -(-layers // other.num_chunks)
            less = each * other.num_chunks - layers
            try:
                check_layout(other, work, self.space.system)
            except LayoutError:
                continue
            if less > LEFT_OVER:
                continue
            for first in range(max(0, less - each), min(each, less) + 1):
                choice = ended(start, other, layers, each - first, each - (less - first))
                if choice is not None:
                    yield choice

    def _every(self, choice: LayoutChoice) -> Iterator[LayoutChoice]:
        """All partitions of a layout, if there are at most EVERY."""
        layers, chunks = sum(choice.sizes), len(choice.sizes)
        if choice.layout.stages or chunks < 2 or comb(layers + 1, chunks - 1) > EVERY:
            return
        for cuts in combinations(range(layers + 1), chunks - 1):
            ends = (0, *cuts, layers)
            sizes = tuple(b - a for a, b in pairwise(ends))
            if all(sizes[1:-1]):
                yield choice.of_sizes(sizes)

    def _moved(self, choice: LayoutChoice) -> Iterator[LayoutChoice]:
        """The layout with a layer less or more at its ends, or with a layer moved between
        neighbouring chunks."""
        layers, sizes = sum(choice.sizes), choice.sizes
        if choice.layout.stages or len(sizes) < 2:
            return
        for first, last in product((-1, 0, 1), repeat=2):
            moved = ended(choice, choice.layout, layers, sizes[0] + first, sizes[-1] + last)
            if moved is not None:
                yield moved
        for at in range(len(sizes) - 1 if len(sizes) <= NEIGHBOURS else 0):
            for step in (1, -1):
                near = list(sizes)
                near[at], near[at + 1] = near[at] - step, near[at + 1] + step
                if min(near) >= 0 and all(near[1:-1]):
                    yield choice.of_sizes(tuple(near))

    def at(self, choice: LayoutChoice) -> Result | None:
        """The fastest plan that fits at a layout, by the search's methods or with a list of layers;
        None if none fits."""
        if choice not in self._known:
            found = self._trials(choice) if len(self._known) < MOST else []
            fits = [trial.result for trial in found if trial.result.fits]
            best = min(fits, key=lambda item: item.fitting_s, default=None)
            self._known[choice] = best
        return self._known[choice]

    def _trials(self, choice: LayoutChoice) -> list[Trial]:
        """The trials at a layout; if the plan that keeps everything fits, only that one."""
        trials, registry = LayoutTrials(self.space.job(choice), choice.states), self.space.registry
        keeping = trials.trial(IDENTITY, registry)
        if not keeping.result.fits:
            lists = [LayerLists(trials, text, registry) for text in self.listed]
            found = [self._tried(trials, each) for each in lists]
            found += [trials.trial(text, registry) for text in self._texts]
        self.trials += 1 if keeping.result.fits else len(found)
        return [keeping] if keeping.result.fits else found

    def _tried(self, trials: LayoutTrials, lists: LayerLists) -> Trial:
        """The trial of the shortest lists of layers with which the whole step fits."""
        problem = lists.problem
        room = problem.usable_bytes - problem.reserve_bytes
        trial = trials.trial(IDENTITY, self.space.registry)
        for _ in range(TIGHTER):
            layers = lists.fewest(room)
            if layers is None:
                return trial
            trial = trials.trial(lists.text(layers), self.space.registry)
            if trial.result.fits or trial.short_bytes == inf:
                return trial
            room -= int(trial.short_bytes)
        return trial
