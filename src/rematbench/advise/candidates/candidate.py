"""Candidates: methods in the order in which they are applied, with settings or an open scalar."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir
from rematbench.plugins.policies import LABEL, Policy
from rematbench.plugins.registry import IDENTITY, MethodEntry, method_text
from rematbench.workload import PositiveInt

Scale = Literal["share", "layers", "pieces"]


class Scalar(Struct, frozen=True):
    """A parameter that the search raises until a plan fits.  `share`: a fraction, raised from 0 to
    1 in `steps` steps.  `layers`: a number of layers per chunk.  Seconds and bytes of a pass are
    linear in both.  `pieces`: the declared `values`; more pieces cost seconds and free bytes."""

    scale: Scale
    steps: int = 0
    values: tuple[str, ...] = ()

    def count(self, layers: int) -> int:
        """The number of values that the scalar has for a chunk of `layers` layers."""
        return {"share": self.steps, "layers": layers, "pieces": len(self.values)}[self.scale]


class Variant(Struct, frozen=True):
    """One method of a candidate.  `text`: the method with its settings; `text.format` fills in the
    value of an open scalar.  `composes`: false for policies (as in `compare`).  `cuts`: whether the
    method computes in pieces; `moves`: whether it reorders passes, so that its plan may be faster
    than the plan that it extends."""

    method: str
    text: str
    scalar: Scalar | None = None
    composes: bool = True
    cuts: bool = False
    moves: bool = False

    def at(self, step: int) -> str:
        """The method's text at a step of its scalar (from 1 on)."""
        if self.scalar is None:
            return self.text
        match self.scalar.scale:
            case "share":
                return self.text.format(step / self.scalar.steps)
            case "pieces":
                return self.scalar.values[min(step, len(self.scalar.values)) - 1]
        return self.text.format(step)


def of_policy(policy: Policy) -> Variant:
    """A policy as a variant; the number of layers that it tunes, if any, is the scalar."""
    if policy.smallest:
        return Variant(policy.method, f"{policy.name} {{}}", Scalar("layers"), composes=False)
    return Variant(policy.method, policy.name, composes=False)


def of_pieces(entry: MethodEntry) -> Variant:
    """A method that computes in pieces, as a variant whose scalar is the method's grid."""
    values = tuple(method_text(entry, each) for each in entry.grid)
    return Variant(entry.name, entry.name, Scalar("pieces", values=values), cuts=True)


class Candidate(Struct, frozen=True):
    """Methods in the order in which they are applied; a candidate without methods keeps every
    activation.  The *share* is the part, at most one, with a scalar in which costs are linear."""

    parts: tuple[Variant, ...] = ()

    @property
    def share(self) -> Variant | None:
        """The part whose scalar is a share or a number of layers; None without such a part."""
        result = (p for p in self.parts if p.scalar is not None and p.scalar.scale != "pieces")
        return next(result, None)

    @property
    def moves(self) -> bool:
        """Whether a part reorders passes."""
        return any(part.moves for part in self.parts)

    @property
    def pieces(self) -> Variant | None:
        """The part that computes in pieces; None without such a part."""
        result = (p for p in self.parts if p.scalar is not None and p.scalar.scale == "pieces")
        return next(result, None)

    def without(self, part: Variant) -> "Candidate":
        return Candidate(tuple(item for item in self.parts if item != part))

    @property
    def in_one_piece(self) -> "Candidate":
        return self.without(self.pieces) if self.pieces else self

    @property
    def most_pieces(self) -> int:
        """The number of values of the candidate's pieces; 1 for a candidate without pieces."""
        scalar = self.pieces.scalar if self.pieces else None
        return len(scalar.values) if scalar else 1

    @property
    def whole(self) -> "Candidate":
        """The candidate without methods that compute in pieces."""
        return Candidate(tuple(part for part in self.parts if not part.cuts))

    @property
    def cutting(self) -> "Candidate":
        """The candidate with only those of its methods that compute in pieces."""
        return Candidate(tuple(part for part in self.parts if part.cuts))

    def text(self, step: int = 0, pieces: int = 1) -> str:
        """The candidate's text for `Registry.resolve`, at a step of its share and of its pieces."""
        words = (part.at(pieces if part is self.pieces else step) for part in self.parts)
        return "+".join(words) or IDENTITY


KEEP = Candidate()


class Trainer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policies that a trainer on some `stacks` offers: the configuration `keys` to paste, by
    method; `why`: the place in the trainer's source."""

    name: str
    stacks: tuple[str, ...]
    why: str
    keys: dict[str, str]


class CompareConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/compare.yaml."""

    policies: tuple[Policy, ...]
    most_methods: PositiveInt
    shown_share: Annotated[float, Meta(ge=0.0, le=1.0)]
    trainers: tuple[Trainer, ...] = ()


def load_compare() -> CompareConfig:
    """The policies and limits of config/compare.yaml."""
    data = read_mapping(data_dir("config") / "compare.yaml", LABEL)
    return convert(data, CompareConfig, LABEL)
