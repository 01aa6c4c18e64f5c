"""Measured, predicted and published rates of one GPU."""

import statistics
from collections.abc import Sequence
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
from rematbench.host.console import CommandError
from rematbench.inputs.paths import data_dir
from rematbench.measure.parts.measured_errors import CPU_NOTE, mean_error, runs_with, signed_error
from rematbench.measure.records import Rate, read_lines
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    fixed,
    hidden,
    percent,
    seconds,
    signed_percent,
    whole,
)
from rematbench.worlds.records.measured import same_gpu

INPUTS = {"runs": "results/measured/gpu*"}
READS = ("config/kernels/sources.yaml", "results/published/kernels.csv")
WITHIN = ("gemm", "attention_forward", "attention_backward", "norm", "memcpy_d2h", "memcpy_h2d")
"""Kinds of rates with comparable published rows."""
BACKENDS = {"flash": "fa2", "cudnn": "cudnn"}


def build(runs: list[Path]) -> Table:
    """The table of the last run that measured rates."""
    found = runs_with(runs, "rates.jsonl")
    if not found:
        raise CommandError("no rates.jsonl there")
    return rates_table(read_lines(found[-1] / "rates.jsonl", Rate))


def rates_table(rates: Sequence[Rate]) -> Table:
    """Every rate: measured, predicted and published, with the reason if it did not run."""
    published = Published()
    rows = [_rate_row(rate, published) for rate in sorted(rates, key=_order)]
    by_kind: dict[str, list[float | None]] = {}
    for row in rows:
        word = f"{row['what']} without a pause" if " for_s=" in row["shape"] else row["what"]
        by_kind.setdefault(word, []).append(row["error"])
    means = "; ".join(f"{what} {mean_error(errors)}" for what, errors in sorted(by_kind.items()))
    device = rates[0].provenance.device if rates else ""
    return Table(
        name="gpu_rates",
        title=f"Rates of {device}, measured, predicted and published",
        columns=(
            *columns("what implementation shape status n"),
            Column("median_s", "measured s", seconds),
            Column("spread", "spread %", percent),
            Column("rate", "TFLOP/s or GB/s", fixed(1)),
            *columns("predicted_s error"),
            Column("published_s", "published s", seconds),
            Column("published_error", "beside it %", signed_percent),
            Column("published_n", "rows", whole),
            Column("reason", "reason"),
            *hidden("min_s max_s clock dtype written sm_clock_mhz power_w temperature_c"),
        ),
        rows=tuple(rows),
        note=(
            f"{CPU_NOTE if device.startswith('cpu') else ''} Spread: interquartile range over the "
            "median. Predicted: the shipped cost model's seconds for the same kernel. Published: "
            "median of the rows of kernels.csv for this GPU with the same kernel and shape (for "
            "attention, rows with another number of heads if none has the same number). "
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
        "error": signed_error(rate.median_s, rate.predicted_s),
        "published_s": known,
        "published_error": signed_error(rate.median_s, known),
        "published_n": len(of) or None,
        "written": rate.provenance.written,
    }


class Published:
    """The rows of kernels.csv, looked up by rate."""

    def __init__(self) -> None:
        self.rows = read_kernel_rows(data_dir("published") / "kernels.csv")
        self.sources: Sources = load_sources(data_dir("config") / "kernels" / "sources.yaml")

    def seconds(self, rate: Rate) -> list[float]:
        """Published seconds of the rate's work on the same GPU, one number per row."""
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
