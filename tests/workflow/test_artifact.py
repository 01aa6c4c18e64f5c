"""The page in a real browser; tables that depend neither on the run nor on the Python version."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.report import Page, gather, load_report
from rematbench.report_html import page_html
from tests.workflow.checkout import ROOT

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OTHERS = ("python3.14", "python3.13", "python3.12", "python3.11")


def built(folder: Path) -> Path:
    """The committed results' page if there is one, else one of what exists here."""
    page = ROOT / "results" / "index.html"
    if page.is_file():
        return page
    config = load_report()
    text = page_html(
        Page(config=config, outcome="none", facts=(), sections=tuple(gather(config, folder)))
    )
    path = folder / "index.html"
    path.write_text(text)
    return path


@pytest.mark.skipif(not BROWSER, reason="needs chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 800])
def test_the_page_opens_without_errors_or_requests(tmp_path: Path, width: int) -> None:
    page = built(tmp_path)
    shot, log = tmp_path / "page.png", tmp_path / "net.json"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={log}", f"--window-size={width},1200", f"--screenshot={shot}",
        page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shot.stat().st_size > 10_000, done.stderr
    assert "CONSOLE" not in done.stderr
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 5_000_000
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//|url\(|@import|<script", text)
    dom = subprocess.run(
        [*command[:-2], "--dump-dom", page.resolve().as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    ).stdout  # fmt: skip
    assert "What is not modelled" in dom


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


def matrix_bytes(python: str, folder: Path) -> bytes:
    """One model's matrix at one length, by an interpreter with another hash seed."""
    suite = folder / "suite.yaml"
    text = (ROOT / "config" / "paper.yaml").read_text()
    lengths = "seq_lens: [4096, 16384, 65536, 131072, 262144, 1048576]"
    assert lengths in text
    suite.write_text(text.replace(lengths, "seq_lens: [16384]", 1))
    out = folder / "matrix.csv"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "random"}
    subprocess.run(
        [python, "-m", "rematbench.cli", "matrix", suite, "--model", "llama3-8b", "-o", out],
        env=environment, cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return out.read_bytes() + out.with_suffix(".candidates.csv").read_bytes()


@pytest.mark.soak
def test_two_runs_give_identical_tables(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first, second = (matrix_bytes(sys.executable, folder) for folder in folders)
    assert first == second


@pytest.mark.soak
def test_two_python_versions_give_identical_tables(tmp_path: Path) -> None:
    pythons = interpreters()
    if len(pythons) < 2:
        pytest.skip("needs a second Python with the dependencies: name it in REMATBENCH_PYTHONS")
    made = []
    for index, python in enumerate(pythons):
        folder = tmp_path / str(index)
        folder.mkdir()
        made.append(matrix_bytes(python, folder))
    assert len(set(made)) == 1
