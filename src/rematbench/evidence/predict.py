"""Predict a sheet of configurations: every row gets a status, and a bad row does not stop the
sheet."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rematbench.costs.flops import megatron_flop_per_token
from rematbench.costs.states import state_bytes
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import resolve
from rematbench.engine.lowering.lower import rank_orders
from rematbench.evaluate.result import Result, evaluate_method, told_fragmented
from rematbench.evaluate.unread import unread
from rematbench.evidence.bands import with_host_rates
from rematbench.evidence.hosted import placed_states, printed, timed
from rematbench.evidence.published.row_cases import PRINTED, PublishedCase, read_case
from rematbench.evidence.published.sheets import SPEED, PeakKind, PeakRank, Row, RowError, text
from rematbench.evidence.published.words import committed
from rematbench.host.workers import collect_rarely
from rematbench.inputs.constants import Calibration
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition, Registry
from rematbench.problem import Problem

SPEEDS = ("tokens_per_s_per_gpu", "step_s", "mfu_causal")
BYTES = ("reserved_bytes", "device_total_bytes", "headroom_bytes", "usable_bytes")
PICKED = (*SPEEDS, *BYTES, "status", "evidence")
"""Columns of a result's row that a prediction has as pred_NAME."""
COLUMNS = tuple(
    f"pred_{name}"
    for name in (
        *(*SPEEDS, "peak_device_bytes", "peak_host_bytes", *BYTES, "offload_fraction"),
        *("status", "reason", "attention", "constants", "low", "high", "evidence"),
    )
)
"""Columns of a prediction; `pred_low` and `pred_high`: ends of the 80 % band of tokens/s/GPU."""
MORE = tuple(f"pred_{name}" for name in PRINTED)
"""Further columns, only for rows that print these values."""
Cells = dict[str, Any]
Progress = Callable[[int, int], None]
Setting = tuple[tuple[Path, ...], Calibration | None]
"""Further folders of methods, and constants in place of the shipped constants (None: shipped)."""


def predict_rows(
    rows: Sequence[Row],
    *,
    processes: int = 2,
    methods: Iterable[Path] = (),
    progress: Progress | None = None,
    constants: Calibration | None = None,
) -> list[dict[str, Any]]:
    """Return every row with its pred_* columns, in order; equal configurations are predicted
    once."""
    registry = discover(methods)
    read = [_read(row, registry) for row in rows]
    cases = {case.key: case for case in read if isinstance(case, PublishedCase)}
    order = sorted(cases, key=lambda key: -_effort(cases[key]))
    todo = [cases[key] for key in order]
    found = _predict_all(todo, processes, (tuple(methods), constants), progress)
    table = dict(zip(order, found, strict=True))
    return [
        {**row, **_speed(row, case), **table[case.key]}
        if isinstance(case, PublishedCase)
        else {**row, **case}
        for row, case in zip(rows, read, strict=True)
    ]


def prediction_columns(rows: Sequence[Row]) -> list[str]:
    """The columns of the predictions of rows: COLUMNS, and those of MORE that a row has."""
    return [*COLUMNS, *(column for column in MORE if any(column in row for row in rows))]


def joined(sheets: Iterable[str], **options: Any) -> list[dict[str, Any]]:
    """The rows of committed sheets with their pred_* columns (`options`: as predict_rows)."""
    return predict_rows([row for name in sheets for row in committed(name)], **options)


def _read(row: Row, registry: Registry) -> PublishedCase | Cells:
    """The case of a row, or the columns that say why it has none."""
    try:
        return read_case(row, registry)
    except RowError as error:
        return _nothing(error.status, str(error))
    except Exception as error:  # one bad row must not stop the sheet
        return _nothing("failed", f"{type(error).__name__}: {error}")


MEGATRON_FLOP = "Megatron-LM num_floating_point_operations"
"""The FLOP count by which a row's TFLOP/s are converted to tokens/s."""


def _speed(row: Row, case: PublishedCase) -> Cells:
    """Tokens/s per GPU computed from a row's TFLOP/s; empty if the row prints tokens/s, or does not
    print the dispatcher on which they depend."""
    counted = text(row, "tflops_convention").startswith(MEGATRON_FLOP)
    flop_per_s = float(text(row, "tflops_per_gpu_as_published") or 0) * 1e12
    if text(row, SPEED) or not counted or not text(row, "dispatcher") or not flop_per_s:
        return {}
    vocab = case.system.padded_vocab(case.model.vocab, case.layout.tp)
    flop = megatron_flop_per_token(case.model, case.work.seq_len, vocab)
    return {SPEED: f"{flop_per_s / flop:.1f}"}


def _predict_all(
    cases: Sequence[PublishedCase], processes: int, setting: Setting, progress: Progress | None
) -> list[Cells]:
    with ExitStack() as stack:
        found: Iterable[Cells] = (_work(case, *setting) for case in cases)
        if processes > 1 and len(cases) > 1:
            context = multiprocessing.get_context("spawn")
            pool: Executor = ProcessPoolExecutor(processes, context, collect_rarely)
            work = partial(_work, methods=setting[0], constants=setting[1])
            found = stack.enter_context(pool).map(work, cases, chunksize=4)
        made = []
        for done, cells in enumerate(found, start=1):
            made.append(cells)
            if progress is not None:
                progress(done, len(cases))
        return made


def _work(case: PublishedCase, methods: tuple[Path, ...], constants: Calibration | None) -> Cells:
    return predict_case(case, _registry(methods), constants)


@cache
def _registry(methods: tuple[Path, ...]) -> Registry:
    return discover(methods)


def _effort(case: PublishedCase) -> int:
    """A weight roughly proportional to the time to predict a case: its passes over all ranks."""
    lay = case.layout
    searched = 5 if case.offload is None and lay.pp > 2 else 1
    return lay.pp * lay.vpp * max(1, lay.num_micro_batches) * searched


def predict_case(
    case: PublishedCase, registry: Registry, constants: Calibration | None = None
) -> Cells:
    """The pred_* columns of a case; only status and reason if the case cannot be predicted. Bands
    are learnt for the shipped constants."""
    try:
        case = timed(case) if case.hosted else case
        result = run_case(case, case.problem(constants), registry)
        result = replace(told_fragmented(result), status=result.status)
        if result.evaluation is not None and constants is None:
            result = with_host_rates(result, result.family)
    except RowError as error:
        return _nothing(error.status, str(error))
    except Exception as error:  # one bad row must not stop the sheet
        return _nothing("failed", f"{type(error).__name__}: {error}")
    return _columns(result, case)


def run_case(case: PublishedCase, problem: Problem, registry: Registry) -> Result:
    base = placed_states(case, problem)[0] if case.hosted else problem.base_plan
    return evaluate_method(problem, method_of(case, problem, registry), base)


def method_of(case: PublishedCase, problem: Problem, registry: Registry) -> Composition:
    """A case's recompute policy, followed by pp_offload with the case's share. If the case gives no
    share, pp_offload takes the smallest share that fits, by the paper's estimate on the stack
    megatron-kwai and by the ledger on other stacks; such a case has no offload if its layout or
    stack does not support it."""
    plain = registry.resolve(case.method, case.settings)
    if case.offload == 0.0:
        return plain
    settings: dict[str, Any] = {"alpha": case.offload}
    if case.offload is None:
        settings = {"fit": "paper" if case.system.name == "megatron-kwai" else "ledger"}
        if problem.layout.pp < 3 or "activation_offload" not in problem.system.accepts.features:
            return plain
    offload = registry.resolve("pp_offload", settings)
    return Composition((*plain.methods, *offload.methods))


def _columns(result: Result, case: PublishedCase) -> Cells:
    """The pred_* columns of a result; the peak is the quantity that the case's row prints."""
    evaluation, plan, problem = result.evaluation, result.plan, result.problem
    reason = "; ".join(text for text in (result.reason, case.assumed, unread(problem)) if text)
    if evaluation is None or plan is None:
        return _nothing(result.status, reason)
    row = result.quick_row()
    cells = {f"pred_{key}": row[key] for key in PICKED} | {
        "pred_reason": reason,
        "pred_peak_device_bytes": peak_bytes(result, case.peak_kind, case.peak_rank),
        "pred_peak_host_bytes": max(evaluation.peak_host_bytes),
        "pred_offload_fraction": plan.fit.get("alpha", 0.0),
        "pred_attention": row["kernel"],
        "pred_constants": " ".join(problem.constants),
        "pred_low": row["low_tokens_per_s_per_gpu"],
        "pred_high": row["high_tokens_per_s_per_gpu"],
    }
    more = printed(case, problem, plan) if case.hosted else {}
    return {key: "" if cells[key] is None else cells[key] for key in COLUMNS} | more


def _nothing(status: str, reason: str) -> Cells:
    empty = dict.fromkeys(COLUMNS, "")
    return {**empty, "pred_status": status, "pred_reason": " ".join(reason.split())}


def peak_bytes(result: Result, kind: PeakKind, rank: PeakRank = "fullest") -> int | None:
    """Peak device bytes of a result with a plan, as the quantity `kind` (allocated bytes: of the
    pipeline rank `rank`); None if it is unstated."""
    plan, evaluation = result.plan, result.evaluation
    assert plan is not None
    assert evaluation is not None
    match kind:
        case "allocated":
            peaks = evaluation.peak_device_bytes
            return {"fullest": max(peaks), "first": peaks[0], "last": peaks[-1]}[rank]
        case "reserved":
            return evaluation.reserved_bytes
        case "device":
            return result.device_total_bytes
        case "computed":
            return computed_bytes(result.problem, plan)
    return None


def computed_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of the states of the first stage's layers, and of what these layers keep for
    micro-batches in flight, as in Figure 1 of Korthikanti et al. (without embeddings)."""
    layers = (layer for chunk in plan.partition[0] for layer in chunk)
    weights = sum(problem.layer(layer).parameters for layer in layers)
    states = state_bytes(weights, problem.layout, problem.system)
    return states.total + layer_bytes_in_flight(problem, plan)


def layer_bytes_in_flight(problem: Problem, plan: Plan) -> int:
    """Peak bytes that the first stage's layers keep for micro-batches in flight."""
    order = rank_orders(plan, problem)[0]
    whole: dict[int, int] = {}
    for chunk in range(len(plan.partition[0])):
        ops = ChunkOps.of_plan(problem, plan, 0, chunk)
        fates, _ = resolve(plan, ops.sites, "warmup", 0)
        whole[chunk] = sum(f.keep_bytes for (part, *_), f in fates.items() if part == "layer")
    live = peak = 0
    for item in order:
        live += (item.forward - item.last) * whole[item.chunk]
        peak = max(peak, live)
    return peak
