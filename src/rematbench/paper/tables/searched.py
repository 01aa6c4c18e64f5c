"""Tables of committed searches (results/searched).

They show the loss of published layouts, the regret on published sweeps, the best plan of a
package's space, and the best plans of models with experts. A search takes minutes, but checking its
answer takes one simulation, so each answer is simulated again before a table is written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.advise.candidates.layouts import DEGREES
from rematbench.advise.search.job import simulated
from rematbench.evaluate.result import WORDS
from rematbench.evidence.published.sheets import Row, number, read_sheet
from rematbench.host.console import CommandError
from rematbench.host.workers import collect_rarely
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    fixed,
    hidden,
    percent,
    signed_percent,
    whole,
)

INPUTS = {
    "layouts": "results/searched/layouts.csv",
    "spaces": "results/searched/spaces.csv",
    "sweeps": "results/searched/sweeps.csv",
    "experts": "results/searched/experts.csv",
}
TABLES = ("searched_layouts", "searched_spaces", "searched_sweeps", "searched_experts")
ROUNDING = 1e-6

NEEDED = ("name", "step_s", "gap", "model", "cluster", "system", "seq_len", *WORDS, "partition")
NEEDED += ("precision", "attention", "run_with")
"""Columns that a line needs so that its plan can be simulated again."""

FILLING = (
    "Plans may fill the device, as published plans do; the command `search` leaves a reserve "
    "free unless --reserve-gib is 0. "
)

SIMULATED = (
    "All steps are simulated, so a loss or gain compares layouts and plans only. gap: no plan in "
    "the search space is faster than the best by more than this. The space takes shares from a "
    "grid, so a published plan may use a share between two grid points. Layouts are written "
    "tp-cp-pp-vpp-dp, followed by u (Ulysses), mb (micro-batch) and z (ZeRO stage) if they "
    "differ from 1, and by the layers of uneven ends."
)


def build(layouts: Path, spaces: Path, sweeps: Path, experts: Path) -> list[Table]:
    """The tables; CommandError if the step of a plan no longer agrees with its line."""
    collect_rarely()
    made = []
    tables = (layout_table, space_table, sweep_table, expert_table)
    for path, table in zip((layouts, spaces, sweeps, experts), tables, strict=True):
        rows = read_sheet(path, NEEDED)
        if wrong := checked(table is not sweep_table, rows):
            raise CommandError(f"{path}: {wrong}")
        made.append(table(rows))
    return made


def checked(filled: bool, rows: Sequence[Row]) -> str:
    """A sentence on the first line whose plan no longer has the committed step; empty if every step
    is confirmed.  `filled`: plans may fill the device, as published plans do."""
    reserve_gib = 0.0 if filled else None
    for row in rows:
        if not row.get("run_with"):
            continue
        step_s, told = simulated(row, reserve_gib).fitting_s, number(row, "step_s") or 0.0
        if abs(step_s - told) > ROUNDING * told:
            return (
                f"{row['name']} for {row['model']} on {row['gpus']} GPUs takes {step_s:.6g} s now, "
                f"not {told:.6g} s: the cost model has changed; search again "
                "(./bench reproduce --full)"
            )
    return ""


def layout_text(row: Row) -> str:
    """The degrees tp-cp-pp-vpp-dp and a layout's unusual fields; empty if there is no plan."""
    if not row.get("tp"):
        return ""
    words = ["-".join(row[key] for key in DEGREES)]
    words += [f"u {row['ulysses']}"] if row["ulysses"] != "1" else []
    words += [f"mb {row['micro_batch']}"] if row["micro_batch"] != "1" else []
    words += [f"z {row['zero_stage']}"] if row["zero_stage"] != "1" else []
    ends = row["partition"].split(",")
    words += [f"ends {ends[0]} {ends[-1]}"] if "--partition" in row["run_with"] else []
    return " ".join(words)


def _short(source: str) -> str:
    """The source without its edition and address."""
    return source.partition(";")[0].partition(", ")[0]


def _rows(rows: Sequence[Row]) -> tuple[dict[str, Any], ...]:
    return tuple({**row, "layout": layout_text(row)} for row in rows)


SPEED = Column("tokens_per_s_per_gpu", "tokens/s/GPU", fixed(0))
JOB = (
    *columns("model cluster gpus seq_len"),
    Column("global_batch", "batch", whole),
)
BEST = (
    Column("name", "plan"),
    *columns("layout"),
    SPEED,
)
PROVED = Column("gap", "gap %", percent)


def layout_table(rows: Sequence[Row]) -> Table:
    """The table of published layouts compared with the best layout of a search."""
    return Table(
        name="searched_layouts",
        title="Published layouts against the best of a search (simulated)",
        columns=(
            *columns("model gpus"),
            Column("published_layout", "published layout"),
            Column("published_tokens_per_s_per_gpu", "published tokens/s/GPU", fixed(0)),
            Column("pred_tokens_per_s_per_gpu", "ours of it", fixed(0)),
            *BEST,
            Column("loss", "published loses %", percent),
            Column("rank", "its rank", whole),
            Column("ranked", "of"),
            *columns("decides"),
            PROVED,
            *hidden("pred_step_s step_s decides_s run_with"),
        ),
        rows=_rows(rows),
        note=(
            f"{FILLING}{SIMULATED} decides: the part of the step that is longer in the published "
            "layout. its rank: 1 plus the number of other layouts (and divisions of layers) with "
            "a plan faster than the published one (`at least`: only those found in a fixed "
            "amount of work)."
        ),
    )


def sweep_table(rows: Sequence[Row]) -> Table:
    """The table of published sweeps: the speed lost by following the search."""
    return Table(
        name="searched_sweeps",
        title="Published sweeps: what following the search would have lost",
        columns=(
            Column("source", "source", _short),
            *JOB,
            *columns("rows"),
            Column("regret", "our pick loses %", percent),
            Column("regret_filled", "with no reserve %", percent),
            *BEST,
            Column("over_pick", "over our pick %", signed_percent),
            Column("best_measured", "measured"),
            Column("best_regret", "it loses %", percent),
            PROVED,
            *columns("reason"),
            *hidden("layers hidden step_s run_with"),
        ),
        rows=_rows(rows),
        note=(
            "our pick: the measured row with the highest predicted speed among rows that leave "
            "the search's reserve free. loses: its measured speed relative to the best measured "
            "speed (100: it ran out of memory, or no row is predicted to fit). The best plan of "
            "the whole space is rarely a measured row; `over our pick` compares predicted speeds. "
            f"{SIMULATED}"
        ),
        shown=45,
    )


def space_table(rows: Sequence[Row]) -> Table:
    """The table of the whole space's best plan compared with the best plan of a package's space."""
    return Table(
        name="searched_spaces",
        title="The whole space against the space of one package (simulated)",
        columns=(
            *columns("job space"),
            Column("system", "stack"),
            *BEST,
            *columns("mfu_causal mfu_dense"),
            Column("published_mfu", "published MFU %", percent),
            *columns("binds layouts"),
            PROVED,
            *columns("reason"),
            *hidden("source step_s run_with"),
        ),
        rows=_rows(rows),
        note=FILLING + SIMULATED,
    )


def expert_table(rows: Sequence[Row]) -> Table:
    return Table(
        name="searched_experts",
        title="Models with experts: the best plan of the whole space (simulated)",
        columns=(
            *JOB,
            *BEST,
            *(Column(key, key.upper()) for key in ("ep", "etp")),
            *columns("mfu_causal binds layouts"),
            PROVED,
            *columns("reason"),
            *hidden("step_s run_with"),
        ),
        rows=_rows(rows),
        note=(
            f"Experts are balanced, their exchange is NCCL's all-to-all. {FILLING}{SIMULATED} MFU "
            "counts the active parameters of a token."
        ),
    )
