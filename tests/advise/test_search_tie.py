"""Beside the fastest plan: the simplest of its tie, and the best of a package's own options."""

import math
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.candidates.candidate import load_compare
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.candidates.trials import LayoutTrials
from rematbench.advise.search import job, tie
from rematbench.advise.search.job import with_engines
from rematbench.advise.search.queue import Queue
from rematbench.advise.search.request import Progress, SearchRequest
from rematbench.advise.search.rounds import SearchJob, in_one_process
from rematbench.cli.search_output import beside_line
from rematbench.evaluate.result import Result
from rematbench.inputs.job import Job
from rematbench.inputs.load import names as names_of
from tests.everything import ALONE, everything
from tests.problems import all_methods

GIB = 2**30
TIGHT = SearchRequest(
    spec=Job(
        model="gpt-1.3b", cluster="a800-80gb", system="megatron-core", gpus=4, seq_len=8192,
        global_batch=8, hbm_bytes=16 * GIB,
    ),
    only=("keep_all", "balanced_checkpointing:point=all", "pp_offload:alpha=0.5"),
    fixed=Fixed(cp=1, micro_batch=1, vpp=1, zero_stage=1),
    within=0.0,
)  # fmt: skip


def best_of(made: SearchJob) -> Result:
    results, _ = in_one_process(made.search(), most_work=1 << 40)
    return made.completed(results[:1])[0]


def level(one: Result) -> tuple[int, bool]:
    """Methods, and whether host memory is used."""
    return len(set(one.family.split("+")) - {"keep_all"}), bool(one.host_node_bytes)


@pytest.mark.parametrize(
    ("width", "only"),
    [
        (1.0, TIGHT.only),
        pytest.param(
            1.0, ("pp_offload:alpha=0.1", "full_recompute:every=1"), marks=pytest.mark.full
        ),
        (0.0, TIGHT.only),
    ],
)
def test_the_simplest_plan_of_the_tie_is_that_of_all_plans(
    width: float, only: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewest methods, then no host memory, then the fastest: of all plans, none of them shown."""
    for module in (tie, job):
        monkeypatch.setattr(module, "ratio_band", lambda *, one_layout: width)
    keeps = "keep_all" in only
    fixed = TIGHT.fixed if keeps else replace(TIGHT.fixed, pp=4)
    room = TIGHT.spec.changed(hbm_bytes=(16 if keeps else 26) * GIB)
    made = SearchJob(replace(TIGHT, only=only, fixed=fixed, spec=room))
    best = best_of(made)
    tied = [
        replace(one.result, family=made.registry.resolve(one.result.method).family)
        for one in everything(made.request)
        if one.result.fitting_s <= math.exp(width) * best.fitting_s
    ]
    least = min((level(one), one.fitting_s) for one in tied)
    simple = tie.simplest(made, best, ALONE)
    assert (simple is None) == (level(best) == least[0])
    assert simple is None or (level(simple), simple.fitting_s) == least


def test_what_a_package_reaches_alone_is_a_line() -> None:
    """On its own stacks only, and not in a search of the package itself."""
    made = SearchJob(TIGHT)
    best = best_of(made)
    ((name, alone),) = tie.of_packages(made, [best], ALONE)
    assert name == "megatron_core"
    assert alone is not None
    own = SearchJob(replace(TIGHT, only=(), engine=name))
    assert alone.fitting_s == best_of(own).fitting_s
    known = [best, with_engines(alone)]
    assert name in known[1].runs_on
    ((_, again),) = tie.of_packages(made, known, lambda *_, **__: iter([Progress()]))
    assert again is not None  # its own search finds nothing, but SIMPLEST may have options
    assert again.fitting_s == alone.fitting_s
    share = 100 * (alone.fitting_s / best.fitting_s - 1.0)
    tied = ", a tie" if alone.tied else ""
    line = beside_line(f"{name} alone", alone, best)
    assert line.startswith(f"{name} alone: {alone.method} at ")
    assert line.endswith(f": {share:.1f} % slower than the first row{tied}")
    assert beside_line(name, best, best).endswith(": as fast as the first row")
    assert "no plan" in beside_line(name, None, best)
    assert not list(tie.of_packages(own, [best], ALONE))
    other = SearchJob(replace(TIGHT, spec=replace(TIGHT.spec, system="torchtitan")))
    assert not list(tie.of_packages(other, [best], ALONE))


@pytest.mark.parametrize(
    ("system", "length", "method", "keys"),
    [
        ("torchtitan", 2048, "keep_all", '[activation_checkpoint] mode = "none"'),
        ("torchtitan", 65536, "full_recompute", '[activation_checkpoint] mode = "full"'),
        pytest.param(
            *("trl", 98304, "full_recompute:inputs=host"),
            "gradient_checkpointing: true, activation_offloading: true",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_trainer_has_its_best_setting_and_the_keys_to_paste(
    system: str, length: int, method: str, keys: str
) -> None:
    """The policies of other packages that have a method's name are none of a trainer's."""
    spec = Job(
        model="gpt-1.3b", cluster="h100-80gb", system=system, gpus=2, seq_len=length,
        global_batch=2,
    )  # fmt: skip
    made = SearchJob(SearchRequest(spec=spec, fixed=Fixed(cp=1, tp=1, pp=1, micro_batch=1))).ready()
    best = best_of(made)
    found = {name: (said, item) for (name, *_), said, item in tie.of_trainers(made, [best], ALONE)}
    said, alone = found[system]
    assert alone is not None
    assert (alone.method, said) == (method, f"{system}: {keys}")
    assert alone.fitting_s >= best.fitting_s * (1 - 1e-9)
    kwai = SearchJob(TIGHT).ready()
    assert not list(tie.of_trainers(kwai, [best], ALONE))  # a stack of no trainer


def test_trainers_name_stacks_and_methods_that_exist() -> None:
    shipped = names_of("system")
    for trainer in load_compare().trainers:
        assert set(trainer.stacks) <= set(shipped), trainer.name
        for method in trainer.keys:
            all_methods().resolve(method)


# -- the order in which a search works: what is taken when, and that nothing is tried twice --------


def test_a_ripe_entry_may_come_ahead_of_its_turn_and_comes_once() -> None:
    queue: Queue[str] = Queue()
    for bound, name, ripe in ((1.0, "a", False), (3.0, "c", True), (2.0, "b", True)):
        queue.push(bound, name, ripe=ripe)
    assert (queue.bound, queue.ripe_bound, len(queue)) == (1.0, 2.0, 3)
    assert queue.pop(ripe=True) == (2.0, "b")
    assert [queue.pop() for _ in range(len(queue))] == [(1.0, "a"), (3.0, "c")]
    assert queue.bound == queue.ripe_bound == float("inf")


def test_no_plan_of_a_layout_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan as short as itself would say that more pieces free nothing."""
    seen: Counter[tuple[int, str]] = Counter()
    trial = LayoutTrials.trial

    def counted(there: LayoutTrials, method: str, *others: Any, **more: Any) -> Any:
        seen[id(there.job), method] += 1
        return trial(there, method, *others, **more)

    monkeypatch.setattr(LayoutTrials, "trial", counted)
    spec = Job(
        model="gpt-1.3b", cluster="a800-80gb", system="megatron-core",
        gpus=4, seq_len=8192, global_batch=16, hbm_bytes=16 * GIB,
    )  # fmt: skip
    fixed = Fixed(pp=4, micro_batch=1, zero_stage=1)
    asked = SearchRequest(spec=spec, only=("pp_offload", "mst"), fixed=fixed, within=0.0)
    search = SearchJob(asked).search()
    for _ in search.run():
        pass
    assert search.best_s < float("inf")
    assert any("+mst" in method for _, method in seen)
    assert max(seen.values()) == 1
