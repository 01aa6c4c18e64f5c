"""Matrices that ranks cut both ways (AxoNN): published volumes, and a grid against one process."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import LayoutError
from rematbench.problem import Problem, rank_parameters
from rematbench.worlds.torch.case import Case
from tests.problems import GPT, plan_of, problem
from tests.worlds.torch import cases, laws

LINEARS = ("qkv", "proj", "fc1", "fc2")


def grid(tp: int, columns: int, model: Any = GPT, **others: Any) -> Problem:
    made = problem(model=model, tp=tp, tp_columns=columns, sp=False, **{"zero_stage": 0, **others})
    return dataclasses.replace(made, evaluator=evaluate, _memo={}, _weights={})


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (1, 4), (4, 2)])
def test_volumes_are_those_of_the_communication_model(rows: int, columns: int) -> None:
    """Of a linear of k x n: 2 (c-1)/c m n/r elements forward over the ranks of its inner side (with
    recomputation twice), and 2 (r-1)/r m k/c of its input gradient over those of its outer side;
    sides change places from linear to linear (AxoNN, comm_model.py)."""
    p = grid(rows, columns)
    model, e = p.workload.model, p.workload.element_bytes
    program = lower(plan_of(p, "full_recompute"), p)
    check(program)
    sent: Counter[tuple[str, str, bool]] = Counter()
    for action, *_ in program.ranks[0].actions():
        comm = action.exchange.comm
        if comm and action.kind is Kind.ALL_REDUCE and action.op in LINEARS:
            back = any(s.is_gradient for s in action.reads)
            size = {"tp": rows, "columns": columns}[comm.group]
            sent[action.op, comm.group, back] += 2 * (size - 1) * comm.nbytes // size
    m, h, f = p.workload.seq_len, model.hidden, model.ffn
    shapes = {"qkv": (h, 3 * h), "proj": (h, h), "fc1": (h, f), "fc2": (f, h)}
    want: Counter[tuple[str, str, bool]] = Counter()
    for op, (k, n) in shapes.items():
        (inner, i), (outer, o) = ("columns", columns), ("tp", rows)
        if op in ("proj", "fc2"):
            inner, i, outer, o = outer, o, inner, i
        passes = p.layout.num_micro_batches * model.num_layers
        want[op, inner, False] = 2 * passes * 2 * (i - 1) * m * n * e // (i * o)
        want[op, outer, True] = passes * 2 * (o - 1) * m * k * e // (o * i)
    assert sent == +want


def test_weights_are_shared_by_all_ranks_of_the_grid() -> None:
    whole, both = grid(1, 1), grid(2, 2)
    counts = [rank_parameters(p, p.base_plan, 0) for p in (whole, both)]
    matrices = GPT.active_layer_matrices + GPT.vocab * GPT.hidden * (2 - GPT.tied_embeddings)
    assert counts[0] - counts[1] >= matrices * 3 // 4


@pytest.mark.parametrize("spec", ["keep_all", "full_recompute"])
def test_a_grid_of_one_column_is_megatrons_text(spec: str) -> None:
    usual = problem(model=GPT, tp=2, sp=False)
    texts = [lower(plan_of(p, spec), p).text() for p in (usual, grid(2, 1, zero_stage=1))]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("others", "words"), [({"pp": 2}, "cp, pp"), ({"sp": True}, "sequence parallelism")]
)
def test_what_is_not_modelled_says_a_ranks_parameters(others: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=rf"{words}.*M parameters"):
        problem(model=GPT, tp=2, tp_columns=2, global_batch=4, **{"sp": False, **others})


CASES = {
    f"{name}-{how}": Case(
        name=f"{name}-{how}", problem=made, plan=plan_of(made, how), steps=2, gradients=True
    )
    for name, model in (("gpt", cases.TINY_GPT), ("llama", cases.TINY))
    for how in ("keep_all", "full_recompute")
    for made in [
        dataclasses.replace(
            grid(2, 2, model, seq_len=cases.SEQ, global_batch=2),
            workload=replace(grid(2, 2, model, seq_len=cases.SEQ).workload, precision="fp64"),
        )
    ]
}


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    return laws.launch(list(CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_on_a_grid_equal_one_process(
    launched: dict[str, Any], name: str
) -> None:
    case, result = launched[name]
    assert result.status == "ok", result.reason
    assert laws.differs(case, result, laws.reference_of(case)) < 1e-10
    assert not laws.bytes_differ(case, result)


def test_depth_and_data_move_a_ranks_part_of_a_matrix() -> None:
    """Weights gathered over depth: (d-1)/d K H^2/(r c); gradients over data: 2 (g-1)/g of it."""
    plain = replace(GPT, mlp_bias=False, qkv_bias=False, proj_bias=False)
    p = grid(2, 2, plain, dp=2, zero_stage=3, global_batch=2)
    layer = p.layer(0)
    matrices = (4 * GPT.hidden**2 + 2 * GPT.hidden * GPT.ffn) // 4
    norms = 2 * p.workload.model.norm_parameters // 2
    assert layer.parameters == matrices + norms
    moved = {
        (a.kind, a.part): a.exchange.comm.nbytes
        for a, *_ in lower(p.base_plan, p).ranks[0].actions()
        if a.exchange.comm and a.exchange.comm.group == "dp" and a.part.letter == "L"
    }
    states = p.system.states
    assert {n for (k, _), n in moved.items() if k is Kind.ALL_GATHER} == {
        states.gather_bytes * layer.parameters
    }
    assert {n for (k, _), n in moved.items() if k is Kind.REDUCE_SCATTER} == {
        states.reduce_bytes * layer.parameters
    }
