"""Turn a row of a sheet into a problem and a method.  A missing or wrong cell raises a one-line
RowError."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from rematbench.evaluate.problems import Variant, make_problem, system_variant
from rematbench.evidence.published.sheets import (
    NOBODY,
    PeakKind,
    PeakRank,
    Row,
    RowError,
    flag,
    fraction,
    given_facts,
    read_peak_kind,
    read_peak_rank,
    text,
    whole,
)
from rematbench.evidence.published.words import INSIDE, NONE, policies, policy, printed, said
from rematbench.inputs.configfile import ConfigError, closest
from rematbench.inputs.constants import Calibration
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Degrees, Layout, LayoutError, partition_of_sizes
from rematbench.inputs.load import (
    Kind,
    claim_of_row,
    is_path,
    load_cluster,
    load_model,
    load_system,
    names,
    version_of,
)
from rematbench.inputs.stages import stages_of, stages_text
from rematbench.inputs.system import StackChoice, System, ZeroStage, with_facts
from rematbench.model import GATED
from rematbench.plan import Unsupported
from rematbench.plugins.registry import IDENTITY, MethodError, Registry, Value
from rematbench.problem import Problem
from rematbench.solve.recompute_modules import MODULES
from rematbench.workload import Experts, Latent, Model, Work

ASSUMED = "unknown model: norms, biases and positions taken from"
"""Start of the remark that a row's model is not in config/models."""

PRINTED = ("forward_s", "backward_s", "update_s", "host_used_gib")
"""Further columns with results that a prediction has."""
LAYOUT_COLUMNS = ("global_batch", "tp", "pp")
SHAPE_COLUMNS = {
    **{"layers": "num_layers", "hidden": "hidden", "heads": "num_heads"},
    **{"kv_heads": "num_kv_heads", "ffn": "ffn", "vocab": "vocab", "head_dim": "head_dim"},
}
OPTIONAL = ("head_dim",)
"""Fields that a row of a model without a file may leave out."""


class HostedStates(Struct, frozen=True, kw_only=True):
    """Optimizer states in host memory, as a row places them.  `share`: the share of sub-groups on
    the host; one in `interleave` of these visits the device (0: none).  `node`: the kind of node as
    the row names it; `nodes`: their number; `ranks`: the ranks of each."""

    node: str
    nodes: int
    ranks: int
    share: float
    interleave: int


class PublishedCase(Job, frozen=True, kw_only=True):
    """A published row as a job with a method and its settings; equal cases have equal predictions.
    `assumed`: a remark on properties of the model that the row does not give.  `peak_kind`,
    `peak_rank`: which bytes its peak counts, and of which pipeline rank.  `prints`: the columns of
    PRINTED that the row has."""

    model: Model
    system: System
    method: str
    settings: dict[str, Any]
    offload: float | None
    assumed: str = ""
    peak_kind: PeakKind = "allocated"
    peak_rank: PeakRank = "fullest"
    prints: tuple[str, ...] = ()
    hosted: HostedStates | None = None

    @property
    def key(self) -> bytes:
        """Canonical bytes of the case: equal for equal cases."""
        return msgspec.json.encode(self, order="deterministic")

    def problem(self, constants: Calibration | None = None) -> Problem:
        """The problem, with `constants` or the shipped constants.  RowError if the layout is
        invalid or no kernel rate covers the problem."""
        try:
            return make_problem(self, constants)
        except LayoutError as error:
            raise RowError("failed", f"layout: {error}") from error
        except RateError as error:
            raise RowError("unsupported", str(error)) from error


def read_case(row: Row, registry: Registry) -> PublishedCase:
    """The case of a row; RowError if a cell is missing, wrong or not modelled."""
    words = said(row)
    if words.refused:
        raise RowError("unsupported", "; ".join(words.refused))
    row = words.row
    system = _system(row, words.stack)
    layout = _layout(row, system, words.job.pop("instances", 1))
    method, settings = _policy(row, registry)
    if passes := words.job.pop("passes", ""):
        if method != IDENTITY:
            raise RowError("unsupported", f"{passes} with {method} is not modelled for rows")
        method, settings = passes, {}
    cluster = _shipped("cluster", words.job.pop("cluster", text(row, "cluster")))
    if not cluster:
        raise RowError("failed", "column cluster is missing or empty")
    try:
        load_cluster(cluster)
    except ConfigError as error:
        raise RowError("unsupported", str(error)) from error
    model, assumed = _model(row, words.model)
    if model.experts and "forced" not in text(row, "router"):
        assumed = "; ".join(filter(None, (assumed, "experts balanced")))
    if stack := version_of(text(row, "system")):
        assumed = "; ".join(filter(None, (assumed, f"{text(row, 'system')} taken for {stack}")))
    moved = whole(row, "layers_of_last_stage", least=0) if words.job.pop("moved", 0) else None
    stages = _stages(row, model.num_layers, layout, words.job.pop("ends", 0), moved)
    return PublishedCase.at(
        replace(layout, stages=stages),
        model=model,
        assumed=assumed,
        cluster=cluster,
        system=system,
        seq_len=whole(row, "seq_len"),
        **given_facts(row, Work, own=("seq_len", *words.read)),
        **given_facts(row, StackChoice, own=words.read),
        **words.job,
        method=method,
        settings=settings,
        offload=fraction(row, "offload_fraction"),
        peak_kind=read_peak_kind(row),
        peak_rank=read_peak_rank(row),
        prints=tuple(name for name in PRINTED if text(row, name)),
        hosted=_hosted(row, layout) if text(row, "host_ratio") else None,
    )


@cache
def _claim(system: str, note: str) -> tuple[str, dict[str, str]]:
    name, words = claim_of_row(system, note)
    return load_system(name).name, words


def claim_of(row: Row) -> tuple[str, dict[str, str]]:
    """The name of a row's stack, and the methods that the row's words for recomputation mean."""
    return _claim(text(row, "system"), text(row, "note"))


def stack_of(row: Row) -> str:
    return claim_of(row)[0]


# -- model, system, layout --------------------------------------------------------------------


def _model(row: Row, words: dict[str, Any]) -> tuple[Model, str]:
    """The model of a row, with the fields that its words state, and the remark of `Case.assumed`: a
    named model with the row's shape columns, a model of a file, or a model whose shapes are all in
    the row.  Such a model has the norms, biases and kind of positions of a shipped model of its
    family, as many learned positions as the sequence needs, and no windows."""
    name = _shipped("model", text(row, "model"))
    mlp = words.pop("mlp", "")
    known = [column for column in SHAPE_COLUMNS if text(row, column)]
    latent = {k.removeprefix("latent."): words.pop(k) for k in [*words] if "latent." in k}
    shape: dict[str, int] = {key: words.pop(key) for key in OPTIONAL if key in words}
    shape |= {SHAPE_COLUMNS[c]: whole(row, c) for c in known}
    if latent:
        shape["head_dim"] = latent.get("nope", 0) + latent.get("rope", 0)
    if name and is_path(name):
        return _of_file(name, shape, mlp), ""
    assumed = ""
    if name in names("model"):
        model = load_model(name)
        tied = flag(row, "tied", model.tied_embeddings)
    else:
        if kin := _kin(name):
            shape = {"vocab": load_model(kin).vocab} | shape
        if missing := [c for c, field in SHAPE_COLUMNS.items() if field not in (*shape, *OPTIONAL)]:
            reason = f"unknown model {name!r}; to build it, the row lacks {', '.join(missing)}"
            raise RowError("failed", f"{reason} (column model also takes a model file)")
        relative = _relative(name, mlp)
        model = replace(load_model(relative), max_positions=0)
        plain = flag(row, "plain_heads", False)
        shape["head_dim"] = shape.get("head_dim") or _head_dim(name, shape, mlp, plain=plain)
        tied = flag(row, "tied", model.tied_embeddings)
        ends = "tied ends" if tied else "ends not tied"
        taken = f"{ASSUMED} {relative} ({_taken(model)})"
        assumed = f"{taken}; head_dim {shape['head_dim']}, {ends}, no windows"
    stated = {"tied_embeddings": tied, **words}
    if latent:
        stated["latent"] = _latent(model, latent)
    for every, column in ((1, "window"), (2, "alternate_window")):
        if size := stated.pop(column, 0):  # the first layer has the window
            layers = range(shape.get("num_layers", model.num_layers))
            stated["attention_window"] = tuple(0 if i % every else size for i in layers)
    if text(row, "experts") not in NONE:
        stated["experts"] = _experts(row, model)
    model = _reshaped(model, name, shape, mlp or model.mlp)
    return replace(model, **stated), assumed


HUB = re.compile(r"[\w-]+/([\w.-]+)(?<!\.yaml)(?<!\.yml)(?<!\.json)")
"""The name of a model on a hub, ORGANISATION/MODEL."""


def _shipped(kind: Kind, name: str) -> str:
    """The shipped name of a name that has another case, other separators, details in parentheses or
    an organisation of a hub; other names as they are."""
    hub = HUB.fullmatch(name) if kind == "model" and not Path(name).exists() else None
    name = hub[1] if hub else name
    plain = re.sub("[ _]", "-", INSIDE.sub("", name).strip().lower())
    return plain if plain in names(kind) else name


def _experts(row: Row, model: Model) -> Experts:
    """The experts of a row. Facts that the row does not state are those of the named model; the
    first layers are the dense ones."""
    counts = {name: text(row, name) for name in ("dense_layers", "shared_experts_ffn")}
    dense, shared = (0 if cell in NONE else whole(row, name) for name, cell in counts.items())
    if not counts["dense_layers"] and model.experts:
        dense = model.first_dense
    widths: dict[str, Any] = {
        "count": whole(row, "experts"),
        "active": whole(row, "topk"),
        "ffn": whole(row, "moe_ffn"),
        "shared_ffn": shared,
        "dense_layers": tuple(range(dense)),
    }
    return replace(model.experts, **widths) if model.experts else Experts(**widths)


def _latent(model: Model, columns: dict[str, int]) -> Latent:
    """The latent attention of a row: its columns, and the named model's values for the others;
    RowError if a value is in neither."""
    given = {**to_builtins(model.latent or {}), **columns}
    try:
        return convert(given, Latent)
    except ValidationError as error:
        raise RowError("unsupported", f"column attention_kind: mla: {error}") from error


def _of_file(name: str, shape: dict[str, int], mlp: str) -> Model:
    """The model of a file; RowError if a column of the row contradicts the file."""
    try:
        model = load_model(name)
    except ConfigError as error:
        raise RowError("failed", str(error)) from error
    columns = {field: column for column, field in SHAPE_COLUMNS.items()}
    for field, value in {**shape, **({"mlp": mlp} if mlp else {})}.items():
        if getattr(model, field) != value:
            column, there = columns.get(field, field), getattr(model, field)
            raise RowError("failed", f"column {column}: {value}, but {name} has {there}")
    return model


WIDE_HEADS = re.compile(r"qwen-?3|mistral-(small|nemo|24b)|devstral|magistral")
"""Dense families whose heads are WIDE columns wide, whatever hidden / heads is (the key head_dim of
their config.json)."""
WIDE = 128
USUAL_HEADS = (64, 128)


def _head_dim(name: str, shape: dict[str, int], mlp: str, *, plain: bool) -> int:
    """The width of a head of a model without a file: that of its family, or hidden / heads.
    RowError if models of this kind often have heads of another width, unless the row's words say
    `plain_heads` (`plain`): heads of the trainer are always hidden / heads wide."""
    if WIDE_HEADS.search(name.lower()) and not plain:
        return WIDE
    width, rest = divmod(shape["hidden"], shape["num_heads"])
    if rest:
        problem = f"hidden {shape['hidden']} is not a multiple of heads {shape['num_heads']}"
        raise RowError("failed", problem)
    if plain:
        return width
    if ((not mlp or mlp in GATED) and width not in USUAL_HEADS) or "gemma" in name.lower():
        raise RowError(
            "failed",
            f"unknown model {name!r}: hidden / heads = {width} may not be its head_dim: add a "
            "column head_dim, or give the model's file in the column model",
        )
    return width


def _taken(model: Model) -> str:
    """What a row's model takes from a similar model, in words: norms, biases, positions,
    dropout."""
    biased = ("qkv_bias", "proj_bias", "mlp_bias")
    biases = [name.removesuffix("_bias") for name in biased if getattr(model, name)]
    return ", ".join(
        (
            model.norm,
            f"biases of {' and '.join(biases)}" if biases else "no biases",
            f"{model.position} positions",
            f"dropout {model.dropout:g}" if model.drops else "no dropout",
            *(["norms behind attention and MLP"] if model.post_norm else []),
            *(["norms of queries and keys"] if model.qk_norm else []),
        )
    )


def _relative(name: str, mlp: str) -> str:
    """The name of a known dense model of the same family (the word before the first digit or dash)
    and kind of MLP, or of a known model with the same kind of MLP.  A row's columns say whether it
    has experts."""
    family = re.split(r"[-\d]", name.lower(), maxsplit=1)[0]
    known = [n for n in names("model") if family and re.split(r"[-\d]", n, maxsplit=1)[0] == family]
    known.sort(
        key=lambda n: n.split("-")[0] != name.lower().split("-")[0]
    )  # models of the same version come first
    gated = not mlp or mlp in GATED
    for candidate in [*known, "llama-7b" if gated else "gpt-22b"]:
        relative = load_model(candidate)
        plain = relative.experts is None and relative.latent is None
        if candidate == _kin(name) or (relative.gated == gated and plain):
            return candidate
    raise AssertionError("no known model has this kind of MLP")


def _kin(name: str) -> str:
    """The longest known model name NAME such that the row's name begins with `NAME-`, as test
    models that share a tokenizer do; empty if there is none."""
    return max((n for n in names("model") if name.lower().startswith(f"{n}-")), key=len, default="")


def _reshaped(model: Model, name: str, shape: dict[str, int], mlp: str) -> Model:
    changed = {key: value for key, value in shape.items() if getattr(model, key) != value}
    if not changed and mlp == model.mlp and name == model.name:
        return model
    new = {**changed, "mlp": mlp, "name": name or model.name}
    heads, hidden = new.get("num_heads", model.num_heads), new.get("hidden", model.hidden)
    assert isinstance(heads, int)
    assert isinstance(hidden, int)
    if {"num_heads", "hidden"} & changed.keys() and "head_dim" not in shape:
        if hidden % heads:
            raise RowError("failed", f"hidden {hidden} is not a multiple of heads {heads}")
        new["head_dim"] = hidden // heads
    if "num_layers" in changed:
        new["attention_window"] = ()
    result = replace(model, **new)
    if result.num_heads % result.num_kv_heads:
        raise RowError("failed", f"kv_heads {result.num_kv_heads} must divide heads {heads}")
    return result


def _system(row: Row, words: dict[str, Any]) -> System:
    """The stack of a row, with its options and the facts that its words state."""
    if "ep_overlap" not in words:
        words.pop("delayed_wgrad", None)  # without the overlap there is nothing to delay
    name = text(row, "system")
    if not name:
        raise RowError("failed", "column system is missing or empty")
    try:
        system = load_system(claim_of_row(name, text(row, "note"))[0])
    except ConfigError as error:
        raise RowError("unsupported", str(error)) from error
    options: tuple[Variant, ...] = get_args(Variant)
    wanted = tuple(option for option in options if flag(row, option, False))
    variant = system_variant(system, wanted)
    if isinstance(variant, Unsupported):
        raise RowError("unsupported", variant.reason)
    return with_facts(variant, **words) if words else variant


def _layout(row: Row, system: System, instances: int) -> Layout:
    """The layout of a row; dp follows from gpus if the row does not have it.  `instances`: how many
    replicas of the sharded optimizer there are."""
    missing = [column for column in LAYOUT_COLUMNS if not text(row, column)]
    if not text(row, "dp") and (missing or not text(row, "gpus")):
        missing.append("dp")
    if missing:
        raise RowError("unsupported", f"layout not published: no value for {', '.join(missing)}")
    own = ("ep", "etp") if text(row, "experts") in NONE else ()
    given: dict[str, Any] = given_facts(row, Degrees, own=own)
    tp, cp, ulysses = given["tp"], given.get("cp", 1), given.get("ulysses", 1)
    ranks = tp * cp * given["pp"]
    gpus = whole(row, "gpus", ranks * whole(row, "dp", 1))
    if text(row, "dp") and gpus != ranks * whole(row, "dp"):
        told = ranks * whole(row, "dp")
        raise RowError("failed", f"gpus {gpus} is not tp x cp x pp x dp = {told}")
    dp, rest = divmod(gpus, ranks)
    if rest:
        raise RowError("failed", f"gpus {gpus} is not a multiple of tp x cp x pp = {ranks}")
    stage = given.get("zero_stage", 3 if system.zero.data_parallel == "fsdp" else 1)
    if stage not in get_args(ZeroStage):
        raise RowError("failed", f"column zero_stage: {stage} is not 0, 1, 2 or 3")
    if system.parallel.cp_kind == "ulysses" and ulysses == 1:  # Layout counts these cp ranks in dp
        cp, dp, ulysses = 1, dp * cp, cp
    given |= {"sp": flag(row, "sp", tp > 1), "cp": cp, "dp": dp, "ulysses": ulysses}
    given |= {"shard_degree": dp // instances} if instances > 1 else {}
    return Layout(**{**given, "zero_stage": stage})


def _stages(row: Row, layers: int, layout: Layout, ends: int, last: int | None) -> str:
    """The stages of a row whose layout says more than their number, as text.  `ends`: the layers by
    which the first and the last chunk are smaller than the others.  `last`: layers of the last
    stage (Megatron's decoder-last-pipeline-num-layers); if the other stages cannot be equal, the
    last of them have one layer more."""
    cells = text(row, "partition").split(",")
    if last is not None:
        each, more = divmod(layers - last, layout.pp - 1)
        sizes = [each + (stage >= layout.pp - 1 - more) for stage in range(layout.pp - 1)] + [last]
    elif cells != [""]:
        sizes = [int(word) if word.strip().isdigit() else -1 for word in cells]
    else:
        size, rest = divmod(layers + 2 * ends, layout.num_chunks)
        if not ends or rest or size > ends:  # an even partition does the same
            return "" if ends else text(row, "pp_layout")
        sizes = [size - ends, *[size] * (layout.num_chunks - 2), size - ends]
    if min(sizes) < 0 or len(sizes) != layout.num_chunks or sum(sizes) != layers:
        problem = f"is not {layers} layers in {layout.num_chunks} chunks"
        raise RowError("failed", f"column partition: {text(row, 'partition')!r} {problem}")
    return stages_text(stages_of(partition_of_sizes(sizes, layout.pp), layers))


def _hosted(row: Row, layout: Layout) -> HostedStates:
    nodes = int(text(row, "node").rpartition(" x")[2])
    return HostedStates(
        node=text(row, "cluster"),
        nodes=nodes,
        ranks=layout.gpus // nodes,
        share=fraction(row, "host_ratio") or 0.0,
        interleave=whole(row, "update_interleave", 0, least=0),
    )


# -- method -----------------------------------------------------------------------------------


def _policy(row: Row, registry: Registry) -> tuple[str, dict[str, Any]]:
    """The method and settings of a row, by its words for recomputation and for its modules; a sheet
    with both columns and words in neither does not publish them."""
    word, modules = printed(row, "recompute"), printed(row, "recompute_modules").lower()
    claimed = claim_of_row(text(row, "system"), text(row, "note"))[1]
    if word.lower() in claimed:
        return recompute_method(claimed[word.lower()], registry)
    if not word and not modules and "recompute_modules" in row:
        raise RowError("unsupported", "recomputation not published")
    plain = re.split(r"[\s,;+]+", INSIDE.sub("", modules).replace("-", "_").strip("[ ]"))
    if plain[0] in (*NONE, "full", word.lower()):
        return recompute_method(modules if len(plain) > 1 else word, registry)
    if modules and (found := policy(modules)):
        return found
    if unknown := [module for module in plain if module not in MODULES]:
        near = closest(unknown[0], MODULES)
        raise RowError(
            "unsupported", f"column recompute_modules: {unknown[0]!r} is not modelled{near}"
        )
    return "selective_recompute", {"modules": tuple(plain)}


def recompute_method(words: str, registry: Registry) -> tuple[str, dict[str, Value]]:
    """The method and parameters of a published policy (`full`, `uniform 2`, `block 4`,
    `selective(2)`, ...) or of a method's name; RowError for an unknown policy."""
    if found := policy(words):
        return found
    try:
        registry.resolve(words)
    except MethodError:
        reason = f"recompute {words!r} is not a known policy (known: {', '.join(policies())})"
        raise RowError("unsupported", reason) from None
    return words, {}


def bundle_of(row: Mapping[str, str], registry: Registry) -> str:
    """The name of a row's bundle, which is the composed method that plans the row."""
    try:
        name, _ = recompute_method(text(row, "recompute"), registry)
    except RowError:
        return NOBODY
    alone = text(row, "offload_fraction") in ("0", "0.0") or "pp_offload" in name
    return name if alone else f"{name}+pp_offload"
