"""What fills the memory of each pipeline rank of one record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.stage_memory import stage_bytes
from rematbench.host.table import write_sheet
from rematbench.worlds.records.plan_replay import Replay, replay


def build(output: Path, values: Mapping[str, str], records: Path) -> str:
    rows = stage_rows(replay(records / f"{values['record']}.json"))
    write_sheet(output, rows)
    return f"{output}: {len(rows)} ranks"


def stage_rows(again: Replay) -> list[dict[str, Any]]:
    """A row for each pipeline rank: the bytes of each part of its memory, and the run's title."""
    program = lower(again.plan, again.problem)
    bars = stage_bytes(again.problem, again.plan, program, again.evaluation)
    return [{**asdict(bar), "title": again.title} for bar in bars]
