"""A row for every cell of a campaign, finished or not: the outcome, the measured numbers next to
the simulated step and peak, and whether the cells of a problem agree in their first loss and
gradient.

Weights and batches come from the problem's seed, so all engines start from the same weights. The
first loss and gradient norm of a cell are compared with those of the cell that keeps all
activations. Later steps depend on each engine's optimizer. A campaign stores no whole gradients.
Equal norms do not prove that a method is lossless, but a wrong gradient rarely has the right norm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.problem import Problem
from rematbench.worlds.records.measured import BOUNDS, OF_CUDA, Measured, measured_speed
from rematbench.worlds.records.record import Record
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import OURS, Campaign, CampaignCell
from rematbench.worlds.slurm.runner import CellRecord, decode

Row = dict[str, Any]
OUTCOME = ("status", "reason", "job_id", "written", "record_key")
SPEED = ("step_s", "step_min_s", "step_max_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense")
COLUMNS = (
    *("engine", "kernels", "device", "torch", "losses", "gradient_norms"),
    *("timed_steps", *SPEED, "peak_device_bytes", *OF_CUDA),
    *("peak_host_bytes", "offload_bytes", "recompute_flop"),
    *("simulated_step_s", "simulated_peak_bytes", "step_error_percent", "peak_error_percent"),
)
REFERENCE_COLUMNS = ("against", "first_loss_error", "first_norm_error", "alike")


def cell_rows(campaign: Campaign, store: Store) -> list[Row]:
    """A row for each cell with its request and outcome; without a record its status is
    `waiting`."""
    return [_row(campaign, store, cell)[0] for cell in campaign.cells]


def number_rows(campaign: Campaign, store: Store) -> list[Row]:
    """The rows of `cell_rows` with COLUMNS and REFERENCE_COLUMNS; every cell is planned and
    simulated."""
    rows: list[Row] = []
    measured: list[Measured | None] = []
    for cell in campaign.cells:
        row, outcome = _row(campaign, store, cell)
        record = outcome.record if outcome else None
        simulated = campaign.simulated(cell)
        row |= columns(record, campaign.problem(cell.spec), simulated)
        row["engine"] = row["engine"] or campaign.engine(cell)
        keeps_all = simulated is not None and campaign.keeps_all(cell, simulated)
        row["keeps_all"] = "yes" if keeps_all else ""
        rows.append(row)
        measured.append(record.measured if record else None)
    return [row | more for row, more in zip(rows, reference_columns(rows, measured), strict=True)]


def _row(campaign: Campaign, store: Store, cell: CampaignCell) -> tuple[Row, CellRecord | None]:
    key = campaign.key(cell)
    spec = cell.spec
    row: Row = {
        "cell": cell.name,
        "problem": spec.name,
        "method": cell.variant.method,
        "settings": msgspec.json.encode(cell.variant.settings, order="sorted").decode(),
        "world": "executed",
        "model": spec.model,
        "cluster": spec.cluster,
        "system": spec.system,
        "gpus": spec.gpus,
        "nodes": campaign.center.nodes(spec.gpus),
        "seq_len": spec.work.seq_len,
        "precision": spec.work.precision,
    }
    data = store.read(key)
    if data is None:
        return row | dict.fromkeys(OUTCOME, "") | {"status": "waiting"}, None
    found = decode(data)
    outcome = (found.status, found.reason, found.job_id, found.written, found.key)
    return row | dict(zip(OUTCOME, outcome, strict=True)), found


def engine_of(label: str, stack: Mapping[str, str]) -> str:
    """The label of a run, in which the package that it begins with is followed by its version."""
    package = next((name for name in stack if label.startswith(name)), "")
    return label.replace(package, f"{package} {stack[package]}", 1) if package else label


def columns(record: Record | None, problem: Problem, simulated: PlanEvaluation | None) -> Row:
    """The values of COLUMNS for a cell. Seconds of a CPU do not measure performance, so a CPU run
    has no simulated step. A cell without a record has only the simulated step and peak."""
    row: Row = dict.fromkeys(COLUMNS, "")
    found = record.measured if record else None
    if record is not None and found is not None:
        row |= _engine(record) | _numbers(found)
    on_cpu = problem.cluster.generation == "cpu" or row["device"].startswith("cpu")
    if simulated is not None:
        row["simulated_peak_bytes"] = max(simulated.peak_device_bytes)
        row["simulated_step_s"] = "" if on_cpu else simulated.step_s
    if found is None:
        return row
    if found.step_s:
        row |= _speed(found.step_s, row["device"], problem)
    if simulated is not None:
        expected = simulated.peak_device_bytes[found.fullest.pp]
        row["simulated_peak_bytes"] = expected
        if problem.workload.precision == "bf16":  # simulated states are those of bf16 training
            row["peak_error_percent"] = percent(row["peak_device_bytes"], expected)
        if found.step_s and row["simulated_step_s"]:
            row["step_error_percent"] = percent(row["step_s"], simulated.step_s)
    return row


def percent(measured: float, simulated: float) -> float:
    """Measured minus simulated value, in percent of the simulated value."""
    return round(100 * (measured / simulated - 1.0), 3)


def _engine(record: Record) -> dict[str, str]:
    found, origin = record.engine, record.provenance
    if found is None:
        return {
            "engine": f"{OURS} {origin.rematbench}",
            "kernels": f"{record.spec.stack.attention} attention of torch",
            "device": origin.device,
            "torch": origin.torch,
        }
    return {
        "engine": engine_of(found.label, found.stack),
        "kernels": "; ".join(f"{what}: {kernel}" for what, kernel in found.kernels.items()),
        "device": found.device,
        "torch": found.stack.get("torch", ""),
    }


def _numbers(measured: Measured) -> Row:
    """The columns of losses, gradient norms and bytes; device bytes are the fullest rank's."""
    top = measured.fullest
    row: Row = {
        "peak_device_bytes": top.peak_bytes,
        "peak_host_bytes": max(rank.host_bytes for rank in measured.ranks),
    }
    for key in ("losses", "gradient_norms"):
        values = getattr(measured, key)
        row[key] = msgspec.json.encode(values).decode() if values else ""
    if top.allocated_bytes:
        row |= {key: getattr(top, key) for key in OF_CUDA}
    if top.actions:
        for key in ("offload_bytes", "recompute_flop"):
            row[key] = sum(getattr(rank, key) for rank in measured.ranks)
    return row


def _speed(step_s: Sequence[float], device: str, problem: Problem) -> Row:
    made = measured_speed(problem, step_s, device)
    named = {key: getattr(made, key) for key in SPEED}
    row = {key: "" if value is None else value for key, value in named.items()}
    return row | {"timed_steps": made.steps}


def reference_columns(rows: Sequence[Row], measured: Sequence[Measured | None]) -> list[Row]:
    """The values of REFERENCE_COLUMNS for every row, given its measured numbers (None: not run).
    The reference is a run of the same problem that keeps all activations, in our executor if there
    is one, otherwise in any engine. The values are empty for the reference itself, for cells that
    did not run, and without a reference."""
    ran = {
        number: found
        for number, found in enumerate(measured)
        if found is not None and found.losses and found.gradient_norms
    }
    values: list[Row] = [dict.fromkeys(REFERENCE_COLUMNS, "") for _ in rows]
    for number, found in ran.items():
        problem = rows[number]["problem"]
        kept = [n for n in ran if rows[n]["keeps_all"] and rows[n]["problem"] == problem]
        reference = min(kept, key=lambda n: not _is_ours(rows[n]), default=number)
        if reference != number:
            values[number] = _errors(rows[number], found, rows[reference], ran[reference])
    return values


def _is_ours(row: Row) -> bool:
    return str(row["engine"]).split(" ")[0] == OURS


def _errors(row: Row, measured: Measured, reference_row: Row, reference: Measured) -> Row:
    loss, norm = measured.first_errors(reference)
    bound = BOUNDS[row["precision"]]
    close = loss <= bound and norm <= bound  # a NaN compares as False
    name = (
        reference_row["method"]
        if _is_ours(reference_row)
        else f"{reference_row['method']} ({reference_row['engine']})"
    )
    return dict(zip(REFERENCE_COLUMNS, (name, loss, norm, "yes" if close else "NO"), strict=True))
