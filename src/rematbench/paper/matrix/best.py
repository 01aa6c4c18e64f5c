"""The best layout of every arm in a cell of the matrix, by search, with the proved gap.

The answers of the searches are committed.  A later run simulates the plan of each answer again,
which takes one simulation (`sweep`).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any

from msgspec import Struct, structs

from rematbench.advise.bounds.probes import ProbePrograms
from rematbench.advise.candidates.candidate import Candidate
from rematbench.advise.candidates.layouts import Fixed, LayoutChoice, may_host, partitions
from rematbench.advise.candidates.methods import candidates_of, chooses
from rematbench.advise.search.best_first import Search
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import LIMIT_S, ONE_PROCESS_WORK, SearchJob, in_one_process
from rematbench.evaluate.evaluator import Evaluator, without_cluster
from rematbench.evidence.published.sheets import Row, number
from rematbench.host.console import CommandError
from rematbench.host.declared import flat
from rematbench.host.workers import Pool, collect_rarely
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster, load_system
from rematbench.paper.matrix.spec import Arm, MatrixSpec, Work
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry

SAME, BEST, ANY = "same layout", "best layout", "any plan"
"""What a search answers: the one layout of a cell, the best layout of an arm, the fastest plan of
all methods and compositions."""

CELL = ("model", "cluster", "seq_len")
OPEN = ("tp", "cp", "pp", "vpp", "ulysses")
"""The degrees that a search of the matrix chooses; the others are equal for all arms."""

ANSWERED = (
    *(*CELL, "table", "arm", "asked", "name", *OPEN, "partition", "step_s", "gap", "layouts"),
    *("simulations", "device_short_bytes", "host_short_bytes", "reason"),
)
"""Columns of a committed answer."""

Line = dict[str, Any]
Task = tuple[Work, int]
"""A model with its GPUs, and a sequence length."""


class CommittedPlan(Struct, frozen=True, kw_only=True):
    """The committed answer of one search of a cell; its plan is evaluated again (`sweep`).  It has
    the method's text, the layout with its layers by chunk (None: no plan fits), the step in
    seconds, the proved gap (a fraction; None: not proved), and the layouts and simulations of the
    proof.  If no plan fits, it has the reason or the smallest shortage in bytes of an excluded
    plan: of device memory, or of host memory if no plan lacked device memory."""

    name: str = ""
    choice: LayoutChoice | None = None
    step_s: float = inf
    gap: float | None = None
    layouts: int = 0
    simulations: int = 0
    short: dict[str, float] = {}
    reason: str = ""

    @property
    def proof(self) -> Line:
        """The columns of the proof and of the missing bytes."""
        line: Line = {key: getattr(self, key) for key in ("gap", "layouts", "simulations")}
        return line | {f"{place}_short_bytes": nbytes for place, nbytes in self.short.items()}


def cell_job(
    spec: MatrixSpec,
    work: Work,
    cluster: str,
    seq_len: int,
    evaluator: Evaluator | None = None,
    programs: ProbePrograms | None = None,
) -> SearchJob:
    """The search job of one cell. The cells of one model and length share `evaluator` and the
    `programs` of probes."""
    hosts = may_host(load_cluster(cluster), load_system(spec.system))
    home = {"optimizer": "device"} if hosts else {}  # all arms keep the states where the stack does
    problem = spec.problem(seq_len, model=work.model, cluster=cluster, gpus=work.gpus, **home)
    fixed = Fixed(sp=True, micro_batch=spec.micro_batch, zero_stage=spec.zero_stage)
    request = SearchRequest(spec=problem, fixed=fixed, within=spec.within)
    return SearchJob(request, evaluator, programs)


def runs(arm: Arm, seq_len: int) -> bool:
    """Whether an arm runs at this length."""
    return not arm.seq_lens or seq_len in arm.seq_lens


def searched(arm: Arm, seq_len: int, registry: Registry) -> bool:
    """Whether the best layout of an arm is searched: the arm runs at this length and is not a
    planner (planners are tried only at the cell's one layout)."""
    names = [method.name for method in arm.resolved(registry).methods]
    return not registry.has_planner(names) and runs(arm, seq_len)


class Answers:
    """The answers of a cell, by table and arm.  An answer comes from the `committed` line with the
    same question if there is one, otherwise from a search.  `arms` and `methods` have arm names as
    keys; `searched`: the names of the arms whose best layouts are searched."""

    def __init__(
        self,
        cell: SearchJob,
        spec: MatrixSpec,
        registry: Registry,
        committed: Mapping[tuple[str, str], Row],
    ) -> None:
        self.cell, self.spec, self.registry = cell, spec, registry
        self.arms = {arm.name: arm for arm in spec.all_arms(registry)}
        self.methods = {name: arm.resolved(registry) for name, arm in self.arms.items()}
        own = self.arms.values()
        seq_len = cell.request.spec.work.seq_len
        self.searched = [arm.name for arm in own if searched(arm, seq_len, registry)]
        self._answers = {
            key: read_answer(row, cell)
            for key, row in committed.items()
            if key[1] in ("", *self.arms) and row["asked"] == self.question(*key)
        }

    @property
    def at(self) -> tuple[Any, ...]:
        return tuple(flat(self.cell.request.spec)[key] for key in CELL)

    def question(self, table: str, name: str) -> str:
        """The question of an answer in words: a method and its job. For the one layout, it adds the
        preferred pipeline ranks; for the fastest plan of all, the allowed methods."""
        job = shlex.join(self.cell.request.spec.to_arguments())
        if table == ANY:
            return f"{','.join(sorted(self.registry.methods))} {job}"
        words = f"{self.methods[name].text} {job}"
        return f"{words} (pp {self.spec.same_layout_pp})" if table == SAME else words

    def best(self, name: str) -> CommittedPlan:
        if (BEST, name) not in self._answers:
            self._answers[BEST, name] = self._best(name)
        return self._answers[BEST, name]

    @property
    def fastest(self) -> CommittedPlan:
        return min(map(self.best, self.searched), key=lambda answer: answer.step_s)

    def one_layout(self) -> CommittedPlan:
        """The baseline's best layout with `same_layout_pp` pipeline ranks, otherwise with fewer. If
        the baseline fits nowhere, the layout of the fastest arm."""
        key = (SAME, self.spec.baseline)
        if key not in self._answers:
            found = self._best(self.spec.baseline, self.spec.same_layout_pp)
            found = found if found.choice else self._best(self.spec.baseline)
            self._answers[key] = found if found.choice else self.fastest
        return self._answers[key]

    def any_plan(self) -> CommittedPlan:
        """The fastest plan of all methods and compositions, or the fastest arm's plan if no other
        plan is faster."""
        if (ANY, "") not in self._answers:
            fastest, search = self.fastest, self.cell.search()
            search.note_step(fastest.step_s)
            found = _answer(self.cell, search)
            best = found if found.step_s < fastest.step_s else fastest
            self._answers[ANY, ""] = structs.replace(
                best, gap=search.gap, layouts=found.layouts, simulations=found.simulations
            )
        return self._answers[ANY, ""]

    def _best(self, name: str, min_pp: int = 1) -> CommittedPlan:
        method, cell = self.methods[name], self.cell
        candidates = candidates_of(method, self.registry)
        search = cell.search_of(candidates, min_pp)
        best = _answer(cell, search)
        if best.choice is None:
            return best
        if not any(one.share for one in candidates):  # a method may choose its own share
            chosen = any(chooses(one, self.registry) for one in method.methods)
            return self._faster(best, method.text) if chosen else best
        while (text := _smaller_share(candidates, best.name)) is not None:
            faster = self._faster(best, text)
            if faster is best:
                break
            best = faster
        return best

    def _faster(self, answer: CommittedPlan, text: str) -> CommittedPlan:
        """The answer, or the plan of the method `text` at this layout if its step is shorter."""
        assert answer.choice is not None
        there = self.cell.trials(answer.choice)
        step_s = there.trial(text, self.registry).result.fitting_s
        return (
            structs.replace(answer, name=text, step_s=step_s) if step_s < answer.step_s else answer
        )


def _smaller_share(candidates: Sequence[Candidate], text: str) -> str | None:
    """The text of the method with the next smaller share of its grid; None if the share of `text`
    is the smallest."""
    for one in candidates:
        scalar = one.share.scalar if one.share else None
        texts = [one.text(step) for step in range(scalar.steps + 1 if scalar else 0)]
        if text in texts[1:]:
            return texts[texts.index(text) - 1]
    return None


def _answer(cell: SearchJob, search: Search) -> CommittedPlan:
    """The answer of a search that stops after a fixed amount of work."""
    results, simulations = in_one_process(search, most_work=ONE_PROCESS_WORK)
    layouts, excluded = len(cell.space.choices), search.excluded
    work = CommittedPlan(gap=search.gap, layouts=layouts, simulations=simulations)
    if results:
        best = results[0]
        choice = cell.choice(best)
        return structs.replace(work, name=best.method, choice=choice, step_s=best.fitting_s)
    if search.queue:
        return structs.replace(work, gap=None, reason="no plan found in a fixed amount of work")
    short = {"device": excluded.device_short_bytes, "host": excluded.host_short_bytes}
    if place := next((place for place, nbytes in short.items() if nbytes < inf), ""):
        return structs.replace(work, short={place: short[place]})
    if excluded.refusal or search.short_bytes == inf:
        return structs.replace(work, reason=excluded.refusal or "no layout has a plan")
    return structs.replace(work, short={"device": search.short_bytes})


def best_lines(spec: MatrixSpec, *, processes: int) -> Iterator[Line]:
    """The answers of all searches of the matrix, as lines.  One process searches all cells of one
    model and length, because their programs are equal on every cluster."""
    registry = discover()
    for arm in spec.all_arms(registry):
        arm.resolved(registry)  # an error is raised here, not in a worker
    for work, cluster in product(spec.works, spec.clusters):
        _ = cell_job(spec, work, cluster, spec.seq_lens[0]).space
    tasks = [(work, seq_len) for work in spec.works for seq_len in spec.seq_lens]
    waiting, found = list(tasks), dict[Task, list[Line]]()
    pool: Pool[Task, list[Line]] = Pool(processes, Worker, (spec,), LIMIT_S)
    pool.add(tasks)
    try:
        for task, lines in pool.run():
            if isinstance(lines, str):
                why = (
                    f"took {LIMIT_S} CPU seconds"
                    if lines == "late"
                    else ("was killed (perhaps out of memory)")
                )
                raise CommandError(f"a process {why} with {task[0].model} at {task[1]} tokens")
            found[task] = lines
            while waiting and waiting[0] in found:
                yield from found.pop(waiting.pop(0))
    finally:
        pool.close()


class Worker:
    """Searches all cells of one model and length in a process."""

    def __init__(self, spec: MatrixSpec) -> None:
        collect_rarely()
        self.spec, self.registry = spec, discover()

    def __call__(self, task: Task) -> list[Line]:
        """The lines of the cells, in the order of the clusters."""
        return list(self.lines(task))

    def lines(self, task: Task) -> Iterator[Line]:
        evaluator, programs = Evaluator(without_cluster), ProbePrograms()
        for name in self.spec.clusters:
            cell = cell_job(self.spec, task[0], name, task[1], evaluator, programs)
            answers = Answers(cell, self.spec, self.registry, {})
            for arm in answers.searched:
                yield line_of(answers, BEST, arm, answers.best(arm))
            yield line_of(answers, SAME, self.spec.baseline, answers.one_layout())
            yield line_of(answers, ANY, "", answers.any_plan())


def line_of(answers: Answers, table: str, arm: str, answer: CommittedPlan) -> Line:
    line: Line = dict.fromkeys(ANSWERED, "") | dict(zip(CELL, answers.at, strict=True))
    line |= {"table": table, "arm": arm, "asked": answers.question(table, arm), "name": answer.name}
    if answer.choice:
        lay, sizes = answer.choice.layout, answer.choice.sizes
        line |= {key: getattr(lay, key) for key in OPEN}
        line |= {"partition": ",".join(map(str, sizes)), "step_s": answer.step_s}
    return {**line, **answer.proof, "reason": answer.reason}


def read_answer(row: Row, cell: SearchJob) -> CommittedPlan:
    """The answer of a committed line; CommandError if the line is damaged."""
    try:
        return _read(row, cell)
    except (ValueError, StopIteration, LayoutError) as error:
        where = " ".join(row[key] for key in (*CELL, "table", "arm"))
        raise CommandError(
            f"cells: {where}: the row is not the result of a search ({error or 'partition'})"
        ) from None


def _read(row: Row, cell: SearchJob) -> CommittedPlan:
    places = {place: number(row, f"{place}_short_bytes") for place in ("device", "host")}
    choice = None
    if row["name"]:
        layout = cell.request.spec.changed(**{key: int(row[key]) for key in OPEN}).layout
        sizes = tuple(int(layers) for layers in row["partition"].split(","))
        divided = partitions(layout, cell.model.num_layers)
        choice = next(one for one in divided if one.sizes == sizes)
    return CommittedPlan(
        name=row["name"],
        choice=choice,
        step_s=number(row, "step_s") or inf,
        gap=number(row, "gap"),
        layouts=int(row["layouts"]),
        simulations=int(row["simulations"]),
        short={place: nbytes for place, nbytes in places.items() if nbytes},
        reason=row["reason"],
    )
