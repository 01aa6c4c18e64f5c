"""Bytes in closed form, from lowered programs: what a layer leaves, what a rank peaks at."""

from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.copies import pinned_block_bytes
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import issue_order, live_at_peak, live_bytes
from rematbench.engine.program.profile import program_profiles
from rematbench.engine.program.program import Step
from rematbench.engine.program.storage import HOST
from rematbench.evidence.published.estimators import Recomputation, korthikanti_layer_bytes
from rematbench.inputs.layout import Layout
from rematbench.plan import Offload, Recompute, Rule
from rematbench.problem import Problem
from tests.problems import (
    BALANCED,
    FULL,
    GPT,
    LLAMA,
    SCORES,
    by_layer,
    half,
    layers,
    problem,
    rule,
    transfers,
)
from tests.program_text import parse_program

WIDE = replace(LLAMA, hidden=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn=192)
SELECTIVE = rule(Recompute(), *SCORES)


def left_per_layer(rules: tuple[Rule, ...], model: Any, **kwargs: Any) -> int:
    """Bytes that one more layer leaves on the device after a forward."""
    nets = []
    for depth in (1, 2):
        given = problem(model=layers(depth, model), **kwargs)
        program = lower(given.base_plan.with_rules(*rules), given)
        forward = [block.label for block in program.ranks[0].blocks].index("F")
        nets.append(program_profiles(program)[0][forward].device_net)
    return nets[1] - nets[0]


@pytest.mark.parametrize(("tp", "cp", "b", "s"), [(1, 1, 1, 32), (2, 1, 2, 64), (2, 2, 1, 64)])
@pytest.mark.parametrize("model", [LLAMA, WIDE])
def test_atc24_bytes_per_layer(model: Any, tp: int, cp: int, b: int, s: int) -> None:
    """None (12 + 4g/a + 8H/h) bsh, balanced (8 + 4g/a + 4H/h) bsh, full 2 bsh, over t c; flash
    attention's row statistics (4 B a row and head), which the paper leaves out, stay where kept."""
    h, ffn, a, g = model.hidden, model.ffn, model.num_heads, model.num_kv_heads
    unit = b * s * h // (tp * cp)
    lse = 4 * b * s * a // (tp * cp)
    sizes = {"tp": tp, "cp": cp, "micro_batch": b, "seq_len": s, "global_batch": b}

    def left(*rules: Rule) -> int:
        return left_per_layer(rules, model, system="megatron-kwai", **sizes)

    gqa, wide = Fraction(4 * g, a), Fraction(ffn, h)
    assert left() == (12 + gqa + 8 * wide) * unit + lse
    assert left(BALANCED) == (8 + gqa + 4 * wide) * unit + lse
    assert left(*FULL) == 2 * unit


@pytest.mark.parametrize("t", [1, 2, 4])
def test_korthikanti_bytes_per_layer(t: int) -> None:
    """sbh (34 + 5as/h) / t with sequence parallelism, sbh (10 + 24/t + 5as/(ht)) without;
    34 sbh / t with selective and 2 sbh / t with full recomputation.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, table 2.
    """
    b, s, h, a = 2, 32, GPT.hidden, GPT.num_heads

    def left(*rules: Rule, sp: bool = True, again: Recomputation = "none") -> Fraction:
        """In units of sbh; the estimator says the same."""
        sizes = {"tp": t, "sp": sp, "micro_batch": b, "global_batch": b}
        kind = {"system": "megatron-lm", "attention": "unfused", "seq_len": s}
        found = left_per_layer(rules, GPT, **kind, **sizes)
        assert found == korthikanti_layer_bytes(GPT, Layout(**sizes), s, again)
        return Fraction(found, s * b * h)

    scores = Fraction(5 * a * s, h)
    assert left() == (34 + scores) / t
    assert left(SELECTIVE, again="selective") == Fraction(34, t)
    assert left(*FULL, again="full") == Fraction(2, t)
    assert left(sp=False) == 10 + (24 + scores) / t
    assert left(*FULL, sp=False, again="full") == 2


def test_memo_skeleton() -> None:
    """16 bsh elements in a GPT block with ffn 4h (MEMO, arXiv 2407.12117), and the statistics."""
    model = replace(GPT, dropout=0.0)
    units = Fraction(left_per_layer((), model, system="megatron-lm"), 2 * 32 * model.hidden)
    assert units == 16 + Fraction(4 * 32 * model.num_heads, 2 * 32 * model.hidden)


def middle(pp: int, vpp: int, m: int, **kwargs: Any) -> Problem:
    """One layer per chunk: ranks 1 .. pp - 2 hold neither embedding nor head."""
    return problem(model=layers(pp * vpp), pp=pp, vpp=vpp, global_batch=m, **kwargs)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 2, 8), (3, 2, 9), (4, 1, 8), (5, 1, 5)])
@pytest.mark.parametrize("system", ["rematbench", "torchtitan"])
def test_keep_all_peak(pp: int, vpp: int, m: int, system: str) -> None:
    """In flight x saved bytes, and in the last backward's MLP three gradients against the freed
    fc2 input and the output's gradient; with overlapped sends the output on its way as well."""
    given = middle(pp, vpp, m, system=system)
    layer = given.layer(0)
    boundary = layer.activations["layer_input"].nbytes
    ffn = layer.activations["fc2_in"].nbytes
    sending = boundary if given.system.parallel.p2p_overlap != "none" else 0
    ledgers = issue_order(lower(given.base_plan, given))
    for rank in range(1, pp - 1):
        in_flight = (vpp - 1) * pp + 2 * (pp - rank - 1) + 1 if vpp > 1 else pp - rank
        peak = in_flight * layer.saved_bytes + boundary + sending + 2 * ffn
        assert ledgers[rank].device_peak_bytes == peak


@pytest.mark.parametrize(("depth", "m"), [(1, 3), (3, 2), (2, 5)])
def test_gpipe_keeps_layers_x_micro_batches_x_saved_bytes(depth: int, m: int) -> None:
    """When the forwards are done, L x M x saved bytes and each micro-batch's ends are alive."""
    given = problem(model=layers(depth), global_batch=m)
    rank = lower(replace(given.base_plan, schedule="gpipe"), given).ranks[0]
    forwards = sum(len(rank.blocks[s.block].actions) for s in rank.steps[:m])
    device, host = list(live_bytes(rank.actions()))[forwards - 1]
    ends = given.embedding.saved_bytes + given.head.saved_bytes
    assert device == depth * m * given.layer(0).saved_bytes + m * ends
    assert host == 0


@pytest.mark.parametrize("m", [1, 4, 9])
def test_full_recompute_peak_does_not_grow_with_depth_but_for_inputs(m: int) -> None:
    def peak(depth: int) -> int:
        given = problem(model=layers(depth), global_batch=m)
        plan = replace(given.base_plan, schedule="gpipe").with_rules(*FULL)
        return issue_order(lower(plan, given))[0].device_peak_bytes

    boundary = problem().layer(0).activations["layer_input"].nbytes
    assert peak(5) - peak(3) == 2 * m * boundary


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
def test_offload_everything_leaves_host_bytes_in_flight(granularity: str) -> None:
    """The host holds what is in flight; its peak is reached when the last forward is out."""
    m = 4
    given = problem(model=layers(2), global_batch=m)
    plan = replace(given.base_plan, schedule="gpipe").with_rules(rule(Offload()))
    ledger = issue_order(lower(transfers(plan, granularity=granularity), given))[0]
    saved = 2 * given.layer(0).saved_bytes
    # GPipe's first reload is issued before the last forward, and joins the host's bytes until read
    assert ledger.host_peak_bytes == m * saved
    assert ledger.host_left_bytes == ledger.device_left_bytes == 0


def test_the_peak_is_explained_storage_by_storage() -> None:
    given = problem(pp=2, vpp=2, global_batch=4, tp=2)
    program = lower(given.base_plan.with_rules(BALANCED, half()), given)
    for rank, ledger in zip(program.ranks, issue_order(program), strict=True):
        alive = live_at_peak(rank, ledger.peak_step)
        assert sum(item.nbytes for item in alive) == ledger.device_peak_bytes
        assert len({item[:3] for item in alive}) == len(alive)


@pytest.mark.parametrize("unit", [1, 2**40, 2**62])
def test_the_walk_over_steps_is_exact_at_any_size(unit: int) -> None:
    """The peak is the first of equal peaks; a plan that fits nowhere may exceed 64 bits."""
    program = parse_program(
        "rank 0\nblock F\n"
        f"F0.0 compute L0.a a=L0.x:{3 * unit} t={unit}\n"
        "FREE0.0 compute - f=L0.x\n"
        "block D2H\n"
        f"D2H0.0 d2h L0.x a=L0.x@host:{2 * unit} n={unit}\n"
    )
    rank = program.ranks[0]
    steps = tuple(Step(block, i, 0) for i, block in enumerate((1, 0, 0, 1)))
    ledger = issue_order(replace(program, ranks=(replace(rank, steps=steps),)))[0]
    assert (ledger.device_peak_bytes, ledger.peak_step) == (4 * unit, 1)
    assert (ledger.host_peak_bytes, ledger.host_left_bytes) == (4 * unit, 4 * unit)
    assert ledger.device_left_bytes == 0


@pytest.mark.parametrize(("nbytes", "block"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192)])
def test_a_pinned_block_is_a_power_of_two(nbytes: int, block: int) -> None:
    assert pinned_block_bytes(nbytes) == block


def test_pinned_blocks_are_counted_whole() -> None:
    """Every tensor that leaves takes its block from its copy out to its copy in."""
    given = problem(pp=2, global_batch=4)
    plan = by_layer(given.base_plan.with_rules(rule(Offload(), "q", "k", "v", "lse")))
    for rank, found in zip(lower(plan, given).ranks, issue_order(lower(plan, given)), strict=True):
        held: dict[object, int] = {}
        peak = 0
        for action, micro_batch, chunk in rank.actions():
            for alloc in action.allocs:
                if alloc.storage.place == HOST:
                    held[alloc.storage, micro_batch, chunk] = 1 << (alloc.nbytes - 1).bit_length()
            peak = max(peak, sum(held.values()))
            for name in action.frees:
                held.pop((name, micro_batch, chunk), None)
        assert found.pinned_peak_bytes == peak >= found.host_peak_bytes > 0
