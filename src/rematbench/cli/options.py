"""The options that describe one run, shared by plan, simulate and timeline."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from msgspec import Struct
from msgspec.structs import replace
from typer import Argument, Option

from rematbench.choose.outcome import make_problem
from rematbench.host.console import CommandError
from rematbench.packages.process import baselines
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import AttentionKind, Problem
from rematbench.spec.layout import Layout, ZeroStage
from rematbench.workload import Precision

MOST_S = 7 * 86_400.0
"""A week; far longer times are more milliseconds than torch's timeouts can count."""


Timeout = Annotated[
    float, Option(min=1, max=MOST_S, help="Seconds without a result until given up.")
]
REQUIRED = ("model", "cluster", "gpus", "seq_len", "global_batch")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One run as typed on the command line; every field is an option of the same name."""

    method: Annotated[str, Argument(metavar="METHOD", help="A method or a+b (see `methods`).")]
    model: Annotated[
        str,
        Option(
            metavar="M",
            show_default=False,
            help="Name, YAML file or Hugging Face config.json (required).",
        ),
    ] = ""
    cluster: Annotated[
        str, Option(metavar="C", show_default=False, help="Name or YAML file (required).")
    ] = ""
    system: Annotated[str, Option(metavar="Y", help="Software stack: name or file.")] = (
        "megatron-core"
    )
    gpus: Annotated[
        int | None, Option(min=1, metavar="N", show_default=False, help="In all (required).")
    ] = None
    seq_len: Annotated[
        int | None, Option(min=1, metavar="S", show_default=False, help="Tokens (required).")
    ] = None
    global_batch: Annotated[
        int | None,
        Option(min=1, metavar="B", show_default=False, help="Sequences per step (required)."),
    ] = None
    micro_batch: Annotated[int, Option(min=1, metavar="b", help="Sequences per pass.")] = 1
    tp: Annotated[int, Option(min=1, help="Tensor parallel ranks.")] = 1
    cp: Annotated[int, Option(min=1, help="Context parallel ranks.")] = 1
    pp: Annotated[int, Option(min=1, help="Pipeline parallel ranks.")] = 1
    vpp: Annotated[int, Option(min=1, help="Model chunks per pipeline rank.")] = 1
    ulysses: Annotated[int, Option(min=1, help="All-to-all sequence ranks, of dp.")] = 1
    zero: Annotated[int, Option(min=0, max=3, help="ZeRO stage (3: as FSDP full shard).")] = 1
    no_sp: Annotated[bool, Option("--no-sp", help="No sequence parallelism beside tp.")] = False
    partition: Annotated[
        str, Option(metavar="9,8,..", help="Layers of each of the pp x vpp chunks, in order.")
    ] = ""
    gpipe: Annotated[
        bool, Option("--gpipe", help="All forwards before all backwards, instead of 1F1B.")
    ] = False
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="A parameter of the method (repeatable)."),
    ] = None
    attention: Annotated[AttentionKind, Option(help="Attention kernel.")] = "flash"
    precision: Annotated[Precision, Option(help="Compute precision.")] = "bf16"
    methods: Annotated[
        list[Path] | None, Option(metavar="DIR", help="More method files (repeatable).")
    ] = None


class Request(Struct, frozen=True, kw_only=True):
    """One run, ready to plan."""

    problem: Problem
    method: Composition
    base: Plan


def takes_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of RunOptions; it receives them as its first argument."""
    return _takes(command, {})


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """The same without those of a method: the run is that of keep_all."""
    return _takes(command, {"method": "keep_all", "settings": None})


def _takes(command: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(RunOptions, include_extras=True)
    fields = [f for f in dataclasses.fields(RunOptions) if f.name not in fixed]

    @wraps(command)
    def run(**given: Any) -> None:
        options = {f.name: given.pop(f.name) for f in fields}
        command(RunOptions(**options, **fixed), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    options = [
        inspect.Parameter(
            f.name,
            keyword,
            annotation=hints[f.name],
            default=empty if f.default is dataclasses.MISSING else f.default,
        )
        for f in fields
    ]
    own_hints = get_type_hints(command, include_extras=True)
    extra = [p.replace(kind=keyword, annotation=own_hints[p.name]) for p in own]
    signature = inspect.Signature([*options, *extra])
    run.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del run.__wrapped__  # or inspect looks through to the command
    return run


def request(options: RunOptions) -> Request:
    """Load names and files, derive dp; CommandError and the loaders' errors are one line each."""
    missing = [f"--{name.replace('_', '-')}" for name in REQUIRED if not getattr(options, name)]
    if missing:
        raise CommandError(f"missing option: {', '.join(missing)}")
    assert options.gpus is not None
    assert options.seq_len is not None
    assert options.global_batch is not None
    method = _method(options)
    layout = Layout(
        tp=options.tp,
        sp=not options.no_sp and options.tp > 1,
        cp=options.cp,
        pp=options.pp,
        vpp=options.vpp,
        dp=_data_parallel(options, options.gpus),
        zero_stage=_zero(options.zero),
        ulysses=options.ulysses,
        micro_batch=options.micro_batch,
        global_batch=options.global_batch,
    )
    problem = make_problem(
        model=options.model,
        cluster=options.cluster,
        system=options.system,
        layout=layout,
        seq_len=options.seq_len,
        precision=options.precision,
        attention=options.attention,
    )
    base = problem.base_plan
    if options.partition:
        base = replace(base, partition=_partition(options.partition, problem))
    if options.gpipe:
        if layout.vpp > 1:
            raise CommandError(f"--gpipe has one chunk per rank, --vpp is {layout.vpp}")
        base = replace(base, schedule="gpipe")
    return Request(problem=problem, method=method, base=base)


def _method(options: RunOptions) -> Composition:
    """The method that is named; a baseline's name is no method's, and has commands of its own."""
    try:
        found = discover(options.methods or ())
        return found.resolve(options.method, settings_of(options.settings))
    except MethodError as error:
        named = [word.strip() for word in options.method.split("+")]
        name = next((word for word in named if word in baselines()), "")
        if not name:
            raise
        raise CommandError(
            f"{name} is a baseline and no method: `rematbench baseline run {name}` executes it, "
            f"`rematbench baseline predict {name}` simulates its policy"
        ) from error


def _data_parallel(options: RunOptions, gpus: int) -> int:
    ranks = options.tp * options.cp * options.pp
    dp, rest = divmod(gpus, ranks)
    if rest or dp == 0:
        near = max(1, round(gpus / ranks)) * ranks
        raise CommandError(
            f"--gpus {gpus} must be a multiple of tp x cp x pp = {options.tp} x "
            f"{options.cp} x {options.pp} = {ranks} (for example {near})"
        )
    return dp


def _zero(stage: int) -> ZeroStage:
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    return stages[stage]


def settings_of(given: list[str] | None) -> dict[str, str]:
    """KEY=VALUE texts as a dictionary; CommandError for anything else."""
    found: dict[str, str] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise CommandError(f"--set {text!r}: expected KEY=VALUE")
        if key.strip() in found:
            raise CommandError(f"--set {key.strip()}: given twice")
        found[key.strip()] = value.strip()
    return found


def _partition(text: str, problem: Problem) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layers per chunk in pipeline order -> global layer indices by (rank, chunk)."""
    lay, layers = problem.layout, problem.workload.model.num_layers
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise CommandError(f"--partition {text!r}: expected whole numbers above 0 between commas")
    sizes = [int(word) for word in words]
    if len(sizes) != lay.num_chunks or sum(sizes) != layers:
        raise CommandError(
            f"--partition {text!r}: {len(sizes)} chunks of {sum(sizes)} layers in all; needs "
            f"pp x vpp = {lay.num_chunks} chunks of {layers} layers"
        )
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    chunks = [tuple(range(a, b)) for a, b in pairwise(bounds)]
    return tuple(tuple(chunks[c * lay.pp + r] for c in range(lay.vpp)) for r in range(lay.pp))
