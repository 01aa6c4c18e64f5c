"""What the bounds of a search know of work beside copies, of periods that repeat, and of the
embedding; and that a search that is over leaves nothing behind."""

import gc
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematbench.advise.bounds import schedule_walk
from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Probe, Refused, behind_embedding, further
from rematbench.advise.bounds.probes import Measured, Prober
from rematbench.advise.bounds.schedule_bound import lowest_traffic, stages
from rematbench.advise.bounds.schedule_walk import (
    NONE,
    Copies,
    CopyTimes,
    Pieces,
    Rules,
    Turns,
    events,
    shortened,
    walk,
)
from rematbench.advise.candidates.candidate import Candidate, Variant
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.candidates.trials import planned_at
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluator import Evaluator, without_cluster
from rematbench.inputs.job import Job
from rematbench.plan import Offload, Plan, Recompute, Rule, Select
from tests.tables import tables


def job(model: str = "llama-65b", gpus: int = 16, **changes: int) -> SearchJob:
    """Nodes with a link between them, which pipeline messages cross."""
    spec = Job(
        model=model, cluster="a800-80gb", system="megatron-kwai", gpus=gpus, seq_len=4096,
        global_batch=64,
    )  # fmt: skip
    fixed = Fixed(micro_batch=1, zero_stage=1, cp=1, **changes)
    return SearchJob(SearchRequest(spec=spec, fixed=fixed, within=0.01))


def even(made: SearchJob) -> tuple[GroupBounds, int]:
    """The one layout whose ends have as many layers as the others, in its group."""
    return next(
        (made._group(at), index)
        for at, cut in enumerate(made._layouts)
        for index, choice in enumerate(cut)
        if choice.even
    )


METHODS = ("memo:alpha=0.25", "memo:alpha=1.0", "pp_offload:alpha=0.5")
DEPTHS = ((4, 1), (4, 4), (8, 2), (8, 5), (16, 5))


def traffics(made: SearchJob, text: str) -> tuple[CopyTraffic, CopyTraffic]:
    """What a method's copies are beside, by the simulator and by the bound."""
    group, index = even(made)
    choice, there = group.choices[index], group.trials_at(index)
    plan = planned_at(there.job, text, made.registry)
    assert isinstance(plan, Plan)
    real = ActionCosts(there.problem, lower(plan, there.problem)).crowd
    probe = group.probe(Candidate((Variant(text.split(":", maxsplit=1)[0], text),)))
    assert isinstance(probe, Probe)
    found = stages(probe.facts, choice.sizes, waits=bool(group.columns.waits[index]))
    frame = group.frame(index)
    least = lowest_traffic(
        there.problem.cost, frame.turns, found, plan.transfers, float(group.sent_bytes[index])
    )
    for name, most, bound in zip(real._fields, real, least, strict=True):
        assert bound <= most * (1 + 1e-12), name
    return real, least


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize(("pp", "vpp"), DEPTHS)
def test_what_copies_are_beside_is_bounded_from_the_schedule(text: str, pp: int, vpp: int) -> None:
    """Near the simulator's numbers, and never above them."""
    real, least = traffics(job(tp=1, pp=pp, vpp=vpp), text)
    assert least.kernel_delay_share >= 0.9 * real.kernel_delay_share > 0.0
    assert least.sent_per_d2h >= 0.85 * real.sent_per_d2h
    assert least.two_way_share >= 0.7 * real.two_way_share
    assert real.sent_per_d2h > 0.0


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("vpp", [1, 5])
def test_copies_are_beside_collectives_between_nodes(text: str, vpp: int) -> None:
    """A tensor-parallel group of two nodes sends far more over the NICs than stages do."""
    real, least = traffics(job(gpus=64, tp=16, pp=4, vpp=vpp), text)
    inside, _ = traffics(job(gpus=64, tp=8, pp=4, vpp=vpp), text)
    assert real.sent_per_d2h > 10 * inside.sent_per_d2h
    assert least.sent_per_d2h >= 0.7 * real.sent_per_d2h
    assert least.received_per_h2d >= 0.55 * real.received_per_h2d


TURNS = st.builds(
    lambda pp, vpp, groups, more: Turns(
        "1f1b" if vpp == 1 else "interleaved_1f1b", pp, vpp, groups * pp + (vpp == 1) * more % pp
    ),
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(6, 11),
    st.integers(0, 4),
)
SECONDS = st.floats(0.01, 10.0)


@settings(max_examples=settings.default.max_examples // 2)
@given(turns=TURNS, whole=st.booleans(), lag=st.integers(1, 3))
def test_no_event_before_a_cut_waits_for_one_after_it(turns: Turns, whole: bool, lag: int) -> None:
    """A shortened schedule has a whole period between its cuts, on every rank."""
    short, left_out = shortened(turns)
    assert left_out * turns.pp == turns.micro_batches - short.micro_batches > 0
    copies = Copies(whole, lag)
    parts, (one,) = events(short, copies, cut=True), events(short, copies)
    columns = [[*chain.from_iterable(part[at] for part in parts)] for at in range(len(one))]
    assert Counter(zip(*columns, strict=True)) == Counter(zip(*one, strict=True))
    done = {NONE}
    for kind, own, source in zip(columns[0], columns[4], columns[5], strict=True):
        assert source in done
        if not kind:
            done.add(own)
    passes = Counter(
        rank for kind, rank in zip(parts[1].kind, parts[1].rank, strict=True) if not kind
    )
    assert passes == dict.fromkeys(range(turns.pp), 2 * turns.pp * turns.vpp)


@given(turns=TURNS, data=st.data())
def test_a_long_schedule_takes_as_long_as_without_a_leap(turns: Turns, data: st.DataObject) -> None:
    """Whatever its passes, messages and copies take: also where a rank or the host falls behind."""

    def some(count: int) -> Sequence[float]:
        return data.draw(st.lists(SECONDS, min_size=count, max_size=count))

    several = 2 * turns.stages
    pieces = Pieces(some(several), some(several), some(several), some(several))
    rules = Rules(data.draw(st.booleans()), data.draw(st.booleans()))
    copies = Copies(data.draw(st.booleans()), 2)
    beside = CopyTimes(
        some(turns.stages), some(turns.stages), some(turns.stages), data.draw(st.booleans())
    )

    def both() -> list[float]:
        alone = walk(turns, pieces, rules)
        return alone + walk(turns, pieces, rules, copies, beside)

    found = both()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_walk, "shortened", lambda turns: (turns, 0))
        assert both() == pytest.approx(found, rel=1e-8)


def test_equal_stages_leap_over_all_but_five_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's passes are then its whole step, but for the pipeline's bubble."""
    turns = Turns("interleaved_1f1b", 4, 2, 400)
    same = [1.0] * (2 * turns.stages)
    pieces = Pieces(same, same, [0.1] * len(same), [0.0] * len(same))
    leaps: list[bool] = []
    whole = schedule_walk.Clocks.leap

    def noted(*args: Any) -> bool:
        leaps.append(whole(*args))
        return leaps[-1]

    monkeypatch.setattr(schedule_walk.Clocks, "leap", noted)
    ends = walk(turns, pieces, Rules(False, False))
    assert leaps == [True]
    assert max(ends) == pytest.approx(400 * 2 * 2 + 3 * 2)


@pytest.mark.parametrize("text", tables(__file__)["embeddings"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_embedding_adds_the_same_to_every_plan(text: str, tp: int) -> None:
    """A probe that leaves out its first rank finds what a lowered first rank says."""
    made = job(tp=tp, pp=4, vpp=1)
    group, _ = even(made)
    found = group.probe(Candidate((Variant("", text),)))
    assert isinstance(found, Probe)
    known = cast(Any, found._end_bytes).__self__
    assert known.ranks[0] == 1
    whole = Measured(known.small, known.plan, known.small.ranks)
    keep = Prober(group.problem, {})._keeping
    for traffic in (None, NO_TRAFFIC):
        inner = whole.cost(1, traffic)
        first = behind_embedding(inner, keep.cost(0, traffic), keep.cost(1, traffic))
        assert known.cost(1, traffic) == inner
        real = whole.cost(0, traffic)
        for one, other in zip(first[:2], real[:2], strict=True):
            assert one._replace(landed_s=0.0) == pytest.approx(
                other._replace(landed_s=0.0), rel=1e-9, abs=1e-12
            )
        assert first[2:] == pytest.approx(real[2:], rel=1e-9)
        facts = found.nbytes if traffic is None else found.facts
        assert facts.first.base == first


OFFLOAD = "pp_offload:alpha=1.0"


@pytest.mark.parametrize(
    ("text", "spared"),
    [
        (OFFLOAD, True),
        (f"balanced_checkpointing+{OFFLOAD}", True),
        (f"balanced_checkpointing+{OFFLOAD}+mst:mlp_chunks=2,head_chunks=2", False),
        ("balanced_checkpointing+memo:alpha=1.0", False),
        ("balanced_checkpointing", False),
    ],
)
def test_a_last_rank_that_copies_nothing_is_that_of_the_plan_without_copies(
    text: str, spared: bool
) -> None:
    """It is not lowered again, and its seconds and bytes are those of its own blocks."""
    group, _ = even(job(tp=2, pp=4, vpp=1))
    method = group.registry.resolve(text, None, group.problem)
    found, prober = group.probe(Candidate((Variant("", text),))), Prober(group.problem, {})
    assert isinstance(found, Probe)
    known = cast(Any, found._end_bytes).__self__
    assert (3 in known.ranks) != spared
    whole = Measured(known.small, known.plan, known.small.ranks)
    ended = prober._measured(method, (1, 1, 1, 2), ranks=(3,))
    for traffic in (None, NO_TRAFFIC):
        facts = found.nbytes if traffic is None else found.facts
        assert facts.last.base == whole.cost(3, traffic)
        if spared:
            assert isinstance(ended, Measured)
            slope, real = facts.last.slope, further(ended.cost(3, traffic), whole.cost(3, traffic))
            for one, other in zip(slope[:2], real[:2], strict=True):
                assert one.compute_s == pytest.approx(other.compute_s, rel=1e-9)
                assert one.net_bytes == other.net_bytes


def test_a_first_rank_that_a_plan_treats_otherwise_is_lowered() -> None:
    """By the stages or the layers that a rule selects."""
    group, _ = even(job(tp=1, pp=4, vpp=1))
    small = Prober(group.problem, {})._small((1, 1, 2, 1))
    for fate in (Recompute(scope="layer"), Offload()):
        assert small.alike(small.base.with_rules(Rule(Select(activations=("fc1",)), fate)))
        for select in (Select(stages=(0,)), Select(layers=(0, 2)), Select(stages=(1, 2, 3))):
            assert not small.alike(small.base.with_rules(Rule(select, fate)))
    assert small.alike(small.base.with_rules(Rule(Select(layers=(0, 1)), Offload())))


def test_ranks_that_are_not_wanted_stay_empty() -> None:
    """The passes of the others are lowered as in the whole program, and nothing after these."""
    group, index = even(job(tp=1, pp=4, vpp=2))
    problem = group.trials_at(index).problem
    whole, some = lower(problem.base_plan, problem), lower(problem.base_plan, problem, (1, 3))
    assert [bool(rank.steps) for rank in some.ranks] == [False, True, False, True]
    for rank in (1, 3):
        passes, steps = some.ranks[rank], whole.ranks[rank].steps
        assert passes.blocks == whole.ranks[rank].blocks[: len(passes.blocks)]
        assert passes.steps == steps[: len(passes.steps)]
        left = {whole.ranks[rank].blocks[step.block].label for step in steps[len(passes.steps) :]}
        assert "OPT" in left
        assert not left & {"F", "B"}


def test_a_search_that_is_over_is_freed_at_once() -> None:
    """Its programs are large, and cycles of references would keep them until a collection."""
    gc.collect()
    gc.disable()
    try:
        made = job("llama-7b", tp=2, pp=4)
        made.evaluator = evaluator = Evaluator(without_cluster)
        search = made.search()
        found = [trial for trial, _ in zip(search.run(), range(300), strict=False) if trial]
        assert any(trial.result.fits for trial in found)
        group = made._group(0)
        left: list[Any] = [made, search, group, evaluator]
        left += evaluator._lowered.values()
        left += group._probes.values()
        left += [group.problem, *(there.problem for there in group._trials.values())]
        left = [ref(one) for one in left if not isinstance(one, Refused)]
        del made, search, group, evaluator, found
        assert [one() for one in left] == [None] * len(left)
    finally:
        gc.enable()
