"""Twin law and gradients, one process: this one."""

from tests.worlds.torch import grid, laws

CASES = [
    *grid.raw_cases("one"),
    *grid.method_cases("one"),
    *grid.in_groups("one"),
    *grid.bitwise_cases("one"),
]
(
    test_live_bytes_equal_the_ledger_after_every_action,
    test_gradients_equal_the_autograd_model,
    test_keep_offload_and_whole_recompute_give_the_same_bits,
) = grid.tests_of(CASES, lambda made: {case.name: (case, laws.run_here(case)) for case in made})
