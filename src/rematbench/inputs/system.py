"""The software stack: its facts, in groups.  A stack's file lists them by name, without groups.

A new fact needs a field in a group with its sentence, and the code that reads it.  The reading of
files, printed differences, changes by name and hashes follow from the fields.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rematbench.host.declared import Fact, Part, facts, flat, made

StateBytes = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Bytes of one parameter (or, for `held_logit_bytes`, of one logit)."""
Multiple = Annotated[int, Meta(gt=0, le=1 << 24)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
DeviceBytes = Annotated[int, Meta(ge=1 << 20, le=1 << 60)]
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
CUDNN = ("hopper", "blackwell")
"""The GPU generations on which TransformerEngine prefers cuDNN's attention."""
NormKernel = Literal["eager", "torch", "compiled", "fused"]
RopeKernel = Literal["eager", "complex", "fused", "fused_complex"]
"""Names of implementations in config/kernels/operators.yaml."""
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
EpOverlap = Literal["none", "interleaved", "always"]
EpOverlapChoice = Literal["off", "on", "delayed_wgrad"]
"""The overlaps of experts' exchanges that a run may request of a stack that supports them."""
Fp32Copy = Literal["none", "zero", "always"]
WideAttention = Literal["none", "equal_heads", "fp32", "fp64"]
_PARTS = "attn|mlp|moe|moe_router|moe_preprocess"
Graphs = Annotated[str, Meta(pattern=rf"^(none|layer|full_iteration|({_PARTS})(,({_PARTS}))*)$")]
"""What CUDA graphs capture: nothing (none); each layer; a whole iteration except its update; or
parts of a layer between commas, by Megatron-core's names (transformer_config.py,
cuda_graph_scope): attn (attention with its norm), mlp (that of a dense layer), moe (experts with
their norm), moe_router (norm, router and shared expert), moe_preprocess (counts and permutation
before the exchange)."""
AttentionChoice = Literal["flash", "unfused", "fa1", "fa2", "fa3", "cudnn", "triton"]
"""Attention kernels that a run may request: `flash` (the stack's fused kernel), `unfused` (scores
in memory), or a fused kernel by its name."""
OptimizerKind = Literal[
    "adam8bit",
    "adam4bit",
    "adam_bf16",
    "lion",
    "lion8bit",
    "adafactor",
    "muon",
    "momentum",
    "sgd",
]
"""Optimizers other than the stack's Adam."""


class StackChoice(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choices of a run within its stack and devices; None keeps the value of the stack or the
    cluster."""

    attention: Annotated[AttentionChoice, Fact(column="own")] = "flash"
    """This attention kernel runs (flash: the stack's fused kernel)."""
    hbm_bytes: Annotated[DeviceBytes | None, Fact(metavar="H")] = None
    """A device has this many bytes of memory; replaces the cluster's value."""
    optimizer: Annotated[Home | None, Fact(column="own")] = None
    """Optimizer states are stored in this memory; replaces the stack's value."""
    optimizer_kind: OptimizerKind | None = None
    """This optimizer runs instead of the stack's Adam; master weights stay."""
    parameters: Annotated[Home | None, Fact(column="own")] = None
    """With ZeRO 3, parameters are stored in this memory; replaces the stack's value."""
    ep_overlap: EpOverlapChoice | None = None
    """Experts' exchanges overlap with another micro-batch; replaces the stack's value."""
    dispatcher: Dispatcher | None = None
    """This dispatcher sends tokens to their experts; replaces the stack's value."""
    cuda_graphs: Annotated[Graphs | None, Fact(metavar="SCOPE")] = None
    """CUDA graphs capture this (none, layer, full_iteration, or some of attn,mlp,moe,moe_router,
    moe_preprocess); replaces the stack's value."""


Scale = Annotated[float, Meta(gt=0.0, le=100.0)]


class Scales(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors of a stack that are fitted to a user's rows (`rematbench calibrate --rows`)."""

    kernels: Scale = 1.0
    """Multiplies the seconds of all kernels."""
    attention: Scale = 1.0
    """Multiplies the seconds of attention, in addition to `kernels`."""
    communication: Scale = 1.0
    """Multiplies the seconds of collectives and of sends."""
    host: Scale = 1.0
    """Multiplies the seconds of the host's launches."""
    half_width: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """The prediction band from these rows has this half-width, as a logarithm (0: no rows)."""


class States(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters, gradients and optimizer states, and the update."""

    param_bytes: StateBytes
    """Bytes of a parameter in the copy that kernels read."""
    grad_bytes: StateBytes
    """Bytes of a parameter's gradient."""
    optimizer_bytes: StateBytes
    """Bytes of a parameter's master weight and moments (sharded from ZeRO stage 1 on)."""
    reduce_bytes: StateBytes
    """Bytes per parameter that the reduction of gradients sends."""
    gather_bytes: StateBytes
    """Bytes per parameter that the gather of parameters sends."""
    fp32_copy: Fp32Copy = "none"
    """Whether the optimizer keeps master weights of parameters that are fp32 or fp64 already:
    never (none), if ZeRO shards states (zero), or always."""
    late_state_bytes: StateBytes = 0
    """Bytes per parameter of the optimizer states that the first update allocates, in gaps left by
    activations of the first step; the other states exist before training.  Adam of torch and of
    TransformerEngine allocates both moments at its first step, also under DeepSpeed's ZeRO, whose
    master weights exist before."""
    fresh_gradients: bool = False
    """If true, the first backward of a step allocates each gradient when the kernel of its weight
    runs, and the end of the step frees them (zero_grad(set_to_none=True)); otherwise gradients are
    alive throughout."""
    dummy_gradients: bool = False
    """If true, GEMMs that accumulate into a gradient return a dummy buffer to autograd, in the
    dtype of the weights.  One buffer for each weight shape on a rank, the head's included, stays
    allocated (TransformerEngine with Megatron's fused gradient accumulation)."""
    step_scratch_bytes: StateBytes = 0
    """Bytes per updated parameter that the optimizer step allocates and frees."""
    flat_step: bool = False
    """If true, the optimizer step updates a rank's share of the parameters as one tensor, after it
    has freed the gradients of the other ranks' shares; otherwise it updates tensor by tensor."""
    expandable_segments: bool = False
    """If true, torch's allocator maps pages at the end of growing segments
    (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""


class Loss(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The logits and the loss.

    `logits_fp32`, `loss_keeps_logits` and `loss_in_place` describe an unfused loss and are
    independent.  A tiled loss (logits in pieces) is no fact of a stack: a plan divides the head
    into pieces (mst: head_chunks), with any loss."""

    vocab_multiple: Multiple = 1
    """The vocabulary is padded up to a multiple of vocab_multiple x tp tokens."""
    fused_loss: bool
    """If true, one kernel computes the loss and overwrites its saved tensor with the gradient."""
    logits_fp32: bool
    """If true, an unfused loss converts the logits to fp32."""
    loss_in_place: bool = True
    """If true, the gradient overwrites the saved softmax (Megatron's vocabulary-parallel
    cross-entropy); otherwise it is a second tensor (F.cross_entropy)."""
    loss_keeps_logits: bool = True
    """If true, a wide copy of the logits is alive while the softmax is computed; otherwise the
    softmax overwrites the logits."""
    shifts_logits: bool = False
    """If true, the loss converts the logits to fp32 and then copies those of all tokens but the
    last, while the model's forward still holds its logits and the input of the head."""
    prediction_layers: bool = True
    """If true, the stack trains the prediction layers of a model; otherwise its classes leave them
    out."""
    held_logit_bytes: StateBytes = 0
    """Bytes per logit that stay alive during the loss's backward because the training loop holds
    the model's output (0: it does not).  If logits are computed in pieces, there is no output."""


class Kernels(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels of a layer, and the workspaces of the libraries that run them."""

    attention: AttentionBackend
    """The fused attention kernel that runs for `--attention flash`, by its name in config/kernels
    (`unfused`: the stack has no fused kernel)."""
    cudnn_first: bool = False
    """If true, fused attention is cuDNN's on GPUs from Hopper on, whatever `attention` names
    (TransformerEngine 2.x, attention/dot_product_attention/utils.py, get_attention_backend)."""
    repeats_kv: bool = False
    """If true, fused attention receives keys and values repeated for each query head, and saves the
    repeated tensors."""
    wide_query_gradient: bool = False
    """If true, the backward of fused attention also holds the gradient of queries in fp32 and, if
    several query heads share a key head, the gradients of keys and values for each query head
    (FlashAttention-2). Unless a stack's file states this, these bytes are not counted."""
    eager_operators: bool = False
    """If true, unfused attention and soft caps are eager torch operators, which save keys and
    values repeated for each query head, the softmax both in fp32 and as a copy, and the tanh of a
    cap."""
    norm: NormKernel = "fused"
    """The RMSNorm kernel, by its name in config/kernels/operators.yaml (a LayerNorm is `fused` in
    every stack; `compiled` fuses both)."""
    norm_keeps_steps: bool = False
    """If true, an eager RMSNorm does not save its input but the input in fp32, the reciprocal root
    mean square and the normalised input (in fp32 if 1 is added to the weight)."""
    rope: RopeKernel = "fused"
    """The kernel that applies rotary positions, by its name in config/kernels/operators.yaml."""
    fused_swiglu: bool
    """If true, one kernel computes the activation of a gated MLP and its product."""
    fused_linears: bool = True
    """If true, one GEMM computes q, k and v, and one GEMM computes gate and up; otherwise each
    projection is a GEMM, and a partial recomputation runs only the GEMMs that it needs."""
    tiles_again: bool = False
    """If true, an MLP in mini-sequences saves only its input, and the backward recomputes it piece
    by piece (DeepSpeed's TiledMLP); otherwise a recomputed layer recomputes all pieces of its MLP
    before their backward."""
    compiled: bool = False
    """If true, a compiler fuses the elementwise operators of a layer (torch.compile)."""
    cuda_graphs: Graphs = "none"
    """What CUDA graphs capture; the host issues each graph with one launch.  Each pass of a layer
    has a graph, of the layer or of its parts; embedding and head are in none.  A graph of a layer
    with experts ends at the counts of their tokens, unless experts are padded."""
    tf32: bool = False
    """If true, fp32 matrix products run in TF32 (torch: set_float32_matmul_precision; its default,
    highest, is full fp32)."""
    cublas_bytes: Bytes = 0
    """Device bytes of torch's cuBLAS workspaces, one for each thread that multiplies (forward and
    backward)."""
    workspaces: Workspaces = 0
    """The number of workspaces of TransformerEngine's matrix products, each of the GPU generation's
    `workspace_bytes`."""

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs capture anything."""
        return self.cuda_graphs != "none"

    @property
    def captures_iteration(self) -> bool:
        """Whether one CUDA graph captures a whole iteration."""
        return self.cuda_graphs == "full_iteration"


class Parallel(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor, context and pipeline parallelism."""

    rank_order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    """The order of degrees in which ranks are numbered, the fastest first."""
    tp_overlap: TpOverlap
    """Which tensor-parallel collectives overlap with GEMMs: none; those of a linear's backward,
    with its two GEMMs (backward, as in Megatron's asynchronous linear); or those of the forward
    too, chunk by chunk (gemm)."""
    gemm_overlap_links: OverlapLinks = "nvlink"
    """The links over which `tp_overlap: gemm` works: within an NVLink domain (user buffers of
    TransformerEngine and symmetric memory of torch, which write into a peer's memory), or all
    links.  A group that leaves the domain overlaps as `backward`."""
    cp_kind: CpKind = "none"
    """How context-parallel ranks exchange keys and values (none: no context parallelism)."""
    cp_merges: bool = False
    """If true, context parallelism runs attention for the keys and values of one rank after another
    and merges the parts in fp32, even if it gathers all of them (torch's context_parallel)."""
    p2p_overlap: P2pOverlap
    """The schedules in which a pipeline send overlaps with the next pass; in others a rank waits
    for each send at once."""
    p2p_synchronous: bool = False
    """If true, and sends do not overlap with passes, the host waits until a pipeline message has
    arrived before it issues further actions."""
    holds_outputs: bool = False
    """If true, a pipeline stage keeps its output until the backward of the micro-batch; otherwise
    until it is sent."""
    returns_outputs: bool = False
    """If true, the last stage of a pipeline keeps the logits of every micro-batch of a step and
    merges them at its end (torch.distributed.pipelining with return_outputs)."""


class Zero(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data parallelism: what ranks shard, and when they reduce and gather it."""

    data_parallel: DataParallelKind = "zero"
    """The implementation of ZeRO stages 2 and 3: DeepSpeed's (zero) or torch's (fsdp)."""
    reduce_overlap: bool
    """If true, the reduction of gradients overlaps with the backward."""
    gather_overlap: bool
    """If true, the gather of parameters overlaps with compute."""
    broadcast_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Seconds that each broadcast takes besides those of its bytes, if updated parameters are
    gathered by broadcasts of one rank's shard after another (0: by an all-gather)."""
    bucket_bytes: Bytes = 0
    """Bytes of a gradient bucket of an overlapped reduction (0: no buckets)."""
    reentrant: bool = False
    """If true, a recomputed layer is a separate autograd graph, whose input has a gradient even if
    nothing below it trains (torch.utils.checkpoint, use_reentrant).  FSDP then gathers no layer
    ahead in the backward, its root keeps embedding and head whole until the end, and its hooks keep
    the input of each frozen layer and that input's gradient."""
    waiting_frees: Annotated[int, Meta(ge=0, le=8)] = 0
    """The number of units whose gathered parameters (and gradients) the host frees before the
    device is done with them, so that the next units take other memory (record_stream, whose blocks
    torch does not count as allocated; FSDP's limit_all_gathers lets two wait)."""
    whole_buckets: bool = False
    """If true, ZeRO copies gradients into buckets of `bucket_bytes` (two with reduce_overlap).
    They are allocated whole from the first gradient of a backward that reduces until its end; with
    sharded parameters one bucket is permanent.  A reduction copies a bucket's content (DeepSpeed's
    contiguous_gradients)."""
    ddp_buckets: bool = False
    """If true, data parallelism without ZeRO is torch's DistributedDataParallel, whose buckets hold
    all gradients a second time (gradient_as_bucket_view is false by default)."""
    prefetch_elements: Parameters = 0
    """If positive, parameters that are gathered per layer are gathered operator by operator, and
    before an operator runs at least this many elements of the next matrices are requested ahead
    (stage3_prefetch_bucket_size).  0: a layer is gathered as a whole, while the layer before it
    runs (FSDP)."""
    live_elements: Parameters = 0
    """The number of gathered elements from which no further matrix is requested ahead
    (stage3_max_live_parameters)."""
    hook_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """At ZeRO stage 3, seconds of the host's hooks around each pass of an operator with weights,
    also without peers, and again at each gather (DeepSpeed: fetch_sub_module, release_sub_module,
    all_gather_coalesced)."""
    sub_group_parameters: Parameters = 0
    """The number of parameters that ZeRO 3 updates together, whose gradients are one buffer on the
    host (0: all of a rank)."""


class Host(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States in host memory, copies to and from it, and what the host waits for."""

    optimizer_on_host: bool = False
    """If true, the optimizer states are in host memory unless a run says otherwise."""
    parameters_on_host: bool = False
    """If true, each rank's shard of the parameters is in host memory with ZeRO 3, unless a run says
    otherwise."""
    host_gradients: bool = False
    """If true, an optimizer in host memory has its gradients there: those of `host_grad_bytes` that
    the update reads, and a buffer in compute precision (lowering/states/host_states.py).  Gradients
    that ZeRO 2 or 3 shards are then not on the device."""
    host_grad_bytes: StateBytes = 4
    """Bytes per parameter of gradients that are copied to an optimizer in host memory (DeepSpeed
    first converts them to fp32 on the device: stage3.py, _offload_grad_partition_at_boundary, and
    stage_1_and_2.py, async_inplace_copy_grad_to_fp32_buffer_from_gpu)."""
    host_tensors: bool = False
    """If true, torch updates tensor by tensor on the host, and each tensor has its own buffers for
    weights and gradients, both of `host_grad_bytes` (Megatron's hybrid optimizer)."""
    resident_bytes: StateBytes = 0
    """Bytes per parameter of optimizer states that the device keeps although the optimizer is in
    host memory (Megatron's fp32 shard, of which the host has a copy)."""
    host_pinned: bool = True
    """If true, the buffers of `host_gradients` and of parameters in host memory are pinned."""
    pinned_blocks: PinnedBlocks = "powers_of_two"
    """The size of a pinned tensor: torch rounds up to the next power of two, whereas a stack with
    its own allocator may pin exactly what the tensor needs (exact)."""
    blocking_copies: bool = False
    """If true, the host waits for the end of each copy of activations between device and host (a
    copy from or to memory that is not pinned, or `Tensor.cpu()`); copies of states do not block."""
    launch_blocking: bool = False
    """If true, the host waits for the end of each kernel, collective and copy before it issues the
    next (CUDA_LAUNCH_BLOCKING=1), so that nothing overlaps on a rank."""


class ExpertExchange(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The exchange of tokens between experts."""

    dispatcher: Dispatcher = "alltoall"
    """What sends tokens to their experts: NCCL's all-to-all over expert-parallel ranks, an
    all-gather of all tokens, or the kernels of DeepEP or HybridEP (one copy of a token per
    node)."""
    ep_overlap: EpOverlap = "none"
    """The schedules in which a backward and the following forward, of another micro-batch, hide
    each other's all-to-alls of experts behind their compute: none; interleaved (pipelines with
    several chunks per rank, or a single rank, as in Megatron-core's combined 1F1B); always."""
    delayed_wgrad: bool = False
    """If true, and exchanges overlap, a backward computes weight gradients after the input
    gradients of attention and of experts, so that the exchange after these overlaps with weight
    gradients too."""
    fused_router: bool = False
    """If true, one kernel computes a router's probabilities and map, and one kernel each computes
    the scores and the value of its balancing loss; otherwise torch operators do."""
    fused_indices: bool = False
    """If true, one kernel converts DeepEP's indices to a map of tokens to experts; otherwise torch
    operators do."""
    expert_workspaces: Workspaces = 0
    """The number of further workspaces for a model with experts (one for each stream of a grouped
    GEMM)."""


class Accepts(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the stack can run: these facts decide which jobs it accepts, and change no number."""

    model_parallel: tuple[ModelParallel, ...] = ("tp", "pp", "vpp", "ep")
    """The degrees that may exceed 1, besides those of context parallelism (`cp_kind`,
    `features`)."""
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    """The supported ZeRO stages, if there are peers to shard over."""
    pipeline_zero_stages: tuple[ZeroStage, ...] = (0, 1)
    """The ZeRO stages that are also supported in a pipeline, where stages 2 and 3 keep gathered
    parameters and whole gradients until a rank's last pass (FSDP2)."""
    wide_attention: WideAttention = "none"
    """The precisions above 16 bits for which the stack has a fused attention kernel: none (flash
    attention takes 16 bits), fp32, fp64 (and fp32), or equal_heads (fp32 if queries and keys have
    equally many heads, as for torch's SDPA with enable_gqa)."""
    features: tuple[str, ...] = ()
    """Further features of the stack; a request for a missing one is Unsupported."""


class System(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training stack: the facts that determine bytes and time, in groups."""

    name: str
    """The name under which the stack is printed."""
    version: str
    """The versions of the stack's packages for which the facts hold."""
    states: States
    """These facts size parameters, gradients and optimizer states, and describe the update."""
    loss: Loss
    """These facts say which tensors the loss makes and keeps."""
    kernels: Kernels
    """These facts name the kernels of a layer and size their workspaces."""
    parallel: Parallel
    """These facts say how ranks of one model exchange tensors."""
    zero: Zero
    """These facts say how ranks reduce gradients and gather parameters."""
    host: Host = Host()
    """These facts say what is in host memory, and how copies reach it."""
    experts: ExpertExchange = ExpertExchange()
    """These facts say how tokens reach their experts."""
    accepts: Accepts = Accepts()
    """These facts decide which jobs the stack takes."""
    constants: tuple[str, ...] = ()
    """Names of entries of config/calibration.yaml, of which the first existing one applies: that of
    a shipped stack, then those of its bases (load.py sets the field)."""
    scales: Scales = Scales()
    """Factors that were fitted to a user's measurements."""
    sources: dict[str, str] = {}
    """The sources of facts, by name, as the stack's files state them."""

    def attention_on(self, generation: str) -> AttentionBackend:
        """The fused attention kernel that runs on a GPU generation."""
        first = self.kernels.cudnn_first and generation in CUDNN
        return "cudnn" if first else self.kernels.attention

    @property
    def norm_kernel(self) -> NormKernel:
        """The RMSNorm kernel that runs."""
        kernels = self.kernels
        return "compiled" if kernels.compiled and kernels.norm != "fused" else kernels.norm

    @property
    def rope_kernel(self) -> RopeKernel:
        """The kernel of rotary positions that runs."""
        return "fused" if self.kernels.compiled else self.kernels.rope

    def sends_beside(self, vpp: int) -> bool:
        """Whether a pipeline send overlaps with the next pass, with `vpp` chunks on each rank."""
        overlap = self.parallel.p2p_overlap
        return overlap == "always" or (overlap == "interleaved" and vpp > 1)

    def holds_host(self, vpp: int) -> bool:
        """Whether the host waits until a pipeline message has arrived, with `vpp` chunks per
        rank."""
        return self.parallel.p2p_synchronous and not self.sends_beside(vpp)

    def padded_vocab(self, vocab: int, tp: int) -> int:
        """The vocabulary size in use, padded up to a multiple of vocab_multiple x tp."""
        unit = self.loss.vocab_multiple * tp
        return -(-vocab // unit) * unit


FACTS = tuple(facts(System))
"""The keys of a stack's file: its facts without groups."""


def with_facts(system: System, **facts: Any) -> System:
    """A copy of the stack in which some facts, named as in files, have other values; TypeError for
    an unknown name."""
    if unknown := facts.keys() - {*FACTS}:
        raise TypeError(f"unknown facts of a stack: {', '.join(sorted(unknown))}")
    return made(System, {**flat(system), **facts})
