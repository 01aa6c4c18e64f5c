"""The search: it returns what trying everything returns, its bounds' schedule is legal, and it says
what it proved."""

import itertools
import math
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rematbench.advise.bounds.schedule_walk import NONE, Turns, events
from rematbench.advise.candidates.layouts import Fixed, LayoutChoice, partitions
from rematbench.advise.search import job, questions
from rematbench.advise.search.job import with_engines
from rematbench.advise.search.queue import SHOWN
from rematbench.advise.search.request import Progress, Rounds, SearchRequest
from rematbench.advise.search.rounds import SearchJob, distinct, rounds
from rematbench.cli.app import command_line
from rematbench.engine.lowering.schedule import passes
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.result import Result
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.plan import Plan
from rematbench.plugins.registry import MethodError
from rematbench.worlds.packages.flags import Engines
from tests.everything import ALONE, everything, trials_at

RUN = CliRunner()
app = command_line()
GIB = 2**30
BOTH = ("balanced_checkpointing", "pp_offload")


def asked(**changes: Any) -> SearchRequest:
    """A job on four small devices, so small that keeping everything does not fit everywhere."""
    spec = {
        "model": "gpt-1.3b",
        "cluster": "a800-80gb",
        "system": "megatron-core",
        "gpus": 4,
        "seq_len": 2048,
        "global_batch": 8,
        "hbm_bytes": 18 * GIB,
        **changes,
    }
    return SearchRequest(spec=Job(**spec), only=BOTH)


def last(one: SearchRequest, *, processes: int = 1, shown: int = 1) -> Progress:
    """The end of a search."""
    *_, end = rounds(one, shown=shown, processes=processes)
    return end


@pytest.mark.parametrize(
    ("hbm_gib", "only"),
    [
        (18, "balanced_checkpointing"),
        pytest.param(32, "balanced_checkpointing", marks=pytest.mark.full),
        pytest.param(24, "", marks=pytest.mark.soak),
        pytest.param(40, "", marks=pytest.mark.soak),
    ],
)
def test_the_ten_best_are_those_of_everything(hbm_gib: int, only: str) -> None:
    """Also those that add a method to a plan that fits, and those far slower than the best: a row
    for each layout and composition, at the least share that fits."""
    job = replace(asked(hbm_bytes=hbm_gib * GIB), only=(only,) if only else ("keep_all", *BOTH))
    one = replace(job, within=0.0, fixed=Fixed(tp=1, micro_batch=1, zero_stage=1))
    wanted = [trial.result for trial in distinct(everything(one))]
    end = last(one, shown=10)
    assert len(wanted) >= 10
    assert wanted[9].fitting_s > SHOWN * wanted[0].fitting_s or hbm_gib != 18
    seconds = [tried.step_s for tried in end.results[:10]]
    assert seconds == pytest.approx([tried.step_s for tried in wanted[:10]], rel=1e-9)
    assert end.listed_s >= end.results[9].step_s
    assert last(one).simulations < end.simulations


def both_shares_and_pieces(hbm_gib: int) -> SearchRequest:
    """A job at one layout, where copies take longer than the passes beside them."""
    spec = Job(
        model="llama-3.1-8b", cluster="a800-80gb", system="rematbench", gpus=8, seq_len=16384,
        global_batch=16, hbm_bytes=hbm_gib * GIB,
    )  # fmt: skip
    fixed = Fixed(micro_batch=1, zero_stage=1, tp=2, pp=4, cp=1, vpp=4)
    return SearchRequest(spec=spec, only=("pp_offload", "mst"), within=0.0, fixed=fixed)


@pytest.mark.parametrize("hbm_gib", [46, 50])
def test_with_a_method_more_a_smaller_share_may_do(hbm_gib: int) -> None:
    """The search ended at the share with which pp_offload fits alone, and called it proved: with
    mini-sequences less has to leave, and the step is a tenth shorter and more."""
    one = both_shares_and_pieces(hbm_gib)
    alone, found = last(replace(one, only=("pp_offload",))), last(one)
    assert "+mst" not in alone.results[0].method
    assert "pp_offload" in found.results[0].method
    assert "+mst" in found.results[0].method
    assert found.best_s < 0.91 * alone.best_s
    assert found.gap == 0.0


def test_processes_share_the_work_and_find_the_same() -> None:
    """One process or two: the same best step, and rounds do not depend on time."""
    one = replace(asked(), within=0.0, only=("balanced_checkpointing",))
    alone, shared = last(one), last(one, processes=2)
    assert shared.best_s == pytest.approx(alone.best_s, rel=1e-12)
    assert [t.method for t in last(one, processes=2).results] == [t.method for t in shared.results]


def test_after_the_proof_few_rounds_look_for_more_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand plans are not there, and the rounds after the proof are counted."""
    one = replace(asked(), within=0.5)
    monkeypatch.setattr("rematbench.advise.search.rounds.WORK", 20)

    def proved() -> int:
        return sum(at.gap <= one.within for at in rounds(one, shown=1000, processes=1))

    for later in (1, 3):
        monkeypatch.setattr("rematbench.advise.search.rounds.LATER", later)
        assert proved() == later + 1


def test_bounds_come_in_order_and_never_above_the_best() -> None:
    """The bound of what is left only rises, and each simulated step is no less than its own."""
    before = 0.0
    for at in rounds(replace(asked(), within=0.0), shown=1, processes=1):
        assert at.bound_s >= before
        before = at.bound_s
        for tried in at.results:
            assert tried.bound_s <= tried.fitting_s * (1 + 1e-9)


@pytest.mark.parametrize(("pp", "vpp", "count"), [(1, 1, 3), (4, 1, 6), (2, 3, 4), (4, 2, 4)])
def test_the_walk_runs_every_pass_after_what_it_waits_for(pp: int, vpp: int, count: int) -> None:
    """A legal order of all passes, each rank's as scheduled."""
    name: Any = "interleaved_1f1b" if vpp > 1 else "1f1b"
    turns = Turns(name, pp, vpp, count)
    (found,) = events(turns, None)
    at = {number: place for place, number in enumerate(found.pass_id)}
    for rank in range(pp):
        mine = [
            number for number, where in zip(found.pass_id, found.rank, strict=True) if where == rank
        ]
        assert mine == [
            turns.half * item.forward + (item.chunk * pp + rank) * count + item.micro_batch
            for item in passes(name, rank, pp, vpp, count)
        ]
    for place, source in enumerate(found.source):
        assert source == NONE or at[source] < place


def test_uneven_ends_hold_every_layer() -> None:
    """A layer less or more on the ends; the other ranks share the rest."""
    layout = Layout(pp=4, dp=1, global_batch=4)
    found = list(partitions(layout, 24))
    assert found[0].sizes == (6, 6, 6, 6)
    assert all(sum(choice.sizes) == 24 and min(choice.sizes) > 0 for choice in found)
    assert {(5, 7, 7, 5), (7, 5, 5, 7), (5, 7, 6, 6)} <= {choice.sizes for choice in found}
    assert len(found) == len({choice.sizes for choice in found})


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "ends"),
    [
        (94, 8, 2, {(5, 5)}),
        (92, 8, 2, {(5, 5), (4, 4), (3, 5), (5, 3), (2, 6), (6, 2)}),
        (31, 4, 2, {(4, 3), (3, 4)}),
        (61, 8, 2, {(3, 3), (1, 4), (2, 3), (3, 2), (4, 1)}),
        (24, 4, 2, {(3, 3)}),
    ],
)
def test_uneven_chunks_lie_at_the_ends(layers: int, pp: int, vpp: int, ends: object) -> None:
    """The even partition has what is left over in the middle; 94 layers have one less there."""
    layout = Layout(pp=pp, vpp=vpp, dp=1, global_batch=pp)
    found = [choice.sizes for choice in partitions(layout, layers)]
    assert all(sum(sizes) == layers for sizes in found)
    assert {(sizes[0], sizes[-1]) for sizes in found} == ends
    assert len(found) == len({*found})


def test_what_is_asked_wrongly_is_one_line() -> None:
    """A space without layouts and a method that is none."""
    with pytest.raises(
        LayoutError, match="gpus 4 must be a multiple of 3, the product of the requested degrees"
    ):
        _ = SearchJob(replace(asked(), fixed=Fixed(tp=3))).space
    with pytest.raises(LayoutError, match="no layout is possible on 4 GPUs"):
        _ = SearchJob(replace(asked(global_batch=3), fixed=Fixed(micro_batch=2))).space
    with pytest.raises(MethodError, match="did you mean 'memo'"):
        SearchJob(replace(asked(), only=("memmo",)))
    with pytest.raises(MethodError, match="unknown engine 'megatron'"):
        SearchJob(replace(asked(), engine="megatron"))


def test_a_named_method_is_in_every_plan_of_the_answer() -> None:
    """Keeping everything fits and is faster; that is another method."""
    roomy = replace(asked(hbm_bytes=40 * GIB), only=())
    free, only = last(roomy), last(replace(roomy, only=("full_recompute",)))
    assert free.results[0].method == "keep_all"
    assert all(one.method.startswith("full_recompute") for one in only.results)
    assert only.best_s > free.best_s
    assert only.gap <= roomy.within
    both = last(replace(roomy, only=("full_recompute", "keep_all")))
    assert both.best_s == free.best_s
    some = last(replace(roomy, only=("full_recompute:inputs=shared",)))  # no plan at tp 1
    assert some.results[0].problem.layout.tp > 1


def test_the_best_micro_batch_is_found() -> None:
    """Any divisor of a replica's sequences may be the fastest, one or a power of two or not."""
    one = replace(asked(seq_len=512, global_batch=24, hbm_bytes=40 * GIB), only=("keep_all",))
    fixed = Fixed(tp=1, cp=1, pp=1, zero_stage=1)
    by_size = {
        size: last(replace(one, fixed=replace(fixed, micro_batch=size), within=0.0)).best_s
        for size in (1, 2, 3, 6)
    }
    found = last(replace(one, fixed=fixed, within=0.0)).results[0]
    size = found.problem.layout.micro_batch
    assert size == min(by_size, key=by_size.__getitem__) == 6
    assert found.fitting_s == by_size[size] < 0.999 * min(by_size[1], by_size[2])


def test_the_fewest_gpus_need_be_no_power_of_two() -> None:
    """Inside a node every number is tried where four are too few and eight reach the speed."""
    one = asked(gpus=8, global_batch=24, hbm_bytes=40 * GIB)
    one = replace(one, only=("keep_all",), fixed=Fixed(micro_batch=1, zero_stage=1))
    spec = one.spec
    six = last(replace(one, spec=spec.changed(gpus=6)))
    speed = 0.98 * spec.degrees.global_batch * spec.work.seq_len / six.best_s
    found = list(questions.fewest_gpus(one, speed, ALONE))
    assert [gpus for gpus, plan in found if plan] == [8, 6]


def test_the_fewest_gpus_are_whole_nodes_with_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def reached(one: SearchRequest, step_s: float, run: Rounds) -> Result | None:
        tried.append(one.spec.gpus)
        return cast(Result, "a plan") if one.spec.gpus in (48, 56, 64) else None

    monkeypatch.setattr(questions, "reached", reached)
    one = asked(gpus=64, global_batch=24)  # nodes of eight GPUs
    answers = list(questions.fewest_gpus(one, 1e3, ALONE))
    assert tried == [1, 2, 4, 8, 16, 32, 64, 40, 48]
    assert [gpus for gpus, plan in answers if plan] == [64, 48]
    tried.clear()
    fixed = replace(one, fixed=Fixed(pp=3))  # of 40 GPUs no layout has three ranks of a pipeline
    list(questions.fewest_gpus(fixed, 1e3, ALONE))
    assert 40 not in tried
    assert tried[-1] == 48


def test_pieces_free_what_a_family_seems_to_keep(tmp_path: Path) -> None:
    """What the head keeps without pieces is no bound of plans with them."""
    stack = tmp_path / "sharded.yaml"
    stack.write_text(
        "name: sharded\nbase: megatron-core\nzero_stages: {value: [3], source: mine}\n"
    )
    spec = Job(
        model="llama-3.1-8b", cluster="h100-80gb", system=str(stack), gpus=8, cp=8,
        seq_len=7 << 17, global_batch=1,
    )  # fmt: skip
    only = ("full_recompute", "mst")
    found = last(SearchRequest(spec=spec, fixed=Fixed(cp=8, zero_stage=3), only=only)).results
    assert "full_recompute+mst" in found[0].method


def test_pieces_whose_number_is_typed_make_room_too() -> None:
    """NOTHING FITS was said: bytes of a family with such a method were those of no pieces."""
    spec = Job(
        model="llama-3.1-8b", cluster="a800-80gb", system="megatron-core", gpus=8,
        seq_len=131072, global_batch=8, hbm_bytes=32 * GIB,
    )  # fmt: skip
    typed = ("full_recompute", "mst:mlp_chunks=16,head_chunks=16")
    fixed = Fixed(tp=8, pp=1, micro_batch=1, zero_stage=1)
    found = last(SearchRequest(spec=spec, only=typed, fixed=fixed)).results
    assert [tried.method for tried in found] == ["+".join(typed)]


def test_a_method_with_settings_is_searched_as_it_is_typed() -> None:
    """So is a policy by its name; what is a composition already is refused."""
    made = SearchJob(replace(asked(), only=("memo:alpha=0.3", "full_recompute:block 1")))
    assert [one.text for one in made.variants] == ["memo:alpha=0.3", "full_recompute:block 1"]
    assert [one.composes for one in made.variants] == [True, False]
    with pytest.raises(MethodError, match="name single methods only"):
        _ = SearchJob(replace(asked(), only=("memo+mst",))).variants


def test_gpipe_is_no_faster_and_no_leaner() -> None:
    """In a small job without copies.  What the space loses: docs/decisions/advise.md."""
    made = SearchJob(asked(hbm_bytes=80 * GIB))
    deep = [one for one in made.space.choices if one.layout.pp > 2 and one.layout.vpp == 1]
    for choice in deep[:6]:
        problem = made.problem(choice)
        for text in ("keep_all", "selective_recompute", "full_recompute"):
            plan = made.registry.resolve(text, None, problem).plan(
                problem, choice.base(problem.base_plan)
            )
            assert isinstance(plan, Plan)
            one, gpipe = (
                evaluate(problem, replace(plan, schedule=name)) for name in ("1f1b", "gpipe")
            )
            assert gpipe.step_s >= one.step_s * (1 - 1e-9)
            assert max(gpipe.peak_device_bytes) >= max(one.peak_device_bytes)


def test_joint_plans_are_counted() -> None:
    """Each layout with each candidate, at every step of its scalars."""
    made = SearchJob(asked(gpus=2))
    search = made.search()
    candidates = list(search.family.roots)
    for candidate in candidates:
        candidates += search.family.more(candidate)
    expected = 0
    for choice, candidate in itertools.product(made.space.choices, candidates):
        scalars = [part.scalar for part in candidate.parts if part.scalar]
        sizes = {"share": 32, "layers": max(choice.sizes)}
        assert all(one.steps in (0, 32) for one in scalars)
        counts = [len(one.values) or sizes[one.scale] for one in scalars]
        expected += math.prod(counts)
    assert last(asked(gpus=2)).plans == expected > len(made.space.choices)


def test_plans_of_one_layout_tie_by_the_error_of_one_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That error is smaller than the error between layouts."""
    made = SearchJob(asked(hbm_bytes=80 * GIB))
    first, second = made.space.choices[:2]

    def tried(choice: LayoutChoice, text: str) -> Result:
        return trials_at(made, choice).trial(text, made.registry).result

    one, same, other = (
        tried(first, "keep_all"), tried(first, "full_recompute"), tried(second, "full_recompute")
    )  # fmt: skip
    slower = max(same.fitting_s, other.fitting_s) / one.fitting_s
    bands = {True: 0.0, False: math.log(slower) + 0.01}
    monkeypatch.setattr(job, "ratio_band", lambda *, one_layout: bands[one_layout])
    assert [found.tied for found in made.completed([one, same, other])] == [False, False, True]


def test_a_row_has_the_family_and_the_engines_of_its_plan() -> None:
    made = SearchJob(asked())
    (best,) = made.completed(last(asked()).results[:1])
    composed = made.registry.resolve(best.method, None, best.problem)
    assert best.family == composed.name
    assert best.plan == composed.plan(best.problem, best.base)
    assert with_engines(best).runs_on == Engines(best.problem).of(best.plan)  # type: ignore[arg-type]


def test_a_number_of_gpus_without_a_layout_reaches_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error stays in this process; a worker's would read as a lack of memory."""
    assert questions.reached(asked(gpus=29), math.inf, rounds) is None
    assert "Traceback" not in capfd.readouterr().err
