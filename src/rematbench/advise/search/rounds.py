"""A search in worker processes: rounds of work, and planners at the end.

Each process has a share of the layout groups, and all processes know the best step.  A round is a
fixed amount of work, counted and not timed, so that plans do not depend on the machine's speed.
Planners are methods whose plan is unknown until it is solved.  No bound covers such plans, so
planners run after the other plans are proved, each at the layouts of the fastest plans, in that
order, until one of its plans fits."""

from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Iterator, Sequence
from functools import cached_property, partial
from itertools import count
from math import inf
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.layout_group import GroupKey, group_key
from rematbench.advise.bounds.lines import Probe, Refused
from rematbench.advise.bounds.probes import ProbePrograms
from rematbench.advise.candidates.candidate import Candidate, Variant, load_compare
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.candidates.trials import LayoutTrials, Trial
from rematbench.advise.search.best_first import Search
from rematbench.advise.search.families import FixedFamily, PlanFamily, rebuilds
from rematbench.advise.search.job import SearchSpace, reserving
from rematbench.advise.search.queue import Alike, LeanOrder, SearchQueue
from rematbench.advise.search.request import MINUTE, Progress, SearchRequest
from rematbench.evaluate.evaluator import Evaluator
from rematbench.evaluate.result import Result, Status
from rematbench.host.console import CommandError
from rematbench.host.workers import NoAnswer, Pool, collect_rarely, lost_reason
from rematbench.plugins.registry import MethodError
from rematbench.worlds.packages.flags import Engines

WORK = 400
"""The work of a round (`Search.work`), about half a second."""
ONE_PROCESS_WORK = 2 * MINUTE * WORK
"""The work of MINUTE rounds in two processes, for a search in one process."""
LATER = 40
"""The most rounds, half a minute, that look for the other rows after the gap is proved."""
LIMIT_S = 3600
"""The limit of CPU seconds of a worker's task; a round takes a few seconds."""


class SearchJob(SearchSpace):
    """A search that is ready to run.  `programs`: programs of probes that searches of the same
    model and length on other clusters share (None: there are no such searches)."""

    def __init__(
        self,
        request: SearchRequest,
        evaluator: Evaluator | None = None,
        programs: ProbePrograms | None = None,
    ) -> None:
        super().__init__(request, evaluator)
        self.programs = {} if programs is None else programs
        self._groups: dict[int, GroupBounds] = {}

    def search(self, part: int = 0, parts: int = 1, *, lists: bool = False) -> Search:
        """The search over every `parts`-th group, from group `part` on.  `lists`: whether slower
        plans are listed too."""
        request = self.request
        most, exact = request.most_methods, request.within == 0 and not request.any_fit
        most = load_compare().most_methods if most is None else most
        family = PlanFamily(self._samples(), most, keeping=self.keeps, exact=exact)
        return Search(
            self._alike(part, parts),
            family,
            self.registry,
            engine=request.engine,
            within=request.within,
            queue=SearchQueue(
                faster_than_s=request.faster_than_s,
                lists=lists,
                lean=LeanOrder(family.leanest) if request.any_fit else None,
            ),
        )

    # Why: docs/decisions/advise.md, Is every layout group made before a search begins?
    def _alike(self, part: int = 0, parts: int = 1) -> list[Alike]:
        """The groups of one part, of which those that are `Alike` are together.  In a search for
        any plan that fits, so are those that differ only in the micro-batch."""
        sets: dict[GroupKey, list[int]] = defaultdict(list)
        for index, choices in enumerate(self._layouts):
            key = group_key(choices[0]).plain
            sets[key._replace(micro_batch=1) if self.request.any_fit else key].append(index)
        return [
            Alike(
                Counter(max(choice.sizes) for index in own for choice in self._layouts[index]),
                [partial(self._group, index) for index in own],
            )
            for own in [*sets.values()][part::parts]
        ]

    def search_of(self, candidates: Sequence[Candidate], min_pp: int = 1) -> Search:
        """The search for the best layout of fixed candidates, among layouts with at least `min_pp`
        pipeline ranks."""
        within = self.request.within
        return Search(
            self._alike(), FixedFamily(candidates), self.registry, within=within, min_pp=min_pp
        )

    @cached_property
    def _layouts(self) -> list[list[LayoutChoice]]:
        groups: dict[object, list[LayoutChoice]] = defaultdict(list)
        for choice in self.space.choices:
            groups[group_key(choice)].append(choice)
        return list(groups.values())

    def ready(self) -> Self:
        """Return the job after checks; MethodError for a method that moves passes if no bound
        covers its plans."""
        super().ready()
        replies: dict[str, list[Probe | Refused]] = defaultdict(list)
        for variant in self.variants:
            if variant.moves:
                reply = self._sampled[0].probe(Candidate((variant,)))
                replies[variant.method].append(reply)
        for name, every in replies.items():
            refused = [reply.reason for reply in every if isinstance(reply, Refused)]
            if len(refused) == len(every):
                raise MethodError(
                    f"search has no bound for {refused[0]}; use compare --also {name}"
                )
        return self

    @cached_property
    def _sampled(self) -> list[GroupBounds]:
        """Up to four groups on which methods are compared: those with the lowest, the middle and
        the highest tensor parallelism, if possible with a pipeline and room for the states; and one
        with overlapping exchanges, because such groups refuse some methods."""
        layouts = self._layouts

        def order(index: int) -> tuple[int, int]:
            return layouts[index][0].layout.tp, layouts[index][0].layout.micro_batch

        every = [
            index
            for index, own in enumerate(layouts)
            if not own[0].overlaps and not own[0].dispatcher
        ]
        deep = [index for index in every if layouts[index][0].layout.pp > 1] or list(every)
        ordered = sorted(deep, key=order)
        middle = len(ordered) // 2
        beside = sorted((i for i, own in enumerate(layouts) if own[0].overlaps), key=order)
        nearest = [ordered, [*ordered[middle:], *ordered[:middle][::-1]], ordered[::-1]]
        nearest += [beside] if beside else []
        chosen = [
            next((index for index in indices if self._group(index).has_room), indices[0])
            for indices in nearest
        ]
        return [*map(self._group, dict.fromkeys(chosen))]

    def _samples(self) -> list[dict[Variant, Probe]]:
        """The probes of single methods in the `_sampled` groups: of all methods in the first group
        in which some method has a plan, and of those that only rebuild in the later ones."""
        results: list[dict[Variant, Probe]] = []
        for bounds in self._sampled:
            again = (
                [s for s, p in results[0].items() if rebuilds(s, p)] if results else self.variants
            )
            probes = {variant: bounds.probe(Candidate((variant,))) for variant in again}
            planned = {s: p for s, p in probes.items() if isinstance(p, Probe)}
            results += [planned] if planned or results else []
        results = results or [{}]
        if not self.request.hosts:
            return [{s: p for s, p in item.items() if "offload" not in p.kinds} for item in results]
        return results

    def _group(self, index: int) -> GroupBounds:
        if index not in self._groups:
            choices = self._layouts[index]
            self._groups[index] = GroupBounds(
                choices,
                self.problem(choices[0]),
                self.registry,
                partial(reserving, self.request.reserve_gib),
                evaluator=self.evaluator,
                programs=self.programs,
            )
        return self._groups[index]

    def trials(self, choice: LayoutChoice) -> LayoutTrials:
        """The trials of a layout, which all searches of the job share."""
        key = group_key(choice)
        index = next(i for i, each in enumerate(self._layouts) if group_key(each[0]) == key)
        return self._group(index).trials_at(self._layouts[index].index(choice))


class Round(Struct, frozen=True):
    """The input of a process for a round: the best step of all processes in seconds, and whether to
    search for the further rows of the table."""

    best_s: float
    listing: bool


class State(Struct, frozen=True, kw_only=True):
    """The answer of a process after a round: the trials of the round, and the state of its Search
    (`excluded`: numbers of excluded and slower plans)."""

    trials: tuple[Trial, ...]
    bound_s: float
    short_bytes: float
    excluded: dict[str, int]
    plans: int


class Part:
    """The search of a share of the layout groups, in a worker process."""

    def __init__(self, request: SearchRequest, part: int, parts: int, *, lists: bool) -> None:
        collect_rarely()
        self.search = SearchJob(request).search(part, parts, lists=lists)
        self.steps = self.search.run()
        longest = sum((each.longest for each in self.search.alike), Counter[int]())
        plans_of = self.search.family.plans
        self.plans = sum(plans_of(layers) * count for layers, count in longest.items())

    def __call__(self, start: Round) -> State:
        """Work for one round and return the State after it."""
        search, trials = self.search, []
        search.note_step(start.best_s)
        if start.listing and not search.queue.listing:
            search.list_all()
            self.steps = search.run()
        end = search.work + WORK
        for trial in self.steps:
            if trial is not None:
                trials.append(trial)
            if search.work >= end or search.ended:
                break
        return State(
            trials=tuple(trials),
            bound_s=search.bound_s,
            short_bytes=search.short_bytes,
            excluded=dict(search.excluded.counts + search.queue.slower),
            plans=self.plans,
        )


# Why: docs/decisions/advise.md, Are rounds of a search limited by the clock?
def rounds(
    request: SearchRequest,
    *,
    shown: int = 10,
    processes: int = 2,
    most_rounds: int | None = None,
    limit_s: float = inf,
) -> Generator[Progress, None, None]:
    """Yield the progress after each round.  The rounds end when the gap is proved and the first
    `shown` plans are final (or LATER rounds have searched for them), when no plan is left or none
    left takes less than `limit_s`, or after `most_rounds` rounds."""
    pools: list[Pool[Round, State]] = [
        Pool(1, partial(Part, lists=shown > 1), (request, part, processes), LIMIT_S)
        for part in range(processes)
    ]
    at, later, fitting = Progress(), 0, list[Trial]()
    try:
        for done in count(1):
            listing = later > 0 and shown > 1
            for pool in pools:
                pool.add([Round(min(at.best_s, limit_s), listing)])
                pool.begin()
            answers = [answer for pool in pools for _, answer in pool.run()]
            states = [answer for answer in answers if isinstance(answer, State)]
            if len(states) < len(answers):
                raise CommandError("a process of the search died (out of memory on this machine?)")
            fitting = distinct([*fitting, *(item for state in states for item in state.trials)])
            at = _after(at, states, fitting, listing=listing)
            yield at
            later += at.gap <= request.within
            proved = later > LATER or (later > 0 and at.lists(shown, request.within))
            left_s = at.listed_s if listing else at.bound_s
            ends = left_s == inf and (listing or shown == 1 or not at.results)
            if proved or ends or at.bound_s >= limit_s or done == most_rounds:
                return
    finally:
        for pool in pools:
            pool.close()


def in_one_process(search: Search, *, most_work: int) -> tuple[list[Result], int]:
    """Run a search in this process; return the plans that fit, fastest first, and the number of
    simulations.  It ends when its gap is proved or after `most_work`.  The bytes that excluded
    plans lack are not computed, because that would need full replays."""
    trials = []
    for trial in search.run():
        if trial is not None:
            trials.append(trial)
        if search.gap <= search.within or search.work >= most_work:
            break
    return [trial.result for trial in distinct(trials)], len(trials)


def _after(
    before: Progress, states: Sequence[State], fitting: Sequence[Trial], *, listing: bool
) -> Progress:
    """The progress after a round; `fitting`: the plans that fit, of all rounds."""
    excluded: Counter[str] = Counter()
    for state in states:
        excluded.update(state.excluded)
    lowest_s = min(state.bound_s for state in states)
    return Progress(
        results=tuple(trial.result for trial in fitting),
        bound_s=max(before.bound_s, lowest_s),
        listed_s=lowest_s if listing else 0.0,
        simulations=before.simulations + sum(len(state.trials) for state in states),
        excluded=dict(excluded),
        short_bytes=min(state.short_bytes for state in states),
        plans=sum(state.plans for state in states),
    )


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that fit, fastest first.  Each layout keeps one plan per candidate and, among
    plans with equal steps, the one that reserves the fewest bytes."""

    def order(trial: Trial) -> tuple[float, int]:
        evaluation = trial.result.evaluation
        reserved_bytes = evaluation.reserved_bytes if evaluation else 0
        return round(trial.result.fitting_s, 9), reserved_bytes

    kept: list[Trial] = []
    taken: set[tuple[Hashable, object]] = set()
    for item in sorted((trial for trial in trials if trial.result.fits), key=order):
        at = place_of(item.result)
        keys = {(at, order(item)[0]), (at, item.candidate or item.result.method)}
        if not keys & taken:
            kept.append(item)
            taken |= keys
    return kept


def place_of(result: Result) -> Hashable:
    """A key that is equal for plans with the same layout, the same layers on each rank, the same
    exchange between experts and the same places of optimizer states."""
    problem, system = result.problem, result.problem.system
    pieces = result.plan.state("optimizer").pieces if result.plan else None
    chosen = (system.host.optimizer_on_host, system.experts)
    return problem.layout, result.base.partition, *chosen, pieces


MOST_LAYOUTS = 3
"""The most layouts at which a planner is solved, because each takes seconds."""
Task = tuple[str, LayoutChoice]
"""A planner and the layout at which to solve it."""


class Solver:
    """Solves planners in a worker process."""

    def __init__(self, request: SearchRequest) -> None:
        self.job = SearchJob(request)

    def __call__(self, task: Task) -> Result:
        method, choice = task
        job, only = self.job.job(choice), self.job.request.engine
        engines = Engines(job.problem, only) if only else None
        trials = LayoutTrials(job, choice.states)
        return trials.trial(method, self.job.registry, engines=engines).result


def solve_planners(
    job: SearchJob, fastest: Sequence[Result], *, limit_s: int, processes: int
) -> Iterator[Result]:
    """Yield the results of planners, layout by layout.  `fastest`: the plans of the search, fastest
    first.  `limit_s`: CPU seconds for a planner at one layout."""
    choices = list(dict.fromkeys(map(job.choice, fastest)))[:MOST_LAYOUTS]
    waiting = list(job.planners) if choices else []
    pool: Pool[Task, Result] = Pool(processes, Solver, (job.request,), limit_s)
    try:
        for choice in choices:
            pool.add([(method, choice) for method in waiting])
            answers = {method: answer for (method, _), answer in pool.run()}
            for method in list(waiting):  # the order does not depend on which ends first
                answer = answers[method]
                if isinstance(answer, str):
                    waiting.remove(method)
                    yield _lost(job, choice, method, answer, limit_s)
                elif answer.fits or choice == choices[-1]:
                    waiting.remove(method)
                    yield replace(answer, reason=answer.reason.replace(f"{method}: ", "", 1))
    finally:
        pool.close()


def _lost(
    job: SearchJob, choice: LayoutChoice, method: str, lost: NoAnswer, limit_s: int
) -> Result:
    """The result of a planner whose process was ended."""
    status: Status = "timed out" if lost == "late" else "failed"
    reason = lost_reason(lost, limit_s)
    return Result(job=job.job(choice), method=method, family=method, status=status, reason=reason)
