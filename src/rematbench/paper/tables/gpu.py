"""Tables of one GPU: rates beside what is predicted and published, steps beside their predictions.

Every error is signed: measured less predicted, over predicted.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rematbench.evidence.kernels.kernel_curves import seconds as bytes_seconds
from rematbench.evidence.kernels.kernel_rows import (
    KernelRow,
    Sources,
    load_sources,
    measured,
    read_kernel_rows,
)
from rematbench.host.table import Column, Table, fixed, gib, percent, signed_percent, whole
from rematbench.measure.layer_suite import LayerSuite, by_hand_names, layer_names
from rematbench.measure.parts.layers import ratio
from rematbench.measure.predictions import PREDICTED
from rematbench.measure.records import Prediction, Rate, Turn, by_cell, read_lines
from rematbench.paper.tables.speed import seconds
from rematbench.spec.paths import data_dir
from rematbench.worlds.records.measured import measured_speed, same_gpu
from rematbench.worlds.records.suite_cells import problem_of

TIME_BAR, BYTES_BAR = 0.05, 0.005
"""Expected before any measurement: mean absolute errors of time and of allocated bytes (ours)."""
KEEP_BAR = (1.15, 1.26)
"""Expected before any measurement: speed of what keeps attention over full recomputation, at 32K to
128K tokens (ours)."""
KEEPS = "keep attention"
WITHIN = ("gemm", "attention_forward", "attention_backward", "norm", "memcpy_d2h", "memcpy_h2d")
"""Kinds of rates with published rows that can be laid beside them."""
BACKENDS = {"flash": "fa2", "cudnn": "cudnn"}
CPU_NOTE = "Run on a CPU, to try it out: the seconds mean nothing."


def _error(got: float | None, want: float | None) -> float | None:
    return got / want - 1.0 if got and want else None


def _mean(errors: Sequence[float | None]) -> str:
    """The mean absolute error and how many it is of."""
    known = [abs(error) for error in errors if error is not None]
    return f"{100 * statistics.fmean(known):.2f} % of {len(known)}" if known else "none known"


# -- rates --------------------------------------------------------------------------------------


def rates_table(rates: Sequence[Rate]) -> Table:
    """Every rate: measured, predicted, published; what did not run, with the reason."""
    published = Published()
    rows = [_rate_row(rate, published) for rate in sorted(rates, key=_order)]
    by_kind: dict[str, list[float | None]] = {}
    for row in rows:
        word = f"{row['what']} without a pause" if " for_s=" in row["shape"] else row["what"]
        by_kind.setdefault(word, []).append(row["error"])
    means = "; ".join(f"{what} {_mean(errors)}" for what, errors in sorted(by_kind.items()))
    device = rates[0].provenance.device if rates else ""
    return Table(
        name="gpu_rates",
        title=f"Rates of {device}, measured, predicted and published",
        columns=(
            *(Column(key, key) for key in ("what", "implementation", "shape", "status")),
            Column("n", "n", whole),
            Column("median_s", "measured s", seconds),
            Column("spread", "spread %", percent),
            Column("rate", "TFLOP/s or GB/s", fixed(1)),
            Column("predicted_s", "predicted s", seconds),
            Column("error", "error %", signed_percent),
            Column("published_s", "published s", seconds),
            Column("published_error", "beside it %", signed_percent),
            Column("published_n", "rows", whole),
            Column("reason", "reason"),
            *(Column(key, "") for key in ("min_s", "max_s", "clock", "dtype", "written")),
            *(Column(key, "") for key in ("sm_clock_mhz", "power_w", "temperature_c")),
        ),
        rows=tuple(rows),
        note=(
            f"{CPU_NOTE if device.startswith('cpu') else ''} Spread: interquartile range over the "
            "median. Predicted: the shipped cost model's seconds for the same kernel. Published: "
            "median of the rows of kernels.csv of this GPU with the same kernel and shape "
            "(attention: of other heads where the same are not there). "
            f"Mean absolute errors: {means}."
        ).strip(),
    )


def _order(rate: Rate) -> tuple[Any, ...]:
    numbers = [(key, int(v) if v.isdigit() else 0, v) for key, v in rate.shape.items()]
    return (rate.what, rate.implementation, numbers)


def _rate_row(rate: Rate, published: "Published") -> dict[str, Any]:
    of = published.seconds(rate)
    known = statistics.median(of) if of else None
    scale = 1e12 if rate.unit == "flop" else 1e9
    return {
        **{key: getattr(rate, key) for key in ("what", "implementation", "status", "reason")},
        **{key: getattr(rate, key) for key in ("median_s", "min_s", "max_s", "clock", "dtype")},
        **{key: getattr(rate.gpu, key) for key in ("sm_clock_mhz", "power_w", "temperature_c")},
        "shape": " ".join(f"{key}={value}" for key, value in rate.shape.items()),
        "n": rate.n or None,
        "spread": rate.spread,
        "rate": rate.work / rate.median_s / scale if rate.work and rate.median_s else None,
        "predicted_s": rate.predicted_s,
        "error": _error(rate.median_s, rate.predicted_s),
        "published_s": known,
        "published_error": _error(rate.median_s, known),
        "published_n": len(of) or None,
        "written": rate.provenance.written,
    }


class Published:
    """The rows of kernels.csv, to look up those of a rate."""

    def __init__(self) -> None:
        self.rows = read_kernel_rows(data_dir("published") / "kernels.csv")
        self.sources: Sources = load_sources(data_dir("config") / "kernels" / "sources.yaml")

    def seconds(self, rate: Rate) -> list[float]:
        """Published seconds of the rate's work on the same GPU, a number for each row."""
        if rate.what not in WITHIN:
            return []
        device = rate.provenance.device
        rows = [row for row in self.rows if row.what == rate.what and same_gpu(row.gpu, device)]
        rows = [row for row in rows if self._is_like(row, rate)]
        heads = [row for row in rows if row.shape.get("h") == rate.shape.get("h")]
        return [_row_seconds(row, rate) for row in heads or rows]

    def _is_like(self, row: KernelRow, rate: Rate) -> bool:
        if rate.what == "gemm":
            keys: tuple[str, ...] = ("m", "n", "k")
        elif rate.what == "norm":
            keys = ("rows", "hidden", "pass")
        else:
            keys = ("s", "d", "causal") if rate.what.startswith("attention") else ()
        alike = all(row.shape.get(key) == rate.shape.get(key) for key in keys)
        return alike and row.dtype in ("bf16", "fp16", "") and self._is_kernel(row, rate)

    def _is_kernel(self, row: KernelRow, rate: Rate) -> bool:
        """Whether the row ran the kernel that the rate did, as sources.yaml groups them."""
        if rate.what == "gemm":
            return rate.implementation == "torch" and "cublas" in row.implementation
        if rate.what == "norm":
            return self.sources.operators.norm[rate.implementation].match.holds(row)
        facts = self.sources.gpus.get(row.gpu)
        if facts is None:
            return False
        rows, backend = (
            self.sources.generations[facts.generation],
            BACKENDS.get(rate.implementation),
        )
        if rate.what.startswith("attention"):
            return backend is not None and rows.attention[backend].match.holds(row)
        match = rows.copies["alone"].match
        return match is None or match.holds(row)


def _row_seconds(row: KernelRow, rate: Rate) -> float:
    """Seconds of the rate's work at the row's rate."""
    if row.what == "norm":
        return bytes_seconds(row)
    figure = measured(row)
    if figure.quantity == "seconds":
        return figure.value
    return rate.work / figure.value


# -- steps --------------------------------------------------------------------------------------


def layer_rows(suite: LayerSuite, folder: Path, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row for each cell that has a turn (or a refusal), beside its prediction if it has one.  A
    rank that runs alone has no MFU."""
    known = {line.cell: line for line in read_lines(folder / PREDICTED, Prediction)}
    labels, found, by_hand = layer_names(suite), by_cell(turns), by_hand_names(suite)
    problems = {spec.name: spec.problem() for spec in suite.problems}
    rows = []
    for name, label in labels.items():
        line = known.get(name)
        if name not in found or (line is None and name not in by_hand):
            continue
        problem, last = problem_of(name), found[name][-1]
        row: dict[str, Any] = {"cell": name, "problem": problem, "method": label}
        row["run"] = folder.name
        row |= {"status": _status(last), "reason": last.reason}
        row |= {"context": problems[problem].workload.seq_len, "device": last.provenance.device}
        row |= beside_prediction(line, found[name])
        reference = f"{problem}.{suite.references[problem]}"
        if row["step_s"]:
            row |= _ratios(found[name], found.get(reference, ()), line, known[reference])
        if row["step_s"] and problem not in suite.alone:
            speed = measured_speed(problems[problem], [row["step_s"]], row["device"])
            row |= {"mfu_causal": speed.mfu_causal, "mfu_dense": speed.mfu_dense}
        first = line is None or last.provenance.written >= line.provenance.written
        row |= {"against": labels[reference], "predicted_first": first}
        rows.append(row)
    return rows


def _status(turn: Turn) -> str:
    """The status; of a refused cell also the reason, without the name of the only rank."""
    short = turn.reason.replace("device memory of pipeline rank 0: ", "")
    return f"refused: {short}" if turn.status == "refused" else turn.status


def beside_prediction(line: Prediction | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """Measured and predicted numbers of a cell with their errors; medians of its turns' seconds,
    peaks of all its turns."""
    steps = [statistics.median(turn.step_s) for turn in turns if turn.step_s]
    found: dict[str, Any] = {"n": len(steps) or None}
    got = {"step_s": statistics.median(steps) if steps else None}
    for key in ("allocated_bytes", "reserved_bytes", "pinned_bytes"):
        got[key] = max(getattr(turn, key) for turn in turns) or None
    for key, value in got.items():
        want = getattr(line, key) if line else None
        found |= {key: value, f"predicted_{key}": want, f"{key}_error": _error(value, want)}
    return found


def _ratios(
    turns: Sequence[Turn], reference: Sequence[Turn], line: Prediction | None, other: Prediction
) -> dict[str, Any]:
    found, step_s = ratio(turns, reference), line.step_s if line else None
    predicted = other.step_s / step_s if other.step_s and step_s else None
    if found is None:
        return {"predicted_ratio": predicted}
    half = found.half_width if math.isfinite(found.half_width) else None
    error = _error(found.mean, predicted)
    return {"ratio": found.mean, "half_width": half, "rounds": found.n,
            "predicted_ratio": predicted, "ratio_error": error}  # fmt: skip


def layers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Steps and bytes, measured beside predicted."""
    bars = (
        f"Mean absolute errors: time {_mean([row['step_s_error'] for row in rows])} (expected: at "
        f"most {100 * TIME_BAR:g} %), allocated bytes "
        f"{_mean([row['allocated_bytes_error'] for row in rows])} (expected: at most "
        f"{100 * BYTES_BAR:g} %)."
    )
    shown: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("step_s", "step s", seconds),
        ("allocated_bytes", "allocated GiB", gib),
        ("reserved_bytes", "reserved GiB", gib),
        ("pinned_bytes", "pinned GiB", gib),
    )
    columns = [Column(key, key) for key in ("problem", "method", "status")]
    columns.append(Column("n", "n", whole))
    for key, heading, show in shown:
        columns += [Column(key, heading, show), Column(f"predicted_{key}", "predicted", show)]
        columns.append(Column(f"{key}_error", "error %", signed_percent))
    columns.append(Column("run", "run"))
    columns += [Column(key, "") for key in ("reason", "device", "predicted_first")]
    return Table(
        name="gpu_layers",
        title=f"Steps on {devices_of(rows)}, measured beside predicted",
        columns=tuple(columns),
        rows=tuple(rows),
        note=f"{caveats(rows)}n: turns; a step is the median of the medians of turns, bytes the "
        f"most of any turn. Predicted pinned bytes count powers of two. {bars}",
    )


def ratios_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each method's speed over the problem's reference, and both MFUs, by context."""
    low, high = KEEP_BAR
    ran = [row for row in rows if row["step_s"]]
    kept = [row["ratio"] for row in ran if KEEPS in row["method"] and row.get("ratio")]
    text = ", ".join(f"{value:.3f}" for value in kept) or "not measured"
    return Table(
        name="gpu_ratios",
        title=f"Speed over full recomputation and MFU by context, on {devices_of(rows)}",
        columns=(
            Column("context", "context", whole),
            *(Column(key, key) for key in ("problem", "method", "against")),
            Column("rounds", "n", whole),
            Column("ratio", "ratio", fixed(4)),
            Column("half_width", "95 % +-", fixed(4)),
            Column("predicted_ratio", "predicted", fixed(4)),
            Column("ratio_error", "error %", signed_percent),
            Column("mfu_causal", "MFU causal %", percent),
            Column("mfu_dense", "MFU dense %", percent),
        ),
        rows=tuple(sorted(ran, key=lambda row: (row["context"], row["problem"]))),
        note=f"{caveats(rows)}Ratio: seconds of `against` over the method's, paired by round. What "
        f"keeps attention: {text} (expected: {low:g} to {high:g} at 32K to 128K).",
    )


def devices_of(rows: Sequence[dict[str, Any]]) -> str:
    """The names of the devices that rows were measured on."""
    return ", ".join(sorted({row["device"] for row in rows}))


def caveats(rows: Sequence[dict[str, Any]]) -> str:
    """What a note says first: that rows are of a CPU, or were predicted too late; else nothing."""
    early = all(row["predicted_first"] for row in rows)
    told = "" if early else "NOT every prediction was written before its measurement. "
    return (f"{CPU_NOTE} " if devices_of(rows).startswith("cpu") else "") + told
