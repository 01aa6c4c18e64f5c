"""Turn a row of a sheet into a problem and a method.  A missing or wrong cell raises a one-line
RowError."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

import msgspec

from rematbench.evaluate.problems import Variant, make_problem, system_variant
from rematbench.evidence.published import expert_columns
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
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.constants import Calibration
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Degrees, Layout, LayoutError
from rematbench.inputs.load import (
    claim_of_row,
    is_path,
    load_cluster,
    load_model,
    load_system,
    names,
)
from rematbench.inputs.system import StackChoice, System, ZeroStage
from rematbench.plan import Unsupported
from rematbench.plugins.registry import MethodError, Registry, Value
from rematbench.problem import Problem
from rematbench.workload import GATED, MlpKind, Model, Work

ASSUMED = "unknown model: norms, biases and positions taken from"
"""Start of the remark that a row's model is not in config/models."""

LAYOUT_COLUMNS = ("global_batch", "tp", "pp", "dp")
SHAPE_COLUMNS = {
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "ffn",
    "vocab": "vocab",
    "head_dim": "head_dim",
}
OPTIONAL = ("head_dim",)
"""Fields that a row of a model without a file may leave out."""
SAC_KEEPS = ("q", "v", "attn_out", "lse", "gate_out")
"""Tensors that torchtitan's per-operator selective checkpointing keeps of a Llama layer: the
outputs of every second matmul in the order wq, wk, wv, wo, w1, w3, w2, and of attention.  Without
the compiler the output of w2 is kept too (`held`), although no backward reads that output; the
compiler's partitioner drops it.  Source: torchtitan/parallelisms/parallelize_llama.py, _save_list,
2024-12.  One difference: here q is kept after RoPE, not before."""

SELECTIVE_SAC: dict[str, Value] = {"keep": SAC_KEEPS, "held": ("fc2_out",), "scope": "layer"}


class PublishedCase(Job, frozen=True, kw_only=True):
    """The content of a row; equal cases have equal predictions.  `assumed`: a remark on properties
    of the model that the row does not give.  `peak_kind`, `peak_rank`: what its peak is, and of
    which pipeline rank."""

    model: Model
    system: System
    method: str
    settings: dict[str, Value]
    offload: float | None
    assumed: str = ""
    peak_kind: PeakKind = "allocated"
    peak_rank: PeakRank = "fullest"

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
    routed = expert_columns.has_experts(row)
    if routed:
        expert_columns.refuse_unmodelled(row)
    system = _system(row)
    if routed:
        system = expert_columns.dispatching(row, system)
    layout = _layout(row, system)
    word = text(row, "recompute")
    said = claim_of_row(text(row, "system"), text(row, "note"))[1]
    method, settings = recompute_method(said.get(word.lower(), word), registry)
    if system.kernels.compiled and "held" in settings:
        settings = {key: value for key, value in settings.items() if key != "held"}
    if not text(row, "cluster"):
        raise RowError("failed", "column cluster is missing or empty")
    try:
        load_cluster(text(row, "cluster"))
    except ConfigError as error:
        raise RowError("unsupported", str(error)) from error
    model, assumed = _model(row)
    if routed:
        model = expert_columns.read_experts(row, model)
        assumed = "; ".join(filter(None, (assumed, expert_columns.balance_remark(row))))
        dropped = expert_columns.module_settings(row)
        method, settings = (
            (method, settings) if dropped is None else ("selective_recompute", dropped)
        )
    return PublishedCase.at(
        layout,
        model=model,
        assumed=assumed,
        cluster=text(row, "cluster"),
        system=system,
        seq_len=whole(row, "seq_len"),
        **given_facts(row, Work, own=("seq_len",)),
        **given_facts(row, StackChoice, own=_own_words(row)),
        **(expert_columns.capacity(row) if routed else {}),
        method=method,
        settings=settings,
        offload=fraction(row, "offload_fraction"),
        peak_kind=read_peak_kind(row),
        peak_rank=read_peak_rank(row),
    )


@cache
def _claim(system: str, note: str) -> tuple[str, dict[str, str]]:
    """The name of a row's stack, and the methods that the row's words for recomputation mean."""
    name, words = claim_of_row(system, note)
    return load_system(name).name, words


def claim_of(row: Row) -> tuple[str, dict[str, str]]:
    """The name of a row's stack, and the methods that the row's words for recomputation mean."""
    return _claim(row["system"], row["note"])


def stack_of(row: Row) -> str:
    """The name of a row's stack."""
    return claim_of(row)[0]


def _own_words(row: Row) -> tuple[str, ...]:
    """Columns in which a row has other words than a run's options: exchanges of experts, the
    attention that a package chooses, and the bytes of the optimizer's states."""
    other = {"attention": ("auto",), "optimizer": expert_columns.OPTIMIZERS}
    return ("ep_overlap", *(name for name, words in other.items() if text(row, name) in words))


# -- model, system, layout --------------------------------------------------------------------


def _model(row: Row) -> tuple[Model, str]:
    """The model of a row, and the remark of `Case.assumed`: a named model with the row's shape
    columns, a model of a file, or a model whose shapes are all in the row.  Such a model has the
    norms, biases and kind of positions of a shipped model of its family, as many learned positions
    as the sequence needs, and no windows."""
    name = text(row, "model")
    shape = {field: whole(row, c) for c, field in SHAPE_COLUMNS.items() if text(row, c)}
    mlp = text(row, "mlp").lower()
    if mlp and mlp not in get_args(MlpKind):
        raise RowError("unsupported", f"mlp {mlp!r} is not modelled")
    if name and is_path(name):
        return _of_file(name, shape, mlp), ""
    assumed = ""
    if name in names("model"):
        model = load_model(name)
    else:
        if kin := _kin(name):
            shape = {"vocab": load_model(kin).vocab} | shape
        missing = [c for c, field in SHAPE_COLUMNS.items() if field not in (*shape, *OPTIONAL)]
        if missing:
            columns = ", ".join(missing)
            reason = f"unknown model {name!r}, and no column {columns} to build it"
            raise RowError("failed", f"{reason} (the column also takes a model's file)")
        relative = _relative(name, mlp)
        model = msgspec.structs.replace(load_model(relative), max_positions=0)
        head_dim = shape.get("head_dim") or _head_dim(name, shape, mlp)
        shape["head_dim"] = head_dim
        taken = f"{ASSUMED} {relative} ({_taken(model)})"
        assumed = f"{taken}; head_dim {head_dim}, {_ends(row, model)}, no windows"
    tied = flag(row, "tied", model.tied_embeddings)
    model = msgspec.structs.replace(model, tied_embeddings=tied)
    return _reshaped(model, name, shape, mlp or model.mlp), assumed


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


def _head_dim(name: str, shape: dict[str, int], mlp: str) -> int:
    """The width of a head of a model without a file: its family's, or hidden / heads.  RowError if
    models of this kind often have heads of another width."""
    if WIDE_HEADS.search(name.lower()):
        return WIDE
    width, rest = divmod(shape["hidden"], shape["num_heads"])
    if rest:
        problem = f"hidden {shape['hidden']} is not a multiple of heads {shape['num_heads']}"
        raise RowError("failed", problem)
    if ((not mlp or mlp in GATED) and width not in USUAL_HEADS) or "gemma" in name.lower():
        raise RowError(
            "failed",
            f"unknown model {name!r}: hidden / heads = {width} may not be its head_dim: add a "
            "column head_dim, or give the model's file in the column model",
        )
    return width


def _taken(model: Model) -> str:
    """What a row's model has of a similar model: norms, biases, positions and dropout."""
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


def _ends(row: Row, model: Model) -> str:
    return "tied ends" if flag(row, "tied", model.tied_embeddings) else "ends not tied"


def _relative(name: str, mlp: str) -> str:
    """The name of a known dense model of the same family (the word before the first digit or dash)
    and kind of MLP, or of a known model with the same kind of MLP.  A row's columns say whether it
    has experts."""
    family = re.split(r"[-\d]", name.lower(), maxsplit=1)[0]
    known = [n for n in names("model") if family and re.split(r"[-\d]", n, maxsplit=1)[0] == family]
    known.sort(key=lambda n: n.split("-")[0] != name.lower().split("-")[0])  # of one version first
    gated = not mlp or mlp in GATED
    for candidate in [*known, "llama-7b" if gated else "gpt-22b"]:
        relative = load_model(candidate)
        if candidate == _kin(name) or (relative.gated == gated and relative.experts is None):
            return candidate
    raise AssertionError("the fallback is of the right kind")


def _kin(name: str) -> str:
    """The known model with whose name and a dash a row's name begins, as of a family of tests of
    one tokenizer; empty if there is none."""
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
    result = msgspec.structs.replace(model, **new)
    if result.num_heads % result.num_kv_heads:
        raise RowError("failed", f"kv_heads {result.num_kv_heads} must divide heads {heads}")
    return result


def _system(row: Row) -> System:
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
    return variant


def _layout(row: Row, system: System) -> Layout:
    known = row if text(row, "dp") else {**row, "dp": _dp(row)}
    missing = [column for column in LAYOUT_COLUMNS if not text(known, column)]
    if missing:
        raise RowError("unsupported", f"layout not published: no value for {', '.join(missing)}")
    tp = whole(row, "tp")
    default_stage = 3 if system.zero.data_parallel == "fsdp" else 1
    stage = whole(row, "zero_stage", default_stage, least=0)
    if stage not in get_args(ZeroStage):
        raise RowError("failed", f"column zero_stage: {stage} is not 0, 1, 2 or 3")
    cp, dp, ulysses = whole(row, "cp", 1), whole(known, "dp"), whole(row, "ulysses", 1)
    if system.parallel.cp_kind == "ulysses" and ulysses == 1:  # Layout counts these cp ranks in dp
        cp, dp, ulysses = 1, dp * cp, cp
    experts = expert_columns.expert_layout(row, dp) if expert_columns.has_experts(row) else {}
    given: dict[str, Any] = given_facts(row, Degrees, own=("ep", "etp"))
    given |= {"tp": tp, "sp": flag(row, "sp", tp > 1), "cp": cp, "dp": dp, "ulysses": ulysses}
    layout = Layout(**{**given, "zero_stage": stage, **experts})
    gpus = whole(row, "gpus", layout.gpus)
    if gpus != layout.gpus:
        raise RowError("failed", f"gpus {gpus} is not tp x cp x pp x dp = {layout.gpus}")
    return layout


def _dp(row: Row) -> str:
    """The data-parallel degree gpus / (tp x cp x pp); empty where gpus, tp or pp is not given.
    RowError where the degrees do not divide gpus."""
    if not all(text(row, column) for column in ("gpus", "tp", "pp")):
        return ""
    gpus, ranks = whole(row, "gpus"), whole(row, "tp") * whole(row, "cp", 1) * whole(row, "pp")
    dp, rest = divmod(gpus, ranks)
    if rest:
        raise RowError("failed", f"gpus {gpus} is not a multiple of tp x cp x pp = {ranks}")
    return str(dp)


# -- method -----------------------------------------------------------------------------------

POLICIES: dict[str, tuple[str, dict[str, Value]]] = {
    "": ("keep_all", {}),
    "none": ("keep_all", {}),
    "no": ("keep_all", {}),
    "full": ("full_recompute", {}),
    "selective": ("selective_recompute", {}),
    "balanced": ("balanced_checkpointing", {}),
    "balanced+fc1": ("balanced_checkpointing", {"point": "published+fc1"}),
    "selective(sac)": ("selective_recompute", SELECTIVE_SAC),
    "selective(per-op sac)": ("selective_recompute", SELECTIVE_SAC),
    "selective(op)": ("selective_recompute", SELECTIVE_SAC),
}
"""Published words for recomputation -> method and parameters."""

_COUNTED = re.compile(r"^(full|uniform|block|selective)[ (:]*(\d+)\)?$")


def recompute_method(words: str, registry: Registry) -> tuple[str, dict[str, Value]]:
    """The method and parameters of a published policy (`full`, `uniform 2`, `block 4`,
    `selective(2)`, ...) or of a method's name; RowError for an unknown policy."""
    policy = " ".join(words.lower().split())
    if policy in POLICIES:
        return POLICIES[policy]
    counted = _COUNTED.match(policy)
    if counted and int(counted[2]) > 0:
        kind, count = counted[1], int(counted[2])
        if kind == "selective":
            return "full_recompute", {"every": count}
        method = "block" if kind == "block" else "uniform"
        return "full_recompute", {"method": method, "num_layers": count}
    try:
        registry.resolve(words)
    except MethodError:
        known = ", ".join([*filter(None, POLICIES), "uniform N", "block N", "selective(N)"])
        reason = f"recompute {words!r} is not a known policy (known: {known})"
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
