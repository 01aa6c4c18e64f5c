"""The page in a real browser; tables that depend neither on the run nor on the Python version."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

from rematbench.evaluate.result import evaluate_method
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import write_sheet
from rematbench.paper.html import page_html
from rematbench.paper.page import Page, gather, load_report
from rematbench.worlds.slurm.campaign import Campaign, load_campaign_suite
from tests.problems import all_methods
from tests.workflow.checkout import ROOT

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OF_THE_BROWSER = ("google.com", "googleapis.com", "gvt1.com")
"""Hosts that Chromium asks by itself whatever page it opens."""
OTHERS = ("python3.14", "python3.13", "python3.12", "python3.11")


def built(folder: Path) -> Path:
    """The committed results' page if there is one, else one of what exists here."""
    page = ROOT / "results" / "index.html"
    if page.is_file():
        return page
    config = load_report()
    found = gather(config, folder)
    page = Page(
        config=config,
        measured="",
        outcome="none",
        trusted="",
        unmeasured=(),
        facts=(),
        filled=found,
    )
    path = folder / "index.html"
    path.write_text(page_html(page))
    return path


@pytest.mark.skipif(not BROWSER, reason="needs chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 800])
def test_the_page_opens_without_errors_or_requests(tmp_path: Path, width: int) -> None:
    page = built(tmp_path)
    shot, log = tmp_path / "page.png", tmp_path / "net.json"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={log}", f"--window-size={width},1200", f"--screenshot={shot}",
        page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shot.stat().st_size > 10_000, done.stderr
    assert "CONSOLE" not in done.stderr
    asked = {
        urlparse(url).hostname or "" for url in re.findall(r'"url":"([^"]+)"', log.read_text())
    }
    assert not [host for host in asked if not host.endswith(OF_THE_BROWSER)]
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 5_000_000
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//|url\(|@import|<script", text)
    dom = subprocess.run(
        [*command[:-2], "--dump-dom", page.resolve().as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    ).stdout  # fmt: skip
    assert "What is not modelled" in dom


@pytest.mark.full
def test_every_cell_at_full_scale_is_predicted_to_fit() -> None:
    registry = all_methods()
    cells = Campaign(load_campaign_suite(ROOT / "config/full_scale.yaml"), registry).cells
    for cell in cells:
        method = registry.resolve(cell.variant.method, cell.variant.settings)
        assert evaluate_method(cell.spec.problem(), method).status == "ok", cell.name


def interpreters() -> list[str]:
    """Every Python here that has this project's dependencies, by version."""
    found: dict[str, str] = {}
    code = "import sys, rematbench, msgspec, scipy; print(sys.version_info[:2])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    listed = os.environ.get("REMATBENCH_PYTHONS", "").split(os.pathsep)
    for python in (sys.executable, *filter(None, listed), *OTHERS):
        try:
            done = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, env=environment, check=False
            )
        except OSError:
            continue
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), python)
    return list(found.values())


MATRIX = """
import sys
from pathlib import Path
from rematbench.paper.builders.matrix import build
suite, cells = Path("config/paper.yaml"), Path("results/searched/cells.csv")
build(Path(sys.argv[1]), {"model": "llama3-8b", "seq_lens": "16384"}, suite, cells)
"""


def made_bytes(python: str, folder: Path) -> bytes:
    """One model's matrix at one length and the predictions of every tenth published cell, by an
    interpreter with another hash seed."""
    folder.mkdir()
    matrix, sheet, predicted = (folder / f"{name}.csv" for name in ("matrix", "sheet", "made"))
    write_sheet(sheet, read_sheet(ROOT / "results" / "published" / "runs.csv")[::10])
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "random"}
    for words in (
        ["-c", MATRIX, matrix],
        ["-m", "rematbench.cli.app", "predict", sheet, "-o", predicted],
    ):
        subprocess.run([python, *words], env=environment, cwd=ROOT, check=True, capture_output=True)
    return b"".join(path.read_bytes() for path in (matrix, predicted))


@pytest.mark.soak
def test_two_runs_give_identical_tables(tmp_path: Path) -> None:
    first, second = (made_bytes(sys.executable, tmp_path / name) for name in ("a", "b"))
    assert first == second


@pytest.mark.soak
def test_two_python_versions_give_identical_tables(tmp_path: Path) -> None:
    pythons = interpreters()
    if len(pythons) < 2:
        pytest.skip("needs a second Python with the dependencies: name it in REMATBENCH_PYTHONS")
    made = [made_bytes(python, tmp_path / str(i)) for i, python in enumerate(pythons)]
    assert len(set(made)) == 1
