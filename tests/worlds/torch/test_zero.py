"""ZeRO 2 and 3: every method on two ranks, and what only their states do."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from rematbench.inputs.layout import Layout
from rematbench.worlds.records.measured import BOUNDS
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.run_records import measured_ranks, norm_error
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.groups import Coordinates, Group
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import FULL, make_problem
from tests.tables import tables
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import TIED, TINY_GPT

QUICK = ("keep_all", "full_recompute", "memo", "mst")
HOSTED = ("optimizer",), ("optimizer", "gradient"), ("optimizer", "gradient", "parameter")
LAYOUTS = ("dp2-zero2", "dp2-zero3")


def named(name: str, case: Case) -> Case:
    return replace(case, name=f"{name} {case.name}")


def hosted(layout: str) -> list[Case]:
    """The states that a stage shards, more and more of them in host memory."""
    kinds = HOSTED if layout == "dp2-zero3" else HOSTED[:2]
    return [cases.in_host_memory(cases.case(layout, "keep"), *some) for some in kinds]


CASES = grid.short(
    [
        *grid.method_cases("dp2-zero3", QUICK),
        *grid.raw_cases("dp2-zero2", "mini-dropped"),
        *grid.raw_cases("cp2-zero3", "rows"),
        *grid.raw_cases("ulysses2-zero3", "offload-slots"),
        named("tied", cases.case("dp2-zero3", "full", model=TIED)),
        named("biases", cases.case("dp2-zero3", "keep", model=TINY_GPT)),
        *hosted("dp2-zero3"),
    ]
) + [case for case in grid.bitwise_cases("dp2-zero3") if not case.name.endswith("layers")]
(
    test_live_bytes_equal_the_ledger_after_every_action,
    test_gradients_equal_the_autograd_model,
    test_keep_offload_and_whole_recompute_give_the_same_bits,
) = grid.tests_of(CASES, laws.launch)
every = grid.tests_of(
    [
        *(case for layout in LAYOUTS for case in grid.method_cases(layout)),
        *hosted("dp2-zero2"),
        *(case for layout in LAYOUTS for case in grid.composed_cases(layout, ("memo+mst",))),
    ],
    laws.launch,
)
test_live_bytes_of_every_method, test_gradients_of_every_method = map(pytest.mark.full, every[:2])


@cache
def in_bf16() -> dict[str, tuple[Case, Result]]:
    """ZeRO 1, 2 and 3 on the same batches, and the states of ZeRO 3 in host memory."""
    made = [
        cases.case(f"dp2{stage}", "keep", precision="bf16") for stage in ("", "-zero2", "-zero3")
    ]
    made += [cases.in_host_memory(made[-1], *kinds) for kinds in HOSTED]
    results = execute_cases(made, timeout_s=120.0)
    return {case.name: (case, result) for case, result in zip(made, results, strict=True)}


def test_bf16_gradients_are_those_of_zero_1_within_its_rounding() -> None:
    """ZeRO 2 and 3 reduce in bf16, ZeRO 1 in fp32; where states are changes no bit."""
    first, second, *third = (result for _, result in in_bf16().values())
    assert norm_error(second.gradients[0], first.gradients[0]) <= BOUNDS["bf16"]
    assert all(laws.same_bits(result, second) for result in third)
    assert not any(laws.bytes_differ(*pair) for pair in in_bf16().values())


def test_each_stage_shards_one_more_state() -> None:
    """Of P parameters on two ranks: 2 + 4 + 12 / 2, 2 + 4 / 2 + 12 / 2 and 18 / 2 bytes in bf16."""
    count = cases.tiny("dp2").workload.model.parameters
    sizes = [result.ranks[0].state_bytes for _, result in in_bf16().values()]
    one, two, three, *moved = sizes
    assert (one - two, two - three) == (2 * count, count)
    assert [three - size for size in moved] == [6 * count, 8 * count, 9 * count]


def test_a_rank_has_an_equal_range_of_every_unit() -> None:
    """Its ranges of a unit's parameters follow each other; the ranks' ranges are all of it."""
    given, seen = cases.tiny("dp4-zero3"), []
    for rank in range(4):
        place = Coordinates(tp=0, cp=0, dp=rank, pp=0)
        model = RankModel(given, given.base_plan, place, torch.device("meta"), seed=0)
        for states in model.every_unit():
            assert states.stop - states.start == states.size // 4
            assert sum(p.stop - p.start for p in states.parameters) == states.size // 4
        seen.append({p.spec.name: (p.start, p.stop) for p in model.parameters.values()})
    for name, first in seen[0].items():
        ends = [first, *(other[name] for other in seen[1:])]
        assert first[0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(ends))


def test_one_collective_for_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered before the forward and the backward, and scattered once, in each micro-batch; the
    head's unit is gathered for both by the forward's end."""
    counts = {"all_gather": 0, "reduce_scatter": 0}
    for name in counts:
        whole = getattr(Group, name)

        def counted(group: Group, *tensors: torch.Tensor, name: str = name, whole=whole) -> None:  # type: ignore[no-untyped-def]
            counts[name] += 1
            whole(group, *tensors)

        monkeypatch.setattr(Group, name, counted)
    case = cases.case("dp2-zero3", "keep", precision="bf16")
    trace_rank(case.problem, case.plan)
    units = case.problem.workload.model.num_layers + 2
    passes = case.problem.layout.num_micro_batches
    assert counts["reduce_scatter"] == units * passes
    assert counts["all_gather"] <= 2 * units * passes


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("full", [False, True], ids=["keep_all", "full_recompute"])
def test_a_rank_at_paper_scale_lies_within_two_percent_of_the_simulation(
    stage: int, full: bool
) -> None:
    """llama-65b on 64 GPUs; ZeRO 2 with tensor parallelism, because its weights stay whole."""
    lay = Layout(
        tp=1 if stage == 3 else 8, dp=64 if stage == 3 else 8, zero_stage=stage, global_batch=64
    )
    given = make_problem(
        model="llama-65b", cluster="h800-80gb", system="rematbench", layout=lay, seq_len=4096
    )
    plan = given.base_plan.with_rules(*FULL) if full else given.base_plan
    (rank,) = measured_ranks(given, plan, [trace_rank(given, plan)], 1)
    assert rank.differing_actions == 0
    assert abs(rank.peak_error) <= 0.02
    assert rank.state_bytes == pytest.approx(rank.simulated_state_bytes, rel=1e-3)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = tables(__file__)["refused"]


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_by_name(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, changes = REFUSED[words]
    degrees = {name: n for name, n in changes.items() if name != "system_changes"}
    monkeypatch.setitem(cases.LAYOUTS, layout, cases.LAYOUTS[layout] | degrees)
    others = {name: n for name, n in changes.items() if name not in degrees}
    given = cases.tiny(layout, "bf16", **others)
    assert words in refusals(given, given.base_plan)


def test_gradients_on_the_host_are_refused_with_stages() -> None:
    case = cases.in_host_memory(cases.case("pp2", "keep"), "optimizer", "gradient")
    words = "ZeRO stages 2 and 3, or gradients on the host, with pipeline stages"
    assert words in refusals(case.problem, case.plan)


def test_weights_on_the_host_need_the_optimizer_there() -> None:
    case = cases.in_host_memory(cases.case("dp2-zero3", "keep"), "gradient", "parameter")
    words = "gradients and parameters on the host without an optimizer there"
    assert words in refusals(case.problem, case.plan)
