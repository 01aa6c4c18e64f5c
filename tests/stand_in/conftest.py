"""The stand-in libraries, built once; without torch's CUDA build these tests skip."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stand_in import libraries

Run = Callable[..., list[str]]
LIMIT_S = 900.0


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if libraries.missing():
        pytest.skip(libraries.missing())
    return libraries.build(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def run(variables: dict[str, str], tmp_path: Path) -> Run:
    """Run a Python module (or, with a path, a program) on the stand-in; its lines."""

    def started(*words: str, **more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *words],
            env={**variables, **more},
            cwd=libraries.HERE.parents[1],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.splitlines()

    return started
