"""Mini-sequences as a method: the paper's rules, transients over M, composition, refusals."""

import dataclasses
from collections import Counter
from math import ceil
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.ledger import issue_order
from rematbench.engine.program.program import Program
from rematbench.evaluate.evaluation import evaluate, program_bytes
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import with_facts
from rematbench.paper.studies.longest import longest_sequence
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from tests.problems import all_methods, layers, make_problem, plan_of, problem, refusal, remade
from tests.tables import tables

TABLES = tables(__file__)

REGISTRY = all_methods()


def counts(plan: Plan) -> dict[str, int]:
    return {sequence.ops[0]: sequence.count for sequence in plan.mini_sequences}


def one_a100(model: str, seq_len: int) -> Problem:
    return make_problem(
        model=model,
        cluster="a100-80gb-single",
        system="mst-hf",
        layout=Layout(zero_stage=0, global_batch=1),
        seq_len=seq_len,
    )


def tiny_problem(seq_len: int, **changes: Any) -> Problem:
    return dataclasses.replace(problem(seq_len=seq_len, **changes), evaluator=evaluate)


def head_actions(p: Problem, plan: Plan) -> list[Action]:
    (rank,) = lower(plan, p).ranks
    return [a for block in rank.blocks for a in block.actions if a.part == "H"]


# -- the paper's rules ------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "pieces"), TABLES["pieces"])
def test_mlp_pieces_have_hidden_rows_but_for_short_and_very_long_sequences(
    seq_len: int, pieces: dict[str, int]
) -> None:
    plan = plan_of(one_a100("llama3-8b", seq_len), "mst")
    assert counts(plan) == {**pieces, "lm_head": 32}


@pytest.mark.parametrize(
    ("model", "pieces"), [("llama3-8b", 32), ("llama2-7b", 8), ("qwen2-7b", 43), ("gemma-2-9b", 72)]
)
def test_head_pieces_are_vocabulary_over_hidden(model: str, pieces: int) -> None:
    assert counts(plan_of(one_a100(model, 8192), "mst"))["lm_head"] == pieces


def test_given_pieces_win_over_the_rules() -> None:
    p = one_a100("llama3-8b", 8192)
    assert counts(plan_of(p, "mst", mlp_chunks=5, head_chunks=7)) == {"fc1": 5, "lm_head": 7}
    assert counts(plan_of(p, "mst", mlp_chunks=1, head_chunks=1)) == {}


# -- transients -------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_logits_of_a_step_fall_by_the_number_of_pieces(pieces: int) -> None:
    p = problem(seq_len=64)
    names = ("logits", "loss_saved", "d:H.logits")
    whole, split = (
        [
            alloc.nbytes
            for action in head_actions(p, plan_of(p, "mst", head_chunks=n, mlp_chunks=1))
            for alloc in action.allocs
            if any(name in str(alloc.storage) for name in names)
        ]
        for n in (1, pieces)
    )
    assert max(split) * pieces == max(whole)
    assert {nbytes * pieces for nbytes in split} <= set(whole)


def test_no_saved_byte_of_a_layer_changes() -> None:
    p = problem(seq_len=64)
    before = issue_order(lower(plan_of(p, "keep_all"), p))[0]
    after = issue_order(lower(plan_of(p, "mst", head_chunks=1, mlp_chunks=4), p))[0]
    assert after.device_left_bytes == before.device_left_bytes == 0
    assert after.device_peak_bytes <= before.device_peak_bytes


def test_logits_are_computed_again_by_piece() -> None:
    p = problem()
    again = [
        a for a in head_actions(p, plan_of(p, "mst", head_chunks=4)) if a.kind is Kind.RECOMPUTE
    ]
    assert [a.op for a in again] == ["lm_head", "loss"] * 4
    assert sum(a.rows.fraction for a in again) == 2.0


# -- composition ------------------------------------------------------------------------------


def test_an_mlp_whose_tensors_leave_stays_whole_and_says_so() -> None:
    plan = plan_of(problem(model=layers(6), seq_len=64), "memo+mst", alpha=0.5)
    assert set(counts(plan)) == {"lm_head"}
    assert "base offloads or rebuilds part of" in str(plan.fit["mlp"])


def test_what_comes_after_finds_the_same_kept_tensors() -> None:
    p = problem(model=layers(6), seq_len=64)
    one, other = plan_of(p, "balanced_checkpointing+mst"), plan_of(p, "mst+balanced_checkpointing")
    assert evaluate(p, one).peak_device_bytes == evaluate(p, other).peak_device_bytes


# -- optimizer-in-backward --------------------------------------------------------------------


def test_optimizer_in_backward_drops_resident_gradients() -> None:
    p = one_a100("llama3-8b", 4096)
    plan = plan_of(p, "full_recompute+mst", optimizer_in_backward=True)
    assert plan.state("optimizer").update == "backward"
    assert evaluate(p, plan).ranks[0].gradient == 0


def test_optimizer_in_backward_alone_changes_nothing_else() -> None:
    p = one_a100("llama3-8b", 4096)
    plan = plan_of(p, "mst", optimizer_in_backward=True, mlp_chunks=1, head_chunks=1)
    assert plan.mini_sequences == ()
    assert plan.rules == ()


def test_refusals() -> None:
    assert refusal(problem(global_batch=2), "mst", optimizer_in_backward=True) == (
        "mst: optimizer-in-backward needs one micro-batch per step, not 2"
    )
    tied = problem(model=replace(layers(2), tied_embeddings=True), pp=2, global_batch=1)
    assert "tied embeddings" in refusal(tied, "mst", optimizer_in_backward=True)
    twice = (
        REGISTRY.resolve("mst").methods[0].plan(problem(), plan_of(problem(), "mst", mlp_chunks=2))
    )
    assert isinstance(twice, Unsupported)


# -- claims -----------------------------------------------------------------------------------


def test_memory_ladder_of_appendix_d() -> None:
    """Llama-3 8B at 4K: 52 with recomputation and optimizer-in-backward, 47 with mini-sequences;
    the paper's GB are 2^30 bytes (its weights are 15, 8.03 billion parameters of 2 bytes).  The
    authors' loop holds 1.96 GB of logits where the head is whole, and none where it is in pieces.
    """
    p = one_a100("llama3-8b", 4096)
    plain = {"optimizer_in_backward": True, "mlp_chunks": 1, "head_chunks": 1}
    found = [
        max(evaluate(p, plan_of(p, "full_recompute+mst", **settings)).peak_device_bytes) / 2**30
        for settings in (plain, {"optimizer_in_backward": True})
    ]
    assert found == [pytest.approx(52, rel=0.06), pytest.approx(47, rel=0.05)]


def test_logits_in_pieces_are_held_by_nobody() -> None:
    """A whole head keeps the fp32 logits that the loop holds; pieces of it make no output."""
    held = problem(global_batch=1, system_changes={"held_logit_bytes": 4})
    plain = problem(global_batch=1)
    for settings, names in (({}, {"H.logits_held"}), ({"head_chunks": 4}, set())):
        plan = plan_of(held, "mst", mlp_chunks=1, **{"head_chunks": 1, **settings})
        check(lower(plan, held))
        made = {str(a.storage) for act in head_actions(held, plan) for a in act.allocs}
        made = {name for name in made if "held" in name}
        assert made == names
        peaks = [max(evaluate(p, plan).peak_device_bytes) for p in (held, plain)]
        assert (peaks[0] > peaks[1]) == bool(names)


def test_longest_sequences_are_ordered_and_ratios_of_the_papers_size() -> None:
    """Claimed 5K / 14K / 60K: 4x recompute-only and 12x vanilla."""
    update: dict[str, Any] = {"mst.optimizer_in_backward": True}
    whole = {**update, "mst.mlp_chunks": 1, "mst.head_chunks": 1}
    found = [
        longest_sequence(
            lambda s: one_a100("llama3-8b", s), REGISTRY.resolve(spec, settings), granularity=3000
        ).seq_len
        for spec, settings in [
            ("keep_all+mst", whole),
            ("full_recompute+mst", whole),
            ("full_recompute+mst", update),
        ]
    ]
    vanilla, recompute, mst = found
    assert 0 < vanilla < recompute < mst
    assert 2 < mst / recompute < 8
    assert 6 < mst / vanilla < 24


def test_longest_sequence_is_a_bracket() -> None:
    method = REGISTRY.resolve("keep_all")
    found = longest_sequence(lambda s: one_a100("llama3-8b", s), method, granularity=512)
    assert found.fails_at == found.seq_len + 512 <= found.never_from
    if found.seq_len:
        assert found.peak_device_bytes <= one_a100("llama3-8b", 512).usable_bytes
    assert "device memory" in found.binds
    assert found.evaluations <= 2 * ceil(found.fails_at / 512).bit_length()


def test_longest_sequence_stops_at_its_limit_and_at_refusals() -> None:
    tiny = longest_sequence(tiny_problem, REGISTRY.resolve("mst"), granularity=64,
                            limit=256)  # fmt: skip
    assert (tiny.seq_len, tiny.binds) == (256, "the limit of the search")
    none = longest_sequence(lambda s: tiny_problem(s, model=layers(1)),
                            REGISTRY.resolve("memo"))  # fmt: skip
    assert none.seq_len == 0
    assert "layers on every rank" in none.binds
    odd = longest_sequence(lambda s: tiny_problem(s, tp=2), REGISTRY.resolve("mst"),
                           granularity=63)  # fmt: skip
    assert (odd.seq_len, odd.fails_at) == (0, 63)
    assert "must be a multiple of" in odd.binds


def test_bytes_a_token_beside_layer_inputs_are_those_that_are_stated() -> None:
    """Of Llama-3-8B at 60K tokens (config/study/mst.yaml): one rebuilt layer, and four tensors of
    hidden width on the way."""
    p = one_a100("llama3-8b", 60_000)
    plan = plan_of(p, "mst+full_recompute")
    (rank,) = program_bytes(p, plan, lower(plan, p))
    hidden = 2 * p.workload.model.hidden
    a_token = rank.activation_peak / 60_000 - p.workload.model.num_layers * hidden
    assert a_token == pytest.approx(p.layer(0).saved_bytes / 60_000 + 4 * hidden, rel=1e-6)
    assert a_token == pytest.approx(234e3, rel=2e-3)


# -- pieces that are computed again in their own backward --------------------------------------


def again(**facts: Any) -> Problem:
    """Fused Llama blocks on a stack that computes tiles again."""
    return problem(
        model=layers(2), seq_len=64, global_batch=1, system_changes={"tiles_again": True, **facts}
    )


def most_alive(p: Problem, plan: Plan, *names: str) -> int:
    """The most bytes that tensors of layers with these names have at one time."""
    alive: dict[str, int] = {}
    most = 0
    for block in lower(plan, p).ranks[0].blocks:
        for action in block.actions:
            for alloc in action.allocs:
                name = str(alloc.storage)
                if any(f".{word}" in name for word in names) and not name.startswith("d:"):
                    alive[name] = alloc.nbytes
            most = max(most, sum(alive.values()))
            for storage in action.frees:
                alive.pop(str(storage), None)
    return most


def test_tiles_of_a_recomputed_layer_are_alive_alone_and_run_three_times() -> None:
    """Once in the forward, once with their layer, once in their own backward (DeepSpeed's TiledMLP
    under a checkpoint)."""
    inner = ("gate_out", "up_out", "act_out", "fc2_in")
    found = {}
    for fact in (False, True):
        p = again(tiles_again=fact)
        plan = plan_of(p, "full_recompute+mst", mlp_chunks=4, head_chunks=1)
        program = lower(plan, p)
        check(program)
        actions = [a for a, *_ in program.ranks[0].actions()]
        runs = [a.kind for a in actions if a.op == "fc1" and a.part.number == 0]
        assert runs.count(Kind.RECOMPUTE) == (8 if fact else 4)
        found[fact] = most_alive(p, plan, *inner)
    assert found[True] * 4 <= found[False]


@pytest.mark.parametrize("spec", ["mst", "selective_recompute+mst"])
def test_tiles_of_a_kept_layer_save_their_input_alone(spec: str) -> None:
    p = again()
    settings = {"mst.mlp_chunks": 4, "mst.head_chunks": 1}
    plan = plan_of(p, spec, **settings)
    program = lower(plan, p)
    check(program)
    forward = program.ranks[0].blocks[0]
    left = {str(a.storage) for act in forward.actions for a in act.allocs}
    left -= {str(s) for act in forward.actions for s in act.frees}
    assert not [name for name in left if ".gate_out" in name or ".fc2_in" in name]


@pytest.mark.parametrize("degrees", [{}, {"ulysses": 2, "dp": 2}])
@pytest.mark.parametrize("spec", ["mst", "full_recompute+mst"])
def test_heads_in_slices_leave_the_share_of_one_slice(spec: str, degrees: dict[str, int]) -> None:
    """Untied Ulysses: queries, keys and values of U of H heads at a time; the projection and its
    all-to-all run again in the backward, attention does not."""
    model = replace(layers(2), num_heads=4, num_kv_heads=4, head_dim=8)
    stack = {"features": ("ulysses",)}
    p = problem(model=model, seq_len=64, global_batch=2, system_changes=stack, **degrees)
    slices = 4 // p.layout.ulysses
    settings = {"mst.mlp_chunks": 1, "mst.head_chunks": 1}
    whole, cut = (plan_of(p, spec, **settings, **{"mst.attention_chunks": n}) for n in (1, slices))
    programs = [lower(plan, p) for plan in (whole, cut)]
    for program in programs:
        check(program)
    names = ("q", "k", "v")
    assert most_alive(p, cut, *names) * slices <= most_alive(p, whole, *names)
    before, after = (shares(program) for program in programs)
    for op in ("qkv", "attention"):
        assert after["F", op] == pytest.approx(before["F", op])
    layer = spec == "full_recompute+mst"
    passes = 2 * p.layout.num_micro_batches
    assert after["R", "qkv"] == pytest.approx((1 + layer) * passes)
    assert after["R", "attention"] == pytest.approx(layer * passes)
    if p.layout.ulysses > 1:  # forward q, k, v, out; backward these and their gradients
        tensor = p.layer(0).activations["attn_out"].nbytes
        units = [
            round(sum(f["A2A", op] for op in ("to_heads", "to_rows"))) for f in (before, after)
        ]
        assert units == [(8 + 4 * layer) * passes * tensor, (12 + 4 * layer) * passes * tensor]


def shares(program: Program) -> Counter[tuple[str, str]]:
    """The shares of operators that run forward (F) or again (R), and bytes of all-to-alls."""
    found: Counter[tuple[str, str]] = Counter()
    for action, *_ in program.ranks[0].actions():
        comm = action.exchange.comm
        found[action.kind.value, action.op] += comm.nbytes if comm else action.rows.fraction
    return found


def test_slices_of_heads_are_equal_and_of_a_ranks_own() -> None:
    assert "3 slices of 4 heads" in refusal(problem(), "mst", attention_chunks=3)
    assert "tensor parallelism" in refusal(problem(tp=2), "mst", attention_chunks=2)


@pytest.mark.parametrize(("cluster", "gpus", "seq_len", "peak_gib"), TABLES["ladder"])
def test_ladder_of_alst(cluster: str, gpus: int, seq_len: int, peak_gib: float | None) -> None:
    """Published lengths of Llama-3.1 8B with Liger's kernels, weights on the host on one card
    (ArcticTraining @b28638e); the recipe of 1.2 million tokens prints its peak."""
    facts = {
        **{"norm": "fused", "norm_keeps_steps": False, "rope": "fused", "fused_swiglu": True},
        **{"fused_loss": True, "logits_fp32": False, "expandable_segments": True},
        **{"optimizer_on_host": True, "parameters_on_host": gpus == 1},
    }
    given = make_problem(
        model="llama-3.1-8b",
        cluster=cluster,
        system="huggingface-deepspeed",
        layout=Layout(zero_stage=3, dp=gpus, ulysses=gpus, global_batch=1),
        seq_len=seq_len,
    )
    p = remade(given, system=with_facts(given.system, **facts))
    plan = plan_of(p, "full_recompute+mst", **{"full_recompute.inputs": "host"})
    peak = max(evaluate(p, plan).peak_device_bytes)
    assert peak < p.usable_bytes
    if peak_gib:
        assert peak / 2**30 == pytest.approx(peak_gib, rel=0.1)
