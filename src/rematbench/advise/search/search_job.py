"""A search from plain inputs: its layouts, their shards, the candidates to try, and table lines of
its results."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any
from weakref import proxy

from msgspec import Struct, convert
from msgspec.structs import replace

from rematbench.advise.compare.compositions import load_compare
from rematbench.advise.search.best_first import Search
from rematbench.advise.search.candidates import (
    Candidate,
    FixedCandidates,
    Tree,
    Variant,
    package_variants,
    placements,
    places_states,
    rebuilds,
    variants,
)
from rematbench.advise.search.probe_problems import ProbePrograms
from rematbench.advise.search.probes import Probe
from rematbench.advise.search.queue import LeanOrder, SearchQueue
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard, key
from rematbench.advise.search.space import Choice, Fixed, Space, partitions, space
from rematbench.advise.search.trials import Site, states_at
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.breakdown import TRAFFIC, parts_of
from rematbench.evaluate.evaluator import Evaluator
from rematbench.evaluate.problems import make_problem, stack_of
from rematbench.evaluate.result import PlannedJob, Result
from rematbench.evidence.bands import band_of, ratio_band
from rematbench.evidence.peaks import fits_word, leaving_reserve
from rematbench.evidence.published.sheets import flag
from rematbench.host.declared import facts, nested
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job, degrees
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster, load_model
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY, MethodEntry, MethodError, Registry
from rematbench.problem import Problem
from rematbench.workload import Model
from rematbench.worlds.packages.flags import Engines
from rematbench.worlds.packages.process import baselines

GIB = 2**30


class SearchRequest(Struct, frozen=True, kw_only=True):
    """The input of a search: a problem whose degrees are open except the `fixed` ones.  `only`:
    methods to compose, at least one per plan (empty: all methods, and plans without any), and
    planners to try at the end.  A method of optimizer states there adds its plans to those of the
    others, or of all methods where it is the only one.  `folders`: folders with files of more
    methods.  `engine`: keep only plans that this package (or `ours`) has options for.
    `reserve_gib`: device memory that plans leave free (None: the usual reserve).  `within`: the gap
    to prove, a share of the best step.
    With `faster_than_s` the search counts the layouts that have a plan with a shorter step, keeps
    the first such plan of each, and proves no best plan.  With `any_fit` it looks for any plan that
    fits, and bounds no step.  `most_methods`: the most methods of a plan (None: as in
    config/compare.yaml).  `hosts`: whether plans may use host memory beyond what the job says."""

    spec: Job
    fixed: Fixed = Fixed()
    only: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    engine: str = ""
    reserve_gib: float | None = None
    within: float = 0.005
    faster_than_s: float = inf
    any_fit: bool = False
    most_methods: int | None = None
    hosts: bool = True


class SearchJob:
    """A search, ready to run.  `evaluator` and `programs` (of probes): programs lowered by searches
    of the same model and length on other clusters; None if there are no such searches.  Raises
    ConfigError, LayoutError or MethodError for wrong inputs."""

    def __init__(
        self,
        request: SearchRequest,
        evaluator: Evaluator | None = None,
        programs: ProbePrograms | None = None,
    ) -> None:
        self.request, self.evaluator = request, evaluator
        self.programs = {} if programs is None else programs
        self._shards: dict[int, ShardBounds] = {}
        spec = request.spec
        self.model = spec.model if isinstance(spec.model, Model) else load_model(spec.model)
        cluster = spec.cluster if isinstance(spec.cluster, Cluster) else load_cluster(spec.cluster)
        self.cluster = cluster
        self.system = stack_of(spec)
        if self.system.host.optimizer_on_host and cluster.host_update_parameters_per_s is None:
            why = f"{cluster.name} has no host_update_parameters_per_s, so step times are unknown"
            raise ConfigError("", "optimizer", f"'host': cluster {why} (allowed here: device)")
        if self.system.host.parameters_on_host:
            why = "search does not support parameters in host memory; use simulate or compare"
            raise ConfigError("", "parameters", f"'host': {why} (allowed here: device)")
        self.registry = _registry(request)

    @cached_property
    def space(self) -> Space:
        """The layouts of the job, each also with the states placed by every one of `states`;
        LayoutError if no layout is possible."""
        spec = self.request.spec
        hosts = self.request.hosts or self.system.host.optimizer_on_host
        if spec.stack.optimizer is None and not hosts:
            spec = spec.changed(optimizer="device")
        work = spec.workload(self.model)
        found = space(spec, self.request.fixed, work, self.cluster, self.system)
        if not found.choices:
            reasons = [
                f"{count} layouts break the rule: {rule}" for rule, count in found.refused.items()
            ]
            raise LayoutError(
                f"no layout is possible on {self.request.spec.gpus} GPUs: {'; '.join(reasons)}"
            )
        placed = (
            replace(choice, states=text)
            for text in (self.states if self.request.hosts else ())
            for choice in found.choices
            if not choice.hosted
        )
        return replace(found, choices=(*found.choices, *placed))

    def ready(self) -> "SearchJob":
        """Return the job after checks, so that its errors are raised here and not in a worker
        process."""
        self.problem(self.space.choices[0])
        for choice in {one.states: one for one in self.space.choices if one.states}.values():
            self._refuse_states(choice)
        _ = self.variants
        return self

    def _refuse_states(self, choice: Choice) -> None:
        """MethodError if a layout's states cannot be placed, or if more than these changes."""
        problem = self.problem(choice)
        base, plan = problem.base_plan, states_at(choice, problem, self.registry)
        if isinstance(plan, Unsupported):
            raise MethodError(plan.reason)
        if self.model.experts is not None:
            raise MethodError(
                f"{choice.states}: search does not place optimizer states of models with experts"
            )
        others = [state for state in plan.states if state.kind != "optimizer"]
        kept = replace(plan, states=base.states, fit=base.fit) == choice.base(base)
        if not kept or any(state != base.state(state.kind) for state in others):
            why = "changes more than the optimizer's states (gradients that leave in the backward)"
            raise MethodError(f"{choice.states}: {why}, which search does not bound: use compare")
        pieces = plan.state("optimizer").pieces
        if pieces and pieces.start == "ready":
            why = "updates in the backward, which search does not bound: use compare"
            raise MethodError(f"{choice.states}: {why}")

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The methods asked for that place the optimizer's states, each at every value of its
        grid."""
        return placements(self.registry, self.request.only)

    @property
    def keeps(self) -> bool:
        """Whether plans that keep every activation are searched."""
        return not self._asked or IDENTITY in self._asked

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        """The methods asked for, planners too, that place no states."""
        return tuple(name for name in self.request.only if not places_states(self.registry, name))

    @cached_property
    def variants(self) -> list[Variant]:
        """The methods to try, alone and composed.  With our executor as the engine, only methods
        that it runs on at least one of three sample layouts; with a package, the package's own
        policies on any layout that it runs."""
        if self.package:
            return self._policies(self.package)
        found = variants(self.registry, load_compare(), self._only)
        if not self.request.engine:
            return found
        choices = self.space.choices
        alone = [choice for choice in choices if choice.layout.pp == 1]
        some = (*alone[:1], choices[len(choices) // 2], choices[-1])
        engines = [Engines(self.problem(one), self.request.engine) for one in some]
        return [one for one in found if self._runs(one.at(1), engines)]

    @cached_property
    def package(self) -> MethodEntry | None:
        """The package whose policies alone are searched; None for our methods."""
        return baselines().get(self.request.engine)

    def _policies(self, package: MethodEntry) -> list[Variant]:
        """The package's policies.  Which there are depends on the kind of a layout and on the
        layers of its chunks; options for uneven chunks are none of its policies'."""
        even = (choice for choice in self.space.choices if choice.even)
        kinds = {(_kind(choice), choice.sizes[:1]): choice for choice in even}
        problems = map(self.problem, kinds.values())
        runs = [one for one in problems if not package.cls.inexpressible(one)]
        if not runs:
            raise MethodError(
                f"engine {package.name} cannot run stack {self.system.name} on any of these layouts"
            )
        return package_variants(package, runs, self._only)

    @cached_property
    def planners(self) -> tuple[str, ...]:
        """The planners to try at the end: the requested ones, or all of them."""
        if self._asked or self.package:
            return tuple(name for name in self._asked if name not in self._only)
        return tuple(name for name, entry in self.registry.methods.items() if entry.planner)

    @cached_property
    def _only(self) -> tuple[str, ...]:
        """The methods asked for that are no planners and place no states."""
        return tuple(name for name in self._asked if not _planned(self.registry, name))

    def _runs(self, method: str, engines: Sequence[Engines]) -> bool:
        for one in engines:
            try:
                plan = self.registry.resolve(method, None, one.problem).plan(one.problem)
            except (PlanError, LayoutError):
                continue
            if isinstance(plan, Plan) and one.of(plan):
                return True
        return False

    def search(self, part: int = 0, parts: int = 1, *, lists: bool = False) -> Search:
        """Return the search of every `parts`-th shard, from shard `part` on.  `lists`: whether
        slower plans are listed too."""
        request, shards = (
            self.request,
            [self._shard(index) for index in self._part_indices(part, parts)],
        )
        most, exact = request.most_methods, request.within == 0 and not request.any_fit
        most = load_compare().most_methods if most is None else most
        tree = Tree(self._samples(), most, keeping=self.keeps, exact=exact)
        return Search(
            shards,
            tree,
            self.registry,
            engine=request.engine,
            within=request.within,
            queue=SearchQueue(
                faster_than_s=request.faster_than_s,
                lists=lists,
                lean=LeanOrder(tree) if request.any_fit else None,
            ),
        )

    def _part_indices(self, part: int, parts: int) -> list[int]:
        """The shards of one part.  A search for any plan that fits has layouts that differ in the
        micro-batch alone in one part."""
        if not self.request.any_fit:
            return list(range(part, len(self._cuts), parts))
        alike = [key(cut[0])._replace(micro_batch=1) for cut in self._cuts]
        numbers = {one: number for number, one in enumerate(dict.fromkeys(alike))}
        return [index for index, one in enumerate(alike) if numbers[one] % parts == part]

    def search_of(self, candidates: Sequence[Candidate], min_pp: int = 1) -> Search:
        """Return the search for the best layout of given candidates, over layouts with at least
        `min_pp` pipeline ranks."""
        shards = [self._shard(index) for index in range(len(self._cuts))]
        within = self.request.within
        return Search(
            shards, FixedCandidates(candidates), self.registry, within=within, min_pp=min_pp
        )

    @cached_property
    def _cuts(self) -> list[list[Choice]]:
        """The layouts of each shard."""
        groups: dict[object, list[Choice]] = defaultdict(list)
        for choice in self.space.choices:
            groups[key(choice)].append(choice)
        return list(groups.values())

    def _samples(self) -> list[dict[Variant, Probe]]:
        """Probes of every method by itself on one shard, and of the methods that only rebuild on up
        to three: those with the lowest, the middle and the highest tensor parallelism, with a
        pipeline and room for the states where the space has any."""

        cuts = self._cuts

        def order(index: int) -> tuple[int, int]:
            return cuts[index][0].layout.tp, cuts[index][0].layout.micro_batch

        every = range(len(cuts))
        deep = [index for index in every if cuts[index][0].layout.pp > 1] or list(every)
        ordered = sorted(deep, key=order)
        middle = len(ordered) // 2
        nearest = (ordered, [*ordered[middle:], *ordered[:middle][::-1]], ordered[::-1])
        chosen = [
            next((index for index in indices if self._shard(index).shard.has_room), indices[0])
            for indices in nearest
        ]
        found: list[dict[Variant, Probe]] = []
        for bounds in map(self._shard, dict.fromkeys(chosen)):
            again = [s for s, p in found[0].items() if rebuilds(s, p)] if found else self.variants
            probes = {variant: bounds.shard.probe(Candidate((variant,))) for variant in again}
            found.append({s: p for s, p in probes.items() if isinstance(p, Probe)})
        if not self.request.hosts:
            return [{s: p for s, p in one.items() if "offload" not in p.kinds} for one in found]
        return found

    def _shard(self, index: int) -> ShardBounds:
        if index not in self._shards:
            choices = self._cuts[index]
            self._shards[index] = ShardBounds(
                Shard(
                    choices,
                    self.problem(choices[0]),
                    self.registry,
                    evaluator=self.evaluator,
                    programs=self.programs,
                    reserving=partial(_reserving, self.request.reserve_gib),
                )
            )
        return self._shards[index]

    def site(self, choice: Choice) -> Site:
        """Return a layout's Site, which all searches of the job share."""
        cut = next(index for index, one in enumerate(self._cuts) if key(one[0]) == key(choice))
        return self._shard(cut).shard.site(self._cuts[cut].index(choice))

    def job(self, choice: Choice) -> PlannedJob:
        """Return the job of a layout, with the words of its command if a command can express it."""
        problem = self.problem(choice)
        return PlannedJob(
            problem=problem, base=choice.base(problem.base_plan), words=self._words(choice)
        )

    def _words(self, choice: Choice) -> tuple[str, ...]:
        try:
            return (*self.spec(choice).to_arguments(), *choice.words)
        except ConfigError:  # an object (model, cluster or system) has no name on a command line
            return ()

    def choice(self, result: Result) -> Choice:
        """The layout of a result of this job."""
        problem, base = result.problem, result.base.partition
        sizes = tuple(len(rank[chunk]) for chunk in range(len(base[0])) for rank in base)
        even = base == problem.base_plan.partition
        hosted = problem.system.host.optimizer_on_host and not self.system.host.optimizer_on_host
        named = f"+{result.method}"
        states = next((text for text in self.states if named.endswith(f"+{text}")), "")
        return Choice(problem.layout, sizes, even=even, hosted=hosted, states=states)

    def completed(self, results: Sequence[Result]) -> list[Result]:
        """Return the results of plans that fit, fastest first, with all columns of a table except
        the engines (`with_engines`).  `tied`: results that differ from the first by no more than
        our error in comparing two methods."""
        found = []
        for one in results:
            problem, choice, first = one.problem, self.choice(one), results[0]
            assert one.plan is not None
            assert one.verdict is not None
            one_layout = _parallel(choice) == _parallel(self.choice(first))
            limit_s = math.exp(ratio_band(one_layout=one_layout)) * first.fitting_s
            family = self.registry.resolve(one.method, None, problem).family
            found.append(
                replace(
                    one,
                    job=replace(one.job, words=self._words(choice)),
                    family=family,
                    error_band=band_of(problem, family),
                    fit=fits_word(one.verdict.headroom_bytes, problem.room_bytes),
                    tied=one is not first and one.fitting_s <= limit_s,
                    parts_s=parts_of(problem, lower(one.plan, problem), one.fitting_s),
                )
            )
        return found

    def best_row(self, result: Result) -> dict[str, Any]:
        """The table line of one simulated plan, at place 1."""
        return search_row(1, self.completed([result])[0])

    def spec(self, choice: Choice) -> Job:
        """The job's problem at one layout, with the given names of model, cluster and system."""
        hosted = {"optimizer": "host"} if choice.hosted else {}
        return self.request.spec.changed(**degrees(choice.layout), **hosted)

    def problem(self, choice: Choice) -> Problem:
        """Return the Problem at one layout, with its reserve.  Raises ConfigError if the reserve is
        as large as the device, and RateError if no kernel has seconds."""
        loaded = {"model": self.model, "cluster": self.cluster, "system": self.system}
        problem = make_problem(self.spec(choice).changed(**loaded))
        if problem.untimed:
            raise RateError(f"a search ranks plans by seconds; {problem.untimed}")
        if self.evaluator:  # a problem and its costs hold each other, but no programs
            weigher = partial(Evaluator.weigh, proxy(self.evaluator))
            problem = replaced(problem, weigher=weigher)
        return _reserving(self.request.reserve_gib, problem)


def _parallel(choice: Choice) -> Choice:
    """A choice without its micro-batch, which the error of ratios at one layout covers."""
    return replace(choice, layout=replace(choice.layout, micro_batch=1))


def _kind(choice: Choice) -> tuple[object, ...]:
    """What of a layout decides whether a package has options for it."""
    lay = choice.layout
    degrees = (lay.tp, lay.cp, lay.pp, lay.vpp, lay.dp, lay.ulysses, lay.num_micro_batches)
    above = [degree > 1 for degree in degrees]
    return (*above, lay.sequence_parallel, lay.zero_stage, choice.even, choice.hosted)


def _reserving(reserve_gib: float | None, problem: Problem) -> Problem:
    if reserve_gib is None:
        return leaving_reserve(problem)
    reserve = round(reserve_gib * GIB)
    if reserve >= problem.usable_bytes:
        most = f"the device has {problem.usable_bytes / GIB:.2f} GiB"
        raise ConfigError("", "reserve_gib", f"{reserve_gib:g}: {most}")
    return replaced(problem, reserve_bytes=reserve)


def _registry(request: SearchRequest) -> Registry:
    engines = (*baselines(), "ours")
    if request.engine and request.engine not in engines:
        raise MethodError(f"unknown engine {request.engine!r} (known: {', '.join(engines)})")
    registry = discover(request.folders)
    for text in request.only if request.engine in baselines() else ():
        if text != IDENTITY and text.partition(":")[0] != request.engine:
            raise MethodError(
                f"{text!r}: engine {request.engine} has policies of its own: give their names, "
                f"such as {request.engine}:KEY=VALUE, or no method"
            )
    planned = [
        _planned(registry, name) for name in request.only if not places_states(registry, name)
    ]
    if planned and all(planned):
        why = "a planner starts from the plans of other methods: add a method that is not a planner"
        raise MethodError(f"{request.only[0]}: {why}, or use compare")
    return registry


def _planned(registry: Registry, name: str) -> bool:
    """Whether a method, as it is typed, is a planner or is composed with one."""
    return registry.has_planner(method.name for method in registry.resolve(name).methods)


COLUMNS = (
    *("name", "step_s", "bound_s", "tokens_per_s_per_gpu"),
    *("low_tokens_per_s_per_gpu", "high_tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu"),
    *("reserved_bytes", "headroom_bytes", "host_node_bytes", "host_headroom_bytes"),
    *(f"{part}_s" for part in ("compute", "recompute", "bubble", "host", *TRAFFIC)),
    *("binds", "fits", "tied_with_best", "outside"),
)
"""Columns of a plan in tables of searches, before the facts of its job."""


def search_row(place: int, result: Result) -> dict[str, Any]:
    """A table line with every number of a plan, in base SI units and fractions.  `binds` has the
    losses of the step, because memory does not limit a plan that fits."""
    row = result.row()
    row |= {"place": place, "binds": row["losses"]}
    return {key: row[key] for key in ("place", *COLUMNS, *result.job.facts(), "run_with")}


def with_engines(result: Result) -> Result:
    """Return the plan with the engines that can run it.  This look-up takes longer than all other
    columns."""
    assert result.plan is not None
    return replace(result, runs_on=Engines(result.problem).of(result.plan))


def simulated(row: Mapping[str, str], reserve_gib: float | None = None) -> Result:
    """Plan, lower and simulate the plan of a table line again."""
    told = {name: row[name] for name in facts(Job) if row.get(name) and name != "sp"}
    told |= {} if flag(row, "sp", True) else {"sp": "false"}
    spec = convert(nested(told, Job), Job, strict=False)
    search, layout = SearchJob(SearchRequest(spec=spec, reserve_gib=reserve_gib)), spec.layout
    sizes = tuple(int(layers) for layers in row["partition"].split(","))
    choice = next(one for one in partitions(layout, search.model.num_layers) if one.sizes == sizes)
    return Site(choice, search.problem(choice)).trial(row["name"], search.registry).result
