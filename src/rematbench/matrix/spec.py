"""The grand matrix as declared in a suite file: models x lengths x clusters x arms."""

from typing import Any

from msgspec import Struct

from rematbench.plan import Fraction
from rematbench.plugins.registry import Composition, Registry, Value
from rematbench.problem import AttentionKind
from rematbench.workload import PositiveInt, Precision


class Work(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and the GPUs that train it, the same for every arm, length and cluster."""

    model: str
    gpus: PositiveInt


class Grid(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The declared candidate layouts: a product of degrees, cut by rules, the rest ranked by a
    closed-form estimate.

    `layers_per_chunk`: layers of an interleaved chunk (0: one chunk per rank).  Tokens of a
    micro-batch on one rank lie between `least_tokens` and `most_tokens`.  Methods keep different
    shares of the saved tensors: for each of `kept_shares` the `fastest` that should fit are tried.
    """

    tp: tuple[PositiveInt, ...]
    cp: tuple[PositiveInt, ...]
    pp: tuple[PositiveInt, ...]
    layers_per_chunk: tuple[int, ...]
    least_tokens: PositiveInt
    most_tokens: PositiveInt
    kept_shares: tuple[Fraction, ...]
    fastest: PositiveInt


class Arm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a cell: a composed method with settings, under the name that tables use.

    `of`: whose it is (a paper, or a stack whose policy this is, simulated here).  `seq_lens`: the
    lengths it runs at (none: all); `one_layout`: it is tried at the cell's one layout only.  Both
    are for planners too slow for more.
    """

    name: str
    method: str
    of: str
    settings: dict[str, Any] = {}
    seq_lens: tuple[PositiveInt, ...] = ()
    one_layout: bool = False

    def resolved(self, registry: Registry) -> Composition:
        """The method with its settings; MethodError where there is none."""
        settings: dict[str, Value] = dict(self.settings)
        return registry.resolve(self.method, settings)


class MatrixSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the matrix declares.

    `baseline` is the arm whose fastest layout, among those with at least `same_layout_pp` pipeline
    ranks where there are any, is the one layout of the *same layout* table.
    """

    system: str
    tokens_per_step: PositiveInt
    precision: Precision = "bf16"
    attention: AttentionKind = "flash"
    micro_batch: PositiveInt = 1
    zero_stage: int = 1
    works: tuple[Work, ...]
    clusters: tuple[str, ...]
    seq_lens: tuple[PositiveInt, ...]
    layouts: Grid
    baseline: str
    same_layout_pp: PositiveInt
    arms: tuple[Arm, ...]

    def all_arms(self, registry: Registry) -> tuple[Arm, ...]:
        """The declared arms, then every discovered method that no arm runs alone."""
        plain = {arm.method for arm in self.arms}
        more = [name for name in registry.methods if name not in plain]
        return (*self.arms, *(Arm(name=name, method=name, of="methods/") for name in more))

    def problems(self) -> list[str]:
        """What is wrong with the declaration beyond its types, each one line."""
        names = [arm.name for arm in self.arms]
        twice = sorted({name for name in names if names.count(name) > 1})
        found = [f"arms: name {name!r} is given twice" for name in twice]
        found += [f"baseline: no arm {self.baseline!r}"] if self.baseline not in names else []
        found += [
            f"tokens_per_step {self.tokens_per_step} is no multiple of seq_len {length}"
            for length in self.seq_lens
            if self.tokens_per_step % length
        ]
        return found
