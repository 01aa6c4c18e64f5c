"""What fills the memory of each pipeline rank of one record."""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import asdict

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.stage_memory import stage_bytes
from rematbench.host.table import write_sheet
from rematbench.worlds.records.plan_replay import replay


def build(output: Path, values: Mapping[str, str], records: Path) -> str:
    again = replay(records / f"{values['record']}.json")
    program = lower(again.plan, again.problem)
    bars = stage_bytes(again.problem, again.plan, program, again.evaluation)
    write_sheet(output, [{**asdict(bar), "title": again.title} for bar in bars])
    return f"{output}: {len(bars)} ranks"
