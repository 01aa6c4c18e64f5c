"""Host memory of states that leave the device: closed forms of every stack, the room of a node, and
reports of jobs that ended in the host's out-of-memory killer, or did not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.costs.states import sub_groups, zero1_host_states, zero3_host_states
from rematbench.engine.lowering.states.host_states import rank_tensors
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import evaluate_method
from rematbench.evaluate.verdict import judge
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster, load_model, load_system, names
from rematbench.inputs.system import System, with_facts
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Model
from tests.problems import LLAMA, all_methods, layers, problem
from tests.tables import tables

TABLES = tables(__file__)

HOSTED = {"optimizer_on_host": True}
STACKS = [
    name for name in names("system") if "optimizer_offload" in load_system(name).accepts.features
]
LEAVING = [name for name in STACKS if "param_offload" in load_system(name).accepts.features]
GIB = 2**30


def host_state(found: Problem) -> int:
    (rank,) = evaluate(found, found.base_plan).ranks
    return rank.host_state


def pinned(nbytes: int) -> int:
    """The least power of two of at least `nbytes`."""
    block = 1
    while block < nbytes:
        block *= 2
    return block if nbytes else 0


# -- closed forms --------------------------------------------------------------------------------


@given(
    stack=st.sampled_from(STACKS),
    model=st.builds(
        lambda n, hidden, tied: replace(
            layers(n), ffn=4 * hidden, vocab=8 * hidden, tied_embeddings=tied
        ),
        st.integers(1, 4),
        st.integers(8, 40),
        st.booleans(),
    ),
    dp=st.integers(1, 8),
    stage=st.sampled_from([1, 2, 3]),
    micro_batches=st.integers(1, 2),
    exact=st.booleans(),
)
def test_host_bytes_of_every_stack(
    stack: str, model: Model, dp: int, stage: int, micro_batches: int, exact: bool
) -> None:
    """Master weights and moments of a rank's share; where the stack has gradients there, those of
    the update and a buffer in compute precision too."""
    found = problem(
        model=model,
        system=stack,
        system_changes={
            **HOSTED,
            "host_pinned": not exact,
            "resident_bytes": 4 * load_system(stack).host.host_tensors * (micro_batches > 1),
        },
        dp=dp,
        zero_stage=stage,
        global_batch=dp * micro_batches,
    )
    system, tensors = found.system, rank_tensors(found, found.base_plan, 0)
    count = rank_parameters(found, found.base_plan, 0)
    assert sum(tensors) == count
    share = -(-count // dp)
    padded = sum(-(-one // dp) for one in tensors)
    block = (lambda nbytes: nbytes) if exact else pinned
    if system.host.host_tensors:
        parts = [-(-one // dp) for one in tensors]
        left = system.host.resident_bytes  # the device's fp32 weights, whose copy is pinned
        rest = system.states.optimizer_bytes - left
        expected = sum(block(4 * part) + block(left * part) + rest * part for part in parts)
    elif not system.host.host_gradients:
        expected = system.states.optimizer_bytes * share
    elif stage == 3:  # one sub-group: these models are small
        expected = 12 * padded + block(4 * padded) + block(2 * padded)
    else:
        expected = 8 * share + 2 * block(4 * share) + block(2 * share) + block(2 * max(tensors))
        sums = _fullest_sums(tensors, share, block) if micro_batches > 1 else 0
        expected += sums
    assert host_state(found) == expected
    (rank,) = evaluate(found, found.base_plan).ranks
    assert rank.optimizer == system.host.resident_bytes * share
    gone = system.host.host_gradients and stage >= 2
    resident = -(-count // (dp if stage >= 2 else 1))
    assert rank.gradient == (0 if gone else system.states.grad_bytes * resident)


def _fullest_sums(tensors: list[int], part: int, block: Any) -> int:
    """Bytes of the gradients of all tensors that a part touches, of the part with most."""
    best, total = 0, sum(tensors)
    for start in range(0, total, part):
        at, here = 0, 0
        for count in tensors:
            if at < min(start + part, total) and at + count > start:
                here += block(2 * count)
            at += count
        best = max(best, here)
    return best


@given(
    parts=st.lists(st.integers(1, 50), max_size=12),
    least=st.integers(0, 60),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_sub_groups_of_zero_3(parts: list[int], least: int, share: float) -> None:
    """Each but the last has at least `least` parameters, and without its last tensor fewer."""
    groups = sub_groups(parts, least)
    assert sum(groups) == sum(parts)
    if least:
        assert all(least <= size < least + max(parts) for size in groups[:-1])
    else:
        assert len(groups) <= 1
    system = with_facts(load_system("deepspeed"), sub_group_parameters=least)
    hosted = groups[int((1 - share) * len(groups)) :]
    found = zero3_host_states(parts, 1, system, share=share)
    expected = sum(12 * size + pinned(4 * size) for size in hosted)
    assert found.held == expected + pinned(2 * sum(parts))
    assert found.update == 2 * max(hosted, default=0)
    leaving = zero3_host_states(parts, 1, system, parameters=True, share=share)
    moved = sum(pinned(2 * part) for part in parts)  # blocks that torch keeps
    assert leaving.held == found.held + pinned(2 * sum(parts)) + moved
    assert leaving.update == 0
    alone = zero3_host_states(parts, 1, system, optimizer=False, parameters=True)
    assert (alone.held, alone.update) == (pinned(2 * sum(parts)) + moved, 0)


def test_no_parameters_need_no_host_bytes() -> None:
    system = load_system("deepspeed")
    assert zero3_host_states([], 4, system).held == 0
    assert zero1_host_states([], 4, system, accumulates=True).held == 0


@pytest.mark.parametrize("stack", LEAVING)
@pytest.mark.parametrize("dp", [1, 2])
def test_parameters_leave_the_device_whole(stack: str, dp: int) -> None:
    """What stays are the buffers of the units in use, as with any gather by layer."""
    more = {"system": stack, "dp": dp, "zero_stage": 3, "global_batch": dp}
    here = problem(**more, system_changes=HOSTED)
    there = problem(**more, system_changes={**HOSTED, "parameters_on_host": True})
    (stays,), (leaves,) = (evaluate(one, one.base_plan).ranks for one in (here, there))
    assert (leaves.parameter, leaves.gradient, leaves.optimizer) == (0, 0, 0)
    assert stays.parameter == 2 * -(-LLAMA.parameters // dp)
    assert leaves.host_state > stays.host_state
    if dp == 2:
        assert leaves.activation_peak == stays.activation_peak


# -- the room of a node --------------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "other"), TABLES["processes"])
def test_processes_and_system_take_what_was_measured(gib: int, other: float) -> None:
    """Beside an optimizer in host memory; a fixed number of bytes on nodes of every size, but a
    share of the small ones, and never less than the estimate for other jobs."""
    cluster = replace(load_cluster("h100-80gb"), host_bytes=gib * GIB)
    spec = SPEC_33B | {"cluster": cluster, "zero_stage": 3}
    on_host, on_device = (
        make_problem(Job(**spec, optimizer=home)).cost.host_room_bytes / GIB
        for home in ("host", "device")
    )
    assert on_host == pytest.approx(gib - min(other, max(gib * 0.03, 4.47e10 / GIB)), rel=1e-6)
    assert on_device == pytest.approx(gib * 0.97, rel=1e-6)


def test_a_measured_node_has_its_own_number() -> None:
    cluster = load_cluster("polaris-a100-40gb-bound")
    found = make_problem(Job(**SPEC_33B | {"cluster": cluster, "gpus": 4}))
    assert found.cost.host_room_bytes == cluster.host_bytes - (cluster.host_other_bytes or 0)


# -- reported jobs -------------------------------------------------------------------------------

BASE = load_model("llama-7b")
LLAMA_33B = replace(
    BASE, name="33b", num_layers=60, hidden=6656, num_heads=52, num_kv_heads=52, ffn=17920
)
QWEN_32B = replace(
    load_model("llama-7b"),
    name="32b",
    num_layers=64,
    hidden=5120,
    num_heads=40,
    num_kv_heads=8,
    ffn=27648,
    vocab=152064,
)
SPEC_33B: dict[str, Any] = {
    "model": LLAMA_33B,
    "cluster": "a100-40gb-abci",
    "system": "huggingface-deepspeed",
    "gpus": 8,
    "seq_len": 2048,
    "global_batch": 8,
}


def verdict(host_gib: int, **spec: Any) -> dict[str, int]:
    """The bytes that are missing, by place, with every layer recomputed."""
    cluster = replace(
        load_cluster(spec["cluster"]), host_bytes=host_gib * GIB, host_update_parameters_per_s=2e9
    )
    found = make_problem(Job(**spec | {"cluster": cluster, "optimizer": "host"}))
    result = evaluate_method(found, all_methods().resolve("full_recompute"))
    assert result.evaluation is not None
    assert result.verdict == judge(found, result.evaluation)
    assert result.verdict.fits == (result.status == "ok")
    return result.verdict.short_bytes


def test_33b_of_zero_3_does_not_fit_600_gib() -> None:
    """A public report of eight A100 40 GB: killed by the host's out-of-memory killer at 600 GB,
    trained where 750 to 800 GB were used."""
    short = verdict(600, **SPEC_33B, zero_stage=3)
    assert short.keys() == {"host"}
    assert verdict(800, **SPEC_33B, zero_stage=3) == {}


def test_32b_with_parameters_on_the_host_lacks_host_memory() -> None:
    """A public report of one GPU and 744 GiB: killed by the host's out-of-memory killer, with room
    on the device.  With more host memory even 40 GB have room, unless the parameters are there."""
    spec = SPEC_33B | {
        "model": QWEN_32B, "cluster": "h100-80gb-single", "gpus": 1, "global_batch": 1,
        "zero_stage": 3,
    }  # fmt: skip
    assert verdict(744, **spec, parameters="host").keys() == {"host"}
    assert verdict(1024, **spec, parameters="host") == {}
    small = spec | {"cluster": "a100-40gb-abci"}
    assert verdict(1024, **small).keys() == {"device"}
    assert verdict(1024, **small, parameters="host") == {}


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), TABLES["staying"])
def test_parameters_stay_where_the_stack_cannot_move_them(
    changes: dict[str, Any], words: str
) -> None:
    spec = SPEC_33B | {"zero_stage": 3, "optimizer": "host", "parameters": "host"} | changes
    with pytest.raises(LayoutError, match=words):
        make_problem(Job(**spec))


def test_a_stack_may_have_its_parameters_there_by_default() -> None:
    system: System = with_facts(
        load_system("deepspeed"), optimizer_on_host=True, parameters_on_host=True
    )
    spec = SPEC_33B | {"system": system, "zero_stage": 3}
    homes = [
        make_problem(Job(**spec, parameters=home)).base_plan.state("parameter").home
        for home in (None, "device")
    ]
    assert homes == ["host", "device"]
