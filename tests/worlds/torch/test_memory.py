"""Memory layers: rows read and written to the byte, and lookups as torch's embedding_bag."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.cli.show import job_notes
from rematbench.costs.operators.kernels import Elementwise
from rematbench.costs.operators.memory import table_on_host, table_traffic
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.layout import LayoutError
from rematbench.model import Memory
from rematbench.plan import PlanError
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Model
from rematbench.worlds.torch.case import Case
from tests.problems import LLAMA, layers, plan_of, problem
from tests.worlds.torch import cases, laws

TABLE = Memory(layers=(1, 3), heads=2, keys=8, key_dim=8, top=3)


def given(model: Model, **layout: Any) -> Problem:
    made = problem(model=replace(layers(4, model), memory=TABLE), seq_len=cases.SEQ, **layout)
    work = replace(made.workload, precision="fp64")
    return dataclasses.replace(made, workload=work, evaluator=evaluate, _memo={}, _weights={})


def test_rows_are_read_and_written_to_the_byte() -> None:
    p = given(LLAMA)
    tokens, hidden, e = p.workload.seq_len, LLAMA.hidden, p.workload.element_bytes
    owner, other = (p.layer(i).op("lookup") for i in TABLE.layers)
    rows = tokens * TABLE.heads * TABLE.top
    indices, out = rows * (8 + e), tokens * hidden * e
    assert owner.forward == (Elementwise(rows * hidden * e + indices + out),)
    written = 2 * rows * hidden * p.system.states.grad_bytes
    assert owner.backward_weight == other.backward_weight == (Elementwise(written + out),)
    assert (owner.parameters, other.parameters) == (TABLE.rows * hidden, 0)
    assert rank_parameters(p, p.base_plan, 0) == p.workload.model.parameters


def test_a_dense_update_of_an_untouched_table_is_printed() -> None:
    p = given(LLAMA)
    every, idle = table_traffic(p.workload, p.layout, p.system.states)
    states = p.system.states
    row = LLAMA.hidden * (states.grad_bytes + 2 * states.optimizer_bytes + states.param_bytes)
    assert (every, idle) == (TABLE.rows * row, 0)  # so few rows are all read
    large = replace(TABLE, keys=1 << 12)
    work = replace(p.workload, model=replace(p.workload.model, memory=large))
    every, idle = table_traffic(work, p.layout, states)
    assert every - idle == p.workload.seq_len * large.picked * 2 * row
    assert any("rows that some token reads" in line for line in job_notes(p))


def test_what_is_not_modelled_says_the_tables_values() -> None:
    with pytest.raises(LayoutError, match=r"tp or pp above 1; the table has .* billion values"):
        given(LLAMA, tp=2)


def test_a_table_on_the_host_is_refused_with_its_bytes() -> None:
    p = given(LLAMA)
    hosted = replace(p.workload.model, memory=replace(TABLE, keys=1 << 11, home="host"))
    p = dataclasses.replace(p, workload=replace(p.workload, model=hosted))
    states = p.system.states
    each = states.param_bytes + states.grad_bytes + states.optimizer_bytes
    picked = p.workload.seq_len * TABLE.picked * 2 * LLAMA.hidden
    held = (1 << 22) * LLAMA.hidden * each
    assert table_on_host(p.workload, p.layout, states) == (
        *(held, 2 * picked * p.workload.element_bytes),
        picked * states.grad_bytes,
    )
    with pytest.raises(PlanError, match=f"{held / 2**30:.2f} GiB of the table and its states"):
        lower(p.base_plan, p)


@pytest.mark.parametrize("how", ["keep_all", "full_recompute", "balanced_checkpointing"])
@pytest.mark.parametrize("gpt", [False, True])
def test_lookups_equal_embedding_bag(how: str, gpt: bool) -> None:
    p = given(cases.TINY_GPT if gpt else cases.TINY, global_batch=2)
    case = Case(name=how, problem=p, plan=plan_of(p, how), steps=2, gradients=True)
    result = laws.run_here(case)
    assert result.status == "ok", result.reason
    assert laws.differs(case, result, laws.reference_of(case)) < 1e-10
    assert not laws.bytes_differ(case, result)
