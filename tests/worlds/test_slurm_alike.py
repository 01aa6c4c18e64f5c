"""Whether cells of a problem train alike, from made-up losses and norms."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.worlds.records.measured import Measured
from rematbench.worlds.slurm import campaign_rows
from rematbench.worlds.slurm.campaign_rows import REFERENCE_COLUMNS

OURS, MEGATRON = "rematbench 1.0", "megatron-core 0.16.1"
RAN = Measured(losses=(8.0, 7.0), gradient_norms=(2.0, 1.5))
PACKAGE = replace(RAN, losses=(8.008, 6.0))
BLANK = dict.fromkeys(REFERENCE_COLUMNS, "")


class CellRan(NamedTuple):
    """What of a cell's row decides, and its numbers."""

    problem: str
    method: str
    precision: str
    keeps_all: bool
    engine: str
    found: Measured


def alike(cells: Sequence[CellRan | None]) -> list[dict[str, Any]]:
    """The columns of every cell, of which some did not run."""
    waiting = {"problem": "one", "keeps_all": "", "engine": OURS}
    return campaign_rows.reference_columns(
        [cell._asdict() if cell else waiting for cell in cells],
        [cell.found if cell else None for cell in cells],
    )


BASE = CellRan("one", "keep_all", "bf16", True, OURS, RAN)


def test_first_steps_are_held_to_what_keeps_all_in_our_executor() -> None:
    package = CellRan("one", "megatron_core", "bf16", True, MEGATRON, PACKAGE)
    wrong = replace(RAN, gradient_norms=(2.04, 1.5))
    full = CellRan("one", "full_recompute", "bf16", False, OURS, wrong)
    found = alike([package, full, BASE, None])
    assert found[0]["against"] == "keep_all"
    assert abs(found[0]["first_loss_error"] - 1e-3) < 1e-12
    assert found[0]["first_norm_error"] == 0.0, "the second step's is not compared"
    assert found[0]["alike"] == "yes"
    assert abs(found[1]["first_norm_error"] - 0.02) < 1e-12
    assert found[1]["alike"] == "NO", "norm beyond the bound of bf16"
    assert found[2] == found[3] == BLANK


def test_the_bound_is_that_of_the_precision() -> None:
    base, package = (
        CellRan("one", name, "fp32", name == "keep_all", engine, found)
        for name, engine, found in (("keep_all", OURS, RAN), ("megatron_core", MEGATRON, PACKAGE))
    )
    assert alike([base, package])[1]["alike"] == "NO"


def test_without_our_executor_the_packages_own_is_the_reference() -> None:
    package = CellRan("one", "megatron_core", "bf16", True, MEGATRON, PACKAGE)
    tiled = CellRan("one", "deepspeed", "bf16", False, "deepspeed 0.19", PACKAGE)
    found = alike([tiled, package])
    assert found[0]["against"] == "megatron_core (megatron-core 0.16.1)"
    assert (found[0]["alike"], found[1]) == ("yes", BLANK)


def test_nothing_is_said_without_a_reference_or_without_numbers() -> None:
    other = CellRan("two", "keep_all", "bf16", True, OURS, RAN)
    full = CellRan("one", "full_recompute", "bf16", False, OURS, RAN)
    assert alike([other, full]) == [BLANK, BLANK], "another problem's is no reference"
    silent = full._replace(found=replace(RAN, losses=()))
    assert alike([BASE, silent])[1] == BLANK
    for wrong in ({"losses": (float("nan"),)}, {"gradient_norms": (float("nan"),)}):
        nan = full._replace(found=replace(RAN, **wrong))
        assert alike([BASE, nan])[1]["alike"] == "NO"
