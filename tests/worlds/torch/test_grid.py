"""The full grid: every plan, method and composition on every layout, three AdamW steps (soak)."""

from functools import cache
from itertools import product

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.inputs.layout import Layout
from rematbench.worlds.run_records import measured_ranks
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import make_problem, plan_of
from tests.worlds.torch import cases, grid, laws

ZERO = {
    2: ("dp2-zero2", "dp2-zero3", "cp2-zero3", "ulysses2-zero3"),
    4: ("dp4-zero2", "dp4-zero3", "tp2-dp2-zero2", "tp2-dp2-zero3"),
}
SIZES = {
    1: ("one",),
    2: ("tp2", "pp2", "cp2", "ulysses2", "dp2", "pp2-vpp2", *ZERO[2]),
    4: ("pp4-vpp2", "tp2-pp2", "tp2-cp2", "tp2-ulysses2", "pp2-ulysses2", *ZERO[4]),
}
BITWISE = ("tp2", "pp2", "cp2", "ulysses2", "dp2", "pp4-vpp2", "tp2-pp2", "tp2-ulysses2")
BITWISE += ("dp2-zero2", "dp2-zero3", "dp4-zero3")


@cache
def every(size: int) -> list[Case]:
    found: list[Case] = []
    for layout in SIZES[size]:
        plans = [plan for plan in cases.PLANS if layout != "tp2-cp2" or plan in ("keep", "offload")]
        found += grid.raw_cases(layout, *plans)
        found += grid.method_cases(layout)
        found += grid.composed_cases(layout)
        found += grid.bitwise_cases(layout) if layout in BITWISE else []
    return found


@cache
def results(size: int) -> list[tuple[Case, Result]]:
    return list(laws.launch(every(size)).values())


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_live_bytes_equal_the_ledger_after_every_action(size: int) -> None:
    for case, result in results(size):
        grid.check_twin(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_gradients_equal_the_autograd_model(size: int) -> None:
    for case, result in results(size):
        grid.check_gradients(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_keep_offload_and_whole_recompute_give_the_same_bits(size: int) -> None:
    known = {case.name: result for case, result in results(size)}
    pairs = [(name, f"fp32 {name.split()[1]} keep") for name in known if name.startswith("fp32")]
    assert pairs
    assert not [name for name, keep in pairs if not laws.same_bits(known[name], known[keep])]


@pytest.mark.soak
def test_every_composition_has_a_plan_somewhere() -> None:
    found = {case.name.split()[1] for size in SIZES for case in every(size)}
    assert set(laws.COMPOSITIONS) <= found


# -- methods that need three stages, with Ulysses --------------------------------------------------


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
def of_layout(layout: str) -> dict[str, tuple[Case, Result]]:
    return {name.split()[1]: pair for name, pair in laws.launch(cases_of(layout)).items()}


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_losses_and_gradients_are_those_of_the_laws(layout: str) -> None:
    assert {*MOVES, *SAME_BITS.values()} <= of_layout(layout).keys()
    for case, result in of_layout(layout).values():
        grid.check_twin(case, result)
        grid.check_gradients(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_only_moves_bytes_computes_the_same_bits(layout: str, name: str) -> None:
    (case, own), (_, base) = of_layout(layout)[name], of_layout(layout)[SAME_BITS[name]]
    assert laws.same_bits(own, base)
    assert own.gradient_norms == base.gradient_norms
    for moved, kept in zip(own.ranks, base.ranks, strict=True):
        assert (moved.offload_bytes > 0) == offloads(case, moved.place.pp)
        assert kept.offload_bytes == kept.host_peak_bytes == 0
    peaks = [[rank.device_peak_bytes for rank in result.ranks] for result in (own, base)]
    assert peaks[0][0] < peaks[1][0]


# -- total peaks in bf16, two processes: states, activations and what lives inside operators -------


TOTALS = {
    "tp2": Layout(tp=2, global_batch=4, micro_batch=2),
    "pp2": Layout(pp=2, global_batch=4, micro_batch=2),
    "cp2": Layout(cp=2, global_batch=4, micro_batch=2),
    "dp2": Layout(dp=2, zero_stage=1, global_batch=4, micro_batch=2),
}
METHODS = ("keep_all", "full_recompute", "mst")
"""mst: the peak is where gradients of weights and norms are made, not at the loss."""


def case(layout: str, method: str) -> Case:
    problem = make_problem(
        model="tiny-llama",
        cluster="this-machine",
        system="rematbench",
        layout=TOTALS[layout],
        seq_len=256,
    )
    plan = plan_of(problem, method)
    return Case(name=f"{layout} {method}", problem=problem, plan=plan, steps=1)


CASES = list(product(TOTALS, METHODS))


@cache
def totals() -> dict[str, tuple[Case, Result]]:
    return laws.launch([case(*asked) for asked in CASES])


@pytest.mark.full
@pytest.mark.parametrize(("layout", "method"), CASES)
def test_total_peaks_are_within_two_per_cent(layout: str, method: str) -> None:
    found, result = totals()[f"{layout} {method}"]
    assert result.status == "ok", result.reason
    ranks = measured_ranks(found.problem, found.plan, result.ranks, 1)
    assert [rank.differing_actions for rank in ranks] == [0, 0]
    assert all(abs(rank.peak_error) <= 0.02 for rank in ranks)
