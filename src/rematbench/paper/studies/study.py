"""A study file: workloads with candidate layouts, and the questions that methods answer on them.

A suite runs every method at one layout. A study makes the numbers of claims beyond step times (the
longest sequence, the bytes of one operator, the waste of an allocator). It gives every method of a
question the same candidate layouts, so that best layouts are compared with best layouts.
"""

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from rematbench.host.declared import Part, facts, flat
from rematbench.inputs.configfile import convert, read_mapping, require_among, require_unique
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Degrees
from rematbench.workload import PositiveInt
from rematbench.worlds.records.suite import NamedProblem, Variant

Ask = Literal[
    "run",
    "longest",
    "hidden_from",
    "attention_share",
    "saved",
    "parts",
    "fragmentation",
    "estimate",
]


class OpenDegrees(Degrees, Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The degrees of a workload; its layouts may set the global batch in place of these."""

    global_batch: PositiveInt = 1


class StudyWorkload(NamedProblem, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A problem with the layouts that every method may choose from. A layout lists only the fields
    that differ from the problem; `why` also names the source of the numbers."""

    degrees: OpenDegrees
    layouts: tuple[dict[str, Any], ...] = ({},)

    def at_layouts(self, label: str = "") -> tuple[NamedProblem, ...]:
        """The problem at each layout. ConfigError, with the name of the file `label`, for a key
        that is not a field of a problem."""
        own = {name: value for name, value in flat(self).items() if name in facts(NamedProblem)}
        return tuple(convert({**own, **fields}, NamedProblem, label) for fields in self.layouts)


def layout_label(spec: Job) -> str:
    """The degrees above 1 and the ZeRO stage in words: `tp 4, pp 2, micro-batch 8, zero 1`."""
    names = ("tp", "cp", "pp", "vpp", "ulysses", "micro_batch")
    degrees = {name.replace("_", "-"): getattr(spec.degrees, name) for name in names}
    found = [f"{key} {value}" for key, value in degrees.items() if value > 1]
    return ", ".join([*found, f"zero {spec.degrees.zero_stage}"])


class Contender(Variant, frozen=True, kw_only=True):
    """A method with settings. `fewest` names a whole-number setting that is made as small as the
    device allows (from 1 to the layers of a chunk), as a user of Megatron's flags would choose
    it."""

    fewest: str = ""


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that methods answer on workloads (on all workloads of the study if none is named).
    `granularity` (tokens) is the step of a search for a sequence length, `limit` the longest length
    that the search tries."""

    ask: Ask
    workloads: tuple[str, ...] = ()
    methods: tuple[Contender, ...]
    granularity: PositiveInt = 1024
    limit: PositiveInt = 1 << 22


class Study(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of one study file: workloads and questions."""

    name: str
    workloads: tuple[StudyWorkload, ...]
    questions: tuple[Question, ...]

    def of(self, question: Question) -> tuple[StudyWorkload, ...]:
        chosen = question.workloads or tuple(w.name for w in self.workloads)
        return tuple(w for w in self.workloads if w.name in chosen)


def load_study(path: Path) -> Study:
    """The study of a YAML file; ConfigError with the path for a wrong key, type or name."""
    label = str(path)
    study = convert(read_mapping(path, label), Study, label)
    names = [workload.name for workload in study.workloads]
    require_unique(names, label, "workloads")
    for workload in study.workloads:
        workload.at_layouts(f"{label}: {workload.name}: layouts")
    for question in study.questions:
        where = (label, f"questions: {question.ask}", "workload")
        require_among(question.workloads, names, where)
    return study
