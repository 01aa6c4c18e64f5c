"""A job as a user states it: model, cluster, stack, and facts of the work, of the parallel degrees
and of the choices within the stack.  Each fact is declared once, in the struct it belongs to."""

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from msgspec import Struct, StructMeta
from msgspec.structs import FieldInfo

from rematbench.host.declared import Fact, fact, facts, flat, nested, parts
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError, require_among, wrong_field
from rematbench.inputs.layout import Degrees, Layout, LayoutError
from rematbench.inputs.system import StackChoice, System
from rematbench.workload import Model, PositiveInt, Work, Workload

DEFAULT_SYSTEM = "megatron-core-0.16"
"""The default stack."""
SHARDED_SYSTEM = "torchtitan-2026"
"""The default stack of commands with ZeRO 3: FSDP2."""


class _Keywords(StructMeta):
    """The metaclass of Job: its constructor takes the facts of all parts as keyword arguments, and
    raises ConfigError, not TypeError, for a missing or unknown one."""

    def __call__(cls, *values: object, **given: object) -> Any:
        """The struct with these facts; a whole part may be given too, and facts override its
        values."""
        kind = cast("type[Struct]", cls)
        known = facts(kind)
        try:
            for name in parts(kind).keys() & given.keys():
                given = flat(cast("Struct", given.pop(name))) | given
            whole = nested(given, kind)
            whole |= {name: part(**whole[name]) for name, part in parts(kind).items()}
            return super().__call__(*values, **whole)
        except TypeError:
            if values:
                reason = f"pass {values[0]!r} as a keyword argument: model=..., cluster=..."
                raise ConfigError("", "Problem", reason) from None
            require_among(given, [*known, *parts(kind)], ("", "Problem", "field"))
            missing = [name for name, one in known.items() if one.required and name not in given]
            raise ConfigError("", "Problem", f"missing arguments: {', '.join(missing)}") from None


# Why: docs/decisions/inputs.md, Are the facts of a job one flat struct?
class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Keywords):
    """One job, as files, the command line and Python code state it, with the facts of its parts as
    keywords: `Job(model="llama-7b", ..., gpus=8, tp=2, seq_len=4096)`.

    `model`, `cluster` and `system` are each a name, a file's path, or a Model, Cluster or System.
    dp is `gpus` divided by tp x cp x pp.  `sp` None means on if tp > 1.
    """

    model: Annotated[str | Model, Fact(metavar="M", column="own")]
    """The model has this name, or is described in this YAML file or Hugging Face config.json."""
    cluster: Annotated[str | Cluster, Fact(metavar="C", column="own")]
    """The cluster has this name, or is described in this YAML file."""
    system: Annotated[str | System, Fact(metavar="Y", column="own")]
    """The software stack has this name, or is described in this YAML file."""
    gpus: Annotated[PositiveInt, Fact(metavar="N", column="own")]
    """The job runs on this many GPUs."""
    work: Work
    degrees: Degrees
    stack: StackChoice = StackChoice()

    if TYPE_CHECKING:

        def __init__(self, **facts: Any) -> None:
            """For type checkers: the metaclass sorts the keywords into parts."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value of a wrong type or range: `gpus="8"`, `tp=0`."""
        if wrong := wrong_field(self, Job):
            raise ConfigError("", *wrong)

    def changed(self, **facts: Any) -> Self:
        """A copy of the job in which some facts have other values."""
        return type(self)(**{**flat(self), **facts})

    def workload(self, model: Model) -> Workload:
        """The job's workload for the loaded `model`."""
        return Workload(model=model, **flat(self.work))

    @classmethod
    def at(cls, layout: Layout, **others: Any) -> Self:
        """The job with the degrees of a layout; `others` are all other facts."""
        return cls(**degrees(layout), **others)

    @property
    def layout(self) -> Layout:
        """The layout; LayoutError if tp x tp_columns x cp x pp does not divide `gpus`."""
        asked = self.degrees
        ranks = asked.tp * asked.tp_columns * asked.cp * asked.pp
        dp, rest = divmod(self.gpus, ranks)
        if rest:
            near = max(1, round(self.gpus / ranks)) * ranks
            raise LayoutError(
                f"gpus {self.gpus} must be a multiple of tp x cp x pp = "
                f"{asked.tp * asked.tp_columns} x {asked.cp} x {asked.pp} = {ranks} "
                f"(for example {near})"
            )
        sp = asked.tp > 1 if asked.sp is None else asked.sp
        return Layout(**{**flat(asked), "dp": dp, "sp": sp})

    def to_arguments(self) -> list[str]:
        """The command-line options of this job; options at their default are left out.

        ConfigError if the model, cluster or system is an object without a name.
        """
        words, values = [], flat(self)
        for field in options():
            value = values[field.name]
            if isinstance(value, Struct):
                why = "a command line cannot express an object; pass a name or a file"
                raise ConfigError("", field.name, why)
            if isinstance(value, bool):
                words += [flag(field.name)] if value != is_switched_off(field) else []
            elif field.required or value != field.default:
                words += [flag(field.name), str(value)]
        return words


@cache
def options() -> tuple[FieldInfo, ...]:
    """The facts of a job in the order of their options: required ones first, then those of
    degrees, stack and work."""
    known = facts(Job)
    names = [name for name, one in known.items() if one.required]
    names += [name for part in (Degrees, StackChoice, Work) for name in facts(part)]
    return tuple(known[name] for name in dict.fromkeys(names))


def is_switched_off(field: FieldInfo) -> bool:
    """Whether the option of a boolean fact turns it off, as --no-sp does."""
    return fact(field).option.startswith("--no-")


def flag(name: str) -> str:
    """The command-line option of a fact."""
    known = facts(Job).get(name)
    return (known and fact(known).option) or f"--{name.replace('_', '-')}"


def degrees(layout: Layout) -> dict[str, Any]:
    """The facts of a job (`gpus` and Degrees) that a layout determines."""
    return {"gpus": layout.gpus, **{name: getattr(layout, name) for name in facts(Degrees)}}
