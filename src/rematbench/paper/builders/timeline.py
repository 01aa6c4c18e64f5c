"""The timeline of one step of a record."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.evaluate.perfetto import write_timeline
from rematbench.worlds.records.plan_replay import replay
from rematbench.worlds.records.record import read_record


def build(output: Path, values: Mapping[str, str], records: Path) -> str:
    again = replay(read_record(records / f"{values['record']}.json"), cluster="", timeline=True)
    write_timeline(again, output)
    return f"{output}: one step of {again.evaluation.step_s:.3f} s"
