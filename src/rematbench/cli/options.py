"""The options that describe one run, shared by many commands."""

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields, replace
from typer import Argument, BadParameter, Option

from rematbench.advise.candidates.layouts import Fixed
from rematbench.costs.states import PARAMETER_STAGE
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import PlannedJob
from rematbench.evidence.peaks import leaving_reserve
from rematbench.host.console import CommandError
from rematbench.host.declared import fact, facts, limits, plain_type, sentences
from rematbench.host.table import GIB
from rematbench.inputs.configfile import require_among
from rematbench.inputs.job import (
    DEFAULT_SYSTEM,
    SHARDED_SYSTEM,
    Job,
    flag,
    is_switched_off,
    options,
)
from rematbench.inputs.layout import Partition, partition_of_sizes
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.workload import Trained
from rematbench.worlds.packages.process import baselines

MAX_TIMEOUT_S = 7 * 86_400.0
"""One week in seconds; the milliseconds of much longer times overflow torch's timeouts."""

STACKS = f"(Default: {DEFAULT_SYSTEM}; with --zero 3: {SHARDED_SYSTEM}.)"

Timeout = Annotated[
    float,
    Option(min=1, max=MAX_TIMEOUT_S, help="Give up after this many seconds without a result."),
]


def percents(text: str | float, maximum: float = 100) -> float:
    """A percentage from 0 to `maximum`, with or without a percent sign: `1`, `1%`.
    BadParameter for any other text."""
    try:
        number = float(str(text).strip().removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number <= maximum:
        raise BadParameter(f"{text!r} is not a percentage from 0 to {maximum:g}, such as 1 or 1%")
    return number


Within = Annotated[
    float,
    Option(
        parser=partial(percents, maximum=50),
        metavar="P",
        help="Stop when the best plan is proved to within this percent.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one run as typed.  `problem` has the facts of the Job; every other
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
        bool, Option("--gpipe", help="Run all forwards before all backwards, instead of 1F1B.")
    ] = False
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Set a parameter of the method (repeatable)."),
    ] = None
    reserve_gib: Annotated[
        float | None,
        Option(
            min=0, metavar="G", help="GiB that tuned plans leave free (default: our peaks' error)."
        ),
    ] = None
    methods: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Folder or file with more methods (repeatable)."),
    ] = None


class Request(Struct, frozen=True, kw_only=True):
    """One run, ready to plan: a method on a job.  `text`: the method as typed; `settings`: the
    options for its settings, as typed."""

    job: PlannedJob
    method: Composition
    text: str = ""
    settings: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return self.job.problem

    @property
    def base(self) -> Plan:
        return self.job.base

    @property
    def run_with(self) -> str:
        return self.job.run_with(self.text or self.method.name, *self.settings)


def takes_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions; it receives them as its first argument."""
    return _takes(command, {})


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions without a method's; the method is keep_all."""
    return _takes(command, {"method": "keep_all", "settings": None})


def takes_search(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the facts of a Job as options; it receives them as its first argument.
    Degrees that are not given are None, and the search tries their values."""
    tried = [field.name for field in fields(Fixed) if field.default is None]
    note = "The search keeps a value that is given."
    return _with_options(command, _fact_options(tried, note), lambda given: given)


def takes_facts(note: str, *without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the facts of a Job, except those in `without`, as options whose help ends with
    `note`.  It receives the facts that the user gives as its first argument."""
    every = [field.name for field in options()]
    facts = [one for one in _fact_options(every, note) if one.name not in without]

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        return _with_options(
            command,
            facts,
            lambda given: {name: value for name, value in given.items() if value is not None},
        )

    return taking


def _takes(command: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    hints = get_type_hints(RunOptions, include_extras=True)
    kept = [f for f in dataclasses.fields(RunOptions) if f.name not in {"problem", *fixed}]
    own = [_parameter(f.name, hints[f.name], f.default) for f in kept]

    def gathered(given: dict[str, Any]) -> RunOptions:
        typed = {f.name: given.pop(f.name) for f in kept}
        for field in filter(is_switched_off, options()):
            given[field.name] = False if given[field.name] else field.default
        return RunOptions(problem=given, **typed, **fixed)

    return _with_options(command, [*_fact_options(), *own], gathered)


def _with_options(
    command: Callable[..., None],
    further: Iterable[inspect.Parameter],
    gathered: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """The command with further options. Its first argument is `gathered` of their values."""
    options = list(further)

    @wraps(command)
    def run(**given: Any) -> None:
        typed = {one.name: given.pop(one.name) for one in options}
        if text := typed.pop("lora", ""):
            typed |= adapters_of(text)
        command(gathered(typed), **given)

    hints = get_type_hints(command, include_extras=True)
    later = list(inspect.signature(command).parameters.values())[1:]
    extra = [_parameter(p.name, hints[p.name], p.default) for p in later]
    signature = inspect.Signature([*options, *extra])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads the options from it
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del run.__wrapped__  # otherwise inspect shows the signature of `command`
    return run


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """An option as a parameter; `default` may be the empty mark of dataclasses or of inspect."""
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _fact_options(opened: Collection[str] = (), note: str = "") -> Iterator[inspect.Parameter]:
    """The facts of a Job as options.  A command may fill in a required fact, so None stands for a
    required fact that is not given, and for one of `opened`, whose help ends with `note`."""
    for field in options():
        described, kind, name = fact(field), plain_type(field), field.name
        least, most = limits(field)
        words, text = [described.option] if described.option else [], sentences(Job)[name]
        default = {"system": ""}.get(name, None if field.required else field.default)
        text = f"{text} {STACKS}" if name == "system" else text
        if name in opened:
            default, text = None, f"{text} {note}".strip()
            if kind is bool:
                on = flag(name).replace("--no-", "--")
                words = [f"{on}/--no-{on.removeprefix('--')}"]
        elif kind is bool:  # typer makes a switch of it
            words, default = words or [flag(name)], False
        elif field.required and default is None:  # typer adds `required` only without a default
            text = f"{text.removesuffix('.')} (required)."
        option = Option(*words, min=least, max=most, metavar=described.metavar or None, help=text)
        hint = kind | None if default is None else kind
        yield _parameter(name, Annotated[hint, option], default)
    about = (
        "Adapters in one option: rank=R,targets=T,base=B,dtype=D, or PEFT's adapter_config.json."
    )
    yield _parameter("lora", Annotated[str, Option(metavar="rank=R,..", help=about)], "")


def adapters_of(text: str) -> dict[str, Any]:
    """The facts of adapters in `rank=16,targets=q,v,base=nf4`, or in PEFT's adapter_config.json;
    CommandError for a text that is neither.  A word is a fact without its `lora_` or `_dtype`."""
    if "=" not in text:
        from rematbench.foreign.packages import read_file  # noqa: PLC0415  # its tables are large

        reading = read_file(Path(text), {})
        if reading.package != "PEFT" or reading.refused:
            wrong = reading.refused or ["expected rank=R,... or PEFT's adapter_config.json"]
            raise CommandError(f"--lora {text}: {'; '.join(wrong)}")
        return {name: one for name, one in reading.values.items() if name in facts(Trained)}
    short = {name.removeprefix("lora_").removesuffix("_dtype"): name for name in facts(Trained)}
    short |= {"dtype": "trained_dtype", **{name: name for name in facts(Trained)}}
    found: dict[str, Any] = {}
    for word in re.split(r",(?=\w+=)", text):
        key, _, value = word.partition("=")
        require_among([key.strip()], [*short], ("", "--lora", "word"))
        name = short[key.strip()]
        kind = plain_type(facts(Trained)[name])
        try:
            number = kind in (int, float, bool)
            found[name] = convert(value.strip(), kind if number else str, strict=False)
        except ValidationError as error:
            raise CommandError(f"--lora {word}: {error}") from error
    return found


def require(given: Mapping[str, Any]) -> None:
    """CommandError for required facts of a Job, except the stack, that are not given."""
    asked = [f.name for f in options() if f.required and f.name != "system"]
    if missing := [flag(name) for name in asked if not given.get(name)]:
        raise CommandError(f"missing option{'s' * (len(missing) > 1)}: {', '.join(missing)}")


def request(run: RunOptions, *, name_broken: bool = True) -> Request:
    """Load names and files and derive dp; CommandError and the loaders' errors are one line each.
    With `name_broken`, stderr names the files of the user's folders that define no method."""
    require(run.problem)
    stage = run.problem.get("zero_stage")
    usual = SHARDED_SYSTEM if stage == PARAMETER_STAGE else DEFAULT_SYSTEM
    spec = Job(**{**run.problem, "system": run.problem.get("system") or usual})
    problem = _with_reserve(make_problem(spec), run.reserve_gib)
    found = discover(run.methods or ())
    method = found.resolve(run.method, settings_of(run.settings), problem)
    base = problem.base_plan
    if run.partition:
        base = replace(base, partition=_partition(run.partition, problem))
    if run.gpipe:
        if problem.layout.vpp > 1:
            raise CommandError(f"--gpipe needs --vpp 1, but --vpp is {problem.layout.vpp}")
        base = replace(base, schedule="gpipe")
    words = (*spec.to_arguments(), *_words(run))
    broken = discover(run.methods).broken if run.methods and name_broken else {}
    for path, reason in broken.items():
        sys.stderr.write(f"unavailable: {path}: {reason}\n")
    settings = tuple(word for text in run.settings or () for word in ("--set", text))
    job = PlannedJob(problem=problem, base=base, words=words)
    return Request(job=job, method=method, text=run.method, settings=settings)


def _words(options: RunOptions) -> Iterator[str]:
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


def refuse_baseline(text: str) -> None:
    """CommandError for a baseline's policy, because its package executes it, not our executor."""
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


def _partition(text: str, problem: Problem) -> Partition:
    """Layers per chunk in pipeline order -> partition[rank][chunk] of global layer indices."""
    lay, model = problem.layout, problem.workload.model
    layers, words = model.num_layers, text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise CommandError(f"--partition {text!r}: expected whole numbers between commas")
    sizes = [int(word) for word in words]
    if len(sizes) != lay.num_chunks or sum(sizes) != layers or not all(sizes[1:-1]):
        raise CommandError(
            f"--partition {text!r}: got {len(sizes)} chunks with {sum(sizes)} layers in total; "
            f"expected pp x vpp = {lay.num_chunks} chunks with {layers} layers in total, of which "
            "the first (embedding) and the last (loss) may have none"
        )
    return partition_of_sizes(sizes, lay.pp, model.mtp_layers)
