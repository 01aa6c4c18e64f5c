"""The bounds of plans with copies: where copies begin and must have ended, what pinned blocks hold
beyond their tensors, and trials that searches of one job share."""

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.bounds.probes import ProbePrograms
from rematbench.advise.bounds.schedule_walk import FETCH, FREE, Copies, Turns, events
from rematbench.advise.candidates import trials
from rematbench.advise.candidates.candidate import Candidate, Scalar, Variant
from rematbench.advise.candidates.layouts import Fixed, LayoutChoice
from rematbench.advise.candidates.trials import planned_at
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate import evaluator as programs
from rematbench.evaluate.evaluator import Evaluator, Lowered, without_cluster
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from tests.everything import bounds_at

NAMES = {FETCH: "H2D", FREE: "free_d2h"}


def job(**changes: int) -> SearchJob:
    spec = Job(
        model="llama-7b", cluster="h800-80gb", system="megatron-kwai", gpus=8, seq_len=8192,
        global_batch=16,
    )  # fmt: skip
    fixed = Fixed(micro_batch=1, zero_stage=1, cp=1, **changes)
    return SearchJob(SearchRequest(spec=spec, fixed=fixed, within=0.01))


def lowered(made: SearchJob, choice: LayoutChoice, method: str) -> tuple[Plan, Lowered]:
    problem = made.problem(choice)
    plan = planned_at(made.job(choice), method, made.registry)
    assert isinstance(plan, Plan)
    return plan, Lowered(problem, plan)


@pytest.mark.parametrize("method", ["memo:alpha=0.5", "pp_offload:alpha=0.5"])
@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (4, 2), (8, 2)])
def test_copies_begin_and_end_where_the_lowered_steps_say(method: str, pp: int, vpp: int) -> None:
    """On ranks that copy: every fetch before the same pass, and no wait for copies is later."""
    made = job(tp=1, pp=pp, vpp=vpp)
    choice = next(one for one in made.space.choices if one.even)
    plan, found = lowered(made, choice, method)
    lay, moves = choice.layout, plan.transfers
    turns = Turns(plan.schedule, lay.pp, lay.vpp, lay.num_micro_batches)
    (columns,) = events(turns, Copies(moves.granularity == "chunk", moves.release_lag))
    for rank in range(lay.pp - 1):
        expected: list[tuple[str, int, int]] = []
        for kind, at, own in zip(columns.kind, columns.rank, columns.pass_id, strict=True):
            stage = own // turns.micro_batches % turns.stages
            name = NAMES.get(kind, "F" if own >= turns.half else "B")
            if at == rank:
                expected.append((name, own % turns.micro_batches, stage // lay.pp))
        program = found.program.ranks[rank]
        steps = [(program.blocks[s.block].label, s.micro_batch, s.chunk) for s in program.steps]
        steps = [step for step in steps if step[0] in ("F", "B", *NAMES.values())]
        timed = [step for step in steps if step[0] != "free_d2h"]
        assert timed == [step for step in expected if step[0] != "free_d2h"]
        for step in (step for step in expected if step[0] == "free_d2h"):
            passes = [s for s in expected[: expected.index(step)] if s[0] in "FB"]
            before = steps[: steps.index(step)]
            assert len([s for s in before if s[0] in "FB"]) <= len(passes)


def test_one_rank_and_its_layers_slots_count_with_one_micro_batch() -> None:
    """Rounding buffers are there however many micro-batches come."""
    made = job(tp=8, pp=1)
    candidate = Candidate((Variant("memo", "memo:alpha=0.5"),))
    group, bounds = made._group(0), made._group(0).of(candidate)
    assert isinstance(bounds, Bounds)
    _, found = lowered(made, group.choices[0], candidate.text())
    assert 0.95 * found.live_bytes <= bounds.peak_bytes[0, 0] <= found.live_bytes


ENDS = (
    "keep_all",
    "pp_offload:alpha={}",
    "memo:alpha=0.0",
    "balanced_checkpointing+memo:alpha=1.0",
)


@pytest.mark.parametrize("text", ENDS)
@pytest.mark.parametrize(("pp", "vpp"), [(4, 8), (3, 4)])
def test_bytes_where_all_passes_of_the_last_chunk_wait(text: str, pp: int, vpp: int) -> None:
    """With as many micro-batches as ranks every pass is in flight before the first backward, also
    those of the head; in the probe the head's backward follows its forward at once."""
    spec = Job(
        model="llama-7b", cluster="h800-80gb", system="megatron-kwai", gpus=2 * pp, seq_len=32768,
        global_batch=pp,
    )  # fmt: skip
    spec = replace(spec, model=replace(load_model("llama-7b"), num_layers=4 * pp * vpp))
    fixed = Fixed(micro_batch=1, zero_stage=1, cp=1, tp=2, pp=pp, vpp=vpp)
    made = SearchJob(SearchRequest(spec=spec, fixed=fixed))
    choice = next(one for one in made.space.choices if one.even)
    assert choice.layout.num_micro_batches == pp
    scalar = Scalar("share", 20) if "{}" in text else None
    words = [] if text == "keep_all" else text.split("+")
    candidate = Candidate(tuple(Variant(one.split(":")[0], one, scalar) for one in words))
    step = 10 if scalar else 1
    bounds = bounds_at(made, choice).of(candidate)
    assert isinstance(bounds, Bounds)
    _, found = lowered(made, choice, candidate.text(step))
    assert 0.85 <= bounds.peak_bytes[step - 1, 0] / found.live_bytes <= 1.0


def test_clusters_share_the_programs_of_tried_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was tried on one cluster is not lowered on the next, nor weighed by methods, and
    takes as long as when it is lowered anew."""
    made, evaluator = job(tp=1, pp=4), Evaluator(without_cluster)
    probes = ProbePrograms()
    candidate = Candidate((Variant("pp_offload", "pp_offload:alpha=0.25"),))
    expected = [one.result.fitting_s for one in made.search_of([candidate]).run() if one]
    steps, count = [], []
    for cluster in ("a800-80gb", "h800-80gb"):
        spec = replace(made.request.spec, cluster=cluster)
        own = SearchJob(replace(made.request, spec=spec), evaluator, probes)
        with monkeypatch.context() as patch:
            patch.setattr(programs, "lower", lambda *words: count.append(1) or lower(*words))
            steps = [one.result.fitting_s for one in own.search_of([candidate]).run() if one]
    assert steps == expected
    assert len(count) <= len(expected) + 2


def test_an_equal_plan_is_tried_once_in_all_searches_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second search of the same candidate lowers nothing, and finds the same under its own
    name."""
    made, tried = job(tp=1, pp=4), []
    once = trials._judged

    def counted(*words: object) -> object:
        tried.append(words)
        return once(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "_judged", counted)
    candidate = Candidate((Variant("full_recompute", "full_recompute"),))
    first = [one for one in made.search_of([candidate]).run() if one]
    count = len(tried)
    again = Candidate((Variant("full_recompute", "full_recompute:method=uniform"),))
    second = [one for one in made.search_of([again]).run() if one]
    assert count == len(tried) == len(first) > 0
    assert [one.result.step_s for one in first] == [one.result.step_s for one in second]
    assert {one.result.method for one in second} == {again.text()}
    assert discover().methods.keys() == made.registry.methods.keys()


def test_what_is_slower_is_counted_by_reason() -> None:
    """What was never begun, and what has a bound that is too slow."""
    cluster = replace(load_cluster("a800-80gb"), pcie_bytes_per_s=2e9)
    spec = Job(
        model="gpt-1.3b", cluster=cluster, system="megatron-core", gpus=4, seq_len=4096,
        global_batch=8, hbm_bytes=14 << 30,
    )  # fmt: skip
    search = SearchJob(SearchRequest(spec=spec, only=("pp_offload", "full_recompute"))).search()
    assert not search.queue.slower  # nothing fits yet, so nothing is slower
    tried = [one for one in search.run() if one is not None]
    assert any(one.result.fits for one in tried)
    assert not search.queue
    assert search.queue.slower["slower than the best: kernels, messages and copies"] > 0
    assert (
        search.queue.slower[
            "layouts slower than the best even if nothing is recomputed or offloaded"
        ]
        > 0
    )
