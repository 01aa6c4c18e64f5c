"""ZeRO 2 and 3 in a pipeline: gathered parameters and whole gradients stay until the last pass."""

from itertools import product
from math import fsum
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.ledger import issue_order, live_bytes
from rematbench.engine.program.storage import HELD
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluation import evaluate, evaluate_program
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Experts, Model
from rematbench.worlds.records.refusals import refusals
from tests.problems import FULL, layers, make_problem, plan_of, problem, remade


def piped(**changes: Any) -> Problem:
    layout = {"pp": 2, "dp": 2, "zero_stage": 3, "global_batch": 8} | changes
    return problem(model=layers(6), system="torchtitan", **layout)


def walk(made: Problem, rank: int) -> list[tuple[Action, int, int]]:
    return list(lower(made.base_plan, made).ranks[rank].actions())


@pytest.mark.parametrize(("stage", "vpp"), [*product((2, 3), (1, 2))])
def test_a_unit_is_gathered_once_and_reduced_once(stage: int, vpp: int) -> None:
    """In the chunk's first forward, and after the rank's last pass."""
    made = piped(zero_stage=stage, vpp=vpp)
    check(lower(made.base_plan, made))
    for rank in range(2):
        found = walk(made, rank)
        kernels = [i for i, (a, _, _) in enumerate(found) if a.kind in (Kind.BACKWARD_INPUT,)]
        gathers = [
            (a.part, mb, c) for a, mb, c in found if a.op == "parameters" and a.exchange.comm
        ]
        reductions = [
            i for i, (a, _, _) in enumerate(found) if a.op == "gradients" and a.exchange.comm
        ]
        units = {(a.part, c) for a, _, c in found if a.kind is Kind.BACKWARD_WEIGHT}
        assert sorted(gathers) == sorted((part, 0, chunk) for part, chunk in units)
        assert {(found[i][0].part, found[i][2]) for i in reductions} == units
        assert len(reductions) == len(units)
        assert min(reductions) > max(kernels)


@pytest.mark.parametrize(
    ("facts", "gathered", "summed"),
    [({}, 2, 4), ({"gather_bytes": 4}, 4, 4), ({"reduce_bytes": 2}, 2, 2)],
)
@pytest.mark.parametrize("vpp", [1, 2])
def test_copies_and_sums_are_alive_until_the_last_pass(
    facts: dict[str, int], gathered: int, summed: int, vpp: int
) -> None:
    made = piped(vpp=vpp, system_changes=facts)
    for rank in range(2):
        found = walk(made, rank)
        alive = [device for device, _ in live_bytes(found)]
        held = [
            i for i, (a, _, _) in enumerate(found) if any(freed.place == HELD for freed in a.frees)
        ]
        count = rank_parameters(made, made.base_plan, rank)
        assert alive[held[0] - 1] == count * (gathered + summed)
        assert alive[-1] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_equal_names_of_other_bytes_are_freed_with_theirs(stage: int) -> None:
    """Of the two chunks without ends, one layer is dense and one has experts."""
    made = piped(zero_stage=stage, vpp=2)
    mixed = replace(layers(4), experts=Experts(count=4, active=2, ffn=64, dense_layers=(1,)))
    made = remade(made, workload=replace(made.workload, model=mixed))
    for ledger in issue_order(lower(made.base_plan, made)):
        assert ledger.device_left_bytes == 0


def test_gradients_of_another_width_are_in_a_buffer_first() -> None:
    """Of the unit whose backward runs; else kernels add to the sum."""
    for facts, buffered in (({}, True), ({"reduce_bytes": 2}, False)):
        found = walk(piped(system_changes=facts), 1)
        allocs = [alloc for a, _, _ in found for alloc in a.allocs if "gradients" in a.op]
        buffers = {str(alloc.storage) for alloc in allocs}
        assert ("L0.gradients" in buffers) == buffered
        assert "L0.sums^" in buffers


def test_states_beside_them_are_shards() -> None:
    made = piped(dp=4, global_batch=16)
    (rank, *_) = evaluate(made, made.base_plan).ranks
    count = rank_parameters(made, made.base_plan, 0)
    assert (rank.parameter, rank.gradient) == (4 * -(-count // 4), 0)
    assert rank.optimizer == 8 * -(-count // 4)


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_reductions_take_their_seconds_after_the_last_pass(vpp: int) -> None:
    made = piped(vpp=vpp)
    program = lower(made.base_plan, made)
    costs = ActionCosts(made)

    def seconds(action: Action, rank: int) -> float:  # of no host
        return costs(action, rank)

    intervals = simulate(program, seconds, record=True).intervals
    for rank in range(2):
        own = [one for one in intervals if one.rank == rank and one.block == "reduce"]
        units = {
            (one.action.part, one.chunk): one.action.exchange.comm
            for one in own
            if one.action.exchange.comm
        }
        took = max(one.end_s for one in own) - min(one.start_s for one in own)
        each = [
            made.cost.comm_s(Comm("reduce_scatter", "dp", c.nbytes), rank) for c in units.values()
        ]
        assert took == pytest.approx(fsum(each), rel=1e-9)
    whole = evaluate_program(made, made.base_plan, program, record=True).step_s
    assert evaluate(made, made.base_plan).step_s == pytest.approx(whole, rel=1e-9)


def test_graphs_of_recomputed_layers_release_nothing_twice_in_a_pipeline() -> None:
    made = piped()
    plan = plan_of(made, "full_recompute")
    given = remade(made, system=with_facts(made.system, reentrant=True))
    check(lower(plan, given))
    assert [one.optimizer for one in evaluate(given, plan).ranks] == [
        one.optimizer for one in evaluate(made, plan).ranks
    ]


def test_the_executor_refuses_them_by_name() -> None:
    made = piped()
    assert any("with pipeline stages" in words for words in refusals(made, made.base_plan))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_fourth_chunk_is_gathered_again_and_three_stay(stage: int) -> None:
    """torch's schedule keeps three chunks of a rank gathered; gradients are summed as before."""
    few, many = (
        problem(
            model=layers(16), system="torchtitan", pp=2, vpp=vpp, dp=2, zero_stage=stage,
            global_batch=8, system_changes={"returns_outputs": False},
        )
        for vpp in (2, 4)
    )  # fmt: skip
    check(lower(many.base_plan, many))
    gathers = [
        sum(a.op == "parameters" and bool(a.exchange.comm) for a, _, _ in walk(made, 0))
        for made in (few, many)
    ]
    assert gathers[0] == 8 + 1  # layers and the embedding, once
    assert gathers[1] > 2 * gathers[0]
    assert many.base_plan.state("gradient").release == "step"
    rank = evaluate(many, many.base_plan).ranks[1]
    layer = many.layer(0).parameters
    assert rank.pools == 2 * (3 * 2 - 2) * layer  # three chunks of two layers, less two layers
    assert evaluate(few, few.base_plan).ranks[1].pools == 0


# -- a pipeline engine that holds the outputs of micro-batches in flight ---------------------------


GB, GIB = 1e9, 2**30
GPT_181B = Model(
    name="gpt-181b", num_layers=72, hidden=14336, num_heads=64, num_kv_heads=64, head_dim=224,
    ffn=57344, vocab=250880, mlp="gelu", norm="layernorm", position="alibi", tied_embeddings=True,
    qkv_bias=True, proj_bias=True, mlp_bias=True,
)  # fmt: skip


def held(given: Problem, *, holds: bool) -> Problem:
    return remade(given, system=with_facts(given.system, holds_outputs=holds))


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("p2p", ["always", "none"])
def test_an_output_stays_from_its_forward_to_its_backward(vpp: int, p2p: str) -> None:
    """With everything else recomputed, a rank holds one output more for each micro-batch in flight
    but the one at work; no second moves."""
    given = problem(
        model=layers(4 * vpp), pp=4, vpp=vpp, global_batch=8, system_changes={"p2p_overlap": p2p}
    )
    results = []
    for holds in (False, True):
        made = held(given, holds=holds)
        plan = made.base_plan.with_rules(*FULL)
        check(lower(plan, made))
        results.append(evaluate(made, plan))
    without, with_outputs = results
    assert without.step_s == with_outputs.step_s
    output = given.layer(0).activations["layer_input"].nbytes
    more = [
        (a - b) // output
        for a, b in zip(with_outputs.peak_device_bytes, without.peak_device_bytes, strict=True)
    ]
    if vpp == 1:
        assert more[-1] == 0
        assert more == sorted(more, reverse=True)
        assert 2 <= more[0] <= 4
    assert all(n >= 0 for n in more)


@pytest.mark.parametrize(("micro_batch", "measured"), [(1, 29), (2, 37), (4, 49), (8, 69)])
def test_181b_on_384_gpus_as_measured(micro_batch: int, measured: float) -> None:
    """Megatron-DeepSpeed, fp16, full recomputation, TP 8, PP 12: the fullest node, as nvidia-smi
    reports it (a published table of memory by micro-batch)."""
    cluster = replace(load_cluster("a100-80gb-selene"), gpus_per_node=8)
    given = make_problem(
        layout=Layout(tp=8, sp=False, pp=12, dp=4, micro_batch=micro_batch, global_batch=2048),
        model=GPT_181B, cluster=cluster, system="megatron-deepspeed", seq_len=2048,
        precision="fp16", attention="unfused",
    )  # fmt: skip
    found = evaluate(given, plan_of(given, "full_recompute"))
    predicted = (max(found.peak_device_bytes) + given.non_torch_bytes) / GB
    assert predicted == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 32])
def test_the_last_stage_keeps_the_logits_of_all_micro_batches(vpp: int, micro_batches: int) -> None:
    """Beside its activations those of all others, or at the end of the step all and their copy."""

    def pools(*, returned: bool) -> tuple[list[int], int]:
        made = piped(vpp=vpp, global_batch=2 * micro_batches)
        system = with_facts(made.system, returns_outputs=returned)
        made = remade(made, system=system)
        ranks = evaluate(made, made.base_plan).ranks
        return [rank.pools for rank in ranks], ranks[-1].activation_peak

    (first, last), activations = pools(returned=True)
    assert ([first, 0], activations) == pools(returned=False)
    logits = 2 * 32 * piped().workload.model.vocab
    others, merged = (micro_batches - 1) * logits, 2 * micro_batches * logits - activations
    assert last == max(others, merged) > 0
