"""The caching allocator on literal sequences, and on whole plans."""

import re
from dataclasses import replace as replaced
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import MIB, AllocatorPeaks, Mode, rounded
from rematbench.engine.program.program import Late, LateUnit, RankProgram
from rematbench.engine.program.replay import _Run, replay
from rematbench.evaluate import evaluator
from rematbench.evaluate.evaluation import evaluate_program, program_bytes
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, Lowered, evaluate, weighed
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.plan import Plan
from rematbench.problem import Problem
from tests.problems import BALANCED, LLAMA, all_methods, half, layers, plan_of, problem, transfers
from tests.program_text import parse_program
from tests.tables import tables

TABLES = tables(__file__)


def size_of(text: str) -> str:
    """Bytes, of which `M` are MiB; what follows a colon is a place."""
    size, colon, place = text.partition(":")
    terms = re.findall(r"([+-]?\d+)(M?)", size)
    return f"{sum(int(count) * (MIB if mib else 1) for count, mib in terms)}{colon}{place}"


def sequence(*words: str) -> RankProgram:
    """`x=1500` allocates (`x=10M-512`: 512 bytes less than 10 MiB), `-x` frees, `!800` is scratch;
    one step a word."""
    lines = ["rank 0"]
    for word in words:
        lines.append("block S")
        if word.startswith("-"):
            lines.append(f"FREE0.0 compute - f={word[1:]}")
        elif word.startswith("!"):
            lines.append(f"F0.0 compute L0.op t={size_of(word[1:])}")
        else:
            name, nbytes = word.split("=")
            lines.append(f"ALLOC0.0 compute L0.t a={name}:{size_of(nbytes)}")
    return parse_program("\n".join(lines) + "\n").ranks[0]


def run(
    *words: str, capacity: int | None = None, mode: Mode = "default", resident: tuple[int, ...] = ()
) -> AllocatorPeaks:
    return replay(sequence(*words), resident, capacity, mode)


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (1500, 1536), (MIB, MIB)]
)
def test_sizes_are_multiples_of_512(nbytes: int, size: int) -> None:
    assert rounded(nbytes) == size
    assert run(f"x={nbytes}").allocated_bytes == size


@pytest.mark.parametrize(("nbytes", "mib"), TABLES["segments"])
def test_segments(nbytes: str, mib: int) -> None:
    assert run(f"x={nbytes}").reserved_bytes == mib * MIB


FRAGMENTED = [f"x={20 * MIB}", f"y={20 * MIB}", "-x", "-y", f"z={40 * MIB}"]
"""The fragmentation of users' reports: 40 MiB are free, 40 MiB do not fit."""


@pytest.mark.parametrize(("words", "mib"), TABLES["reserved"].values(), ids=TABLES["reserved"])
def test_reserved_bytes(words: list[str], mib: int) -> None:
    assert run(*words).reserved_bytes == mib * MIB


def test_a_large_remainder_of_one_mib_stays_with_its_block() -> None:
    """20 MiB segment: y got the 1 MiB with it."""
    words = [f"{name}={9 * MIB + MIB // 2}" for name in "xy"]
    assert run(*words).allocated_bytes == 20 * MIB


def test_a_failing_malloc_gives_back_whole_segments_first() -> None:
    found = AllocatorPeaks(reserved_bytes=40 * MIB, allocated_bytes=40 * MIB, retries=1)
    assert run(*FRAGMENTED, capacity=60 * MIB) == found


def test_a_segment_in_use_is_not_given_back() -> None:
    """One KiB keeps 2 MiB: 20 MiB more do not fit into 21."""
    words = ["a=1024", "b=1024", "-b", f"x={20 * MIB}"]
    assert run(*words, capacity=22 * MIB).oom_at is None
    assert run(*words, capacity=21 * MIB).oom_at == 3


def test_states_come_first_and_may_not_fit() -> None:
    assert run("x=512", resident=(100 * MIB, 50 * MIB)).reserved_bytes == 152 * MIB
    assert run("x=512", resident=(100 * MIB,), capacity=99 * MIB).oom_at == 0


# -- expandable segments --------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "mib"), TABLES["expandable"])
def test_expandable_pages(words: list[str], mib: int) -> None:
    """20 MiB pages for large blocks, 2 MiB for small, mapped where the last free block ends."""
    assert run(*words, mode="expandable").reserved_bytes == mib * MIB


def test_expandable_pages_are_unmapped_under_pressure() -> None:
    words = [f"x={60 * MIB}", f"y={20 * MIB}", "-x", f"z={80 * MIB}"]
    assert run(*words, mode="expandable", capacity=100 * MIB).oom_at is None
    assert run(*words, mode="expandable", capacity=99 * MIB).oom_at == 3


# -- plans ----------------------------------------------------------------------------------------

WIDE = replace(layers(8, LLAMA), hidden=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn=2816)


@pytest.mark.parametrize("mode", ["default", "expandable"])
def test_allocated_equals_the_ledger_but_for_rounding(mode: Mode) -> None:
    """Every tensor of this plan is a multiple of 512 B, and no remainder stays unsplit."""
    given = problem(model=layers(4), seq_len=1024, global_batch=2)
    plan = given.base_plan
    program = lower(plan, given)
    peaks = replay(program.ranks[0], (), None, mode)
    ledger = evaluate_program(given, plan, program).ranks[0].activation_peak
    assert peaks.allocated_bytes == ledger


def test_twice_the_way_to_the_peak_tells_the_whole_step() -> None:
    given = problem(model=WIDE, seq_len=1024, pp=2, vpp=2, global_batch=24)
    plan = transfers(given.base_plan.with_rules(BALANCED, half()), reload_slots=2)
    program = lower(plan, given)
    held = evaluate_program(given, plan, program).ranks[0]
    resident = (held.parameter, held.gradient, held.optimizer, held.pools)
    whole = replay(program.ranks[0], resident, None)
    assert evaluator.replayed(program, 0, held).reserved_bytes == whole.reserved_bytes


@pytest.mark.parametrize(
    ("method", "micro_batch", "seq_len", "global_batch", "least_gib"),
    [
        ("full_recompute:block 1", 4, 2048, 32, 65.8),  # grows in the backward, after the peak
        ("balanced_checkpointing+mst:mlp_chunks=2,head_chunks=2", 1, 32768, 1, 91.5),  # second step
    ],
)
def test_what_comes_after_the_peak_and_in_a_second_step_is_replayed(
    method: str, micro_batch: int, seq_len: int, global_batch: int, least_gib: float
) -> None:
    """As seen on an H200: 66.0 and 92.9 GiB, 61.9 and 83.8 as far as twice the way to the peak."""
    given = make_problem(
        Job(
            model="llama-3.1-8b-8-layers",
            cluster="h200-141gb-single",
            system="rematbench",
            gpus=1,
            seq_len=seq_len,
            global_batch=global_batch,
            micro_batch=micro_batch,
        )
    )
    plan = all_methods().resolve(method, None, given).plan(given)
    assert isinstance(plan, Plan)
    lowered = SINGLE_EVALUATOR.lowered(given, plan)
    (actions,), (held,) = lowered.program.ranks, lowered.ranks
    blocks = held.blocks(None)
    near = replay(actions, blocks, None, num_steps=2 * held.peak_step + 1)
    assert near.reserved_bytes < 0.95 * lowered.peaks.reserved_bytes
    assert lowered.peaks == replay(actions, blocks, None, passes=2)
    assert lowered.peaks.reserved_bytes >= least_gib * 2**30


def rooms(lowered: Lowered) -> list[int]:
    """Bytes around the live bytes and around what the allocator reserves."""
    live, held = lowered.live_bytes, lowered.peaks.reserved_bytes
    return [
        live - 1,
        live,
        (2 * live + held) // 3,
        (live + 2 * held) // 3,
        held - 1,
        held,
        2 * held,
    ]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("method", ["keep_all", "full_recompute", "memo:alpha=0.5"])
def test_a_replay_that_ends_early_gives_the_same_verdict(method: str, pp: int) -> None:
    """Also where cached segments would be given back, and with a reserve of one MiB."""
    whole = problem(model=WIDE, seq_len=1024, pp=pp, global_batch=6)
    plan = all_methods().resolve(method, None, whole).plan(whole)
    assert isinstance(plan, Plan)
    early = 0
    for room in rooms(known := Lowered(whole, plan)):
        more = room - whole.usable_bytes
        cluster = replace(whole.cluster, hbm_bytes=whole.cluster.hbm_bytes + more)
        given = replaced(whole, cluster=cluster)
        assert given.usable_bytes == room
        for enough in (room, room - MIB):
            found = weighed(given, one := Lowered(given, plan), enough, enough_bytes=enough)
            exact = weighed(given, Lowered(given, plan), enough)
            assert (found.nbytes > enough) == (exact.nbytes > enough)
            assert found.at_least or found == exact
            assert found.nbytes <= exact.nbytes
            assert weighed(given, one) == weighed(given, Lowered(given, plan))
            early += found.at_least
    assert early or known.placed_bytes


@pytest.mark.parametrize("text", ["keep_all", "balanced_checkpointing", "mst:mlp_chunks=4"])
def test_a_round_that_changes_nothing_is_replayed_once(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """One rank runs its micro-batches one after the other, and nothing is alive between them."""
    given = problem(model=WIDE, seq_len=1000, global_batch=6)
    plan = all_methods().resolve(text, None, given).plan(given)
    assert isinstance(plan, Plan)
    (actions,) = lower(plan, given).ranks
    lines, asked = _Run._lines, list[int]()

    def counted(run: _Run, *given: Any) -> None:
        asked[-1] += 1
        lines(run, *given)

    def peaks() -> AllocatorPeaks:
        asked.append(0)
        return replay(actions, (), None, passes=2)

    monkeypatch.setattr(_Run, "_lines", counted)
    found = peaks()
    monkeypatch.setattr(_Run, "_known", lambda *_: 0)
    assert found == peaks()
    assert asked[0] < asked[1] / 2


# -- tensors made between activations: what the replay of a rank with late tensors reserves --------


EARLY = {"mlp_chunks": 1, "head_chunks": 1, "optimizer_in_backward": True}


def rank(*lines: str, late: Late | None) -> RankProgram:
    """A rank of one block per line, all of micro-batch 0 and chunk 0."""
    text = "".join(f"block S\n{line}\n" for line in lines)
    return replace(parse_program(f"rank 0\n{text}").ranks[0], late=late)


def late(
    states: tuple[int, ...] = (), scratch: tuple[int, ...] = (), **gradients: tuple[int, ...]
) -> Late:
    unit = LateUnit(states=states, gradients=gradients, scratch=scratch)
    return Late(units={(0, "L0"): unit})


ALLOC, FREE = f"ALLOC0.0 compute L0.t a=x:{60 * MIB}", "FREE0.0 compute - f=x"


def test_states_take_the_room_that_activations_left() -> None:
    """The moments split the 60 MiB that the first step cached, so the second needs 60 more."""
    lines = (ALLOC, FREE, "OPT0.0 compute -.optimizer n=1")
    states = (20 * MIB, 20 * MIB)
    before = replay(rank(*lines, late=None), states, None)
    after = replay(rank(*lines, late=late(states=states)), (), None)
    assert before.allocated_bytes == after.allocated_bytes == 100 * MIB
    assert before.reserved_bytes == 100 * MIB
    assert after.reserved_bytes == 120 * MIB


def test_states_are_made_at_the_units_own_update() -> None:
    """Updated in the backward, beside an activation that is alive: nothing is split."""
    lines = (ALLOC, "OPT0.0 compute L0.optimizer n=1", FREE)
    found = replay(rank(*lines, late=late(states=(20 * MIB, 20 * MIB))), (), None)
    assert found.reserved_bytes == found.allocated_bytes == 100 * MIB


def test_a_beginning_is_ended_before_the_next_step() -> None:
    """Of a step that is replayed up to its peak, the rest makes what it makes."""
    lines = (ALLOC, FREE, "OPT0.0 compute -.optimizer n=1")
    given = rank(*lines, late=late(states=(20 * MIB, 20 * MIB)))
    assert replay(given, (), None, num_steps=1) == replay(given, (), None)


def test_fresh_gradients_are_freed_after_the_step() -> None:
    grad = "W0.0 compute L0.linear"
    given = rank(ALLOC, grad, FREE, late=late(linear=(30 * MIB,), scratch=(10 * MIB,)))
    first = replay(given, (), None)
    assert first.allocated_bytes == 90 * MIB
    assert replay(given, (), None, passes=4) == first


def test_a_gradient_is_made_where_its_weights_are_differentiated() -> None:
    """A linear's gradient splits the 60 MiB that the first tensor left, so the second needs 60
    more; a norm's, which has no kernel of its own, is made after the unit's backward."""
    first = f"ALLOC0.0 compute L0.t a=x:{60 * MIB}"
    second = f"ALLOC0.0 compute L0.u a=y:{60 * MIB}"
    body = (first, FREE, "W0.0 compute L0.linear", second, "FREE0.0 compute - f=y")
    found = {
        name: replay(rank("\n".join(body), late=late(**{name: (20 * MIB,)})), (), None)
        for name in ("linear", "norm")
    }
    assert {name: peaks.allocated_bytes // MIB for name, peaks in found.items()} == {
        "linear": 80,
        "norm": 80,
    }
    assert found["linear"].reserved_bytes == 120 * MIB
    assert found["norm"].reserved_bytes == 80 * MIB


def test_an_unfused_projection_has_a_gradient_of_its_own() -> None:
    made, plan = accumulated()
    whole, _ = accumulated(fused_linears=True)
    apart, fused = (lower(plan, each).ranks[0].late for each in (made, whole))
    assert apart.gradient_bytes == fused.gradient_bytes
    mine, theirs = apart.units[0, "L1"].gradients, fused.units[0, "L1"].gradients
    assert {op: len(tensors) for op, tensors in mine.items()} == {
        **dict.fromkeys(mine, 1),
        "qkv": 3,
        "fc1": 2,
    }
    assert {op: sum(tensors) for op, tensors in mine.items()} == {
        op: tensors[0] for op, tensors in theirs.items()
    }


def accumulated(**facts: object) -> tuple[Problem, Plan]:
    made = on_one_gpu(2048, 2, **facts)
    return made, made.base_plan


def on_one_gpu(seq_len: int, micro_batches: int, **facts: object) -> Problem:
    return problem(
        model=layers(4),
        system="mst-hf",
        seq_len=seq_len,
        system_changes=facts,
        global_batch=micro_batches,
    )


@pytest.mark.parametrize("facts", [{}, {"late_state_bytes": 0}, {"fresh_gradients": False}])
def test_late_tensors_are_the_states_and_gradients_of_the_ledger(facts: dict[str, object]) -> None:
    """Each fact of the stack stands alone."""
    made, plan = accumulated(**facts)
    (program,) = lower(plan, made).ranks
    held = program_bytes(made, plan, lower(plan, made))[0]
    states = held.optimizer * ("late_state_bytes" not in facts)
    gradients = held.gradient * ("fresh_gradients" not in facts)
    assert (program.late.state_bytes, program.late.gradient_bytes) == (states, gradients)
    if not facts:
        assert held.blocks(program.late) == (held.parameter,)


def test_no_late_tensor_without_a_fact_or_on_the_host() -> None:
    made, plan = accumulated(late_state_bytes=0, fresh_gradients=False)
    assert lower(plan, made).ranks[0].late is None
    host = on_one_gpu(512, 1, optimizer_on_host=True, fresh_gradients=False)
    assert lower(host.base_plan, host).ranks[0].late is None


@settings(max_examples=20, deadline=None)
@given(seq_len=st.sampled_from([512, 1536, 4096]), m=st.integers(1, 3), early=st.booleans())
def test_reserved_bytes_hold_the_live_bytes(seq_len: int, m: int, *, early: bool) -> None:
    """Late or not, the ledger's peak fits into what the allocator reserves, and no second moves."""
    if early and m > 1:
        return
    before = on_one_gpu(seq_len, m, late_state_bytes=0, fresh_gradients=False)
    results = []
    for each in (on_one_gpu(seq_len, m), before):
        plan = plan_of(each, "mst", **EARLY) if early else each.base_plan
        found = evaluate(each, plan)
        assert found.reserved_bytes >= max(found.peak_device_bytes)
        results.append(found)
    assert results[0].step_s == results[1].step_s
    (fresh,), (throughout,) = (found.ranks for found in results)
    if m > 1 or early:
        assert fresh.device_peak == throughout.device_peak
        return
    all_alive = throughout.device_peak - throughout.activation_peak
    assert all_alive <= fresh.device_peak <= throughout.device_peak


# -- streams --------------------------------------------------------------------------------------


def gathers(count: int, stream: str = "dp", more: str = "") -> list[str]:
    """Units of 100 MiB that are gathered and freed one after another, after an activation."""
    lines = [f"ALLOC0.0 compute L0.t a=x:{100 * MIB}", "FREE0.0 compute - f=x"]
    for unit in range(count):
        lines.append(f"AG0.0 {stream} L{unit}.p a=L{unit}.parameters:{100 * MIB} {more}".strip())
        lines.append(f"FREE0.0 compute - f=L{unit}.parameters")
    return lines


def replayed(
    lines: list[str], waiting_frees: int = 0, capacity: int | None = None
) -> AllocatorPeaks:
    text = "".join(f"block S\n{line}\n" for line in lines)
    rank = replace(parse_program(f"rank 0\n{text}").ranks[0], waiting_frees=waiting_frees)
    return replay(rank, (), capacity)


@pytest.mark.parametrize(("stream", "more", "mib"), TABLES["streams"])
def test_no_stream_takes_a_block_of_another(stream: str, more: str, mib: int) -> None:
    """Gathers, and exchanges beside another micro-batch (`p`), run on streams that code made
    current; the buffers of messages and of other collectives are compute's."""
    found = replayed(gathers(3, stream, more))
    assert found.reserved_bytes == mib * MIB
    assert found.allocated_bytes == 100 * MIB


def test_blocks_that_wait_for_another_stream_are_not_allocated() -> None:
    """Two freed units wait, so five units that follow each other take three blocks; where the
    device is full, the host waits for them."""
    found = replayed(gathers(5), waiting_frees=2)
    assert found.reserved_bytes == 400 * MIB
    assert found.allocated_bytes == 100 * MIB
    full = replayed(gathers(5), waiting_frees=2, capacity=300 * MIB)
    assert full.oom_at is None
    assert full.retries > 0
