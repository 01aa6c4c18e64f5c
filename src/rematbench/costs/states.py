"""Bytes of parameters, gradients and optimizer states of a rank, and the optimizer step's traffic.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): stage 1 shards the optimizer over data-parallel
(and context-parallel) ranks, 2 the gradients too, 3 the parameters too.  FSDP full shard is 3.
"""

import numpy as np
from msgspec import Struct

from rematbench.costs.formulas import Quantity
from rematbench.spec.constants import CommonConstants
from rematbench.spec.layout import Layout
from rematbench.spec.system import System

OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3


class StateBytes(Struct, frozen=True, kw_only=True):
    """Resident bytes of one rank's training states."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return self.parameter + self.gradient + self.optimizer


def shard(parameters: int, shards: int) -> int:
    """Parameters of the fullest rank, with `parameters` sharded over `shards` ranks."""
    return -(-parameters // shards)


def sharded_parameters(parameters: int, layout: Layout, since_stage: int) -> int:
    """Parameters of which a rank holds a state that ZeRO shards from stage `since_stage` on."""
    return shard(parameters, layout.state_shards if layout.zero_stage >= since_stage else 1)


def updated_parameters(parameters: int, layout: Layout) -> int:
    """Parameters that a rank's optimizer step updates."""
    return sharded_parameters(parameters, layout, OPTIMIZER_STAGE)


def state_bytes(parameters: int, layout: Layout, system: System) -> StateBytes:
    """Resident bytes for `parameters` of one rank (after tensor and pipeline parallelism).

    Transient gathered copies (ZeRO-3 layers, FSDP units) are not counted here.
    """
    held = sharded_parameters(parameters, layout, PARAMETER_STAGE)
    reduced = sharded_parameters(parameters, layout, GRADIENT_STAGE)
    updated = updated_parameters(parameters, layout)
    return StateBytes(
        parameter=held * system.param_bytes,
        gradient=reduced * system.grad_bytes,
        optimizer=updated * system.optimizer_bytes,
    )


def optimizer_traffic_bytes(
    parameters: Quantity,
    param_bytes: Quantity,
    grad_bytes: Quantity,
    optimizer_bytes: Quantity,
    common: CommonConstants,
) -> Quantity:
    """HBM bytes of clipping and one fused Adam step over `parameters` updated parameters.

    Gradients are read for the norm and again for the update; master weights and moments are read
    and written; compute parameters are written; `optimizer_extra_bytes` per parameter are the bytes
    that the stacks add (gradient zeroing and unscaling).
    Source: Kingma & Ba 2015 for the states; apex FusedAdam reads and writes each once.
    """
    per_parameter = 2.0 * grad_bytes + 2.0 * np.asarray(optimizer_bytes) + param_bytes
    return parameters * (per_parameter + common.optimizer_extra_bytes)
