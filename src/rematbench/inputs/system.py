"""The software stack: its facts, in groups; a file of a stack gives them by name, without groups.

A new fact is a field of a group with its sentence, and the code that reads it.  Readers of files,
printed differences, changes by name and hashes take the facts from the fields.
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
"""Implementations by name in config/kernels/operators.yaml."""
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
EpOverlap = Literal["none", "interleaved", "always"]
EpOverlapChoice = Literal["off", "on", "delayed_wgrad"]
"""What a run may request of a stack that can overlap experts' exchanges."""
Fp32Copy = Literal["none", "zero", "always"]
WideAttention = Literal["none", "equal_heads", "fp32", "fp64"]
_PARTS = "attn|mlp|moe|moe_router|moe_preprocess"
Graphs = Annotated[str, Meta(pattern=rf"^(none|layer|full_iteration|({_PARTS})(,({_PARTS}))*)$")]
"""What CUDA graphs capture: none; each layer; a whole iteration but its update; or, between commas,
parts of a layer by Megatron-core's names (transformer_config.py, cuda_graph_scope): attn (attention
with its norm), mlp (a dense layer's), moe (experts with their norm), moe_router (norm, router and
shared expert), moe_preprocess (counts and permutation in front of the exchange)."""
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
    """What a run chooses of its stack and its devices; None: as the stack or the cluster has it."""

    attention: Annotated[AttentionChoice, Fact(column="own")] = "flash"
    """This attention kernel runs (flash: the stack's)."""
    hbm_bytes: Annotated[DeviceBytes | None, Fact(metavar="H")] = None
    """A device has so many bytes of memory; this replaces the cluster's value."""
    optimizer: Annotated[Home | None, Fact(column="own")] = None
    """Optimizer states are there; this replaces the stack's value."""
    optimizer_kind: OptimizerKind | None = None
    """The optimizer is this one instead of the stack's Adam; master weights stay."""
    parameters: Annotated[Home | None, Fact(column="own")] = None
    """Parameters are there with ZeRO 3; this replaces the stack's value."""
    ep_overlap: EpOverlapChoice | None = None
    """Experts' exchanges run beside another micro-batch; this replaces the stack's value."""
    dispatcher: Dispatcher | None = None
    """Tokens reach their experts in this way; this replaces the stack's value."""
    cuda_graphs: Annotated[Graphs | None, Fact(metavar="SCOPE")] = None
    """CUDA graphs capture this (none, layer, full_iteration, or some of attn,mlp,moe,moe_router,
    moe_preprocess); this replaces the stack's value."""


Scale = Annotated[float, Meta(gt=0.0, le=100.0)]


class Scales(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors for a stack that are fitted to a user's rows (`rematbench calibrate --rows`)."""

    kernels: Scale = 1.0
    """The factor multiplies the seconds of all kernels."""
    attention: Scale = 1.0
    """The factor multiplies the seconds of attention, in addition to that of all kernels."""
    communication: Scale = 1.0
    """The factor multiplies the seconds of collectives and of sends."""
    host: Scale = 1.0
    """The factor multiplies the seconds of the host's launches."""
    half_width: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """The prediction band from these rows has this half-width, as a logarithm (0: no rows)."""


class States(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters, gradients and optimizer states, and the update."""

    param_bytes: StateBytes
    """A parameter of the copy that compute reads has so many bytes."""
    grad_bytes: StateBytes
    """A parameter's gradient has so many bytes."""
    optimizer_bytes: StateBytes
    """A parameter's master weight and moments have so many bytes (sharded from ZeRO stage 1 on)."""
    reduce_bytes: StateBytes
    """The reduction of gradients sends so many bytes per parameter."""
    gather_bytes: StateBytes
    """The gather of parameters sends so many bytes per parameter."""
    fp32_copy: Fp32Copy = "none"
    """It says whether the optimizer copies parameters that are fp32 or fp64 already: none (it does
    not), zero (if ZeRO shards states), always."""
    late_state_bytes: StateBytes = 0
    """The first update allocates so many bytes per parameter of the optimizer states, in gaps left
    by activations of the first step; the other states exist before training.  Adam of torch and of
    TransformerEngine allocates both moments at its first step, also under DeepSpeed's ZeRO, whose
    master weights exist before."""
    fresh_gradients: bool = False
    """If true, the first backward of a step allocates each gradient when the kernel of its weight
    runs, and the end of the step frees them (zero_grad(set_to_none=True)); otherwise gradients are
    alive throughout."""
    dummy_gradients: bool = False
    """If true, products that add to a gradient hand autograd a buffer without values, in the dtype
    of the weights: one for each shape of a weight on a rank, the head's too, which stays allocated
    (TransformerEngine with Megatron's fused accumulation of gradients)."""
    step_scratch_bytes: StateBytes = 0
    """The optimizer step holds so many bytes per updated parameter and frees them."""
    flat_step: bool = False
    """If true, the optimizer step updates a rank's share of the parameters as one tensor, after it
    has freed the gradients of the other ranks' shares; otherwise it updates tensor by tensor."""
    expandable_segments: bool = False
    """If true, torch's allocator maps pages at the end of growing segments
    (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""


class Loss(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vocabulary's logits and the loss.

    An unfused loss has three independent facts: `logits_fp32`, `loss_keeps_logits` and
    `loss_in_place`.  A tiled loss (logits in pieces) is not a fact of a stack: a plan divides the
    head into pieces (mst: head_chunks), with any loss."""

    vocab_multiple: Multiple = 1
    """The vocabulary is padded up to a multiple of vocab_multiple x tp tokens."""
    fused_loss: bool
    """If true, one kernel keeps the loss's statistics and overwrites its saved tensor with the
    gradient."""
    logits_fp32: bool
    """If true, an unfused loss widens the logits to fp32."""
    loss_in_place: bool = True
    """If true, the gradient overwrites the saved softmax (Megatron's vocabulary-parallel
    cross-entropy); otherwise it is a second tensor (F.cross_entropy)."""
    loss_keeps_logits: bool = True
    """If true, a wide copy of the logits is alive while the softmax is computed; otherwise the
    softmax overwrites the logits."""
    shifts_logits: bool = False
    """If true, the loss copies the logits of all tokens but the last after it has widened them,
    while the model's forward still has its logits and the input of the head."""
    prediction_layers: bool = True
    """If true, layers of a model that predict more tokens train; otherwise the stack's classes
    leave them out."""
    held_logit_bytes: StateBytes = 0
    """So many bytes per logit stay alive during the loss's backward because the training loop holds
    the model's output (0: it holds none).  With logits computed in pieces no output exists."""


class Kernels(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels of a layer, and the workspaces of the libraries that run them."""

    attention: AttentionBackend
    """This kernel runs when a run requests `flash`, by its name in config/kernels (`unfused`: the
    stack has no fused kernel)."""
    cudnn_first: bool = False
    """If true, fused attention is cuDNN's on GPUs from Hopper on, whatever `attention` names
    (TransformerEngine 2.x, attention/dot_product_attention/utils.py, get_attention_backend)."""
    repeats_kv: bool = False
    """If true, fused attention receives keys and values once per query head, and saves the repeated
    tensors."""
    wide_query_gradient: bool = False
    """If true, the backward of fused attention also holds the gradient of queries in fp32, and,
    where heads of queries share one of keys, gradients of keys and values for each head of queries
    (FlashAttention-2); a stack that does not say so is not charged for it."""
    eager_operators: bool = False
    """If true, unfused attention and soft caps are eager torch operators, which save keys and
    values once per query head, the softmax both in fp32 and as a copy, and the tanh of a cap."""
    norm: NormKernel = "fused"
    """This kernel computes an RMSNorm, by its name in config/kernels/operators.yaml (a LayerNorm is
    `fused` in every stack; `compiled` fuses both)."""
    norm_keeps_steps: bool = False
    """If true, an eager RMSNorm does not save its input but the input in fp32, the reciprocal root
    mean square and the normalised input (in fp32 where 1 is added to the weight)."""
    rope: RopeKernel = "fused"
    """This kernel rotates queries and keys, by its name in config/kernels/operators.yaml."""
    fused_swiglu: bool
    """If true, one kernel computes the activation of a gated MLP and its product."""
    fused_linears: bool = True
    """If true, one GEMM computes q, k and v, and one GEMM computes gate and up; otherwise each
    projection is a GEMM, and a partial recomputation runs only the GEMMs that it needs."""
    tiles_again: bool = False
    """If true, an MLP in mini-sequences saves its input alone, and each piece is computed again in
    its own backward (DeepSpeed's TiledMLP); otherwise the pieces of a recomputed layer are computed
    with the layer, and all wait for their backward."""
    compiled: bool = False
    """If true, a compiler fuses the elementwise operators of a layer (torch.compile)."""
    cuda_graphs: Graphs = "none"
    """CUDA graphs capture this, and the host issues each with one launch.  Each pass of a layer has
    a graph, of the layer or of its parts; embedding and head are in none.  A layer with
    experts is in its graph up to the counts of their tokens, or whole if experts are padded."""
    tf32: bool = False
    """If true, fp32 matrix products run in TF32 (torch: set_float32_matmul_precision; its default,
    highest, is full fp32)."""
    cublas_bytes: Bytes = 0
    """torch's cuBLAS workspaces, one for each thread that multiplies (forward and backward), take
    so many device bytes."""
    workspaces: Workspaces = 0
    """TransformerEngine's matrix products have so many workspaces, each of the GPU generation's
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
    """Ranks are numbered in this order of degrees, the fastest first."""
    tp_overlap: TpOverlap
    """It says what hides tensor-parallel collectives: none; backward (collectives of a linear's
    backward overlap with its two GEMMs, as in Megatron's asynchronous linear); gemm (forward
    collectives too, chunk by chunk)."""
    gemm_overlap_links: OverlapLinks = "nvlink"
    """Over these links `tp_overlap: gemm` works: within an NVLink domain (user buffers of
    TransformerEngine, symmetric memory of torch: both write into a peer's memory), or all links.  A
    group that leaves the domain overlaps as `backward`."""
    cp_kind: CpKind = "none"
    """Ranks that share a sequence exchange keys and values in this way (none: no such ranks)."""
    cp_merges: bool = False
    """If true, context parallelism runs attention for the keys and values of one rank after another
    and merges the parts in fp32, whatever it gathers (torch's context_parallel)."""
    p2p_overlap: P2pOverlap
    """With these schedules a pipeline send overlaps with the next pass; with others a rank waits
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
    """Data parallelism: what ranks share, and when they reduce and gather it."""

    data_parallel: DataParallelKind = "zero"
    """It says what ZeRO stages 2 and 3 are: DeepSpeed's (zero), or torch's (fsdp)."""
    reduce_overlap: bool
    """If true, the reduction of gradients overlaps with the backward."""
    gather_overlap: bool
    """If true, the gather of parameters overlaps with compute."""
    broadcast_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Updated parameters are gathered by broadcasts of one rank's shard after another, each of
    which takes this many seconds beside those of its bytes (0: by an all-gather)."""
    bucket_bytes: Bytes = 0
    """The gradient bucket of an overlapped reduction has so many bytes (0: not bucketed)."""
    reentrant: bool = False
    """If true, a recomputed layer is a graph of its own, whose input has a gradient although
    nothing below it trains (torch.utils.checkpoint, use_reentrant).  FSDP then gathers no layer
    ahead in the backward, its root keeps embedding and head whole until the end, and its hooks of
    frozen layers keep the input of each and its gradient."""
    waiting_frees: Annotated[int, Meta(ge=0, le=8)] = 0
    """The host frees the gathered parameters of so many units, and as many of their gradients,
    before the device is done with them, so that the next units take other memory (record_stream,
    whose blocks torch does not count as allocated; FSDP's limit_all_gathers lets two wait)."""
    whole_buckets: bool = False
    """If true, gradients are copied under ZeRO into buckets that are allocated whole
    (`bucket_bytes` each, two with reduce_overlap) from the first gradient of a backward whose
    gradients are reduced to its end; with sharded parameters one bucket stays.  A reduction copies
    a bucket's content (DeepSpeed's contiguous_gradients)."""
    ddp_buckets: bool = False
    """If true, data parallelism without ZeRO is torch's DistributedDataParallel, whose buckets hold
    all gradients a second time (gradient_as_bucket_view is false unless a program says so)."""
    prefetch_elements: Parameters = 0
    """With parameters gathered per layer, the matrices of each operator are gathered by themselves,
    and before it runs at least so many elements of the next matrices are requested ahead
    (stage3_prefetch_bucket_size).  0: a layer is gathered at once, while the layer before it runs
    (FSDP)."""
    live_elements: Parameters = 0
    """No matrix is requested ahead while so many elements are whole
    (stage3_max_live_parameters)."""
    hook_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """At ZeRO stage 3 the host runs hooks for so many seconds around each pass of an operator with
    weights, also without peers, and for as many at each gather (DeepSpeed: fetch_sub_module,
    release_sub_module, all_gather_coalesced)."""
    sub_group_parameters: Parameters = 0
    """ZeRO 3 updates so many parameters together, whose gradients are one buffer on the host (0:
    all of a rank)."""


class Host(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States in host memory, copies from and to it, and what the host waits for."""

    optimizer_on_host: bool = False
    """If true, the optimizer states are in host memory unless a run says otherwise."""
    parameters_on_host: bool = False
    """If true, each rank's shard of the parameters is in host memory with ZeRO 3, unless a run says
    otherwise."""
    host_gradients: bool = False
    """If true, an optimizer in host memory has its gradients there: those of `host_grad_bytes` that
    the update reads, and beside them a buffer in compute precision
    (lowering/states/host_states.py).  Gradients that ZeRO 2 or 3 shards are then not on the
    device."""
    host_grad_bytes: StateBytes = 4
    """A gradient on its way to an optimizer in host memory has so many bytes (DeepSpeed widens the
    gradient to fp32 on the device first: stage3.py, _offload_grad_partition_at_boundary, and in
    stage_1_and_2.py async_inplace_copy_grad_to_fp32_buffer_from_gpu)."""
    host_tensors: bool = False
    """If true, torch updates tensor by tensor on the host, where each has buffers of its own for
    its weights and for their gradients, both of `host_grad_bytes` (Megatron's hybrid optimizer)."""
    resident_bytes: StateBytes = 0
    """The device keeps so many bytes per parameter of optimizer states although the optimizer is
    in host memory (Megatron's fp32 shard, of which the host has a copy)."""
    host_pinned: bool = True
    """If true, the buffers of `host_gradients` and of parameters in host memory are pinned."""
    pinned_blocks: PinnedBlocks = "powers_of_two"
    """A pinned tensor takes so many bytes: torch takes the next power of two, a stack with an
    allocator of its own may take what the tensor needs (exact)."""
    blocking_copies: bool = False
    """If true, the host waits for the end of each copy of activations between device and host (a
    copy from or to memory that is not pinned, or `Tensor.cpu()`); copies of states do not block."""
    launch_blocking: bool = False
    """If true, the host waits for the end of each kernel, collective and copy before it issues the
    next (CUDA_LAUNCH_BLOCKING=1), so that nothing overlaps on a rank."""


class ExpertExchange(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The exchange of tokens between experts."""

    dispatcher: Dispatcher = "alltoall"
    """Tokens reach their experts in this way: NCCL's all-to-all over expert-parallel ranks, an
    all-gather of all tokens, or the kernels of DeepEP or HybridEP (one copy of a token for each
    node)."""
    ep_overlap: EpOverlap = "none"
    """With these schedules the all-to-all of a backward's experts runs beside the compute of the
    forward that follows it, of another micro-batch, and that forward's beside the backward's
    compute: none; interleaved (pipelines with several chunks on a rank, or one rank alone, as in
    Megatron-core's combined 1F1B); always."""
    delayed_wgrad: bool = False
    """If true, and exchanges overlap, the weight gradients of a backward follow the input gradients
    of its attention and of its experts, so that the exchange behind those overlaps with them
    too."""
    fused_router: bool = False
    """If true, one kernel computes a router's probabilities and map, and one each the scores and
    the value of its balancing loss; otherwise torch operators do."""
    fused_indices: bool = False
    """If true, one kernel makes DeepEP's indices a map of tokens to experts; otherwise torch
    operators do."""
    expert_workspaces: Workspaces = 0
    """A model with experts has so many workspaces more than `workspaces` (the streams of a grouped
    GEMM)."""


class Accepts(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the stack can run: these facts decide which jobs it takes, and change no number."""

    model_parallel: tuple[ModelParallel, ...] = ("tp", "pp", "vpp", "ep")
    """The stack can raise these degrees above 1, besides context parallelism (`cp_kind`,
    `features`)."""
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    """The stack supports these ZeRO stages if states can be sharded."""
    pipeline_zero_stages: tuple[ZeroStage, ...] = (0, 1)
    """The stack supports these of its ZeRO stages in a pipeline, where stages 2 and 3 keep what
    they gather, and whole gradients, until a rank's last pass (FSDP2)."""
    wide_attention: WideAttention = "none"
    """The stack's fused attention has a GPU kernel in these precisions above 16 bits: none (flash
    attention takes 16 bits), fp32, fp64 (and fp32), or equal_heads (fp32 if queries and keys have
    as many heads, as for torch's SDPA with enable_gqa)."""
    features: tuple[str, ...] = ()
    """The stack has these further abilities; a request for another feature is Unsupported."""


class System(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training stack: the facts that determine bytes and time, in groups."""

    name: str
    """The stack is printed under this name."""
    version: str
    """The facts hold for these versions of its packages."""
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
    """The first of these entries of config/calibration.yaml that exists applies: the name of a
    shipped stack, then those of its bases (load.py sets the field)."""
    scales: Scales = Scales()
    """The factors were fitted to a user's measurements."""
    sources: dict[str, str] = {}
    """Each fact that a file gives with a source has it here, by the fact's name."""

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
        """Whether the host waits until a pipeline message has arrived, with `vpp` chunks on each
        rank."""
        return self.parallel.p2p_synchronous and not self.sends_beside(vpp)

    def padded_vocab(self, vocab: int, tp: int) -> int:
        """The vocabulary in use: padded up to a multiple of vocab_multiple x tp."""
        unit = self.loss.vocab_multiple * tp
        return -(-vocab // unit) * unit


FACTS = tuple(facts(System))
"""The keys of a stack's file: its facts without groups."""


def with_facts(system: System, **facts: Any) -> System:
    """The stack with other values of some facts, each by its key in a file; TypeError for another
    key."""
    unknown = facts.keys() - {*FACTS}
    if unknown:
        raise TypeError(f"no facts of a stack: {', '.join(sorted(unknown))}")
    return made(System, {**flat(system), **facts})
