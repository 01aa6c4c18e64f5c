"""Twin law and gradients, two processes: one launch; the fast share (all of it: test_grid.py)."""

from dataclasses import replace
from typing import Literal

import pytest

from rematbench.plan import Share
from tests.problems import by_layer, rule
from tests.tables import tables
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import TINY_GPT

LAYOUTS = ("tp2", "cp2", "ulysses2", "dp2", "pp2")
METHODS = ("keep_all", "full_recompute", "memo", "mst")
"""On LAYOUTS in the quick run; test_one.py has every method on one process."""


def shared(home: Literal["device", "host"]) -> cases.Case:
    """Full recomputation from inputs of which each tensor-parallel rank keeps its rows."""
    made = cases.case("tp2-no-sp", "full")
    plan = made.plan.with_rules(rule(Share(2, home), "layer_input"))
    return replace(made, plan=by_layer(plan) if home == "host" else plan)


VARIANTS = {
    "shared inputs full": shared("device"),
    "shared inputs offload": shared("host"),
    "tied ends keep": cases.case("pp2", "keep", model=cases.TIED),
    "tied ends offload": cases.case("pp2", "offload", model=cases.TIED),
    "ends without layers full": cases.case("pp2-vpp2-ends", "full"),
    "tied ends without layers offload": cases.case("pp2-vpp2-ends", "offload", model=cases.TIED),
    "biases and learned positions offload": cases.case("ulysses2", "offload", model=TINY_GPT),
    "learned positions vocab-2": cases.case("pp2", "vocab-2-offload", model=TINY_GPT),
    "biases zb-h2-full": cases.case("pp2", "zb-h2-full", model=TINY_GPT),
    "unfused attention full": cases.case("ulysses2", "full", attention="unfused"),
}
CASES = grid.short(
    [
        *(
            case
            for layout, plans in tables(__file__)["raw"].items()
            for case in grid.raw_cases(layout, *plans)
        ),
        *grid.method_cases("tp2", ("lynx_heu", "selective_recompute")),
        *(case for layout in LAYOUTS for case in grid.method_cases(layout, METHODS)),
        *grid.method_cases("pp2", ("pp_offload", "zero_bubble")),
        *grid.method_cases("pp2-vpp2", ("pipe_offload",)),
        *grid.raw_cases("pp2-vpp2", "zb-v", "v-half-offload", "v-min-full", "slices"),
        *grid.raw_cases("tp2-no-sp", "slices"),
        *grid.raw_cases("tp2-no-sp", "mini", "mini-windows"),
        *grid.in_groups("tp2"),
        *grid.raw_cases("dp2-zero0", "keep"),
        *grid.raw_cases("ulysses2-zero0", "keep"),
        *(replace(case, name=name) for name, case in VARIANTS.items()),
    ]
) + grid.bitwise_cases("tp2")
(
    test_live_bytes_equal_the_ledger_after_every_action,
    test_gradients_equal_the_autograd_model,
    test_keep_offload_and_whole_recompute_give_the_same_bits,
) = grid.tests_of(CASES, laws.launch)


@pytest.mark.full
def test_every_method_on_the_layouts() -> None:
    every = [case for layout in LAYOUTS for case in grid.method_cases(layout)]
    for case, result in laws.launch(every).values():
        grid.check_twin(case, result)
        grid.check_gradients(case, result)
