"""The timeline of one step of a record."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.evaluate.perfetto import write_timeline
from rematbench.worlds.records.plan_replay import replay


def build(output: Path, values: Mapping[str, str], records: Path) -> str:
    again = replay(records / f"{values['record']}.json", timeline=True)
    write_timeline(again.title, again.evaluation, output)
    return f"{output}: one step of {again.evaluation.step_s:.3f} s"
