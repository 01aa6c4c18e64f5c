"""The grand matrix as declared in a suite file: models x lengths x clusters x arms."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rematbench.inputs.configfile import ConfigError, convert, require_among, require_unique
from rematbench.inputs.job import Job
from rematbench.inputs.system import AttentionChoice, ZeroStage
from rematbench.plan import Fraction
from rematbench.plugins.registry import Composition, Registry, Value
from rematbench.workload import PositiveInt, Precision
from rematbench.worlds.records.suite import load_suite


class Work(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model and its number of GPUs, which are equal for all arms, lengths and clusters."""

    model: str
    gpus: PositiveInt


class Arm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a cell: a composed method with settings, and a name for the tables.

    `of`: the origin of the method (a paper, or a stack whose policy is simulated).  `seq_lens`: the
    lengths at which the arm runs (none: all).  Planners are tried only at the cell's one layout,
    because no bound on their plan is known before it is solved.
    """

    name: str
    method: str
    of: str
    settings: dict[str, Any] = {}
    seq_lens: tuple[PositiveInt, ...] = ()

    def resolved(self, registry: Registry) -> Composition:
        """The method with its settings; MethodError for an unknown method or a wrong setting."""
        settings: dict[str, Value] = dict(self.settings)
        return registry.resolve(self.method, settings)


class MatrixSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The declaration of a matrix.

    The fastest layout of the arm `baseline` is the one layout of a cell in the *same layout* table.
    Layouts with at least `same_layout_pp` pipeline ranks go first (`best.Answers.one_layout`).
    `within`: the gap that the searches prove, as a share of the best step.
    """

    system: str
    tokens_per_step: PositiveInt
    precision: Precision = "bf16"
    attention: AttentionChoice = "flash"
    micro_batch: PositiveInt = 1
    zero_stage: ZeroStage = 1
    works: tuple[Work, ...]
    clusters: tuple[str, ...]
    seq_lens: tuple[PositiveInt, ...]
    within: Fraction
    baseline: str
    same_layout_pp: PositiveInt
    arms: tuple[Arm, ...]

    def problem(self, seq_len: int, **others: Any) -> Job:
        """The problem of a cell.  `others`: its model, cluster, GPUs and degrees, and values that
        replace declared ones."""
        same = ("system", "precision", "attention", "micro_batch", "zero_stage")
        own = {key: getattr(self, key) for key in same}
        own["global_batch"] = self.tokens_per_step // seq_len
        return Job(**{**own, "seq_len": seq_len, **others})

    def restricted(self, models: Collection[str], seq_lens: Collection[int]) -> "MatrixSpec":
        """The matrix of these models and lengths (empty: all); ConfigError for a value that the
        matrix does not declare."""
        works = {work.model: work for work in self.works}
        require_among(models, [*works], ("", "matrix: models", "model"))
        known = [str(length) for length in self.seq_lens]
        require_among(map(str, seq_lens), known, ("", "matrix: seq_lens", "length"))
        return replace(
            self,
            works=tuple(work for name, work in works.items() if not models or name in models),
            seq_lens=tuple(n for n in self.seq_lens if not seq_lens or n in seq_lens),
        )

    def all_arms(self, registry: Registry) -> tuple[Arm, ...]:
        """The declared arms, then an arm for each discovered method that no declared arm uses,
        except methods that place training states or change the order of passes.  ConfigError if a
        declared arm has the name of an added method."""
        plain = {arm.method for arm in self.arms}
        entries = registry.methods.items()
        more = [name for name, one in entries if name not in plain and not one.waits]
        for arm in self.arms:
            if arm.name in more:
                raise ConfigError(
                    "",
                    f"arms: {arm.name}",
                    f"is the name of a method, so it cannot name {arm.method}",
                )
        return (*self.arms, *(Arm(name=name, method=name, of="methods/") for name in more))

    def check(self, label: str) -> None:
        """ConfigError for an error in the declaration that its types do not exclude."""
        names = [arm.name for arm in self.arms]
        require_unique(names, label, "arms")
        require_among([self.baseline], names, (label, "baseline", "arm"))
        for length in self.seq_lens:
            if self.tokens_per_step % length:
                problem = f"{self.tokens_per_step} is not a multiple of seq_len {length}"
                raise ConfigError(label, "tokens_per_step", problem)


def load_matrix(path: Path) -> MatrixSpec:
    """The matrix of a suite file; ConfigError if the suite declares none, or a wrong one."""
    declared = load_suite(path).matrix
    if declared is None:
        raise ConfigError(str(path), "matrix", "this suite declares no matrix")
    spec = convert(declared, MatrixSpec, f"{path}: matrix")
    spec.check(f"{path}: matrix")
    return spec
