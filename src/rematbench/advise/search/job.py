"""The job of a search: its layouts, the methods to try, and its results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from functools import cached_property, partial
from typing import Any, Self
from weakref import proxy

from msgspec import convert
from msgspec.structs import replace

from rematbench.advise.candidates.candidate import Variant, load_compare
from rematbench.advise.candidates.layouts import LayoutChoice, Space, space
from rematbench.advise.candidates.methods import (
    package_variants,
    placements,
    places_states,
    variants,
)
from rematbench.advise.candidates.trials import LayoutTrials
from rematbench.advise.search.request import SearchRequest
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.breakdown import TRAFFIC, parts_of
from rematbench.evaluate.evaluation import rated
from rematbench.evaluate.evaluator import Evaluator
from rematbench.evaluate.problems import make_problem, stack_of, trained_model
from rematbench.evaluate.result import PlannedJob, Result
from rematbench.evidence.bands import ratio_band, with_host_rates
from rematbench.evidence.peaks import leaving_reserve
from rematbench.evidence.published.sheets import flag
from rematbench.host.declared import facts, nested
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job, degrees
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster, load_model
from rematbench.inputs.stages import stages_of
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY, MethodEntry, MethodError, Registry
from rematbench.problem import Problem
from rematbench.workload import Model
from rematbench.worlds.packages.flags import Engines, unsaid
from rematbench.worlds.packages.process import baselines

GIB = 2**30


class SearchSpace:
    """The layouts and methods that a search may try.  `evaluator`: keeps programs for searches of
    the same model and length on other clusters (None: there are no such searches).  Raises
    ConfigError, LayoutError or MethodError for wrong inputs."""

    def __init__(self, request: SearchRequest, evaluator: Evaluator | None = None) -> None:
        self.request, self.evaluator = request, evaluator
        spec = request.spec
        model = spec.model if isinstance(spec.model, Model) else load_model(spec.model)
        cluster = spec.cluster if isinstance(spec.cluster, Cluster) else load_cluster(spec.cluster)
        self.cluster = cluster
        self.system = stack_of(spec)
        self.model = trained_model(model, self.system)
        if self.system.host.parameters_on_host:
            why = "search does not support parameters in host memory; use simulate or compare"
            raise ConfigError("", "parameters", f"'host': {why} (allowed here: device)")
        self.registry = _registry(request)

    @cached_property
    def space(self) -> Space:
        """The layouts of the job, and each of them again with every placement of `states`;
        LayoutError if no layout is possible."""
        spec = self.request.spec
        hosts = self.request.hosts or self.system.host.optimizer_on_host
        if spec.stack.optimizer is None and not hosts:
            spec = spec.changed(optimizer="device")
        work = spec.workload(self.model)
        result = space(spec, self.request.fixed, work, self.cluster, self.system)
        if not result.choices and self.request.by_layer:
            result = replace(result, choices=result.apart)
        if not result.choices:
            reasons = [
                f"{count} layouts break the rule: {rule}" for rule, count in result.refused.items()
            ]
            raise LayoutError(
                f"no layout is possible on {self.request.spec.gpus} GPUs: {'; '.join(reasons)}"
            )
        placed = (
            replace(choice, states=text)
            for text in (self.states if self.request.hosts else ())
            for choice in result.choices
            if not choice.hosted
        )
        return replace(result, choices=(*result.choices, *placed))

    @property
    def bounded(self) -> bool:
        """Whether bounds cover the layouts."""
        return self.space.choices[0] not in self.space.apart

    def ready(self) -> Self:
        """Return the space after checks, so that errors are raised here, not in a worker."""
        self.problem(self.space.choices[0])
        for choice in {item.states: item for item in self.space.choices if item.states}.values():
            self._refuse_states(choice)
        _ = self.variants
        return self

    def _refuse_states(self, choice: LayoutChoice) -> None:
        """MethodError if a layout's optimizer states cannot be placed, or if the method that places
        them changes more than these."""
        problem = self.problem(choice)
        base, plan = problem.base_plan, choice.keeping(problem, self.registry)
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
        """The requested methods that place optimizer states, each at every value of its grid."""
        return placements(self.registry, self.request.only)

    @property
    def keeps(self) -> bool:
        """Whether plans that keep every activation are searched."""
        return not self._asked or IDENTITY in self._asked

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        """The requested methods, planners included, that do not place states."""
        return tuple(name for name in self.request.only if not places_states(self.registry, name))

    @cached_property
    def variants(self) -> list[Variant]:
        """The methods to try, alone and composed.  If the engine is our executor, only methods that
        it runs on one of three sample layouts; if it is a package, the package's policies on all
        layouts that it runs."""
        if self.package:
            return self._policies(self.package)
        result = variants(self.registry, load_compare(), self.model, self._only)
        if not self.request.engine:
            return result
        choices = self.space.choices
        alone = [choice for choice in choices if choice.layout.pp == 1]
        some = (*alone[:1], choices[len(choices) // 2], choices[-1])
        engines = [Engines(self.problem(item), self.request.engine) for item in some]
        return [item for item in result if self._runs(item.at(1), engines)]

    @cached_property
    def package(self) -> MethodEntry | None:
        """The package to whose policies the search is limited; None if our methods are searched."""
        return baselines().get(self.request.engine)

    def _policies(self, package: MethodEntry) -> list[Variant]:
        """The package's policies on one layout of each kind and chunk size, on which its policies
        depend.  Uneven chunks do not matter, because no policy needs options for them."""
        even = (choice for choice in self.space.choices if choice.even)
        kinds = {(_kind(choice), choice.sizes[:1]): choice for choice in even}
        problems = map(self.problem, kinds.values())
        runs = [item for item in problems if not unsaid(package, item)]
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
        """The requested methods that are no planners and do not place states."""
        return tuple(name for name in self._asked if not _planned(self.registry, name))

    def _runs(self, method: str, engines: Sequence[Engines]) -> bool:
        for item in engines:
            try:
                plan = self.registry.resolve(method, None, item.problem).plan(item.problem)
            except (PlanError, LayoutError):
                continue
            if isinstance(plan, Plan) and item.of(plan):
                return True
        return False

    def job(self, choice: LayoutChoice) -> PlannedJob:
        """The job of a layout, with its command-line options if options can express it."""
        problem = self.problem(choice)
        return PlannedJob(
            problem=problem, base=choice.base(problem.base_plan), words=self._words(choice)
        )

    def _words(self, choice: LayoutChoice) -> tuple[str, ...]:
        try:
            return (*self.spec(choice).to_arguments(), *choice.words)
        except ConfigError:  # an object (model, cluster or system) has no name on a command line
            return ()

    def choice(self, result: Result) -> LayoutChoice:
        problem, base = result.problem, result.base.partition
        stages = stages_of(base, self.model.num_layers)
        sizes = tuple(len(stage.layers) for stage in stages)
        even = base == problem.base_plan.partition
        hosted = problem.system.host.optimizer_on_host and not self.system.host.optimizer_on_host
        named = f"+{result.method}"
        states = next((text for text in self.states if named.endswith(f"+{text}")), "")
        own, stacks = problem.system.experts, self.system.experts
        return LayoutChoice(
            problem.layout, sizes, even=even, hosted=hosted, states=states,
            overlaps=own.ep_overlap != stacks.ep_overlap,
            dispatcher=own.dispatcher if own.dispatcher != stacks.dispatcher else None,
        )  # fmt: skip

    def completed(self, results: Sequence[Result]) -> list[Result]:
        """The results of plans that fit, fastest first, with all columns of a table except the
        engines (`with_engines`).  Results are `tied` if they differ from the first by no more than
        our error in comparing two methods."""
        answers = []
        for item in results:
            problem, choice, first = item.problem, self.choice(item), results[0]
            assert item.plan is not None
            one_layout = _parallel(choice) == _parallel(self.choice(first))
            limit_s = math.exp(ratio_band(one_layout=one_layout)) * first.fitting_s
            family = self.registry.resolve(item.method, None, problem).family
            job = replace(item.job, words=self._words(choice))
            there = problem.remade(cluster=self.cluster)
            banded = with_host_rates(replace(item, job=replace(job, problem=there)), family)
            answers.append(
                replace(
                    item,
                    job=job,
                    family=family,
                    error_band=banded.error_band,
                    fit=banded.fit,
                    tied=item is not first and item.fitting_s <= limit_s,
                    parts_s=parts_of(problem, lower(item.plan, problem), item.fitting_s),
                )
            )
        return answers

    def best_row(self, result: Result) -> dict[str, Any]:
        """The table row of a simulated plan, at place 1."""
        return search_row(1, self.completed([result])[0])

    def spec(self, choice: LayoutChoice) -> Job:
        """The job at one layout, in which model, cluster and system keep their names."""
        chosen = {"optimizer": "host"} if choice.hosted else {}
        chosen |= {"ep_overlap": "on"} if choice.overlaps else {}
        chosen |= {"dispatcher": choice.dispatcher} if choice.dispatcher else {}
        return self.request.spec.changed(**degrees(choice.layout), **chosen)

    def problem(self, choice: LayoutChoice) -> Problem:
        """The Problem at one layout, with its reserve.  ConfigError if the reserve is as large as
        the device, RateError if kernels cannot be timed."""
        loaded = {"model": self.model, "cluster": self.cluster, "system": self.system}
        problem = make_problem(self.spec(choice).changed(**loaded))
        if problem.untimed:
            raise RateError(f"a search ranks plans by seconds; {problem.untimed}")
        if self.system.host.optimizer_on_host or choice.states:
            plan = choice.keeping(problem, self.registry)
            problem = rated(problem, plan) if isinstance(plan, Plan) else problem
        if self.evaluator:  # a proxy, so that problems do not keep programs alive
            weigher = partial(Evaluator.weigh, proxy(self.evaluator))
            problem = replaced(problem, weigher=weigher)
        return reserving(self.request.reserve_gib, problem)


def reserving(reserve_gib: float | None, problem: Problem) -> Problem:
    """The problem in which methods leave `reserve_gib` of a device free (None: the usual reserve).
    ConfigError if that is the whole device."""
    if reserve_gib is None:
        return leaving_reserve(problem)
    reserve = round(reserve_gib * GIB)
    if reserve >= problem.usable_bytes:
        most = f"the device has {problem.usable_bytes / GIB:.2f} GiB"
        raise ConfigError("", "reserve_gib", f"{reserve_gib:g}: {most}")
    return replaced(problem, reserve_bytes=reserve)


def _parallel(choice: LayoutChoice) -> LayoutChoice:
    """A choice with micro-batch 1: layouts that differ only in the micro-batch count as one layout
    for the error of ratios."""
    return replace(choice, layout=replace(choice.layout, micro_batch=1))


def _kind(choice: LayoutChoice) -> tuple[object, ...]:
    """The properties of a layout that decide whether a package has options for it."""
    lay = choice.layout
    degrees = (lay.tp, lay.cp, lay.pp, lay.vpp, lay.dp, lay.ulysses, lay.num_micro_batches)
    above = [degree > 1 for degree in degrees]
    return (
        *above,
        lay.sequence_parallel,
        lay.zero_stage,
        choice.even,
        choice.hosted,
        choice.overlaps,
        choice.dispatcher,
    )


def _registry(request: SearchRequest) -> Registry:
    engines = (*baselines(), "ours")
    if request.engine and request.engine not in engines:
        raise MethodError(f"unknown engine {request.engine!r} (known: {', '.join(engines)})")
    registry = discover(request.folders)
    for text in request.only if request.engine in baselines() else ():
        if text != IDENTITY and text.partition(":")[0] != request.engine:
            raise MethodError(
                f"{text!r}: engine {request.engine} takes only its policies: give their names, "
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
    """Whether a method, as the user types it, is a planner or contains one."""
    return registry.has_planner(method.name for method in registry.resolve(name).methods)


COLUMNS = (
    *("name", "step_s", "bound_s", "tokens_per_s_per_gpu"),
    *("low_tokens_per_s_per_gpu", "high_tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu"),
    *("reserved_bytes", "headroom_bytes", "host_node_bytes", "host_headroom_bytes"),
    *(f"{part}_s" for part in ("compute", "recompute", "bubble", "host", *TRAFFIC)),
    *("binds", "fits", "tied_with_best", "outside"),
)
"""The columns of a plan in tables of searches; the facts of its job follow."""


def search_row(place: int, result: Result) -> dict[str, Any]:
    """A table row with every number of a plan, in base SI units and fractions.  `binds` lists the
    losses of the step, because memory does not limit a plan that fits."""
    return result.line(("place", *COLUMNS), place=place, binds=result.losses)


def with_engines(result: Result) -> Result:
    """The result with the engines that can run its plan, a look-up that takes longer than all other
    columns."""
    assert result.plan is not None
    return replace(result, runs_on=Engines(result.problem).of(result.plan))


def simulated(row: Mapping[str, str], reserve_gib: float | None = None) -> Result:
    """Plan, lower and simulate the plan of a table row again."""
    told = {name: row[name] for name in facts(Job) if row.get(name) and name != "sp"}
    told |= {} if flag(row, "sp", True) else {"sp": "false"}
    spec = convert(nested(told, Job), Job, strict=False)
    search, layout = SearchSpace(SearchRequest(spec=spec, reserve_gib=reserve_gib)), spec.layout
    sizes = tuple(int(layers) for layers in row["partition"].split(","))
    choice = LayoutChoice(layout, sizes).of_sizes(sizes)
    return LayoutTrials(search.job(choice)).trial(row["name"], search.registry).result
