"""The options that describe one run, shared by many commands."""

import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from msgspec import Struct
from msgspec.structs import fields, replace
from typer import Argument, BadParameter, Option

from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Job
from rematbench.evidence.peaks import leaving_reserve
from rematbench.host.console import CommandError
from rematbench.host.table import GIB
from rematbench.inputs.problemspec import ProblemSpec, flag
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.worlds.packages.process import baselines

DEFAULT_SYSTEM = "megatron-core-0.16"
MAX_TIMEOUT_S = 7 * 86_400.0
"""One week in seconds; the milliseconds of much longer times overflow torch's timeouts."""


Timeout = Annotated[
    float,
    Option(min=1, max=MAX_TIMEOUT_S, help="Give up after this many seconds without a result."),
]


def percents(text: str | float, maximum: float = math.inf) -> float:
    """A percentage from 0 to `maximum`, with or without a percent sign: `1`, `1%`.
    BadParameter for any other text."""
    try:
        number = float(str(text).strip().removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number <= maximum or number == math.inf:
        allowed = "of 0 or more" if maximum == math.inf else f"from 0 to {maximum:g}"
        raise BadParameter(f"{text!r} is not a percentage {allowed}, as 1 or 1%")
    return number


Within = Annotated[
    float,
    Option(
        parser=partial(percents, maximum=50),
        metavar="P",
        help="Stop when the best plan is proved to within this percent.",
    ),
]

OPTIONS = {
    "model": Option(
        metavar="M",
        show_default=False,
        help="Model name, YAML file or Hugging Face config.json.",
    ),
    "cluster": Option(metavar="C", show_default=False, help="Cluster name or YAML file."),
    "system": Option(metavar="Y", help="Software stack: name or YAML file."),
    "gpus": Option(min=1, metavar="N", show_default=False, help="Number of GPUs."),
    "seq_len": Option(min=1, metavar="S", show_default=False, help="Tokens."),
    "document_len": Option(
        min=0, metavar="D", help="Mean tokens of packed documents; attention inside each (0: none)."
    ),
    "global_batch": Option(
        min=1,
        metavar="B",
        show_default=False,
        help="Sequences per optimizer step, over all GPUs.",
    ),
    "micro_batch": Option(min=1, metavar="b", help="Sequences per micro-batch."),
    "tp": Option(min=1, help="Tensor parallel ranks."),
    "cp": Option(min=1, help="Context parallel ranks."),
    "pp": Option(min=1, help="Pipeline parallel ranks."),
    "vpp": Option(min=1, help="Model chunks per pipeline rank."),
    "ulysses": Option(min=1, help="Ulysses sequence-parallel ranks, taken from dp."),
    "shard_degree": Option(
        min=0, help="Ranks that share sharded states (0: all peers); replicas between (HSDP)."
    ),
    "ep": Option(min=1, help="Expert parallel ranks, of those of tp x cp x dp."),
    "etp": Option(min=1, help="Tensor parallel ranks inside an expert (none: tp)."),
    "imbalance": Option(
        min=1.0,
        metavar="F",
        help="Tokens of the experts of the worst rank, over balanced ones.",
    ),
    "capacity_factor": Option(
        min=0.0,
        metavar="F",
        help="Most tokens that an expert takes, over balanced ones; the others are dropped "
        "(0: no limit).",
    ),
    "expert_padding": Option(help="Fill each expert up to its capacity."),
    "ep_overlap": Option(
        help="Experts' exchanges beside another micro-batch; replaces the stack's value."
    ),
    "zero_stage": Option("--zero", min=0, max=3, help="ZeRO stage (3: as FSDP full shard)."),
    "sp": Option("--no-sp", help="Turn off sequence parallelism, which tp uses by default."),
    "attention": Option(help="Attention kernel."),
    "precision": Option(help="Compute precision."),
    "hbm_bytes": Option(
        min=1,
        max=1 << 60,
        metavar="H",
        help="Device memory in bytes; replaces the cluster's value.",
    ),
    "optimizer": Option(help="Where optimizer states live; replaces the stack's value."),
    "parameters": Option(help="Home of the parameters, instead of the stack's (ZeRO 3)."),
}
"""The command-line option of each field of a ProblemSpec."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one run as typed.  `problem` has the fields of the ProblemSpec; every other
    field is an option of the same name."""

    problem: dict[str, Any]
    method: Annotated[
        str,
        Argument(
            metavar="METHOD", help="A method, a composition a+b, or a row name from `compare`."
        ),
    ]
    partition: Annotated[
        str,
        Option(metavar="9,8,..", help="Number of layers in each of the pp x vpp chunks, in order."),
    ] = ""
    gpipe: Annotated[
        bool, Option("--gpipe", help="All forwards before all backwards, instead of 1F1B.")
    ] = False
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Set a parameter of the method (repeatable)."),
    ] = None
    reserve_gib: Annotated[
        float | None,
        Option(min=0, metavar="G", help="GiB that tuned plans leave free (else: by peak errors)."),
    ] = None
    methods: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Folder or file with more methods (repeatable)."),
    ] = None


class Request(Struct, frozen=True, kw_only=True):
    """One run, ready to plan: a method on a job.  `text`: the method as typed; `settings`: the
    options for its settings, as typed."""

    job: Job
    method: Composition
    text: str = ""
    settings: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        """The problem that the method plans."""
        return self.job.problem

    @property
    def base(self) -> Plan:
        """The plan that the method changes."""
        return self.job.base

    @property
    def run_with(self) -> str:
        """The shell command of this run."""
        return self.job.run_with(self.text or self.method.name, *self.settings)


def takes_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions; it receives them as its first argument."""
    return _takes(command, {})


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions without a method's; the method is keep_all."""
    return _takes(command, {"method": "keep_all", "settings": None})


def _takes(command: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(RunOptions, include_extras=True)
    kept = [f for f in dataclasses.fields(RunOptions) if f.name not in {"problem", *fixed}]

    @wraps(command)
    def run(**given: Any) -> None:
        problem = {name: given.pop(name) for name in OPTIONS}
        problem["sp"] = False if problem["sp"] else None
        typed = {f.name: given.pop(f.name) for f in kept}
        command(RunOptions(problem=problem, **typed, **fixed), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    options = [
        inspect.Parameter(
            f.name,
            keyword,
            annotation=hints[f.name],
            default=empty if f.default is dataclasses.MISSING else f.default,
        )
        for f in kept
    ]
    own_hints = get_type_hints(command, include_extras=True)
    extra = [p.replace(kind=keyword, annotation=own_hints[p.name]) for p in own]
    signature = inspect.Signature([*_problem_options(keyword), *options, *extra])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del run.__wrapped__  # else inspect shows the command's own signature
    return run


def _name_broken(folders: list[Path]) -> None:
    """Name on stderr the files of the user's folders that define no method, with the reason."""
    for path, reason in discover(folders).broken.items():
        sys.stderr.write(f"unavailable: {path}: {reason}\n")


def _problem_options(keyword: Any) -> Iterator[inspect.Parameter]:
    """The fields of a ProblemSpec as options.  A command may fill in a required field, so None
    stands for a required field that is not given."""
    named = {"model": str, "cluster": str, "system": str, "zero_stage": int, "sp": bool}
    hints = get_type_hints(ProblemSpec) | named
    for field in fields(ProblemSpec):
        default = None if field.required else field.default
        default = DEFAULT_SYSTEM if field.name == "system" else default
        kind = hints[field.name] if default is not None else hints[field.name] | None
        described = copy.copy(OPTIONS[field.name])
        if (
            field.required and default is None
        ):  # typer says so itself only of an option without a default
            described.help = f"{(described.help or '').removesuffix('.')} (required)."
        option = Annotated[kind, described]  # type: ignore[valid-type]  # typer reads it
        yield inspect.Parameter(field.name, keyword, annotation=option, default=default)


def request(options: RunOptions, *, name_broken: bool = True) -> Request:
    """Load names and files and derive dp; CommandError and the loaders' errors are one line each.
    With `name_broken`, stderr names the files of the user's folders that define no method."""
    given = options.problem
    missing = [flag(f.name) for f in fields(ProblemSpec) if f.required and not given.get(f.name)]
    if missing:
        raise CommandError(f"missing option: {', '.join(missing)}")
    spec = ProblemSpec(**given)
    problem = _with_reserve(make_problem(spec), options.reserve_gib)
    method = _method(options, problem)
    base = problem.base_plan
    if options.partition:
        base = replace(base, partition=_partition(options.partition, problem))
    if options.gpipe:
        if problem.layout.vpp > 1:
            raise CommandError(f"--gpipe needs --vpp 1, but --vpp is {problem.layout.vpp}")
        base = replace(base, schedule="gpipe")
    words = (*spec.to_arguments(), *_words(options))
    if options.methods and name_broken:
        _name_broken(options.methods)
    settings = tuple(word for text in options.settings or () for word in ("--set", text))
    job = Job(problem=problem, base=base, words=words)
    return Request(job=job, method=method, text=options.method, settings=settings)


def _words(options: RunOptions) -> Iterator[str]:
    """The given options that are no fields of a ProblemSpec, as typed."""
    if options.partition:
        yield from ("--partition", options.partition)
    if options.gpipe:
        yield "--gpipe"
    if options.reserve_gib is not None:
        yield from ("--reserve-gib", f"{options.reserve_gib:g}")
    for folder in options.methods or ():
        yield from ("--methods", str(folder))


def _with_reserve(problem: Problem, reserve_gib: float | None) -> Problem:
    """The problem with `reserve_bytes`, the device bytes that tuned plans leave free; CommandError
    if more than the device has."""
    if reserve_gib is None:
        return leaving_reserve(problem)
    usable, nbytes = problem.usable_bytes, round(reserve_gib * GIB)
    if nbytes >= usable:
        most = f"the device has {usable / GIB:.2f} GiB"
        raise CommandError(f"--reserve-gib {reserve_gib:g}: {most}")
    return dataclasses.replace(problem, reserve_bytes=nbytes)


def _method(options: RunOptions, problem: Problem) -> Composition:
    """The requested method."""
    found = discover(options.methods or ())
    return found.resolve(options.method, settings_of(options.settings), problem)


def refuse_baseline(text: str) -> None:
    """CommandError for a baseline's policy, which the package executes and not our executor."""
    name = text.partition(":")[0].strip()
    if name in baselines():
        raise CommandError(
            f"{name} is a baseline, not a method: `rematbench baseline run {name}` executes it, "
            f"`rematbench trace {name}` traces it"
        )


def settings_of(texts: list[str] | None) -> dict[str, str]:
    """The settings in KEY=VALUE texts, by key; CommandError for another form."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise CommandError(f"--set {text!r}: expected KEY=VALUE")
        if key.strip() in found:
            raise CommandError(f"--set {key.strip()}: given twice")
        found[key.strip()] = value.strip()
    return found


def _partition(text: str, problem: Problem) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layers per chunk in pipeline order -> partition[rank][chunk] of global layer indices."""
    lay, layers = problem.layout, problem.workload.model.num_layers
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise CommandError(f"--partition {text!r}: expected whole numbers above 0 between commas")
    sizes = [int(word) for word in words]
    if len(sizes) != lay.num_chunks or sum(sizes) != layers:
        raise CommandError(
            f"--partition {text!r}: got {len(sizes)} chunks with {sum(sizes)} layers in total; "
            f"expected pp x vpp = {lay.num_chunks} chunks with {layers} layers in total"
        )
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    chunks = [tuple(range(a, b)) for a, b in pairwise(bounds)]
    return tuple(tuple(chunks[c * lay.pp + r] for c in range(lay.vpp)) for r in range(lay.pp))
