"""What a method decides: a plan is data.  This is the only vocabulary a method file needs."""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rematbench.operators.ops import Part
from rematbench.workload import NonNegativeInt, PositiveInt

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Phase = Literal["warmup", "steady", "cooldown"]
Scope = Literal["consumer", "layer"]
StateKind = Literal["parameter", "gradient", "optimizer"]

Settings = Mapping[str, str | int | float | bool]
"""Values of a method's parameters; a method's `grid` is a tuple of them (see Method)."""

MIB = 1 << 20


class PlanError(ValueError):
    """A plan that cannot be lowered; the message names the rule, the site or the number."""


class Unsupported(Struct, frozen=True):
    """A method's answer for a problem it cannot plan; becomes a row, not a crash."""

    reason: str


class Keep(Struct, frozen=True, tag="keep"):
    """Leave the tensor on the device from its forward to its last backward reader."""


class Group(Struct, frozen=True, tag="group"):
    """Recompute scope: layers first..last (global indices) are rebuilt once, in forward order,
    before the first backward op of the group.  Groups of one chunk do not overlap."""

    first: NonNegativeInt
    last: NonNegativeInt

    def __str__(self) -> str:
        return f"group {self.first}-{self.last}"


class Window(Struct, frozen=True, tag="window"):
    """Where recomputation hides: beside a collective of `op` in `direction`, `layer_offset` layers
    before the consumer, or before the pipeline's receive or send."""

    op: str
    direction: Literal["forward", "backward", "before_recv", "before_send"]
    layer_offset: int = 0


class Recompute(Struct, frozen=True, tag="recompute"):
    """Drop the tensor after its last forward reader and rebuild it in the backward.

    `scope` says when: just before each consumer, at the start of the layer's backward, or for a
    group of layers.  `whole` recomputes every operator of the scope (a checkpointed module, as
    Megatron's full recomputation does), not only those the missing tensors need.
    """

    scope: Scope | Group = "consumer"
    whole: bool = False
    window: Window | None = None


class Offload(Struct, frozen=True, tag="offload"):
    """Copy the tensor to pinned host memory after its forward and back before its backward."""


class Split(Struct, frozen=True, tag="split"):
    """Rows of one site shared out: floor(rows x offload) rows to the host,
    floor(rows x recompute) rows rebuilt, the rest kept.  A row is a token of the rank's own shard:
    the same rows before and after a gather."""

    offload: Fraction = 0.0
    recompute: Fraction = 0.0
    scope: Scope | Group = "consumer"


class ByteBudget(Struct, frozen=True, tag="byte_budget", kw_only=True):
    """Offload `alpha` of the saved BYTES of one (chunk, micro-batch), rounded up to
    `granularity`; tensors under `min_bytes` stay; whole tensors largest first, the boundary
    tensor is split.  For keep and offload only (that is how ATC'24 splits)."""

    alpha: Fraction
    granularity: PositiveInt = MIB
    min_bytes: NonNegativeInt = MIB


Fate = Keep | Recompute | Offload | Split | ByteBudget


class Select(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sites a rule speaks of; None means all.  `layers` are global indices; `micro_batches` is a
    half-open range [first, last).  `kept`: only sites that the rules before this one leave whole
    on the device, so that a composed method changes nothing its base decided."""

    stages: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    parts: tuple[Part, ...] | None = None
    activations: tuple[str, ...] | None = None
    phases: tuple[Phase, ...] | None = None
    micro_batches: tuple[int, int] | None = None
    kept: bool = False


class Rule(Struct, frozen=True):
    """The last rule that matches a site gives its fate; a rule that matches nothing is an error."""

    select: Select
    fate: Fate


class Transfers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When offloaded tensors move.

    `granularity` chunk: D2H is issued when the chunk's forward ends and its device copy is freed
    after the rank's next pass (`release_lag` passes); H2D is issued when the previous backward
    starts, so both run beside it.  layer: D2H after each layer's forward, freed after the next
    layer (the last layer's of a chunk: after the rank's next pass, unless that is its own
    backward); H2D `prefetch_layers` layers ahead in the backward.  `before_send_phases`: phases in
    which the copy that runs beside a forward must end before that forward's send starts (copies
    never share the link with point-to-point traffic).  `reload_slots`: staging slots that take
    turns (0: fresh memory); chunk: what comes back; layer: rounding buffers, both ways (a layer may
    write into its slot when the copies of the slot's last tenant are done).
    """

    granularity: Literal["chunk", "layer"] = "chunk"
    release_lag: PositiveInt = 1
    prefetch_layers: PositiveInt = 1
    before_send_phases: tuple[Phase, ...] = ()
    reload_slots: NonNegativeInt = 0


class StateFate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one kind of state lives and when it is gathered.

    `shards` ranks share it; `gather` per step (after the optimizer) or per layer (before each use),
    `prefetch_layers` ahead; `release` frees a layer's gathered copy after its forward or after its
    backward (never: what is gathered per step is so in place); `keeps_ends`: embedding and head are
    not released after the forward but after their backward (the root group of FSDP).  `update`
    (optimizer): once per step, or for each layer as soon as its gradients are there
    (optimizer-in-backward; gradients are then freed layer by layer).
    """

    kind: StateKind
    shards: PositiveInt = 1
    home: Literal["device", "host"] = "device"
    gather: Literal["none", "step", "layer"] = "none"
    release: Literal["never", "forward", "backward"] = "never"
    keeps_ends: bool = False
    prefetch_layers: PositiveInt = 1
    update: Literal["step", "backward"] = "step"


class MiniSequence(Struct, frozen=True):
    """Compute a run of row-local operators in `count` pieces of the rank's rows."""

    ops: tuple[str, ...]
    count: PositiveInt


class Pass(NamedTuple):
    """One forward (True) or backward (False) of one chunk for one micro-batch on one rank."""

    forward: bool
    micro_batch: int
    chunk: int


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a method decides.

    `partition[rank][chunk]` lists global layer indices; the embedding is before the first chunk of
    rank 0, the head after the last chunk of the last rank.  `orders` are explicit passes per rank
    (empty: `schedule` by name).  `held`: layer outputs that a checkpointing policy caches until
    their layer's backward though nothing there reads them (PyTorch's selective checkpointing caches
    what it does not recompute).  `addresses`: of activations, from the framework's allocator as
    they come, or planned ahead of the step (as MEMO does; the executor leaves them to torch).
    `fit` records numbers a method derived, for tables.
    """

    partition: tuple[tuple[tuple[int, ...], ...], ...]
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    orders: tuple[tuple[Pass, ...], ...] = ()
    rules: tuple[Rule, ...] = ()
    transfers: Transfers = Transfers()
    states: tuple[StateFate, ...] = ()
    mini_sequences: tuple[MiniSequence, ...] = ()
    held: tuple[str, ...] = ()
    addresses: Literal["allocator", "planned"] = "allocator"
    fit: dict[str, float | str] = {}

    def with_rules(self, *rules: Rule) -> "Plan":
        """This plan with rules appended (they win over earlier ones)."""
        return msgspec.structs.replace(self, rules=(*self.rules, *rules))

    def noting(self, **facts: float | str) -> "Plan":
        """This plan with numbers or remarks added to `fit`."""
        return msgspec.structs.replace(self, fit={**self.fit, **facts})

    def state(self, kind: StateKind) -> StateFate:
        """The fate of a state kind (whole and on the device unless the plan says otherwise)."""
        return next((s for s in self.states if s.kind == kind), StateFate(kind=kind))
