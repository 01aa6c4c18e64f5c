"""Twin law and gradients, four processes: one launch; the fast share (the rest: test_grid.py)."""

import pytest

from tests.worlds.torch import grid, laws

METHODS = ("keep_all", "full_recompute", "pp_offload", "memo")
STATE_PEERS = [
    case for name in ("dp2-cp2", "dp2-ulysses2") for case in grid.raw_cases(name, "keep")
]
"""Whose ranks are not in the order of their coordinates where data parallelism varies faster."""
CASES = grid.short(
    [
        *grid.raw_cases("tp2-pp2", "skeletal"),
        *grid.raw_cases("tp2-ulysses2", "windows"),
        *grid.raw_cases("ulysses4", "full"),
        *grid.raw_cases("dp2-ulysses2", "keep"),
        *(grid.in_order(case, "pp", "dp", "cp", "tp") for case in STATE_PEERS),
        *grid.method_cases("pp4-vpp2", METHODS),
        *grid.composed_cases("pp4-vpp2-one-group", ("pp_offload+mst",)),  # the head is offloaded
        *grid.raw_cases("tp2-pp2", "windows"),
        *grid.raw_cases("pp4", "vocab-1", "vocab-2-offload", "interlaced-full"),
        *grid.raw_cases("tp2-ulysses2", "rows"),
        *grid.method_cases("tp2-pp2", METHODS),
    ]
)
pytestmark = pytest.mark.full
(
    test_live_bytes_equal_the_ledger_after_every_action,
    test_gradients_equal_the_autograd_model,
    _,
) = grid.tests_of(CASES, laws.launch)
