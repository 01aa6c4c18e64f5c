"""Recomputation of chosen layers: lists, numbers by chunk, Megatron's forms as special cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematbench.inputs.stages import partition_of_sizes
from rematbench.solve.recompute_modules import chosen_layers, layers_text
from rematbench.worlds.records.record import plan_hash
from tests.problems import GPT, plan_of, problem, refusal

PIPE = problem(model=GPT, pp=2, vpp=2, global_batch=4, stages="E|tt|tt|L")


def hashed(text: str) -> str:
    return plan_hash(PIPE, plan_of(PIPE, text))


@pytest.mark.parametrize(
    ("text", "equal"),
    [
        ("full_recompute", "full_recompute:layers=0-3"),
        ("full_recompute", "full_recompute:per_chunk=0,2,2,0"),
        ("full_recompute:method=block,num_layers=1", "full_recompute:layers=0,2"),
        ("full_recompute:every=2", "full_recompute:layers=1,3"),
        (
            "selective_recompute:modules=[mlp]",
            "selective_recompute:modules=[mlp],per_chunk=0,2,2,0",
        ),
    ],
)
def test_forms_are_lists(text: str, equal: str) -> None:
    assert hashed(text) == hashed(equal)


def test_other_layers_are_kept() -> None:
    some = hashed("selective_recompute:modules=[mlp],layers=1,2")
    assert len({some, hashed("keep_all"), hashed("selective_recompute:modules=[mlp]")}) == 3


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_printed_list_is_read_back(layers: set[int]) -> None:
    base = problem(pp=1).base_plan
    whole = type(base)(partition=partition_of_sizes([41], 1))
    assert chosen_layers(whole, layers_text(layers), "") == tuple(sorted(layers))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("layers=4", "the layers are 0-3"),
        ("layers=3-2", "the layers are 0-3"),
        ("layers=a", "no list of numbers"),
        ("per_chunk=2,2", "the chunks have 0,2,2,0 layers"),
        ("per_chunk=0,3,2,0", "the chunks have 0,2,2,0 layers"),
        ("per_chunk=0,0,0,0", "selects no layer"),
        ("layers=1,per_chunk=0,1,1,0", "exclude each other"),
        ("layers=1,num_layers=2", "need method=uniform and num_layers=1"),
        ("layers=1,every=2", "need every=1"),
        ("layers=1,inputs=host", "all layers"),
    ],
)
def test_a_wrong_list_has_a_reason(text: str, reason: str) -> None:
    assert reason in refusal(PIPE, f"full_recompute:{text}")
