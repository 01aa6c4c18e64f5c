"""What a stack keeps beside the operator table is what its trace shows, layer for layer."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from rematbench.baseline_stack import layer_tensors, stack_of
from rematbench.baselines import job as make_job
from rematbench.baselines import policy, run_jobs
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model
from tests.baselines.cases import GPT, TINY, Asked, asked_problem

pytest.importorskip("megatron.core", reason="megatron-core is installed by ./bench test")


class Stacked(NamedTuple):
    """A layout, a model, settings, and the kind of core attention."""

    layout: str
    model: Model
    settings: dict[str, Any]
    attention: AttentionKind = "flash"

    def problem(self, num_layers: int) -> Problem:
        model = replace(self.model, num_layers=num_layers)
        made = asked_problem(Asked(self.layout, model=model, precision="bf16"))
        return Problem(
            made.workload, made.cluster, made.system, made.layout, made.calibration, self.attention
        )


FUSED = {"bias_activation_fusion": True}
CASES = [
    Stacked("one", TINY, {}),
    Stacked("one", TINY, FUSED),
    Stacked("tp2", TINY, {}),
    Stacked("cp2", TINY, {}),
    Stacked("one", GPT, {}),
    Stacked("one", GPT, {}, "unfused"),
    Stacked("tp2", GPT, {}, "unfused"),
    Stacked("one", replace(GPT, dropout=0.1), {}, "unfused"),
]


def test_one_more_layer_weighs_what_the_stack_says(tmp_path: Path) -> None:
    """Traced with four and with five layers: the difference is one layer's saved tensors."""
    jobs = [
        make_job(case.problem(count), policy("megatron_core", case.settings), "traced")
        for case in CASES
        for count in (4, 5)
    ]
    records = run_jobs("megatron_core", jobs, tmp_path)
    traced, said = [], []
    for number, case in enumerate(CASES):
        few, more = (record.observed for record in records[2 * number : 2 * number + 2])
        assert few is not None, records[2 * number].reason
        assert more is not None
        traced.append(more.activation_peak_bytes[0] - few.activation_peak_bytes[0])
        problem = case.problem(4)
        method = policy("megatron_core", case.settings).methods[0]
        stack = stack_of("megatron_core", method, problem)
        assert stack is not None
        said.append(stack.problem(problem).layer(0).saved_bytes)
        listed = list(layer_tensors(problem, stack))
        saved = [held for held in listed if not held.why.startswith("in the backward")]
        assert sum(held.stack_bytes for held in saved) == said[-1]
        assert sum(held.table_bytes for held in listed) == problem.layer(0).saved_bytes
    assert traced == said
