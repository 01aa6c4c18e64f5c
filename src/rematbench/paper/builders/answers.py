"""The answers to the questions of a study."""

import time
from collections.abc import Mapping
from pathlib import Path

from rematbench.host.files import write_atomically
from rematbench.host.workers import collect_rarely
from rematbench.paper.studies.answers import ask_study, dump
from rematbench.paper.studies.study import load_study
from rematbench.plugins.discover import discover


def build(output: Path, values: Mapping[str, str], study: Path) -> str:
    """Write the answers as JSON; all methods of a question have the same candidate layouts."""
    collect_rarely()
    found = ask_study(load_study(study), discover(), str(output))
    write_atomically(output, dump(found))
    return f"{output}: {len(found)} answers in {time.process_time():.1f} s of CPU"
