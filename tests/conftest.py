"""Property tests draw the same examples on every machine, and neither a deadline nor slow drawing
fails them, since both are of the machine; a run without the tests marked full draws a quarter of
them.  Golden files are rewritten by
`pytest tests/golden --update-golden`."""

import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
"""As in the runtime's own processes (`rematbench.worlds.torch.devices.prepare`), for what
tests run in theirs; oneDNN reads it once, at its first product."""

os.environ["OMP_NUM_THREADS"] = "1"
"""As in the runtime's own processes: threads that wait for each other cost these tiny tensors three
to five times the CPU seconds, and torch reads it as it is loaded."""

os.environ.pop("COLUMNS", None)
"""Workers of pytest-xdist have it, and commands obey it; a test that is about widths sets it."""

collect_ignore_glob = [] if find_spec("torch") else ["worlds/torch/test_*.py"]


def pytest_report_header() -> list[str]:
    """What is left out, and why."""
    return [f"{files}: left out, torch is not installed" for files in collect_ignore_glob]


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
for name, examples in (("short", 25), ("all", 100)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=SLOW,
    )


def is_short(config: pytest.Config) -> bool:
    """Whether tests marked full are left out."""
    return "not full" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    """Before any test file is read: how many examples its tests draw.  The second worker reads the
    folders from the last one on: each file's assertions are rewritten by one worker, and kept."""
    settings.load_profile("short" if is_short(config) else "all")
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and config.args == config.getini("testpaths"):
        config.args = sorted(map(str, Path(__file__).parent.glob("*/")), reverse=True)


@pytest.fixture(scope="session")
def short(request: pytest.FixtureRequest) -> bool:
    """Whether tests marked full are left out: shared set-ups are then smaller too."""
    return is_short(request.config)


TOGETHER = "published"
"""The folder whose modules predict the same rows: one worker has them all."""
SHARING = ("workflow", "slurm", "baselines", "torch", "worlds", "measure", "paper", TOGETHER)
"""Folders of tests/ whose modules share a process or a long set-up, the longest first."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's collector never walks what is collected here, which lives to the end of the run."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share a set-up come first in each half of the tests.  Two workers begin with a
    half each, and a worker without a test takes single ones from the end of the other's list."""
    modules: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: item.path):
        folder = item.path.parent.name
        name = "" if folder == TOGETHER else item.path.name
        modules.setdefault((folder, name), []).append(item)
    order = {folder: at for at, folder in enumerate(SHARING)}
    halves: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for module in sorted(modules, key=lambda module: order.get(module[0], len(order))):
        min(halves, key=len).extend(modules[module])
    items[:] = chain(*sorted(halves, key=len, reverse=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The switch that rewrites golden files instead of comparing them."""
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files, then read the diff"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether this run rewrites golden files."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def no_assumed_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed options leave out the facts of the stack that act beside them: to try each fact takes
    most of a second."""
    monkeypatch.setattr("rematbench.worlds.packages.flags.assumed_facts", lambda *_: ())


THRESHOLD = gc.get_threshold()


def pytest_runtest_teardown() -> None:
    """Commands make Python's collector rare for their process, and a tensor in a cycle (torch makes
    one at its first use) would then live on in the next test of this one."""
    gc.set_threshold(*THRESHOLD)
