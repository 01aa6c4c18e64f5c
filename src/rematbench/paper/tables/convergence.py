"""Loss curves of long training runs against keep_all: every step, and a table of deviations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rematbench.host.console import CommandError
from rematbench.paper.sheet.table import Column, Table, columns, exponent, fixed, sheet, whole
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.measured import LEARNING_RATE
from rematbench.worlds.records.record import Record, read_records
from rematbench.worlds.records.suite import record_label

INPUTS = {"records": "results/measured/convergence/*.json"}
TABLES = ("convergence_deviation",)
SHEETS = ("convergence",)
Entries = Sequence[tuple[str, Record]]


def build(records: list[Path]) -> list[Table]:
    """The curves, step by step, and the table of their deviations."""
    entries = [(problem, record) for problem, record in read_records(records) if record.measured]
    bases = {problem: r for problem, r in entries if r.spec.method == IDENTITY}
    alone = sorted({problem for problem, _ in entries} - set(bases))
    if alone or not bases:
        of = f" on {', '.join(alone)}" if alone else ""
        raise CommandError(f"no record of {IDENTITY}{of} to compare with")
    return [curves_table(entries, bases), sheet("convergence", curve_lines(entries, bases))]


def curve_lines(entries: Entries, bases: Mapping[str, Record]) -> list[dict[str, object]]:
    """A line for each step of every (problem, record), with the loss minus the base's loss."""
    return [
        {
            "problem": at,
            "method": record_label(one),
            "step": step,
            "loss": loss,
            "deviation": loss - b,
        }
        for at, one in entries
        for step, (loss, b) in enumerate(zip(_losses(one), _losses(bases[at]), strict=True))
    ]


def curves_table(entries: Entries, bases: Mapping[str, Record]) -> Table:
    """A row for every (problem, record): how far its losses deviate from the losses of the base."""
    return Table(
        name="convergence_deviation",
        title="Loss curves against keep_all's (executed, CPU)",
        columns=(
            *columns("problem method"),
            Column("steps", "steps", whole),
            Column("first", "first loss", fixed(4)),
            Column("last", "last loss", fixed(4)),
            Column("largest", "largest relative deviation", exponent),
            Column("at_end", "at the last step", exponent),
            *columns("bitwise"),
        ),
        rows=tuple(
            {
                "problem": problem,
                "method": record_label(record),
                **_deviation(_losses(record), _losses(bases[problem])),
            }
            for problem, record in entries
        ),
        note="Bytes of the Python standard library's sources, fp32, AdamW at "
        f"{LEARNING_RATE:g}; the same batches for all. A method that splits a GEMM rounds "
        "differently from step 1 on, and training amplifies the difference; all other methods "
        "are bitwise equal.",
    )


def _losses(record: Record) -> tuple[float, ...]:
    assert record.measured is not None
    return record.measured.losses


def _deviation(losses: tuple[float, ...], base: tuple[float, ...]) -> dict[str, object]:
    gaps = [abs(a - b) / b for a, b in zip(losses, base, strict=True)]
    return {
        "steps": len(losses),
        "first": losses[0],
        "last": losses[-1],
        "largest": max(gaps),
        "at_end": gaps[-1],
        "bitwise": "yes" if losses == base else "no",
    }
