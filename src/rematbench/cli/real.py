"""Shared by the commands that run real code: the check for torch, the options of a process that a
launcher started (such as its rank), and the output of a record."""

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from typer import Option

from rematbench.cli.options import Request
from rematbench.cli.show import heading, method_line
from rematbench.costs.flops import over_peak
from rematbench.host.console import CommandError, align_left, console, gib, grid, plain
from rematbench.host.ranks import NO_RENDEZVOUS
from rematbench.worlds.records.measured import Comparison, Measured, MeasuredSpeed, measured_speed
from rematbench.worlds.records.record import (
    Record,
    RecordError,
    read_record,
    record_json,
    write_record,
)
from rematbench.worlds.records.suite_cells import Cell
from rematbench.worlds.reruns import verify
from rematbench.worlds.run_records import RUNTIME

TORCH = "2.10"
NO_TORCH = (
    f"torch is not installed: `./bench setup --torch cpu` (or cuda) installs it, or `pip install "
    f"'torch>={TORCH}'` in the environment that runs rematbench"
)


def need_torch() -> None:
    """CommandError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError(NO_TORCH)


def need_gpu(device: str) -> None:
    """CommandError if CUDA is requested and torch can use no GPU."""
    if device == "cuda" and not has_gpu():
        raise CommandError("--device cuda: torch sees no GPU here")


def gpus_here() -> int:
    from rematbench.worlds.torch.devices import gpu_count  # noqa: PLC0415  # torch is optional

    return gpu_count()


def has_gpu() -> bool:
    """Whether torch is installed and can use a GPU."""
    return importlib.util.find_spec("torch") is not None and gpus_here() > 0


def as_committed(names: Sequence[str], folder: Path, committed: Path) -> bool:
    """Whether a folder's records equal the committed ones; each difference is a line on stderr."""
    wrong = 0
    for name in names:
        try:
            path = committed / f"{name}.json"
            _, lines = verify(path, lambda at, _: read_record(folder / f"{at}.json"))
        except RecordError as error:
            lines = [str(error)]
        for line in lines:
            typer.echo(f"{name}: {line}", err=True)
        wrong += bool(lines)
    typer.echo(
        f"{committed}: {len(names) - wrong} of {len(names)} equal the committed records",
        err=wrong > 0,
    )
    return not wrong


def cell_of(asked: Request) -> Cell:
    """The cell of a run, with its plan; the cell is named after the method."""
    plan = asked.method.plan(asked.problem, asked.base)
    return Cell(asked.method.name, asked.problem, asked.method, plan, asked.base)


def finish(record: Record, asked: Request, out: Path | None, json: bool) -> None:
    """Write a record to `out` (None: nowhere) and print it, as text or JSON."""
    if out is not None:
        write_record(record, out)
    if json:
        typer.echo(msgspec.json.format(record_json(record)).decode())
        return
    for line in (*heading(asked.problem), method_line(asked), _banner(record)):
        console().print(plain(line))
    if record.measured is None:
        return
    if record.measured.losses:
        console().print(_steps(record.measured))
    console().print(_bytes(record.measured, record.spec.precision))
    stack = asked.problem.system.name
    if stack != RUNTIME:
        console().print(
            f"In the totals, saved tensors are those of {stack}; states and kernels "
            "are those of this runtime."
        )
    if record.measured.step_s:
        seconds, device = record.measured.step_s, record.provenance.device
        console().print(plain(timing(seconds)))
        console().print(plain(speed_text(measured_speed(asked.problem, seconds, device))))
    if record.measured.comparison:
        console().print(plain(verdict(record.measured.comparison)))


def _banner(record: Record) -> str:
    made = record.provenance
    if record.status != "ok":
        return f"{record.status.upper()}: {record.reason}"
    return f"{record.world.upper()} on {made.device}, torch {made.torch}"


def timing(step_s: Sequence[float]) -> str:
    """The seconds of a GPU's timed steps, in words."""
    many = f"{len(step_s)} further steps, timed without checks"
    return f"step {statistics.median(step_s):.4g} s (median of {many}; slowest {max(step_s):.4g} s)"


def speed_text(found: MeasuredSpeed) -> str:
    """Measured tokens/s/GPU, and MFU if the cluster's peak rate is that of this GPU."""
    rate = f"{found.tokens_per_s_per_gpu:,.1f} tokens/s/GPU"
    if found.mfu_causal is None or found.mfu_dense is None:
        return f"{rate} ({found.no_mfu})"
    ways = f"{100 * found.mfu_causal:.1f} % causal, {100 * found.mfu_dense:.1f} % dense"
    why = over_peak(found.mfu_causal, found.mfu_dense)
    return f"{rate}, MFU {ways} ({found.peak}{'; ' if why else ''}{why})"


def verdict(found: Comparison) -> str:
    """Whether a comparison is lossless, and its errors, in one line."""
    word = "yes" if found.lossless else "NO"
    how = "losses and gradients are bitwise equal"
    if not found.bitwise:
        error = f"gradient error {found.gradient_error:.2g}"
        first = found.first_gradient_error
        if first is not None and (found.first_only or first <= found.bound < found.gradient_error):
            error = (
                f"gradient error {first:.2g} at the first step, at most "
                f"{found.gradient_error:.2g} at any step (AdamW amplifies rounding)"
            )
        how = f"largest norm-wise {error}, loss error {found.loss_error:.2g}, bound {found.bound:g}"
    return f"lossless against {found.against}: {word} ({how})"


def _steps(found: Measured) -> Table:
    table = grid("step", "loss", "gradient norm")
    for step, (loss, norm) in enumerate(zip(found.losses, found.gradient_norms, strict=True)):
        table.add_row(str(step), f"{loss:.9g}", f"{norm:.9g}")
    return table


def _bytes(found: Measured, precision: str) -> Table:
    """The table of measured and expected bytes per rank: activations exactly, totals within
    rounding (only for bf16, because the simulated states are those of bf16 training)."""
    heads = ("activation peak", "ledger", "differing actions", "offloaded bytes")
    totals = ("total peak GiB", "simulated GiB", "error")
    table = align_left(grid("rank", *heads, *totals), 0)
    for rank in found.ranks:
        table.add_row(
            f"{rank.rank}",
            f"{rank.boundary_peak_bytes:,}",
            f"{rank.ledger_boundary_peak_bytes:,}",
            f"{rank.differing_actions} of {rank.actions}",
            f"{rank.offload_bytes:,}",
            gib(rank.peak_bytes),
            gib(rank.simulated_peak_bytes),
            f"{100 * rank.peak_error:+.2f} %" if precision == "bf16" else f"not for {precision}",
        )
    return table


Rank = Annotated[int | None, Option(envvar=["RANK", "SLURM_PROCID"], hidden=True)]
Size = Annotated[int | None, Option(envvar=["WORLD_SIZE", "SLURM_NTASKS"], hidden=True)]
Local = Annotated[int, Option(envvar=["LOCAL_RANK", "SLURM_LOCALID"], hidden=True)]
Address = Annotated[str, Option(envvar="MASTER_ADDR", hidden=True)]
Port = Annotated[int, Option(envvar="MASTER_PORT", hidden=True)]


def is_launched(
    rank: int | None, world_size: int | None, meeting: tuple[str, int], gpus: int
) -> bool:
    """Whether a launcher started this process as one of several (a single process starts its ranks
    itself).  CommandError if the launcher's processes cannot be the layout's ranks."""
    if rank is None or world_size is None or world_size == 1:
        return False
    if world_size != gpus:
        raise CommandError(f"--gpus {gpus}: the launcher started {world_size} processes")
    if not 0 <= rank < world_size:
        raise CommandError(
            f"RANK (or SLURM_PROCID) {rank}: the ranks of {world_size} processes are 0 to "
            f"{world_size - 1}"
        )
    if not all(meeting):
        raise CommandError(NO_RENDEZVOUS)
    return True
