"""Builds one rank's model and runs its steps through Megatron-core's own schedules."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    GPUTensorPool,
    PipelineOffloadManager,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from baselines.common.meter import Meter
from baselines.common.weights import Piece, model_specs
from baselines.megatron_core import parameter_names
from baselines.megatron_core.config import (
    ddp_config,
    optimizer_config,
    transformer_config,
    uses_distributed_optimizer,
)
from baselines.megatron_core.layer_spec import layer_spec, mask_padding
from baselines.megatron_core.plan import MegatronCore
from rematbench.workload import Workload
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.arithmetic import IGNORED
from rematbench.worlds.torch.batch import MicroBatch, make_batch, micro_batches, positions
from rematbench.worlds.torch.groups import Coordinates, is_gloo

ALLOCATE = GPUTensorPool.allocate


def join_groups(job: PackageJob) -> Coordinates:
    """Make Megatron-core's process groups for a layout; return this rank's place in the groups."""
    lay = job.run.layout
    PipelineOffloadManager.reset_instance()
    get_moe_layer_wise_logging_tracker().clear()  # an earlier job may have had more layers
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=lay.tp,
        pipeline_model_parallel_size=lay.pp,
        virtual_pipeline_model_parallel_size=lay.vpp if lay.vpp > 1 else None,
        context_parallel_size=lay.cp,
        expert_model_parallel_size=lay.ep,
        expert_tensor_parallel_size=lay.expert_tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(job.timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(job.seed + 1, force_reset_rng=True)
    return Coordinates(
        tp=mpu.get_tensor_model_parallel_rank(),
        cp=mpu.get_context_parallel_rank(),
        dp=mpu.get_data_parallel_rank(),
        pp=mpu.get_pipeline_model_parallel_rank(),
    )


def leave_groups() -> None:
    mpu.destroy_model_parallel()


@dataclass(kw_only=True)
class Rig:
    """The wrapped chunks of one rank, its optimizer, and its place in the groups."""

    job: PackageJob
    place: Coordinates
    chunks: list[Any]
    config: Any
    optimizer: Any
    device: torch.device
    kernels: dict[str, str]

    @property
    def tp(self) -> tuple[int, int]:
        return self.place.tp, self.job.run.layout.tp

    def states(self) -> Iterator[torch.Tensor]:
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.module.buffers()
            for buffer in gradient_buffers(chunk):
                yield from (t for t in (buffer.grad_data, buffer.param_data) if t is not None)
        if self.optimizer is not None:
            for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                for state in inner.optimizer.state.values():
                    yield from (t for t in state.values() if isinstance(t, torch.Tensor))
                for group in inner.optimizer.param_groups:
                    yield from group["params"]

    def fill(self) -> None:
        """Write the weights of the job's seed, and update the optimizer's copies of them."""
        specs = model_specs(self.job.run.model, padded_vocab(self.job.run))
        for chunk in self.chunks:
            parameter_names.fill(chunk.module, self.job.run.model, specs, self.job.seed, self.tp)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def gradient_pieces(self) -> list[Piece]:
        """This rank's parts of the summed gradients, except those that another rank returns."""
        if uses_distributed_optimizer(self.job.run):
            for chunk in self.chunks:
                for buffer in gradient_buffers(chunk):
                    for bucket in buffer.buckets:
                        group = buffer.data_parallel_group
                        own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                        dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
        if self.place.dp or self.place.cp:
            return []
        model = self.job.run.model
        specs = model_specs(model, padded_vocab(self.job.run))
        last = 0 < self.place.pp == self.job.run.layout.pp - 1
        return [
            piece
            for chunk in self.chunks
            for piece in parameter_names.gradient_pieces(chunk.module, model, specs, self.tp)
            if not (last and piece.name == "embedding.weight")
        ]


def padded_vocab(run: RunSpec) -> int:
    """The rows of the embedding over all tensor-parallel ranks: a multiple of tp, as in the
    project's own executor, without effect on the loss. (Megatron-LM pads to a multiple that an
    option sets, and its padding counts in the loss.)"""
    return -(-run.model.vocab // run.layout.tp) * run.layout.tp


def gradient_buffers(chunk: Any) -> list[Any]:
    """The gradient buffers of a wrapped chunk, and those of its experts. (Here `buffers` is a list,
    not the method of torch's modules.)"""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def build(job: PackageJob, policy: MegatronCore, place: Coordinates, device: torch.device) -> Rig:
    run = job.run
    config = transformer_config(job, policy)
    vocab = padded_vocab(run)
    chunks = []
    for index in range(run.layout.vpp):
        stage = index if run.layout.vpp > 1 else None
        layers = run.model.num_layers // run.layout.num_chunks
        start = layers * (index * run.layout.pp + place.pp)
        spec, attention = layer_spec(job, policy, start)
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        rope = run.model.position == "rope"
        module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=max(run.seq_len, run.model.max_positions),
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=run.model.tied_embeddings,
            position_embedding_type="rope" if rope else "learned_absolute",
            vp_stage=stage,
        )
        if first and not rope:  # Megatron-LM casts torch's embedding with the module
            embedding = module.embedding.position_embeddings
            embedding.weight = torch.nn.Parameter(embedding.weight.detach().to(config.params_dtype))
        if last:
            mask_padding(module.output_layer, run.model.vocab, mpu.get_tensor_model_parallel_rank())
        if device.type != "cpu":
            module.to(device)
        # As in Megatron-LM, each chunk after the first is reduced in one bucket.
        wrap = ddp_config(run, policy)
        chunks.append(DistributedDataParallel(config, wrap, module, disable_bucketing=index > 0))
    if policy.overlap_grad_reduce:
        config.no_sync_func = [c.no_sync for c in chunks]
        config.grad_sync_func = [c.start_grad_sync for c in chunks]
        if len(chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
            config.grad_sync_func = config.grad_sync_func[0]
    optimizer = None
    if run.world == "executed":
        # Without overrides, weight decay is on biases and norms, too, as in the executor.
        optimizer = get_megatron_optimizer(
            optimizer_config(run), chunks, config_overrides={}, use_gloo_process_groups=False
        )
    kernels = {
        "core_attention": attention,
        "spec": "te" if attention == "TransformerEngine" else "local",
    }
    if run.model.vocab < vocab:
        kernels["vocabulary"] = "padded for tp; this baseline masks the padding's logits"
    return Rig(
        job=job, place=place, chunks=chunks, config=config, optimizer=optimizer, device=device,
        kernels=kernels,
    )  # fmt: skip


def _sum(losses: torch.Tensor, labels: torch.Tensor) -> Any:
    """(sum, number of labels that are not ignored, log), as Megatron-core's schedules expect."""
    counted = labels.reshape(losses.shape) != IGNORED
    total = (losses * counted).sum()
    return total, counted.sum().int(), {"loss": total.detach().clone()}


def _forward_step(rig: Rig) -> Any:
    lay, seq_len = rig.job.run.layout, rig.job.run.seq_len
    where = positions(lay, rig.place, seq_len).to(rig.device)

    def forward_step(iterator: Iterator[MicroBatch], model: Any) -> Any:
        batch = next(iterator)
        rows = (lay.micro_batch, -1)
        labels = batch.labels.view(rows)
        ids = where.expand(lay.micro_batch, -1)
        losses = model(batch.ids.view(rows), ids, None, labels=labels.clamp(min=0))
        return losses, lambda out: _sum(out, labels)

    return forward_step


def run_step(rig: Rig, batches: list[MicroBatch]) -> list[Any]:
    """Run forward and backward of a step; return the results of the loss function (last stage)."""
    for chunk in rig.chunks:
        chunk.zero_grad_buffer()
    if rig.optimizer is not None:
        rig.optimizer.zero_grad()  # else .grad, which is main_grad, would be added to itself
    schedule = get_forward_backward_func()
    iterators = [iter(batches) for _ in rig.chunks]
    single = len(rig.chunks) == 1
    answer: list[Any] = schedule(
        forward_step_func=_forward_step(rig),
        data_iterator=iterators[0] if single else iterators,
        model=rig.chunks[0] if single else rig.chunks,
        num_microbatches=len(batches),
        seq_length=rig.job.run.seq_len,
        micro_batch_size=rig.job.run.layout.micro_batch,
        forward_only=False,
    )
    return answer


def step_batches(rig: Rig, step: int) -> tuple[list[MicroBatch], int]:
    """This rank's micro-batches, and the number of labels of the step that are not ignored."""
    run, job = rig.job.run, rig.job
    work = Workload(model=run.model, seq_len=run.seq_len, precision=run.precision)
    batch = make_batch(work, run.layout.global_batch, job.seed, step, job.ignored)
    return micro_batches(batch, run.layout, rig.place, rig.device), batch.counted


def pooled() -> list[torch.Tensor]:
    """The tensors in the host memory of fine-grained offloading, whose pool never frees them."""
    if PipelineOffloadManager.OFFLOAD_MGR is None:
        return []
    pools = PipelineOffloadManager.OFFLOAD_MGR.cpu_tensor_pool._pools
    return [tensor for pool in pools.values() for tensor in pool["all"]]


def pool_bytes() -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in pooled())


def measured(meter: Meter, config: Any) -> None:
    """Adapt Megatron-core to the meter. Memory in the pool of fine-grained offloading counts as
    host memory. With gloo, which copies whole buffers, the reduction of gradients after the last
    backward is not part of the peak."""
    GPUTensorPool.allocate = meter.host(ALLOCATE)
    if not is_gloo(None):
        return
    plain = config.finalize_model_grads_func

    def finalize(*arguments: Any, **options: Any) -> None:
        peak = meter.device_peak_bytes
        plain(*arguments, **options)
        meter.device_peak_bytes = peak

    if plain is not None:
        config.finalize_model_grads_func = finalize
