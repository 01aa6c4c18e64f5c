"""Whether a host has memory for a job whose every rank is a process on its CPUs.

A GPU without free memory raises an error. A host without free memory kills a process, and not
always the process that asked for too much. So a job that cannot fit is not started.
"""

from math import prod

import torch

from rematbench.engine.lowering.chunk_ops import ChunkOps
from rematbench.host.memory import free_bytes
from rematbench.problem import rank_parameters
from rematbench.worlds.torch.arithmetic import wide
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.model import DTYPES
from rematbench.worlds.torch.parameters import ParameterSpec, specs_by_name

PROCESS_BYTES = 200 << 20
"""Bytes of a rank on CPUs before its model. Measured: 235 MB private to a process
(/proc/PID/smaps_rollup) with torch 2.13 imported and gloo's group joined, for tiny-llama-deep on 2
and on 4 ranks; rounded down, because other versions may take less."""


def state_bytes(case: Case) -> int:
    """A lower bound of the bytes of all ranks' parameters, gradients, master weights and moments.
    They are counted as the runtime holds them, without padding."""
    problem, lay = case.problem, case.problem.layout
    stages = (rank_parameters(problem, case.plan, stage) for stage in range(lay.pp))
    return sum(_held(case, count) for count in stages) * (lay.gpus // lay.pp)


def _held(case: Case, count: int) -> int:
    """Bytes that a rank holds for `count` parameters of its own."""
    lay, dtype = case.problem.layout, DTYPES[case.problem.workload.precision]
    shards = lay.state_shards if lay.zero_stage >= 1 else 1
    gradients = case.plan.state("optimizer").update != "backward"
    own = count * (dtype.itemsize + gradients * wide(dtype).itemsize)
    return own + count * 3 * wide(dtype).itemsize // shards


def drawing_bytes(case: Case) -> int:
    """Peak bytes of all ranks while weights are drawn. Each rank holds one whole parameter in
    float64 beside the parameters that it has made."""
    lay, total = case.problem.layout, 0
    for stage in range(lay.pp):
        made, most = 0, 0
        for spec in _specs(case, stage):
            whole = prod(spec.shape)
            most = max(most, _held(case, made) + whole * torch.float64.itemsize)
            made += whole if spec.split is None else whole // lay.tp
        total += most
    return total * (lay.gpus // lay.pp)


def _specs(case: Case, stage: int) -> list[ParameterSpec]:
    """A rank's parameters in the order in which they are made."""
    problem, plan = case.problem, case.plan
    places = [
        (unit.table.part, unit.layer)
        for number, layers in enumerate(plan.partition[stage])
        for unit in ChunkOps(problem, stage, number, layers, held=plan.held).units
    ]
    return list(specs_by_name(problem.workload.model, places, 0).values())


def too_large(case: Case) -> str:
    """Why a case on CPUs is not started; empty if the case may fit. It must fit both while its
    weights are drawn and while it trains."""
    free = free_bytes()
    if case.device != "cpu" or free < 0:
        return ""
    trains = {
        "parameters, gradients and optimizer states": state_bytes(case),
        "activations": case.activation_bytes,
    }
    starts = {"weights as they are drawn, whole and in float64": drawing_bytes(case)}
    needs = max(trains, starts, key=lambda found: sum(found.values()))
    needs["processes with torch"] = case.world_size * PROCESS_BYTES
    need = sum(needs.values())
    if need <= free:
        return ""
    parts = ", ".join(f"{nbytes / 2**30:,.1f} of {what}" for what, nbytes in needs.items())
    return (
        f"{case.world_size} ranks hold {need / 2**30:,.1f} GiB at least ({parts}), and this host "
        f"has {free / 2**30:,.1f} GiB free"
    )
