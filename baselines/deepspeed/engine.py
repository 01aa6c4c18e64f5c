"""The DeepSpeed engine of one rank: its configuration, its steps, and its gradients by name."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor

from baselines.common.meter import Meter
from baselines.deepspeed.model import Attention, Decoder
from baselines.deepspeed.places import SHIM, moves, separate_places
from baselines.deepspeed.plan import DeepSpeed
from baselines.deepspeed.zero_sizes import ZERO_3
from rematbench.workload import Workload
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.batch import Batch, make_batch
from rematbench.worlds.torch.parameters import AdamW, square_sum

UPDATE = AdamW()
"""AdamW with the hyperparameters of the project's own executor. Weight decay is on all parameters,
in one group."""


@dataclass(frozen=True, kw_only=True)
class Memories:
    """How host and device memory are told apart. If one CPU is both, `on_host` tells whether a
    tensor is on the host (None: all tensors are on the device). `device` is a device with its own
    memory; `shim` lists the parts of the shim."""

    on_host: Callable[[Tensor], bool] | None = None
    device: torch.device | None = None
    shim: tuple[str, ...] = ()

    def meter(self) -> Meter:
        return Meter(self.on_host, self.device)


@dataclass(kw_only=True)
class Rig:
    """The engine of one rank, with the number of its replica and of its part of the sequence."""

    job: PackageJob
    engine: Any
    decoder: Decoder
    replica: int
    part: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)


def configuration(job: PackageJob, policy: DeepSpeed) -> dict[str, Any]:
    """The configuration for deepspeed.initialize: the policy's, with the job's own settings."""
    run = job.run
    made = policy.configuration(run.model, run.layout, run.precision)
    zero = made["zero_optimization"] | job.settings.get("zero_optimization", {})
    return {**made, **job.settings, "zero_optimization": zero}


@contextmanager
def memories(job: PackageJob, policy: DeepSpeed, *, real: bool) -> Iterator[Memories]:
    """A context in which host and device memory can be told apart. On a GPU they are separate; on a
    CPU the shim separates them if the job offloads anything."""
    norm = ("norm",) if job.run.model.norm == "rmsnorm" else ()
    if job.device != "cpu":
        yield Memories(device=torch.device(job.device))
    elif not moves(configuration(job, policy)):
        yield Memories(shim=norm)
    else:
        with separate_places(real=real) as on_host:
            yield Memories(on_host=on_host, shim=(*SHIM, *norm))


def build(job: PackageJob, policy: DeepSpeed, kind: type[Decoder] = Decoder) -> Rig:
    run = job.run
    groups._release_process_group_references()
    ulysses = run.layout.ulysses > 1
    deepspeed.checkpointing.reset()
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    if ulysses:
        # sequence_parallel_size of the configuration is not used: with it 0.19.8 reduces gradients
        # over data-parallel ranks only, and a sequence rank trains on the gradient of its own part.
        sp.initialize_sequence_parallel(run.layout.ulysses)
    made = configuration(job, policy)
    checkpointed = "activation_checkpointing" in made
    decoder = kind(run.model, policy, checkpointed=checkpointed)
    decoder.fill(job.seed)
    if run.precision == "bf16":
        decoder.bfloat16()
    # DeepSpeed's timer would wait for the device before and after every micro-batch.
    made.setdefault("timers", {"throughput": {"enabled": False}})
    optimizer = torch.optim.AdamW(
        decoder.parameters(),
        fused=job.device == "cuda",  # DeepSpeed's own AdamW is fused, too
        lr=UPDATE.lr,
        betas=(UPDATE.beta1, UPDATE.beta2),
        eps=UPDATE.eps,
        weight_decay=UPDATE.weight_decay,
    )
    mpu = sp if ulysses else None
    engine, *_ = deepspeed.initialize(model=decoder, optimizer=optimizer, config=made, mpu=mpu)
    if checkpointed:
        deepspeed.checkpointing.configure(None, deepspeed_config=made)
    part = 0
    if ulysses:
        part = sp.get_sequence_parallel_rank()
        for layer in decoder.decoder_layers:
            layer.attend = DistributedAttention(
                Attention(), sp.get_sequence_parallel_group(), scatter_idx=2, gather_idx=1
            )
            layer.exchanged = True
    replica = dist.get_rank() // run.layout.ulysses
    return Rig(job=job, engine=engine, decoder=decoder, replica=replica, part=part)


def batch_of(job: PackageJob, step: int) -> Batch:
    run = job.run
    work = Workload(model=run.model, seq_len=run.seq_len, precision=run.precision)
    return make_batch(work, run.layout.global_batch, job.seed, step, job.ignored)


def _rows(rig: Rig, batch: Batch, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, labels, positions) of one micro-batch: this rank's slice of each sequence."""
    lay, seq_len = rig.job.run.layout, rig.job.run.seq_len
    first = rig.replica * batch.ids.shape[0] // lay.replicas + number * lay.micro_batch
    size = seq_len // lay.ulysses
    where = torch.arange(rig.part * size, (rig.part + 1) * size, device=batch.ids.device)
    pick = (slice(first, first + lay.micro_batch), where)
    found = (batch.ids[pick], batch.labels[pick], where)
    return tuple(t.to(rig.device) for t in found)  # type: ignore[return-value]


def run_step(rig: Rig, batch: Batch, counted: int) -> Tensor | float:
    """Run forward and backward of one step; return this rank's sum of losses.

    DeepSpeed averages gradients over replicas, and under ZeRO 3 also over sequence ranks, although
    their gradients must be added. The scale turns the averages into gradients of the mean loss over
    all labels of the batch that are not ignored.
    """
    lay = rig.job.run.layout
    ranks = lay.replicas * (lay.ulysses if lay.zero_stage == ZERO_3 else 1)
    scale = ranks / counted
    losses: list[Tensor | float] = []
    # Reading a GPU's loss here would wait for the GPU; a CPU's tensor, if kept, would be counted.
    micro_steps(
        rig, batch, scale, lambda loss: losses.append(loss if loss.is_cuda else float(loss))
    )
    return sum(losses) / scale


def micro_steps(rig: Rig, batch: Batch, scale: float, note_loss: Callable[[Tensor], None]) -> None:
    """Run forward and backward of the micro-batches in order; `note_loss` gets each scaled loss."""
    lay = rig.job.run.layout
    for number in range(lay.num_micro_batches):
        last = number == lay.num_micro_batches - 1
        rig.engine.set_gradient_accumulation_boundary(last)
        loss = rig.engine(*_rows(rig, batch, number), scale)
        # The product must be a new tensor, because 0.19.8 at stage 0 divides the model's own
        # output by the number of micro-batches in spite of scale_wrt_gas.
        rig.engine.backward(loss * 1.0, scale_wrt_gas=False)
        if not last:
            rig.engine.step()  # it updates only after the last micro-batch
        note_loss(loss.detach())


@contextmanager
def counted(rig: Rig, meter: Meter) -> Iterator[None]:
    """A context in which `meter` counts live bytes, without states and the backend's own copies."""
    backend = deepspeed.comm.comm.cdb
    scatter = backend.reduce_scatter_function
    backend.reduce_scatter_function = meter.without(scatter)
    meter.states(states(rig))
    try:
        with meter:
            yield
    finally:
        backend.reduce_scatter_function = scatter


def fetches_ahead(run: RunSpec) -> bool:
    """Whether weights are fetched ahead from the second pass on. ZeRO 3 does this; its first pass
    records the order of modules."""
    return run.layout.zero_stage == ZERO_3


def gradients(rig: Rig, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Norms of all gradients and, if `whole`, the gradients on rank 0 (a collective under ZeRO)."""
    norms, found = {}, {}
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # ZeRO 1 and 2 do not wait for offloaded gradients
    for name, parameter in rig.decoder.named_parameters():
        grad = safe_get_full_grad(parameter).detach()
        norms[name] = math.sqrt(square_sum(grad.reshape(-1)))
        if whole and dist.get_rank() == 0:
            shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
            full = grad.reshape(shape)
            found[name] = full.to("cpu", torch.float64, copy=True)
    return norms, found


def states(rig: Rig) -> list[Tensor]:
    """The tensors that exist before and after every step: the parameters as the rank currently
    holds them, flat buffers and optimizer states.

    They include tensors that are allocated at the start and never freed: ZeRO 3's part of the
    gradients and reduce bucket and, with an offloaded optimizer, the part of the gradients and the
    buffers for copies.
    """
    found = [*rig.decoder.parameters(), *rig.decoder.buffers()]
    found += [p.ds_tensor for p in rig.decoder.parameters() if hasattr(p, "ds_tensor")]
    optimizer = rig.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    found += updated(rig)
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        buckets = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
        found += [optimizer.grad_partitions_flat_buffer, *(b for b in buckets if b is not None)]
    found += offloading(optimizer, found)
    for state in inner.state.values():
        found += [t for t in state.values() if isinstance(t, Tensor)]
    return found


def offloading(optimizer: Any, parts: list[Tensor]) -> list[Tensor]:
    """Tensors that ZeRO allocates at the start to keep the optimizer or parameters on the host."""
    found = list(getattr(optimizer, "param_groups_fp16_flat_cpu_memory", []))
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        found += [part.grad for part in parts if part.grad is not None]
    if getattr(optimizer, "cpu_offload", False):
        found += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
        found += [
            optimizer.temp_grad_buffer_for_cpu_offload,
            optimizer.temp_grad_buffer_for_gpu_offload,
        ]
    return found


def updated(rig: Rig, *, without_state: bool = False) -> list[Tensor]:
    """The tensors that the optimizer updates: parameters, or ZeRO's flat parts. `without_state`:
    only the tensors that have no moments yet."""
    optimizer = rig.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    # ZeRO 3 shows its inner optimizer one part at a time, and only during the update.
    found = list(getattr(optimizer, "fp32_partitioned_groups_flat", []))
    found += [p for group in inner.param_groups for p in group["params"] if not found]
    return [p for p in found if not (without_state and inner.state.get(p))]
