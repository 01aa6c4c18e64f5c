"""The software stack: saved activations, overlaps, kernels and dtypes of the states."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

StateBytes = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Bytes of one parameter (or, for `held_logit_bytes`, of one logit)."""
Multiple = Annotated[int, Meta(gt=0, le=1 << 24)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Workspaces = Annotated[int, Meta(ge=0, le=64)]
Parameters = Annotated[int, Meta(ge=0, le=1 << 50)]
"""A number of parameters."""
P2pOverlap = Literal["none", "interleaved", "always"]
TpOverlap = Literal["none", "backward", "gemm"]
OverlapLinks = Literal["nvlink", "all"]
CpKind = Literal["none", "allgather", "ring", "ulysses"]
ModelParallel = Literal["tp", "pp", "vpp", "ep"]
ZeroStage = Literal[0, 1, 2, 3]
DataParallelKind = Literal["zero", "fsdp"]
Home = Literal["device", "host"]
PinnedBlocks = Literal["powers_of_two", "exact"]
AttentionBackend = Literal["unfused", "fa1", "fa2", "fa3", "cudnn", "triton"]
NormKernel = Literal["eager", "torch", "compiled", "fused"]
RopeKernel = Literal["eager", "complex", "fused", "fused_complex"]
"""Implementations by name in config/kernels/operators.yaml."""
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
EpOverlap = Literal["none", "interleaved", "always"]
EpOverlapChoice = Literal["off", "on", "delayed_wgrad"]
"""What a run may request of a stack that can overlap experts' exchanges."""
Fp32Copy = Literal["none", "zero", "always"]
WideAttention = Literal["none", "equal_heads", "fp32", "fp64"]
AttentionChoice = Literal["flash", "unfused", "fa1", "fa2", "fa3", "cudnn", "triton"]
"""Attention kernels that a run may request: `flash` (the stack's fused kernel), `unfused` (scores
in memory), or a fused kernel by its name."""


Scale = Annotated[float, Meta(gt=0.0, le=100.0)]


class Scales(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors for a stack that are fitted to a user's rows (`rematbench calibrate --rows`): on the
    seconds of all kernels, of attention (in addition), of collectives and sends, and of the host's
    launches.  `half_width`: the half-width of the prediction band from these rows, as a logarithm
    (0: not calibrated)."""

    kernels: Scale = 1.0
    attention: Scale = 1.0
    communication: Scale = 1.0
    host: Scale = 1.0
    half_width: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0


class System(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training stack: the facts that determine bytes and time.

    Bytes are per parameter: `param_bytes` and `grad_bytes` of the copies used in compute,
    `optimizer_bytes` of master weights and moments (sharded from ZeRO stage 1 on), and the wire
    dtypes `reduce_bytes` (gradient reduction) and `gather_bytes` (parameter gather).
    `tp_overlap`: none; backward (collectives of a linear's backward overlap with its two GEMMs, as
    in Megatron's asynchronous linear); gemm (forward collectives too, chunk by chunk).
    `gemm_overlap_links`: the links over which `gemm` works: within an NVLink domain (user buffers
    of TransformerEngine, symmetric memory of torch: both write into a peer's memory), or all links.
    A group that leaves the domain overlaps as `backward`.
    `bucket_bytes`: the gradient bucket of an overlapped reduction (0: not bucketed).
    `prefetch_elements`: with parameters gathered per layer, the matrices of each operator are
    gathered by themselves, and before it runs at least so many elements of the next matrices are
    requested ahead (stage3_prefetch_bucket_size), unless `live_elements` elements are whole
    (stage3_max_live_parameters).  0: a layer is gathered at once, while the layer before it runs
    (FSDP).
    `fused_linears`: one GEMM computes q, k and v, and one GEMM computes gate and up; otherwise each
    projection is a GEMM, and a partial recomputation runs only the GEMMs that it needs.
    `fused_loss`: one kernel keeps the loss's statistics and overwrites its saved tensor with the
    gradient.  An unfused loss has three independent facts: whether logits are widened
    (`logits_fp32`), whether the wide copy stays alive (`loss_keeps_logits`) and where the gradient
    is written (`loss_in_place`).  A tiled loss (logits in pieces) is not a fact of a stack: a plan
    divides the head into pieces (mst: head_chunks), with any loss.
    `loss_in_place`: the gradient overwrites the saved softmax (Megatron's vocabulary-parallel
    cross-entropy); otherwise it is a second tensor (F.cross_entropy).
    `loss_keeps_logits`: a wide copy of the logits is alive while the softmax is computed; otherwise
    the softmax overwrites the logits.
    `whole_buckets`: under ZeRO, gradients are copied into buckets that are allocated whole
    (`bucket_bytes` each, two with reduce_overlap) from the first gradient of a backward whose
    gradients are reduced to its end; with sharded parameters one bucket that stays.  A reduction
    copies a bucket's content (DeepSpeed's contiguous_gradients).
    `step_scratch_bytes`: bytes per updated parameter that the optimizer step holds and frees.
    `flat_step`: the optimizer step updates a rank's share of the parameters as one tensor, in place
    of tensor by tensor, after it has freed the gradients of the other ranks' shares.
    `norm`, `rope`: the kernels that run, by their names in config/kernels/operators.yaml (a
    LayerNorm is `fused` in every stack; `compiled` fuses both).
    `attention`: the kernel that runs when a run requests `flash`, by its name in config/kernels
    (`unfused`: the stack has no fused kernel).
    `wide_attention`: the precisions above 16 bits in which the stack's fused attention has a kernel
    on a GPU: none (flash attention takes 16 bits), fp32, fp64 (and fp32), or equal_heads (fp32 if
    queries and keys have as many heads, as for torch's SDPA with enable_gqa).
    `tf32`: fp32 matrix products run in TF32 (torch: set_float32_matmul_precision; its default,
    highest, is full fp32).
    `fp32_copy`: whether the optimizer copies parameters that are fp32 or fp64 already: none (it
    does not), zero (if ZeRO shards states), always.
    `constants`: names of entries of config/calibration.yaml, of which the first existing entry
    applies: the name of a shipped stack, then those of its bases (load.py sets the field).
    `norm_keeps_steps`: an eager RMSNorm does not save its input but the input in fp32, the
    reciprocal root mean square and the normalised input (in fp32 where 1 is added to the weight).
    `repeats_kv`: fused attention receives keys and values once per query head, and saves the
    repeated tensors.
    `eager_operators`: unfused attention and soft caps are eager torch operators, which save keys
    and values once per query head, the softmax both in fp32 and as a copy, and the tanh of a cap.
    `held_logit_bytes`: bytes per logit that stay alive during the loss's backward because the
    training loop holds the model's output (0: no output is held).  With logits computed in pieces
    no output exists.
    `p2p_overlap`: the schedules with which a pipeline send overlaps with the next pass; with other
    schedules a rank waits for each send at once.
    `p2p_synchronous`: if sends do not overlap with passes, the host waits until a pipeline message
    has arrived before it issues further actions.
    `holds_outputs`: a pipeline stage keeps its output until the backward of the micro-batch;
    otherwise until it is sent.
    `late_state_bytes`: bytes per parameter of the optimizer states that the first update allocates,
    in gaps left by activations of the first step; the other states exist before training.  (Adam of
    torch and of TransformerEngine allocates both moments at its first step, also under DeepSpeed's
    ZeRO, whose master weights exist before.)
    `fresh_gradients`: the first backward of a step allocates each gradient when the kernel of its
    weight runs, and the end of the step frees them (zero_grad(set_to_none=True)); otherwise
    gradients are alive throughout.
    `blocking_copies`: the host waits for the end of each copy of activations between device and
    host (a copy from or to memory that is not pinned, or `Tensor.cpu()`); copies of states do not
    block.
    `host_grad_bytes`: bytes of one gradient on its way to an optimizer in host memory (DeepSpeed
    widens the gradient to fp32 on the device first: stage3.py, _offload_grad_partition_at_boundary,
    and in stage_1_and_2.py async_inplace_copy_grad_to_fp32_buffer_from_gpu).
    `host_gradients`: an optimizer in host memory has its gradients there: those of
    `host_grad_bytes` that the update reads, and beside them a buffer in compute precision
    (lowering/states/host_states.py).  Gradients that ZeRO 2 or 3 shards are then not on the device.
    `host_pinned`: the buffers of `host_gradients` and of parameters in host memory are pinned.
    `pinned_blocks`: the bytes of a pinned tensor: torch takes the next power of two, a stack with
    an allocator of its own may take what the tensor needs (exact).
    `sub_group_parameters`: the parameters that ZeRO 3 updates together, whose gradients are one
    buffer on the host (0: all of a rank).
    `optimizer_on_host`, `parameters_on_host`: the optimizer states, and with ZeRO 3 each rank's
    shard of the parameters too, are in host memory unless a run says otherwise.
    `launch_blocking`: the host waits for the end of each kernel, collective and copy before it
    issues the next (CUDA_LAUNCH_BLOCKING=1), so that nothing overlaps on a rank.
    `cuda_graphs`: each layer's forward and each layer's backward is a captured CUDA graph that the
    host issues with one launch (Megatron-core's cuda_graph_impl local); embedding and head are not
    captured.
    `expandable_segments`: torch's allocator maps pages at the end of growing segments
    (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
    `dispatcher`: how tokens reach their experts: NCCL's all-to-all over expert-parallel ranks, an
    all-gather of all tokens, or the kernels of DeepEP or HybridEP (one copy of a token for each
    node).
    `ep_overlap`: the schedules with which the all-to-all of a backward's experts runs beside the
    compute of the forward that follows it, of another micro-batch, and that forward's beside the
    backward's compute: none; interleaved (pipelines with several chunks on a rank, or one rank
    alone, as in Megatron-core's combined 1F1B); always.
    `delayed_wgrad`: with it, the weight gradients of a backward follow the input gradients of its
    attention and of its experts, so that the exchange behind those overlaps with them too.
    `cublas_bytes`: device bytes of torch's cuBLAS workspaces, one for each thread that multiplies
    (forward and backward).  `workspaces`: the workspaces of TransformerEngine's matrix products,
    each of the GPU generation's `workspace_bytes`; `expert_workspaces`: further ones where a model
    has experts (the streams of a grouped GEMM).
    `model_parallel`: the degrees that the stack can raise above 1, besides context parallelism
    (`cp_kind`, `features`); `zero_stages`: the ZeRO stages that the stack supports if states can be
    sharded; `pipeline_zero_stages`: those of them that it supports in a pipeline.  In a pipeline,
    stages 2 and 3 keep what they gather, and whole gradients, until a rank's last pass (FSDP2).
    `vocab_multiple`: the vocabulary is padded up to a multiple of vocab_multiple x tp.
    `scales`: the factors that were fitted to a user's measurements.
    `features`: further abilities of the stack; a request for another feature is Unsupported.
    """

    name: str
    version: str
    param_bytes: StateBytes
    grad_bytes: StateBytes
    optimizer_bytes: StateBytes
    reduce_bytes: StateBytes
    gather_bytes: StateBytes
    attention: AttentionBackend
    fused_swiglu: bool
    fused_linears: bool = True
    fused_loss: bool
    logits_fp32: bool
    loss_in_place: bool = True
    loss_keeps_logits: bool = True
    norm: NormKernel = "fused"
    rope: RopeKernel = "fused"
    norm_keeps_steps: bool = False
    repeats_kv: bool = False
    eager_operators: bool = False
    held_logit_bytes: StateBytes = 0
    tp_overlap: TpOverlap
    gemm_overlap_links: OverlapLinks = "nvlink"
    p2p_overlap: P2pOverlap
    p2p_synchronous: bool = False
    holds_outputs: bool = False
    blocking_copies: bool = False
    reduce_overlap: bool
    gather_overlap: bool
    bucket_bytes: Bytes = 0
    prefetch_elements: Parameters = 0
    live_elements: Parameters = 0
    whole_buckets: bool = False
    step_scratch_bytes: StateBytes = 0
    flat_step: bool = False
    cp_kind: CpKind = "none"
    dispatcher: Dispatcher = "alltoall"
    ep_overlap: EpOverlap = "none"
    delayed_wgrad: bool = False
    cublas_bytes: Bytes = 0
    workspaces: Workspaces = 0
    expert_workspaces: Workspaces = 0
    model_parallel: tuple[ModelParallel, ...] = ("tp", "pp", "vpp", "ep")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    pipeline_zero_stages: tuple[ZeroStage, ...] = (0, 1)
    data_parallel: DataParallelKind = "zero"
    compiled: bool = False
    cuda_graphs: bool = False
    launch_blocking: bool = False
    tf32: bool = False
    wide_attention: WideAttention = "none"
    fp32_copy: Fp32Copy = "none"
    optimizer_on_host: bool = False
    parameters_on_host: bool = False
    late_state_bytes: StateBytes = 0
    fresh_gradients: bool = False
    host_grad_bytes: StateBytes = 4
    host_gradients: bool = False
    host_pinned: bool = True
    pinned_blocks: PinnedBlocks = "powers_of_two"
    sub_group_parameters: Parameters = 0
    expandable_segments: bool = False
    vocab_multiple: Multiple = 1
    rank_order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    features: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    scales: Scales = Scales()
    sources: dict[str, str] = {}

    @property
    def norm_kernel(self) -> NormKernel:
        """The RMSNorm kernel that runs."""
        return "compiled" if self.compiled and self.norm != "fused" else self.norm

    @property
    def rope_kernel(self) -> RopeKernel:
        """The kernel of rotary positions that runs."""
        return "fused" if self.compiled else self.rope

    def sends_beside(self, vpp: int) -> bool:
        """Whether a pipeline send overlaps with the next pass, with `vpp` chunks on each rank."""
        always = self.p2p_overlap == "always"
        return always or (self.p2p_overlap == "interleaved" and vpp > 1)

    def padded_vocab(self, vocab: int, tp: int) -> int:
        """The vocabulary in use: padded up to a multiple of vocab_multiple x tp."""
        unit = self.vocab_multiple * tp
        return -(-vocab // unit) * unit
