"""A planning problem as a user states it: model, cluster, system, layout and sequence length."""

from typing import Any, Self, cast

from msgspec import Struct, StructMeta
from msgspec.structs import fields

from rematbench.inputs.cluster import Bytes, Cluster
from rematbench.inputs.configfile import ConfigError, require_among, wrong_field
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.system import AttentionChoice, EpOverlapChoice, Home, System, ZeroStage
from rematbench.workload import (
    Capacity,
    ExpertPadding,
    Imbalance,
    Model,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Workload,
)

SHARED = tuple(name for name in Layout.__struct_fields__ if name != "dp")
"""Fields that ProblemSpec shares with Layout."""
_FLAGS = {"zero_stage": "--zero", "sp": "--no-sp"}


class _FieldErrors(StructMeta):
    """A metaclass that turns the TypeError of a missing or unknown field into a ConfigError."""

    def __call__(cls, *values: object, **given: object) -> Any:
        """The struct with these fields; ConfigError instead of TypeError."""
        try:
            return super().__call__(*values, **given)
        except TypeError:
            if values:
                reason = f"pass {values[0]!r} as a keyword argument: model=..., cluster=..."
                raise ConfigError("", "Problem", reason) from None
            known = fields(cast("type[Struct]", cls))
            require_among(given, [field.name for field in known], ("", "Problem", "field"))
            missing = [field.name for field in known if field.required and field.name not in given]
            raise ConfigError("", "Problem", f"missing arguments: {', '.join(missing)}") from None


class ProblemSpec(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_FieldErrors
):
    """One planning problem, as files, the command line and Python code state it.

    `model`, `cluster` and `system` are each a name, a file's path, or a Model, Cluster or System.
    `gpus` is the total; dp is `gpus` divided by tp x cp x pp.  `sp` None: on if tp > 1.  `seq_len`
    is in tokens; batches count sequences; `hbm_bytes` replaces the cluster's device memory;
    `optimizer` and `parameters` replace the stack's choice of memory for the optimizer states and
    for the parameters.  `document_len` is the mean length of packed documents (0: not packed).
    `etp` None: equal to tp.  `imbalance`: tokens of the experts of the worst rank over the balanced
    number.  `ep_overlap` replaces the stack's choice to run experts' exchanges beside another
    micro-batch.  `capacity_factor` and `expert_padding` are those of Workload.
    """

    model: str | Model
    cluster: str | Cluster
    system: str | System
    gpus: PositiveInt
    seq_len: PositiveInt
    global_batch: PositiveInt
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    ulysses: PositiveInt = 1
    shard_degree: NonNegativeInt = 0
    micro_batch: PositiveInt = 1
    zero_stage: ZeroStage = 1
    sp: bool | None = None
    attention: AttentionChoice = "flash"
    precision: Precision = "bf16"
    hbm_bytes: Bytes | None = None
    optimizer: Home | None = None
    document_len: NonNegativeInt = 0
    parameters: Home | None = None
    ep: PositiveInt = 1
    etp: PositiveInt | None = None
    imbalance: Imbalance = 1.0
    ep_overlap: EpOverlapChoice | None = None
    capacity_factor: Capacity = 0.0
    expert_padding: ExpertPadding = "none"

    def __post_init__(self) -> None:
        """Raise ConfigError for a value of a wrong type: `gpus="8"`, `tp=0`."""
        wrong = wrong_field(self, ProblemSpec)
        if wrong is not None:
            raise ConfigError("", *wrong)

    def workload(self, model: Model) -> Workload:
        """The workload, with the model that `model` names."""
        return Workload(
            model=model,
            seq_len=self.seq_len,
            precision=self.precision,
            document_len=self.document_len,
            imbalance=self.imbalance,
            capacity_factor=self.capacity_factor,
            expert_padding=self.expert_padding,
        )

    @classmethod
    def at(cls, layout: Layout, **others: Any) -> Self:
        """The problem with this layout; `others` are the fields that Layout lacks."""
        return cls(**degrees(layout), **others)

    @property
    def layout(self) -> Layout:
        """The layout; LayoutError if tp x cp x pp does not divide `gpus`."""
        ranks = self.tp * self.cp * self.pp
        dp, rest = divmod(self.gpus, ranks)
        if rest:
            near = max(1, round(self.gpus / ranks)) * ranks
            raise LayoutError(
                f"gpus {self.gpus} must be a multiple of tp x cp x pp = {self.tp} x {self.cp} x "
                f"{self.pp} = {ranks} (for example {near})"
            )
        own = {name: getattr(self, name) for name in SHARED}
        return Layout(**{**own, "dp": dp, "sp": self.tp > 1 if self.sp is None else self.sp})

    def to_arguments(self) -> list[str]:
        """The command-line options of this problem; options at their default are left out.

        ConfigError if the model, cluster or system is an object without a name.
        """
        words = []
        for field in fields(ProblemSpec):
            value = getattr(self, field.name)
            if not field.required and (value is True or value == field.default):
                continue
            if isinstance(value, Struct):
                raise ConfigError(
                    "", field.name, "a command line cannot express an object; pass a name or a file"
                )
            words += [flag(field.name)] if value is False else [flag(field.name), str(value)]
        return words


def flag(field: str) -> str:
    """The command-line option of a field."""
    return _FLAGS.get(field, f"--{field.replace('_', '-')}")


def degrees(layout: Layout) -> dict[str, Any]:
    """The fields of a ProblemSpec that a layout determines."""
    return {"gpus": layout.gpus, **{name: getattr(layout, name) for name in SHARED}}
