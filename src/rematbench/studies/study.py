"""A study file: workloads, their candidate layouts, and questions to ask of methods on them.

A suite runs every method at one layout.  A study asks what papers claim beside a step time (the
longest sequence, the bytes of one operator, what an allocator wastes) and lets every method of a
question have the same candidate layouts, so that best can be set against best.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from rematbench.choose.outcome import make_problem
from rematbench.problem import AttentionKind, Problem
from rematbench.runs.suite import Variant
from rematbench.spec.configfile import (
    ConfigError,
    closest,
    convert,
    read_mapping,
    require_known,
    require_unique,
)
from rematbench.spec.layout import Layout, LayoutError, ZeroStage
from rematbench.workload import PositiveInt, Precision

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


class Degrees(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One candidate layout; `dp` is derived from the workload's GPUs."""

    tp: PositiveInt = 1
    sp: bool = True
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    ulysses: PositiveInt = 1
    zero_stage: ZeroStage = 1
    micro_batch: PositiveInt = 1

    @property
    def label(self) -> str:
        """What differs from one rank with micro-batch 1: `tp 4, pp 2, micro-batch 8`."""
        names = ("tp", "cp", "pp", "vpp", "ulysses", "micro_batch")
        degrees = {name: getattr(self, name) for name in names}
        found = [f"{key.replace('_', '-')} {value}" for key, value in degrees.items() if value > 1]
        return ", ".join([*found, f"zero {self.zero_stage}"])


class StudyWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a cluster, with the layouts that every method may choose from.

    `why` says what it stands for and where its numbers come from.
    """

    name: str
    why: str
    model: str
    cluster: str
    system: str
    gpus: PositiveInt
    seq_len: PositiveInt
    global_batch: PositiveInt = 1
    precision: Precision = "bf16"
    attention: AttentionKind = "flash"
    layouts: tuple[Degrees, ...] = (Degrees(),)

    def problem(self, degrees: Degrees, seq_len: int = 0) -> Problem:
        """The problem at one layout (and another sequence length); LayoutError if a rule breaks."""
        ranks = degrees.tp * degrees.cp * degrees.pp
        if self.gpus % ranks:
            raise LayoutError(f"gpus {self.gpus} must be a multiple of tp x cp x pp = {ranks}")
        own = asdict(degrees) | {"sp": degrees.sp and degrees.tp > 1}
        layout = Layout(**own, dp=self.gpus // ranks, global_batch=self.global_batch)
        return make_problem(
            model=self.model,
            cluster=self.cluster,
            system=self.system,
            layout=layout,
            seq_len=seq_len or self.seq_len,
            precision=self.precision,
            attention=self.attention,
        )


class Contender(Variant, frozen=True, kw_only=True):
    """A method with settings; `fewest` names a whole-number setting that is made as small as the
    device allows (from 1 to the layers of a chunk), as a user of Megatron's flags would."""

    fewest: str = ""


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to ask of methods on workloads (all of the study if none is named).

    `granularity` (tokens) is the step of a search for a sequence length, `limit` its end.
    """

    ask: Ask
    workloads: tuple[str, ...] = ()
    methods: tuple[Contender, ...]
    granularity: PositiveInt = 1024
    limit: PositiveInt = 1 << 22


class Study(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one file asks."""

    name: str
    workloads: tuple[StudyWorkload, ...]
    questions: tuple[Question, ...]

    def of(self, question: Question) -> tuple[StudyWorkload, ...]:
        """The workloads that a question is asked about."""
        chosen = question.workloads or tuple(w.name for w in self.workloads)
        return tuple(w for w in self.workloads if w.name in chosen)


def load_study(path: Path) -> Study:
    """A study from YAML; an unknown key, a wrong type or name is an error with its path."""
    label = str(path)
    study = convert(read_mapping(path, label), Study, label)
    names = [workload.name for workload in study.workloads]
    require_unique(names, label, "workloads")
    for question in study.questions:
        where = (label, f"questions: {question.ask}", "workload")
        require_known(question.workloads, names, where)
    return study


def narrowed(study: Study, workload: str, method: str) -> Study:
    """The study with one workload or one method's label only (empty: all); ConfigError for a name
    that it does not have."""
    names = [w.name for w in study.workloads]
    labels = [m.label for question in study.questions for m in question.methods]
    for option, given, known in (("--workload", workload, names), ("--method", method, labels)):
        if given and given not in known:
            listing = ", ".join(dict.fromkeys(known))
            text = f"{given!r} is not in study {study.name}{closest(given, known)} ({listing})"
            raise ConfigError("", option, text)
    questions = [
        replace(
            question,
            workloads=tuple(w.name for w in study.of(question) if workload in ("", w.name)),
            methods=tuple(m for m in question.methods if method in ("", m.label)),
        )
        for question in study.questions
    ]
    return replace(study, questions=tuple(q for q in questions if q.workloads and q.methods))


def simulate_command(workload: StudyWorkload, degrees: Degrees, method: Variant) -> str:
    """The command that simulates one cell."""
    plain = Degrees()
    words = ["rematbench", "simulate", method.method]
    for key in ("model", "cluster", "system", "gpus", "seq_len", "global_batch"):
        words += [f"--{key.replace('_', '-')}", str(getattr(workload, key))]
    for key in ("tp", "cp", "pp", "vpp", "ulysses", "micro_batch"):
        if getattr(degrees, key) != getattr(plain, key):
            words += [f"--{key.replace('_', '-')}", str(getattr(degrees, key))]
    if degrees.zero_stage != plain.zero_stage:
        words += ["--zero", str(degrees.zero_stage)]
    if degrees.tp > 1 and not degrees.sp:
        words.append("--no-sp")
    for key, default in (("attention", "flash"), ("precision", "bf16")):
        if getattr(workload, key) != default:
            words += [f"--{key}", getattr(workload, key)]
    settings: dict[str, Any] = method.settings
    for key, value in settings.items():
        words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return shlex.join(words)
