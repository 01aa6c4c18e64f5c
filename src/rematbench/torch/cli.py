"""`rematbench execute`: run a method's plan on this machine and write what happened as JSON."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from rematbench.discover import Composition
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from rematbench.torch.case import Case, Result
from rematbench.torch.launch import execute_cases


def execute(
    problem: Problem,
    method: Composition,
    base: Plan | None = None,
    *,
    steps: int = 3,
    device: str = "",
    output: Path | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Execute a method on a problem: the processes are started here, one per GPU of the layout.

    The answer is a record's worth of JSON with world `executed`; written to `output` if given.
    Seconds are reported on CUDA only: a CPU's time is never performance.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = method.plan(problem, base or problem.base_plan)
    if isinstance(plan, Unsupported):
        result = Result(name=method.name, status="unsupported", reason=plan.reason)
    else:
        case = Case(name=method.name, problem=problem, plan=plan, steps=steps, device=kind)
        (result,) = execute_cases([case], timeout_s=timeout_s)
    record = _record(problem, method, result, kind)
    if output is not None:
        partial = output.with_suffix(output.suffix + ".part")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        partial.rename(output)
    return record


def _record(problem: Problem, method: Composition, result: Result, kind: str) -> dict[str, Any]:
    on_gpu = kind == "cuda"
    return {
        "world": "executed",
        "method": method.name,
        "parameters": method.parameters,
        "model": problem.workload.model.name,
        "layout": msgspec.to_builtins(problem.layout),
        "seq_len": problem.workload.seq_len,
        "precision": problem.workload.precision,
        "status": result.status,
        "reason": result.reason,
        "losses": result.losses,
        "gradient_norms": result.gradient_norms,
        "activation_peak_bytes": [rank.device_peak_bytes for rank in result.ranks],
        "peak_device_bytes": [r.device_peak_bytes + r.state_bytes for r in result.ranks],
        "peak_host_bytes": [rank.host_peak_bytes for rank in result.ranks],
        "offload_bytes": sum(rank.offload_bytes for rank in result.ranks),
        "recompute_flop": sum(rank.recompute_flop for rank in result.ranks),
        "step_s": [rank.step_s for rank in result.ranks] if on_gpu else None,
        "provenance": {
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        },
    }
