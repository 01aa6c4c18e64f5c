"""Launches of the operator table beside those that Megatron-core itself dispatches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.problem import Problem
from rematbench.spec.paths import data_dir
from tests.baselines.cases import GPT, TINY, Asked, asked_problem

DISPATCHED = {
    ("gpt", "unfused"): {"forward": 24, "backward": 45},
    ("llama", "flash"): {"forward": 38, "backward": 40},
}
"""Of one layer on one of two tensor-parallel ranks: megatron-core 0.16.1's local spec."""
MODELS = {"gpt": replace(GPT, dropout=0.1), "llama": TINY}


@pytest.mark.parametrize(("model", "attention"), DISPATCHED)
def test_a_host_launches_in_proportion_to_the_table(model: str, attention: str) -> None:
    """The package also adds biases and gradients, copies and casts: about two dispatched kernels
    for one of the table, in both directions, which the fitted seconds of a launch hold.
    Collectives are as many."""
    script = Path(__file__).with_name("launches.py")
    command = [sys.executable, "-W", "ignore", str(script), model, attention]
    root = str(data_dir("config").parent)
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env=paths(root)
    )
    found = json.loads(done.stdout)
    table = counted(model, attention)
    for phase, kernels in DISPATCHED[model, attention].items():
        assert found[phase] == kernels
        assert 1.5 <= kernels / table[phase] <= 2.2
        assert found[f"{phase} collectives"] == table[f"{phase} collectives"] == 2


def paths(root: str) -> dict[str, str]:
    """This process's environment, with the modules that it has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}


def counted(model: str, attention: str) -> dict[str, int]:
    """Of the operator table, for one layer."""
    made = asked_problem(Asked("tp2-no-sp", {}, MODELS[model], "bf16"))
    given = Problem(
        made.workload,
        made.cluster,
        made.system,
        made.layout,
        made.calibration,
        attention,  # type: ignore[arg-type]
    )
    ops, cost = given.layer(0).ops, given.cost
    return {
        "forward": sum(cost.calls(op, "forward") for op in ops),
        "backward": sum(
            cost.calls(op, "backward_input") + cost.calls(op, "backward_weight") for op in ops
        ),
        "forward collectives": sum(bool(c) for op in ops for c in (op.gather, op.reduce)),
        "backward collectives": sum(
            bool(c) for op in ops for c in (op.regather, op.grad_gather, op.grad_reduce)
        ),
    }
