"""Buffers that stand in for gradients: one for each shape of a weight on a rank, and the head's."""

from typing import Any

from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import dummy_gradient_bytes, program_bytes
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from rematbench.workload import Experts
from tests.problems import LLAMA, problem, remade

MODEL = replace(LLAMA, ffn=112)


def made(*, dummy: bool = True, model: Any = MODEL, **layout: Any) -> Problem:
    given = problem(model=model, **layout)
    system = load_system("megatron-core")
    assert system.states.dummy_gradients
    return remade(given, system=with_facts(system, dummy_gradients=dummy))


def held(given: Problem) -> list[int]:
    plan = given.base_plan
    return [dummy_gradient_bytes(given, plan, rank) for rank in range(given.layout.pp)]


def test_a_rank_holds_a_buffer_for_each_shape_of_its_weights() -> None:
    """q, k and v are a product, and so are gate and up; the last rank has the head's columns."""
    given = made(pp=2, tp=2)
    model, tp = given.workload.model, 2
    h, f = model.hidden, model.ffn
    qkv, kv = (model.q_width + 2 * model.kv_width) // tp, model.q_width // tp
    layer = h * qkv + kv * h + h * (2 * f // tp) + (f // tp) * h
    vocab = given.system.padded_vocab(model.vocab, tp) // tp
    assert held(given) == [2 * layer, 2 * (layer + h * vocab)]
    assert held(made(dummy=False, pp=2, tp=2)) == [0, 0]


def test_experts_share_the_buffer_of_their_shape_and_a_router_has_none() -> None:
    model = replace(MODEL, experts=Experts(count=8, active=2, ffn=96))
    given = made(model=model, dp=2, ep=2, global_batch=2)
    h = model.hidden
    attention = h * (model.q_width + 2 * model.kv_width) + model.q_width * h
    head = h * given.system.padded_vocab(model.vocab, 1)
    assert held(given) == [2 * (attention + h * 2 * 96 + 96 * h + head)]


def test_the_peak_of_a_rank_has_the_buffers() -> None:
    with_them, without = made(pp=2), made(dummy=False, pp=2)
    found, plain = (
        program_bytes(one, one.base_plan, lower(one.base_plan, one)) for one in (with_them, without)
    )
    more = [a.device_peak - b.device_peak for a, b in zip(found, plain, strict=True)]
    assert more == held(with_them)
