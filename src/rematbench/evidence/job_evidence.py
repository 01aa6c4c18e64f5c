"""Evidence for a job: published rows predicted with constants fitted without their source, and the
range of jobs that the rows cover.

`config/left_out.csv` has a line per published row.  If constants were fitted to a source, its rows
are predicted with constants refitted without it; all other rows are predicted with the shipped
constants.  The properties of a job are its stack, generation, cluster, scale, context and
mechanisms.  Stacks and clusters are identified by their facts and not by their names: a copy of a
stack under another name has the evidence of the shipped stack, and a cluster with other FLOP/s
under a shipped name has none of its evidence.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import asdict

from rematbench.costs.tiles import ALIGNED_BYTES, is_aligned
from rematbench.evaluate.problems import Variant, system_variant
from rematbench.evidence.published.row_cases import bundle_of, claim_of
from rematbench.evidence.published.sheets import (
    LAYOUT,
    SPEED,
    SWEEP,
    Cell,
    Row,
    is_scored,
    number,
    read_sheet,
)
from rematbench.evidence.quantiles import Errors
from rematbench.host.declared import flat
from rematbench.host.table import grouped
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.constants import Calibration
from rematbench.inputs.load import calibration, load_cluster, load_system, names, rated_clusters
from rematbench.inputs.paths import data_dir
from rematbench.inputs.precision import WIDE, in_precision
from rematbench.inputs.recipes import with_recipe
from rematbench.inputs.system import System, with_facts
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY, Registry
from rematbench.problem import Problem

NAME, EXPERTS, BYTES = "left_out.csv", "left_out_experts.csv", "left_out_bytes.csv"
SHEETS = ("runs.csv", "runs_more.csv")
"""The sheets of published runs; constants are fitted to declared rows of both."""
PEAK = "peak_device_bytes"
REFITTED, SHIPPED = "refitted", "shipped"
SLOPE = "slope_"
LATE = "late_"
LATE_STEP = f"{SLOPE}{LATE}step"
"""Column of the second tangent: ln(step seconds with a slow host / predicted step seconds)."""
OTHER_GENERATION = "pred_other_generation"
"""Column of the speed that the constants of the other fitted GPU generation predict."""
PLACE = ("sheet", "row", SPEED, PEAK)


def line_of(sheet: str, index: int, row: Row, scored: Row, how: str) -> Cell:
    """The line of left_out.csv for a row of a sheet; `scored`: the row with its predictions, `how`:
    REFITTED or SHIPPED.  Empty if neither speed nor peak is both published and predicted."""
    if row["status"] != "ok" or not is_scored(row):
        return {}
    line = {"sheet": sheet, "row": str(index + 1), "constants": how}
    for key in (SPEED, PEAK):
        told, made = row[key], number(scored, f"pred_{key}")
        both = bool(told and made)
        line |= {key: told if both else "", f"pred_{key}": f"{made:.5g}" if both else ""}
    slopes = {key: value for key, value in scored.items() if key.startswith(SLOPE)}
    line |= {key: f"{value:.3f}" if line[SPEED] else "" for key, value in slopes.items()}
    other = number(scored, OTHER_GENERATION)
    line |= {OTHER_GENERATION: f"{other:.5g}" if other and line[SPEED] else ""}
    return line if line[SPEED] or line[PEAK] else {}


def slope_column(scale: str, *, late: bool = False) -> str:
    """The column of d ln(step seconds) / d ln(scale); `late`: for the tangent with a slow host."""
    return f"{SLOPE}{LATE * late}{scale}"


@cache
def out_of_source() -> tuple[Cell, ...]:
    """The lines of config/left_out.csv, each with the columns of its published row.

    ConfigError if a published row has changed since its prediction.
    """
    lines = read_sheet(
        data_dir("config") / NAME, (*PLACE, "constants", f"pred_{SPEED}", f"pred_{PEAK}")
    )
    sheets = {name: read_sheet(data_dir("published") / name) for name in SHEETS}
    return tuple(joined(line, sheets) for line in lines)


@cache
def expert_errors() -> Errors:
    """Absolute errors of ln(speed) of the rows with experts in config/left_out_experts.csv, by
    source."""
    lines = read_sheet(data_dir("config") / EXPERTS, ("source", SPEED, f"pred_{SPEED}"))
    return grouped((line["source"], abs(log_error(line) or 0.0)) for line in lines)


def joined(line: Cell, sheets: Mapping[str, Sequence[Cell]]) -> Cell:
    """A line of left_out.csv with the columns of its published row; ConfigError if the row has
    changed."""
    rows, index = sheets.get(line["sheet"], ()), int(line["row"]) - 1
    row = rows[index] if 0 <= index < len(rows) else {}
    if any(line[key] and line[key] != row.get(key) for key in (SPEED, PEAK)):
        where = f"{line['sheet']} row {line['row']}"
        reason = "the prediction is for another row (rerun `rematbench calibrate --leave-one-out`)"
        raise ConfigError(f"config/{NAME}", where, reason)
    return {**row, **line}


def log_error(row: Row, key: str = SPEED, predicted: str = "") -> float | None:
    """ln(predicted / published) of a column, whose prediction is in `predicted` or in its pred_
    column; None if either value is missing."""
    told, made = number(row, key), number(row, predicted or f"pred_{key}")
    return math.log(made / told) if told and made else None


def left_out_by_source(rows: Sequence[Row]) -> dict[str, float]:
    """Mean absolute speed error of each source in lines of left_out.csv."""
    known = ((row["source"], error) for row in rows if (error := log_error(row)) is not None)
    found = grouped((source, abs(math.expm1(error))) for source, error in known)
    return {source: fmean(errors) for source, errors in found.items()}


# -- jobs -----------------------------------------------------------------------------------------


class JobProperties(Struct, frozen=True, kw_only=True):
    """The properties of a job.  An empty text means that the job is like published rows."""

    stack: str
    """The shipped stack with the same facts (empty: no shipped stack has them)."""
    generation: str
    cluster: str = ""
    """The differences from the nearest shipped cluster, in words."""
    gpus: int
    seq_len: int
    methods: frozenset[str]
    """The mechanisms of the composed method."""
    packing: str = ""
    """The packing of documents, in words."""
    device: str = ""
    """The GPU in words, if no shipped GPU is like it."""
    shape: str = ""
    """The head dimension in words, if its rows are not aligned."""
    precision: str = ""
    """A precision of more than 16 bits, or a recipe."""
    experts: bool = False


class LeftOutCell(Struct, frozen=True, kw_only=True):
    """A published row, predicted with constants fitted without its source.  `log_error` is
    ln(predicted / published) of its speed; `other_log_error` is the same error under the constants
    of another GPU generation (None: it has no rates for a kernel of the row).  Rows of one job on
    one stack with equal options share `sweep`, and `layout` if degrees and ZeRO stage agree."""

    source: str
    job: JobProperties
    log_error: float
    layout: tuple[str, ...]
    sweep: tuple[str, ...]
    other_log_error: float | None = None


class Span(Struct, frozen=True):
    """The range of sequence lengths (tokens) and of GPUs of a set of jobs."""

    shortest_seq: int
    longest_seq: int
    fewest_gpus: int
    most_gpus: int


class Range(Struct, frozen=True):
    """The jobs that published rows cover: spans by (stack, generation), and mechanisms."""

    spans: dict[tuple[str, str], Span]
    methods: frozenset[str]
    experts: bool = False

    def outside(self, job: JobProperties) -> dict[str, str]:
        """The properties of a job that no published row covers, each with its description.  Tokens
        and GPUs are compared with the rows of the job's stack on its generation; if there are none,
        with the rows of its generation, otherwise with all rows."""
        found = {}
        if job.stack not in {stack for stack, _ in self.spans}:
            found["stack"] = f"stack {job.stack or 'with facts of no shipped stack'}"
        known = job.generation in {generation for _, generation in self.spans}
        if not known or job.generation not in fitted_generations():
            unfitted = " (published, but no constant is fitted to its steps)" * known
            found["generation"] = f"generation {job.generation}{unfitted}"
        if job.cluster:
            found["cluster"] = ", ".join(filter(None, (job.cluster, job.device)))
        span, whose = self._nearest(job)
        if not span.fewest_gpus <= job.gpus <= span.most_gpus:
            between = _between(span.fewest_gpus, span.most_gpus)
            found["scale"] = f"{job.gpus:,} GPUs (published{whose}: {between})"
        if not span.shortest_seq <= job.seq_len <= span.longest_seq:
            between = _between(span.shortest_seq, span.longest_seq)
            found["context"] = f"{job.seq_len:,} tokens (published{whose}: {between})"
        if job.packing:
            length = f"{job.seq_len:,} tokens{job.packing}"
            found["context"] = f"{length} (published: whole sequences)"
        return found | self._unlike(job)

    def _unlike(self, job: JobProperties) -> dict[str, str]:
        """The properties of a job's kernels, model and methods that no published row has."""
        strange = job.methods - self.methods
        found = {
            "shape": job.shape,
            "precision": job.precision and f"precision {job.precision} (published: 16 bits)",
            "experts": "experts (published: dense models)" * (job.experts and not self.experts),
            "mechanism": f"mechanism {'+'.join(sorted(strange))}" if strange else "",
        }
        return {name: words for name, words in found.items() if words}

    def _nearest(self, job: JobProperties) -> tuple[Span, str]:
        """The span that a job's tokens and GPUs are compared with, and words for its rows."""
        own = self.spans.get((job.stack, job.generation))
        if own is not None:
            return own, f" on {job.stack}"
        alike = [span for (_, where), span in self.spans.items() if where == job.generation]
        return _joined(alike or list(self.spans.values())), f" on {job.generation}" * bool(alike)


@cache
def fitted_generations() -> frozenset[str]:
    """The GPU generations with a constant that is fitted to published steps."""
    return frozenset(
        name.split(".")[1] for name in calibration().fitted if name.startswith("gpus.")
    )


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _joined(spans: Sequence[Span]) -> Span:
    return Span(
        min(span.shortest_seq for span in spans),
        max(span.longest_seq for span in spans),
        min(span.fewest_gpus for span in spans),
        max(span.most_gpus for span in spans),
    )


def covered(jobs: Iterable[JobProperties]) -> Range:
    """The range that at least one job covers."""
    own: dict[tuple[str, str], list[Span]] = defaultdict(list)
    methods: set[str] = set()
    experts = False
    for job in dict.fromkeys(jobs):
        span = Span(job.seq_len, job.seq_len, job.gpus, job.gpus)
        own[job.stack, job.generation].append(span)
        methods |= job.methods
        experts = experts or job.experts
    spans = {key: _joined(found) for key, found in own.items()}
    return Range(spans, frozenset(methods), experts)


# -- a problem ----------------------------------------------------------------------------------


def job_of(problem: Problem, family: str) -> JobProperties:
    """The job of a problem under a method; `family`: the composed name without parameters."""
    return JobProperties(
        stack=published_stack(problem),
        generation=problem.cluster.generation,
        cluster=unlike_shipped(problem),
        gpus=problem.layout.gpus,
        seq_len=problem.workload.seq_len,
        methods=methods_of(family),
        packing=problem.workload.packing,
        device=unlike_devices(problem.cluster),
        shape=unaligned_heads(problem),
        precision=unlike_precision(problem),
        experts=problem.workload.model.experts is not None,
    )


def unlike_precision(problem: Problem) -> str:
    """A precision of more than 16 bits, or a recipe; otherwise "", as in the published rows."""
    work = problem.workload
    if work.recipe != "none":
        return work.recipe
    return work.precision if work.precision in WIDE else ""


def unaligned_heads(problem: Problem) -> str:
    """The head dimension in words, if its rows are not aligned; otherwise "".  No published step
    has such heads."""
    dim, width = problem.workload.model.head_dim, problem.workload.element_bytes
    if is_aligned(dim, width):
        return ""
    return f"head_dim {dim} (published: multiples of {ALIGNED_BYTES // width})"


def methods_of(family: str) -> frozenset[str]:
    """The mechanisms of a composed name; keep_all is no mechanism."""
    return frozenset(family.split("+")) - {IDENTITY}


NO_SPEED = frozenset(
    (
        *("name", "version", "sources", "constants", "non_torch_bytes", "scales"),
        *("model_parallel", "zero_stages", "pipeline_zero_stages"),
        *("pinned_blocks", "wide_attention", "dummy_gradients", "waiting_frees"),
    )
)
"""Fields of a stack that are not compared: they do not change the seconds of a step, except
`constants`, which are compared by value, and `scales`, which have a separate band."""


def published_stack(problem: Problem) -> str:
    """The name of a shipped stack that, with some of its options on, has the constants of the
    problem's stack and equals it in all fields that affect speed; "" if there is none.  Among
    several, a stack with published rows is preferred, then the stack of the same name."""
    mine, entry = problem.system, problem.calibration.system_entry
    generation = problem.cluster.generation
    if problem.attention == "flash":
        mine = with_facts(mine, attention=problem.kernel, cudnn_first=False)
    work, stage = problem.workload, problem.layout.zero_stage
    alike = [
        other.name
        for other in _stacks(generation)
        if entry(other.constants) == entry(mine.constants)
        and _speed(with_recipe(in_precision(other, work.precision, stage), work)) == _speed(mine)
    ]
    rows = {cell.job.stack for cell in left_out_cells()}
    return min(alike, key=lambda name: (name not in rows, name != mine.name), default="")


@cache
def _stacks(generation: str) -> tuple[System, ...]:
    """The shipped stacks, each with every combination of its options, and with the attention
    kernel that it has on a GPU generation."""
    plain = [load_system(name) for name in names("system")]
    options: tuple[Variant, ...] = get_args(Variant)
    chosen = [c for size in range(len(options) + 1) for c in combinations(options, size)]
    made = (system_variant(system, c) for system in plain for c in chosen)
    return tuple(
        with_facts(one, attention=one.attention_on(generation), cudnn_first=False)
        for one in made
        if isinstance(one, System)
    )


def _speed(thing: System) -> dict[str, Any]:
    return {key: value for key, value in flat(thing).items() if key not in NO_SPEED}


NO_CLUSTER_SPEED = frozenset(
    (
        *("name", "gpu", "sources", "constants", "roofline"),
        *("hbm_bytes", "non_torch_bytes", "host_bytes"),
    )
)
"""Fields of a cluster that are not compared: they do not change the seconds of a step, except
`constants`, which are compared by value."""


def unlike_shipped(problem: Problem) -> str:
    """The facts that change the speed, and the constants, in which the problem's cluster differs
    from the nearest shipped cluster, in words; "" if a shipped cluster has all of them."""
    mine, calibration = problem.cluster, problem.calibration
    own, unlike = _cluster_facts(mine, calibration), {}
    for cluster in rated_clusters():
        other = _cluster_facts(cluster, calibration)
        unlike[cluster.name] = [key for key, value in own.items() if value != other[key]]
    nearest = min(unlike, key=lambda name: (len(unlike[name]), name != mine.name))
    if not unlike[nearest]:
        return ""
    keys = ", ".join(unlike[nearest])
    return f"cluster unlike any shipped cluster (differs from {nearest} in: {keys})"


SAME_DEVICE = 0.05
"""Largest relative difference of FLOP/s and of HBM bytes/s of two GPUs that count as one."""


def unlike_devices(cluster: Cluster) -> str:
    """A cluster's GPU in words, if its FLOP/s or HBM bytes/s differ from every shipped GPU of its
    generation; otherwise ""."""
    for other in rated_clusters():
        pairs = (
            (cluster.peak_flop_per_s, other.peak_flop_per_s),
            (cluster.hbm_bytes_per_s, other.hbm_bytes_per_s),
        )
        if other.generation == cluster.generation and all(
            abs(own / shipped - 1.0) <= SAME_DEVICE for own, shipped in pairs
        ):
            return ""
    rates = f"{cluster.peak_flop_per_s / 1e12:.4g} TFLOP/s and {cluster.hbm_bytes_per_s / 1e12:.3g}"
    return f"a GPU of {rates} TB/s, of which no rate is published"


def _cluster_facts(cluster: Cluster, calibration: Calibration) -> dict[str, Any]:
    facts = {k: v for k, v in asdict(cluster).items() if k not in NO_CLUSTER_SPEED}
    return {
        **facts,
        "constants": calibration.networks[calibration.network_entry(cluster.constants)],
    }


# -- published rows -----------------------------------------------------------------------------


OPTIONS = ("attention", *get_args(Variant))
"""Columns that change a stack: its attention kernel and its options.  Rows with different values
are on different stacks."""


@cache
def left_out_cells() -> tuple[LeftOutCell, ...]:
    """The rows of config/left_out.csv that have a speed."""
    registry = discover()
    found = (_left_out_cell(row, registry) for row in out_of_source())
    return tuple(cell for cell in found if cell is not None)


def _left_out_cell(row: Row, registry: Registry) -> LeftOutCell | None:
    error = log_error(row)
    if error is None:
        return None
    stack, words = claim_of(row)
    method = str(words.get(row["recompute"].lower(), row["recompute"]))
    sweep = (stack, *(row[key] for key in (*SWEEP, *OPTIONS)))
    return LeftOutCell(
        source=row["source"],
        job=JobProperties(
            stack=stack,
            generation=_generation(row["cluster"]),
            gpus=int(number(row, "gpus") or 0),
            seq_len=int(number(row, "seq_len") or 0),
            methods=methods_of(bundle_of({**row, "recompute": method}, registry)),
        ),
        log_error=error,
        other_log_error=log_error(row, SPEED, OTHER_GENERATION),
        layout=(*sweep, *(row[key] for key in LAYOUT)),
        sweep=sweep,
    )


@cache
def _generation(cluster: str) -> str:
    return load_cluster(cluster).generation
