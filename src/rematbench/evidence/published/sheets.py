"""Read sheets of published cells (results/published/runs.csv, or a user's sheet), and turn a row
into a problem and a method.

Every cell is text.  A missing or wrong cell raises a one-line RowError.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import msgspec

from rematbench.evaluate.problems import Variant, make_problem, system_variant
from rematbench.host.errors import UserError
from rematbench.plan import Unsupported
from rematbench.plugins.registry import MethodError, Registry, Value
from rematbench.problem import Problem
from rematbench.spec.configfile import ConfigError, require_unique
from rematbench.spec.constants import Calibration
from rematbench.spec.kernel_rates import RateError
from rematbench.spec.layout import Layout, LayoutError
from rematbench.spec.load import claim_of_row, load_cluster, load_model, load_system, names
from rematbench.spec.problemspec import ProblemSpec
from rematbench.spec.system import AttentionChoice, System, ZeroStage
from rematbench.workload import MlpKind, Model, Precision

Row = Mapping[str, Any]
"""A row of a sheet: texts as they are read, and numbers of predictions."""
Cell = dict[str, str]
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
}
YES, NO = {"yes", "true", "1", "on"}, {"no", "false", "0", "off"}
SAC_KEEPS = ("q", "v", "attn_out", "lse", "gate_out")
"""Tensors that torchtitan's per-operator selective checkpointing keeps of a Llama layer: the
outputs of every second matmul in the order wq, wk, wv, wo, w1, w3, w2, and of attention.  Without
the compiler the output of w2 is kept too (`held`), although no backward reads that output; the
compiler's partitioner drops it.  Source: torchtitan/parallelisms/parallelize_llama.py, _save_list,
2024-12.  One difference: here q is kept after RoPE, not before."""

SELECTIVE_SAC: dict[str, Value] = {"keep": SAC_KEEPS, "held": ("fc2_out",), "scope": "layer"}


class RowError(ValueError):
    """A row that cannot be predicted: the row's status and a one-line reason."""

    def __init__(self, status: Literal["failed", "unsupported"], reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PublishedCase(ProblemSpec, frozen=True, kw_only=True):
    """The content of a row; equal cases have equal predictions.  `assumed`: a remark on properties
    of the model that the row does not give."""

    model: Model
    system: System
    method: str
    settings: dict[str, Value]
    offload: float | None
    assumed: str = ""

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
    system = _system(row)
    layout = _layout(row, system)
    word = text(row, "recompute")
    said = claim_of_row(text(row, "system"), text(row, "note"))[1]
    method, settings = recompute_method(said.get(word.lower(), word), registry)
    if system.compiled and "held" in settings:
        settings = {key: value for key, value in settings.items() if key != "held"}
    if not text(row, "cluster"):
        raise RowError("failed", "column cluster is missing or empty")
    try:
        load_cluster(text(row, "cluster"))
    except ConfigError as error:
        raise RowError("unsupported", str(error)) from error
    model, assumed = _model(row)
    return PublishedCase.at(
        layout,
        model=model,
        assumed=assumed,
        cluster=text(row, "cluster"),
        system=system,
        seq_len=whole(row, "seq_len"),
        document_len=whole(row, "document_len", 0),
        precision=_choice(row, "precision", "bf16", Precision),
        attention=_choice(row, "attention", "flash", AttentionChoice),
        method=method,
        settings=settings,
        offload=_fraction(row, "offload_fraction"),
    )


# -- cells ------------------------------------------------------------------------------------


def text(row: Row, column: str) -> str:
    """The stripped text of a cell; empty if the column is missing."""
    return str(row.get(column) or "").strip()


def whole(row: Row, column: str, default: int | None = None) -> int:
    """The positive whole number in a cell (`zero_stage` may be 0), or `default` if the cell is
    empty.  RowError for any other text, or for an empty cell without a default."""
    cell = text(row, column)
    if not cell:
        if default is None:
            raise RowError("failed", f"column {column} is missing or empty")
        return default
    value = _number(column, cell)
    if value != int(value) or value < (0 if column == "zero_stage" else 1):
        raise RowError("failed", f"column {column}: {cell!r} is not a positive whole number")
    return int(value)


def _number(column: str, cell: str) -> float:
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        raise RowError("failed", f"column {column}: {cell!r} is not a number") from None
    if not math.isfinite(value):
        raise RowError("failed", f"column {column}: {cell!r} is not a number")
    return value


def _fraction(row: Row, column: str) -> float | None:
    cell = text(row, column)
    if not cell:
        return None
    value = _number(column, cell)
    if not 0.0 <= value <= 1.0:
        raise RowError("failed", f"column {column}: {cell!r} is not between 0 and 1")
    return value


def _flag(row: Row, column: str, default: bool) -> bool:
    cell = text(row, column).lower()
    if not cell:
        return default
    if cell not in YES | NO:
        raise RowError("failed", f"column {column}: {cell!r} is neither yes nor no")
    return cell in YES


def _choice(row: Row, column: str, default: str, kind: Any) -> Any:
    """The word in a cell, one of the Literal `kind`; RowError for another word."""
    cell = text(row, column).lower() or default
    allowed = get_args(kind)
    if cell not in allowed:
        known = ", ".join(map(str, allowed))
        raise RowError("unsupported", f"{column} {cell!r} is not modelled (known: {known})")
    return cell


# -- model, system, layout --------------------------------------------------------------------


def _model(row: Row) -> tuple[Model, str]:
    """The named model with the row's shape columns, and the remark of `Case.assumed`.  A model with
    an unknown name takes all shapes from the row, and norms, biases and the kind of positions from
    a known model of its family (as many learned positions as the sequence needs)."""
    name = text(row, "model")
    shape = {field: whole(row, c) for c, field in SHAPE_COLUMNS.items() if text(row, c)}
    mlp = text(row, "mlp").lower()
    if mlp and mlp not in get_args(MlpKind):
        raise RowError("unsupported", f"mlp {mlp!r} is not modelled")
    assumed = ""
    if name in names("model"):
        model = load_model(name)
    else:
        missing = [c for c, field in SHAPE_COLUMNS.items() if field not in shape]
        if missing:
            columns = ", ".join(missing)
            raise RowError("failed", f"unknown model {name!r}, and no column {columns} to build it")
        relative = _relative(name, mlp)
        model = msgspec.structs.replace(load_model(relative), max_positions=0)
        assumed = f"{ASSUMED} {relative}"
    return _reshaped(model, name, shape, mlp or model.mlp), assumed


def _relative(name: str, mlp: str) -> str:
    """The name of a known model of the same family (the word before the first digit or dash) and
    kind of MLP, or of a known model with the same kind of MLP."""
    family = re.split(r"[-\d]", name.lower(), maxsplit=1)[0]
    known = [n for n in names("model") if family and re.split(r"[-\d]", n, maxsplit=1)[0] == family]
    gated = mlp != "gelu"
    for candidate in [*known, "llama-7b" if gated else "gpt-22b"]:
        if load_model(candidate).gated == gated:
            return candidate
    raise AssertionError("the fallback is of the right kind")


def _reshaped(model: Model, name: str, shape: dict[str, int], mlp: str) -> Model:
    changed = {key: value for key, value in shape.items() if getattr(model, key) != value}
    if not changed and mlp == model.mlp and name == model.name:
        return model
    new = {**changed, "mlp": mlp, "name": name or model.name}
    heads, hidden = new.get("num_heads", model.num_heads), new.get("hidden", model.hidden)
    assert isinstance(heads, int)
    assert isinstance(hidden, int)
    if {"num_heads", "hidden"} & changed.keys():
        if hidden % heads:
            raise RowError("failed", f"hidden {hidden} does not divide by heads {heads}")
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
    wanted = tuple(option for option in options if _flag(row, option, False))
    variant = system_variant(system, wanted)
    if isinstance(variant, Unsupported):
        raise RowError("unsupported", variant.reason)
    return variant


def _layout(row: Row, system: System) -> Layout:
    known = row if text(row, "dp") else {**row, "dp": _dp(row)}
    missing = [column for column in LAYOUT_COLUMNS if not text(known, column)]
    if missing:
        raise RowError("unsupported", f"layout not published: {', '.join(missing)} empty")
    tp = whole(row, "tp")
    default_stage = 3 if system.data_parallel == "fsdp" else 1
    stage = whole(row, "zero_stage", default_stage)
    if stage not in get_args(ZeroStage):
        raise RowError("failed", f"column zero_stage: {stage} is not 0, 1, 2 or 3")
    cp, dp, ulysses = whole(row, "cp", 1), whole(known, "dp"), whole(row, "ulysses", 1)
    if system.cp_kind == "ulysses" and ulysses == 1:  # Layout counts these cp ranks in dp
        cp, dp, ulysses = 1, dp * cp, cp
    layout = Layout(
        tp=tp,
        sp=_flag(row, "sp", tp > 1),
        cp=cp,
        pp=whole(row, "pp"),
        vpp=whole(row, "vpp", 1),
        dp=dp,
        zero_stage=cast(ZeroStage, stage),
        ulysses=ulysses,
        micro_batch=whole(row, "micro_batch", 1),
        global_batch=whole(row, "global_batch"),
    )
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


# -- sheets ---------------------------------------------------------------------------------------

NOBODY = "unplanned"
CONFIGURATION = ("model", "cluster", "system", "seq_len", "global_batch", "tp", "pp")
"""Columns that a prediction needs, besides dp or gpus.  Their cells may be empty; the row's status
then says so."""
SPEED: Final = "tokens_per_s_per_gpu"
SCORED = ("source", "status")
"""Further columns that scoring a row needs."""
TABLED = ("table", "recompute", "gpus", "layers")
"""Further columns that the papers' tables need."""
NUMBERS = {
    *(
        "low",
        "high",
        "tokens_per_s_per_gpu",
        "peak_device_bytes",
        "step_s",
        "mfu_causal",
        "mfu_pct_as_published",
    ),
    *("gpus", "layers", "seq_len", "global_batch", "micro_batch", "tp", "cp", "pp", "vpp", "dp"),
    "document_len",
}
"""Columns, published or predicted, whose cells are empty or numbers above 0."""
SHARES = {"offload_fraction", "peak_host_bytes"}
"""Columns, published or predicted, whose cells are empty or numbers of at least 0."""


class Sheet(list[Cell]):
    """The rows of a CSV file as texts, and the columns of its first line."""

    columns: tuple[str, ...] = ()


def read_sheet(path: Path, needed: Iterable[str] = ()) -> Sheet:
    """The rows of a CSV file.  ConfigError if the file cannot be read, lacks a needed column,
    repeats a column, or has a line with too many cells."""
    label = str(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, [])
            lines = [(reader.line_num, line) for line in reader if line]
    except OSError as error:
        raise ConfigError(label, "", f"cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(label, "", f"cannot be read ({reason})") from error
    missing = [column for column in needed if column not in columns]
    if missing:
        raise ConfigError(label, "", f"is not such a sheet: it has no column {', '.join(missing)}")
    require_unique(columns, label, "columns")
    for number, line in lines:
        if len(line) > len(columns):
            problem = f"{len(line)} cells under {len(columns)} columns"
            raise ConfigError(label, f"line {number}", problem)
    sheet = Sheet(dict(zip_longest(columns, line, fillvalue="")) for _, line in lines)
    sheet.columns = tuple(columns)
    return sheet


def read_cells(
    path: Path,
    option: str,
    *needed: str,
    columns: Iterable[str] = CONFIGURATION,
    checked: bool = False,
) -> Sheet:
    """Read a sheet with the columns `columns` and, for published or predicted cells, `needed`.
    UserError with the option's name if a column is missing or if a number is wrong (numbers are
    checked with `needed` or `checked`)."""
    try:
        sheet = read_sheet(path, dict.fromkeys([*columns, *(SCORED if needed else ()), *needed]))
        if needed or checked:
            check_numbers(sheet, str(path))
    except ConfigError as error:
        raise UserError(f"{option}: {error}") from error
    return sheet


def read_predicted(path: Path) -> Sheet:
    """The predicted rows of a sheet; raises the UserError of `read_cells`."""
    sheet = read_cells(path, str(path.parent), *TABLED, "pred_status")
    return sheet


def check_numbers(sheet: Sheet, label: str) -> None:
    """ConfigError for a cell of NUMBERS or SHARES that is neither empty nor a number in range."""
    for column in sheet.columns:
        plain = column.removeprefix("pred_")
        if plain not in NUMBERS | SHARES:
            continue
        for index, row in enumerate(sheet, start=1):
            if row[column] and not _is_number(row[column], positive=plain in NUMBERS):
                least = "above 0" if plain in NUMBERS else "of at least 0"
                problem = f"{row[column]!r} is not a number {least}"
                raise ConfigError(label, f"row {index}, {column}", problem)


def _is_number(cell: str, *, positive: bool) -> bool:
    try:
        value = float(cell)
    except ValueError:
        return False
    return 0.0 <= value < math.inf and (value > 0.0 or not positive)


def bundle_of(row: Mapping[str, str], registry: Registry) -> str:
    """The name of a row's bundle, which is the composed method that plans the row."""
    try:
        name, _ = recompute_method(text(row, "recompute"), registry)
    except RowError:
        return NOBODY
    alone = text(row, "offload_fraction") in ("0", "0.0") or "pp_offload" in name
    return name if alone else f"{name}+pp_offload"


SWEEP = (
    *("source", "system", "cluster", "model", "layers", "hidden"),
    *("gpus", "seq_len", "global_batch"),
)
"""Columns with equal values in all rows of a sweep: the source, stack, cluster and job."""
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "zero_stage")


def number(row: Row, key: str) -> float | None:
    """The number in a column of a row; None if the column is missing or empty."""
    value = row.get(key)
    return None if value in ("", None) else float(str(value))


def is_scored(row: Row) -> bool:
    """Whether a published cell can be scored: its status is ok or oom, its note does not call it
    SUSPECT, and its layout is published."""
    known = row["status"] in ("ok", "oom") and "SUSPECT" not in str(row.get("note", ""))
    return known and number(row, "tp") is not None
