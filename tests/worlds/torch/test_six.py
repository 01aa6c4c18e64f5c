"""Methods that need three stages, with Ulysses: six processes, and eight with interleaved chunks.

`pp_offload` is the one: with fewer stages a copy has no pass to hide behind.  It moves bytes and
computes nothing, so its losses and gradients are keep_all's bit by bit.
"""

from functools import cache

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.single_rank import trace_rank
from tests.worlds.torch import grid, laws

LAYOUTS = ("pp3-ulysses2", "pp4-vpp2-ulysses2")
MOVES = ("pp_offload", "full_recompute+pp_offload", "balanced_checkpointing+pp_offload")
SAME_BITS = {"pp_offload": "keep_all", "full_recompute+pp_offload": "full_recompute"}


@cache
def cases_of(layout: str) -> list[Case]:
    found = grid.method_cases(layout, ("keep_all", "full_recompute", "pp_offload"))
    found += [case for case in grid.composed_cases(layout) if "pp_offload" in case.name]
    return found


def offloads(case: Case, stage: int) -> bool:
    """The last stage's last chunk keeps what it saves: its backward follows at once."""
    lay = case.problem.layout
    return stage < lay.pp - 1 or lay.vpp > 1


@pytest.mark.parametrize("layout", LAYOUTS[:1])
def test_every_stage_has_its_ledgers_bytes_traced(layout: str) -> None:
    (case,) = grid.method_cases(layout, ("pp_offload",))
    for stage, rank in enumerate(lower(case.plan, case.problem).ranks):
        found = trace_rank(case.problem, case.plan, stage)
        assert found.bytes_after == list(live_bytes(rank.actions()))
        assert (found.offload_bytes > 0) == offloads(case, stage)


@cache
def results(layout: str) -> dict[str, tuple[Case, Result]]:
    return {name.split()[1]: pair for name, pair in laws.launch(cases_of(layout)).items()}


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_losses_and_gradients_are_those_of_the_laws(layout: str) -> None:
    assert {*MOVES, *SAME_BITS.values()} <= results(layout).keys()
    for case, result in results(layout).values():
        grid.check_twin(case, result)
        grid.check_gradients(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_only_moves_bytes_computes_the_same_bits(layout: str, name: str) -> None:
    (case, own), (_, base) = results(layout)[name], results(layout)[SAME_BITS[name]]
    assert laws.same_bits(own, base)
    assert own.gradient_norms == base.gradient_norms
    for moved, kept in zip(own.ranks, base.ranks, strict=True):
        assert (moved.offload_bytes > 0) == offloads(case, moved.place.pp)
        assert kept.offload_bytes == kept.host_peak_bytes == 0
    peaks = [[rank.device_peak_bytes for rank in result.ranks] for result in (own, base)]
    assert peaks[0][0] < peaks[1][0]
