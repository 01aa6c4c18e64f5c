"""Offloading and splitting compose in one order; the other is refused by name."""

import pytest

from rematbench.discover import discover
from rematbench.lower import lower
from rematbench.plan import Plan, PlanError
from tests.problems import layers, problem

SETTINGS = {
    "memo": {"alpha": 0.5, "exempt_layers": 1},
    "pp_offload": {"alpha": 0.6, "granularity": 256, "min_bytes": 512},
}


def lowered(spec: str, offloads: str) -> None:
    given = problem(model=layers(8), pp=4, global_batch=8, seq_len=64)
    method = discover().resolve(spec, {"mlp_chunks": 3, **SETTINGS[offloads]})
    plan = method.plan(given)
    assert isinstance(plan, Plan), plan
    lower(plan, given)


@pytest.mark.parametrize("offloads", SETTINGS)
def test_what_offloads_goes_first(offloads: str) -> None:
    lowered(f"{offloads}+mst", offloads)


@pytest.mark.parametrize("offloads", SETTINGS)
def test_the_other_order_is_refused_by_name_and_says_which_to_take(offloads: str) -> None:
    with pytest.raises(
        PlanError, match=r"inside a mini-sequence.*offloads goes before what splits"
    ):
        lowered(f"mst+{offloads}", offloads)
