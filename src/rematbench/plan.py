"""The plan: the decisions of a method as data."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from rematbench.costs.operators.ops import Part
from rematbench.host.errors import UserError
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.model import Model
from rematbench.workload import NonNegativeInt, PositiveInt, Workload

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Phase = Literal["warmup", "steady", "cooldown"]
Scope = Literal["consumer", "layer"]
Shape = Literal["zb-v", "v-half", "v-min"]
"""V-shaped schedules: rank r holds the virtual stages r and 2 pp - 1 - r, so rank 0 holds both ends
of the model.  Weight gradients are separate passes."""
Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-h2", "vocab-1", "vocab-2", "interlaced", Shape
]
SHAPES: tuple[Shape, ...] = get_args(Shape)
ZERO_BUBBLE: dict[Schedule, int] = {"zb-h1": 1, "zb-h2": 2}
"""Schedules of 1F1B in which weight gradients are separate passes. Value: how many more passes a
rank's warm-up has than the next rank's, and by how many its weight gradients come earlier."""
VOCABULARY: dict[Schedule, int] = {"vocab-1": 2, "vocab-2": 1, "interlaced": 0}
"""Schedules of 1F1B in which all stages share the vocabulary.  Value: the barriers per micro-batch
that overlap with other passes (interlaced: passes wait for each other)."""
StateKind = Literal["parameter", "gradient", "optimizer"]

Settings = Mapping[str, str | int | float | bool]
"""Values of a method's parameters by name; a method's `grid` is a tuple of these (see Method)."""

MIB = 1 << 20


class PlanError(UserError):
    """A plan that cannot be lowered; the message names the rule and the site or number."""


class Unsupported(Struct, frozen=True):
    """The result of a method for a problem that it cannot plan; tables show `reason` in its row."""

    reason: str


class Keep(Struct, frozen=True, tag="keep"):
    """Leave the tensor on the device from its forward to its last backward reader."""


class Group(Struct, frozen=True, tag="group"):
    """A recompute scope of several layers: layers first..last (global indices) are recomputed
    together, in forward order, before the group's first backward operator.  Groups of a chunk must
    not overlap."""

    first: NonNegativeInt
    last: NonNegativeInt

    def __str__(self) -> str:
        return f"group {self.first}-{self.last}"


class Window(Struct, frozen=True, tag="window"):
    """The communication behind which recomputation is hidden: a collective of operator `op` in the
    backward, `layer_offset` layers before the consumer, or the pipeline's receive."""

    op: str
    direction: Literal["backward", "before_recv"]
    layer_offset: int = 0


class Recompute(Struct, frozen=True, tag="recompute"):
    """Drop the tensor after its last forward reader and recompute it in the backward.

    `scope` says when: just before each consumer, at the start of the layer's backward, or once for
    a group of layers.  `whole` recomputes every operator of the scope (a checkpointed module, as in
    Megatron's full recomputation), not only those that the missing tensors need.
    """

    scope: Scope | Group = "consumer"
    whole: bool = False
    window: Window | None = None


class Offload(Struct, frozen=True, tag="offload"):
    """Copy the tensor to pinned host memory after its forward and back before its backward."""


class Share(Struct, frozen=True, tag="share"):
    """Keep one of `ranks` equal parts of a tensor of which tensor-parallel ranks have equal copies,
    in the memory `home`, and gather the tensor before its backward."""

    ranks: Annotated[int, Meta(ge=2)]
    home: Literal["device", "host"] = "device"


# Why: docs/decisions/plan.md, Is a share of bytes approximated by a share of rows?
class Split(Struct, frozen=True, tag="split"):
    """Treat the rows of a tensor differently: floor(rows x offload) rows are offloaded to the host,
    floor(rows x recompute) rows are recomputed, and the rest are kept.  A row is a token of the
    rank's shard, the same before and after a gather."""

    offload: Fraction = 0.0
    recompute: Fraction = 0.0
    scope: Scope | Group = "consumer"


class ByteBudget(Struct, frozen=True, tag="byte_budget", kw_only=True):
    """Offload a share `alpha` of the bytes that a chunk saves for a micro-batch, rounded up to a
    multiple of `granularity` bytes: whole tensors, the largest first, and a part of the last one.
    Tensors under `min_bytes` are kept.  Nothing is recomputed (as in ATC'24)."""

    alpha: Fraction
    granularity: PositiveInt = MIB
    min_bytes: NonNegativeInt = MIB


Fate = Keep | Recompute | Offload | Share | Split | ByteBudget


def leaves(fate: Fate) -> bool:
    """Whether a fate copies bytes to the host."""
    if isinstance(fate, Split | ByteBudget):
        return (fate.offload if isinstance(fate, Split) else fate.alpha) > 0
    return isinstance(fate, Offload) or (isinstance(fate, Share) and fate.home == "host")


class Select(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sites to which a rule applies; None selects all.  `layers` are global indices,
    `micro_batches` is a half-open range [first, last), and `slices` are slice numbers.  `kept`
    restricts the rule to sites that all earlier rules keep whole on the device, so that a composed
    method overrides no decision of its base."""

    stages: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    parts: tuple[Part, ...] | None = None
    activations: tuple[str, ...] | None = None
    phases: tuple[Phase, ...] | None = None
    micro_batches: tuple[int, int] | None = None
    slices: tuple[int, ...] | None = None
    kept: bool = False


# Why: docs/decisions/plan.md, Does a plan answer "fate of this site?" by a callback?
class Rule(Struct, frozen=True):
    """A fate for the selected sites.  The last matching rule decides the fate of a site; a rule
    that matches no site is an error."""

    select: Select
    fate: Fate


class Transfers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When offloaded tensors are copied, and which device memory the copies use.

    `granularity` chunk: the D2H copy is issued when the chunk's forward ends, and the device tensor
    is freed `release_lag` passes of the rank later; the H2D copy is issued when the previous
    backward starts.  Both copies overlap with a pass.
    `granularity` layer: the D2H copy is issued after each layer's forward, and the device tensor is
    freed after the next layer (for a chunk's last layer: after the rank's next pass, unless that
    pass is the chunk's own backward); the H2D copy is issued `prefetch_layers` layers ahead in the
    backward (for a chunk's last layer: before the rank's preceding pass, into fresh memory).
    `before_send_phases`: phases in which the copy during a forward must end before that forward's
    send starts, so that copies never share the link with point-to-point traffic.
    `reload_slots`: number of alternating staging slots (0: fresh memory).  With chunk granularity a
    slot holds a reloaded chunk.  With layer granularity the slots are rounding buffers in both
    directions: a layer may write into a slot once the copies of the slot's previous layer are
    complete.
    """

    granularity: Literal["chunk", "layer"] = "chunk"
    release_lag: PositiveInt = 1
    prefetch_layers: PositiveInt = 1
    before_send_phases: tuple[Phase, ...] = ()
    reload_slots: NonNegativeInt = 0


Place = Literal["device", "host", "visit"]
"""Where a piece of optimizer states lives: on the device; in host memory, updated by the CPU; or in
host memory, copied to the device for each update."""


class Piece(Struct, frozen=True):
    """A piece of a rank's optimizer states: parameters [start, start + count) of the rank's share,
    in the order in which gradients become ready (from the last unit to the first)."""

    number: int
    place: Place
    start: int
    count: int

    def within(self, first: int, last: int) -> int:
        """The number of the piece's parameters in [first, last)."""
        return max(0, min(self.start + self.count, last) - max(self.start, first))


class Pieces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer states in pieces of `size` parameters of a rank's share; the last may be smaller.

    `places` is repeated over the pieces.  `start`: pieces wait for the norm of all gradients, or
    start as soon as their gradients are reduced in the last backward.  `clip`: the update clips
    gradients by that norm, so it cannot be combined with an earlier start.  `slots`: visits in
    flight, whose copies overlap with other updates, as do the cast and copy of weights that the
    host updated.  With 0 slots pieces run one by one.
    """

    size: PositiveInt = 100_000_000
    places: Annotated[tuple[Place, ...], Meta(min_length=1)] = ("host",)
    start: Literal["norm", "ready"] = "norm"
    clip: bool = True
    slots: NonNegativeInt = 1


class StateFate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one kind of state is stored, and when it is gathered.

    `shards`: the number of ranks that share the state.  `gather`: per step (after the optimizer) or
    per layer (before each use, `prefetch_layers` ahead).  `release`: a layer's gathered copy is
    freed after its forward, after its backward, or after the rank's last pass of a step, so that
    one gather serves all micro-batches (never: a state gathered per step is gathered in place).
    With release per step, whole gradients accumulate until the last pass and are reduced once.
    `keeps_ends`: embedding and head are released only after their backward, not after their forward
    (the root group of FSDP).  `update` (optimizer): once per step, or per layer as soon as the
    layer's gradients are complete (optimizer-in-backward; gradients are then freed layer by layer).
    `pieces` (optimizer with home host): where each piece of the states is updated; if gradients
    have home host too, only those of pieces that the host updates leave the device.
    """

    kind: StateKind
    shards: PositiveInt = 1
    home: Literal["device", "host"] = "device"
    gather: Literal["none", "step", "layer"] = "none"
    release: Literal["never", "forward", "backward", "step"] = "never"
    keeps_ends: bool = False
    prefetch_layers: PositiveInt = 1
    update: Literal["step", "backward"] = "step"
    pieces: Pieces | None = None

    def cut(self, count: int) -> tuple[Piece, ...]:
        """The pieces of a rank's share of `count` parameters; without `pieces` one piece."""
        if self.pieces is None:
            return (Piece(0, self.home, 0, count),)
        size, places = self.pieces.size, self.pieces.places
        return tuple(
            Piece(number, places[number % len(places)], start, min(size, count - start))
            for number, start in enumerate(range(0, count, size))
        )

    def counts(self, count: int) -> dict[Place, int]:
        """The number of parameters at each place, for a rank's share of `count` parameters."""
        cut, places = self.cut(count), get_args(Place)
        return {each: sum(one.count for one in cut if one.place == each) for each in places}


class MiniSequence(Struct, frozen=True, omit_defaults=True):
    """Compute the consecutive operators `ops` in `count` pieces: pieces of rows for row-local
    operators, or pieces of heads from the query projection to the end of attention (`of`).  The
    backward of a piece of heads recomputes the inputs of attention, and gets its output in row
    order from that in head order (Untied Ulysses, arXiv 2602.21196)."""

    ops: tuple[str, ...]
    count: PositiveInt
    of: Literal["rows", "heads"] = "rows"


class Pass(NamedTuple):
    """One pass of a chunk for a micro-batch on a rank.  `kind`: a forward (True); a backward
    (False); half of a backward, for the gradients of inputs ("B") or of weights ("W"); or a part of
    a vocabulary that all stages share: logits and softmax ("S"), or the gradient of its weights
    ("T")."""

    kind: bool | Literal["B", "W", "S", "T"]
    micro_batch: int
    chunk: int

    @property
    def forward(self) -> bool:
        return self.kind is True

    @property
    def backward(self) -> bool:
        """Whether the pass is a whole backward or its first half."""
        return self.kind in (False, "B")

    @property
    def of_layers(self) -> bool:
        """Whether the pass runs a chunk's layers, not a part of a shared vocabulary."""
        return self.kind not in ("S", "T")

    @property
    def last(self) -> bool:
        """Whether the pass frees what the forward kept: a whole backward or its second half."""
        return self.kind in (False, "W")


# Why: docs/decisions/plan.md, Is a method a hook in a training loop?
class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All decisions of a method.

    `partition[rank][chunk]` lists global layer indices; the embedding is before the first chunk of
    rank 0, the head after the last chunk of the last rank (of rank 0 in V-shaped schedules).
    `orders`: an explicit order of passes for each rank (empty: that of `schedule`).  `slices`: the
    tokens of each slice of a sequence, if slices run as separate passes (empty: whole sequences);
    pass n belongs to slice n modulo their number.  `held`: layer outputs that a checkpointing
    policy keeps until their layer's backward although no operator there reads them (PyTorch's
    selective checkpointing caches what it does not recompute).  `addresses`: addresses of
    activations come from the framework's allocator at run time, or are planned before the step (as
    MEMO does; the executor leaves them to torch).  `cuts`: virtual stages whose input gets no
    gradient; the stage before has its own head and loss, so the plan trains another objective
    (local learning).  `fit`: numbers that the method derived, for tables.
    """

    partition: tuple[tuple[tuple[int, ...], ...], ...]
    schedule: Schedule = "1f1b"
    orders: tuple[tuple[Pass, ...], ...] = ()
    slices: tuple[PositiveInt, ...] = ()
    rules: tuple[Rule, ...] = ()
    transfers: Transfers = Transfers()
    states: tuple[StateFate, ...] = ()
    mini_sequences: tuple[MiniSequence, ...] = ()
    held: tuple[str, ...] = ()
    addresses: Literal["allocator", "planned"] = "allocator"
    cuts: tuple[PositiveInt, ...] = ()
    fit: dict[str, float | str] = {}

    def with_rules(self, *rules: Rule) -> "Plan":
        """This plan with rules appended; they override earlier rules."""
        return msgspec.structs.replace(self, rules=(*self.rules, *rules))

    def sliced(self, slices: tuple[int, ...]) -> "Plan":
        """This plan under 1F1B, with sequences cut into slices of these numbers of tokens."""
        return msgspec.structs.replace(self, slices=slices, schedule="1f1b")

    def turned(self, shape: Shape) -> "Plan":
        """This plan, with two chunks per rank, under a V-shaped schedule."""
        there, back = zip(*self.partition, strict=True)
        partition = tuple(zip(there, reversed(back), strict=True))
        return msgspec.structs.replace(self, partition=partition, schedule=shape)

    def noting(self, **facts: float | str) -> "Plan":
        """This plan with numbers or remarks added to `fit`."""
        return msgspec.structs.replace(self, fit={**self.fit, **facts})

    @property
    def turns(self) -> bool:
        """Whether the schedule is V-shaped."""
        return self.schedule in SHAPES

    @property
    def head_rank(self) -> int:
        """The rank that holds the head."""
        return 0 if self.turns else len(self.partition) - 1

    @property
    def virtual(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each virtual stage, in pipeline order."""
        chunks = [[*chunks] for chunks in zip(*self.partition, strict=True)]
        if self.turns:
            chunks[-1].reverse()
        return tuple(layers for each in chunks for layers in each)

    @property
    def halves(self) -> bool:
        """Whether weight gradients are separate passes."""
        apart = any(item.kind == "W" for order in self.orders for item in order)
        return apart or (self.schedule in (*ZERO_BUBBLE, *SHAPES) and not self.orders)

    def state(self, kind: StateKind) -> StateFate:
        """The fate of a kind of state (default: unsharded and on the device)."""
        return next((s for s in self.states if s.kind == kind), StateFate(kind=kind))


def state_fates(layout: Layout, system: System) -> tuple[StateFate, ...]:
    """ZeRO stages and FSDP as fates (Rajbhandari et al. 2020, arXiv 1910.02054): stage 1 shards the
    optimizer, stage 2 also the gradients, stage 3 also the parameters, which are gathered per layer
    before each use.  Sharded gradients are in host memory if the stack keeps them there with its
    optimizer.  Pipelines gather and reduce once per step, because FSDP2's stages neither reshard
    nor reduce before the last backward (torch 2.13, torch/distributed/pipelining/stage.py,
    backward_maybe_with_nosync and perform_reduce_grad).  If a rank has more chunks than torch keeps
    gathered, a chunk is gathered before each pass, here layer by layer."""
    shards, held = layout.state_shards, layout.pp > 1
    stage = layout.zero_stage
    sharded_grad = shards if stage >= 2 else 1
    leaves = system.host.optimizer_on_host and system.host.host_gradients and stage >= 2
    parameter = StateFate(kind="parameter", gather="step" if 1 <= stage <= 2 else "none")
    if stage == 3:
        parameter = StateFate(
            kind="parameter",
            shards=shards,
            gather="layer",
            release="step" if held and not layout.gathers_again else "forward",
            keeps_ends=system.zero.data_parallel == "fsdp" and not held,
            home="host" if system.host.parameters_on_host else "device",
        )
    elif stage == 2 and system.zero.data_parallel == "fsdp":
        release: Literal["step", "backward", "forward"] = "step" if held else "backward"
        release = "forward" if layout.gathers_again else release
        parameter = StateFate(kind="parameter", shards=shards, gather="layer", release=release)
    return (
        parameter,
        StateFate(
            kind="gradient",
            shards=sharded_grad,
            home="host" if leaves else "device",
            release="step" if held and stage >= 2 and layout.has_peers and not leaves else "never",
        ),
        StateFate(
            kind="optimizer",
            shards=shards if stage >= 1 else 1,
            home="host" if system.host.optimizer_on_host else "device",
        ),
    )


def gathers_by_layer(parameter: StateFate, layout: Layout) -> bool:
    """Whether a layer's weights are brought into a buffer before each use: gathered from peers,
    copied from host memory, or both."""
    elsewhere = layout.has_peers or parameter.home == "host"
    return parameter.gather == "layer" and elsewhere


def refusal(words: str, reasons: Mapping[str, bool]) -> str:
    """`words` followed by the first reason that holds; empty if none holds."""
    return next((f"{words} {name}" for name, holds in reasons.items() if holds), "")


def _of_states(plan: Plan, layout: Layout) -> dict[str, bool]:
    """The fates of states that exclude slices and separate weight gradients, each with whether the
    plan has it."""
    gradient, optimizer = plan.state("gradient"), plan.state("optimizer")
    early = optimizer.pieces is not None and optimizer.pieces.start == "ready"
    return {
        "parameters gathered per layer": gathers_by_layer(plan.state("parameter"), layout),
        "sharded gradients": gradient.shards > 1 or gradient.home == "host",
        "updates in the backward": optimizer.update == "backward" or early,
    }


def passes_refusal(plan: Plan, layout: Layout, system: System, model: Model) -> str:
    """Why a plan with separate passes for weight gradients cannot be lowered; empty if it can."""
    if not plan.halves:
        return ""
    reasons = {
        "experts": model.experts is not None,
        "layers that predict more tokens": model.mtp_layers > 0,
        "tensor parallelism in layers without norms at their inputs": layout.tp > 1
        and not model.pre_norm,
        "tied embeddings on a rank with both ends": plan.turns and model.tied_embeddings,
        "CUDA graphs": system.kernels.captures,
        **_of_states(plan, layout),
    }
    return refusal("separate passes for weight gradients are not lowered with", reasons)


def slices_refusal(
    plan: Plan, system: System, layout: Layout, work: Workload, attention: str
) -> str:
    """Why a plan with slices of sequences cannot be lowered; empty if it can."""
    if not plan.slices:
        return ""
    model, total = work.model, sum(plan.slices)
    if total != work.seq_len:
        return f"the slices have {total} tokens in all, but seq_len is {work.seq_len}"
    reasons = {
        "context parallelism": layout.cp > 1 or layout.ulysses > 1,
        "several chunks on a rank": layout.vpp > 1 and plan.schedule != "interleaved_1f1b",
        "attention scores in memory": attention != "flash",
        "keys and values repeated for each head": system.kernels.repeats_kv,
        "attention windows": any(model.attention_window),
        "latent attention": model.latent is not None,
        "experts": model.experts is not None,
        "layers that predict more tokens": model.mtp_layers > 0,
        "packed documents": work.packed,
        "mini-sequences": bool(plan.mini_sequences),
        "separate passes for weight gradients or a shared vocabulary": plan.halves
        or plan.schedule in VOCABULARY,
        **_of_states(plan, layout),
    }
    return refusal("slices of a sequence are not lowered with", reasons)


def vocabulary_refusal(plan: Plan, layout: Layout, work: Workload) -> str:
    """Why a plan with a vocabulary that all stages share cannot be lowered; empty if it can."""
    if plan.schedule not in VOCABULARY:
        return ""
    model = work.model
    reasons = {
        "one stage": layout.pp == 1,
        "several chunks on a rank": layout.vpp > 1,
        "tensor or data parallelism": layout.tp > 1 or layout.has_peers,
        "tied embeddings": model.tied_embeddings,
        "layers that predict more tokens": model.mtp_layers > 0,
        "weights that do not train": work.partly,
        "pieces of the head": any("loss" in run.ops for run in plan.mini_sequences),
    }
    return refusal("a vocabulary that all stages share is not lowered with", reasons)
