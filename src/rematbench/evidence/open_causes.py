"""Wider bands for jobs whose published error has no known cause, and for GPUs without rates.

The one open cause: under DeepSpeed's ZeRO 3, which exchanges sharded states between nodes in every
pass, published steps of few micro-batches are slower than predicted.  The gap is a constant per
step and does not grow with tokens or gathers, so its share falls with the number of micro-batches.
"""

import math
from functools import cache

from rematbench.evaluate.result import Band
from rematbench.evidence.job_evidence import left_out_cells, published_stack
from rematbench.inputs.layout import Layout
from rematbench.problem import Problem

# Why: docs/decisions/evidence.md, Why is ZeRO 3 over nodes slow at one micro-batch a step?
PUBLISHED_LONGER = 0.75
"""The share by which the published step of one micro-batch is longer than the predicted step, in
quarters rounded up: Llama-2-70B and Yi-34B at 8,192 tokens on 32 A100s under ZeRO 3, 0.72 and 0.49
(XTuner, docs/zh_cn/acceleration/benchmark.rst of commit 4d2758e: 216.8 and 485.1 tokens/s/GPU; its
network is not published, 1,600 Gbit/s a node were assumed).  With two and four micro-batches a step
the same table is within 12 %."""
KNOWN = (
    f"steps of ZeRO 3 over nodes were published up to {PUBLISHED_LONGER:.0%} longer than predicted "
    "at one micro-batch, cause not known"
)
CHECKED = frozenset({"fms-fsdp"})
"""Stacks without rows in the published sheets whose other published speeds of ZeRO 3 and HSDP over
nodes are within 7 % of the prediction (tests/evidence/test_open_causes.py has them)."""
ROOFLINE = 0.5
"""The half-width, a logarithm, for a GPU that is known by its data sheet alone.  Its kernels reach
assumed shares of the peaks, and no row says how wrong these are.  We chose the value."""
NODE = 8
"""GPUs of a node in the published rows."""


def widened(band: Band, problem: Problem) -> Band:
    """The band of a job, widened to ROOFLINE for a GPU that is known by its data sheet alone, or to
    the open cause if it applies.  A stack that its user calibrated has no open cause."""
    if problem.cluster.roofline and band.half_width < ROOFLINE:
        return Band(half_width=ROOFLINE, outside=band.outside, sources=0, other_generation=True)
    what = _exchange(problem) if not problem.system.scales.half_width else ""
    count = problem.layout.num_micro_batches
    half_width = math.log1p(PUBLISHED_LONGER / count)
    if not what or half_width <= band.half_width:
        return band
    words = f"{what} with {count} micro-batch{'es' * (count > 1)} a step ({KNOWN})"
    outside = {**band.outside, "states over nodes": words}
    return Band(half_width=half_width, outside=outside, sources=1, open_cause=True)


def _exchange(problem: Problem) -> str:
    """The exchange of states between nodes whose cost has an open cause, in words; "" if none."""
    lay: Layout = problem.layout
    stack = published_stack(problem)
    if stack in CHECKED:
        return ""
    if lay.state_shards < lay.dp * lay.cp and problem.cost.group("replica", 0).nodes > 1:
        return f"shards of {lay.state_shards} ranks with replicas between nodes (HSDP)"
    over_nodes = lay.zero_stage == 3 and problem.cost.group("dp", 0).nodes > 1
    if over_nodes and stack not in _published_over_nodes():
        return "ZeRO 3 over nodes, of which this stack has no published row,"
    return ""


@cache
def _published_over_nodes() -> frozenset[str]:
    cells = (cell for cell in left_out_cells() if cell.job.gpus > NODE)
    return frozenset(cell.job.stack for cell in cells if cell.layout[-1] == "3")
