"""What a bundle makes of a cell's end: always a row."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rematbench.inputs.configfile import ConfigError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm import runner as runner_module
from rematbench.worlds.slurm.launch import last_words
from rematbench.worlds.slurm.runner import decode, remove_records, run_bundle
from tests.campaigns import campaign, center_file
from tests.tables import tables

RECORD = Path(__file__).parents[2] / "results/measured/executed/tp2.keep_all.0.json"
FAKE = f"""
import json, os, shutil, sys, time
from pathlib import Path
kind, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
def write(**parts):
    out.write_text(json.dumps(json.loads(Path({str(RECORD)!r}).read_text()) | parts))
if kind == "ok":
    write()
elif kind == "oom":
    write(status="failed", reason="rank 0: Error: Connection closed by peer", measured=None)
    (out.parent / "record.json.error.1").write_text("failed\\nDistBackendError: timed out\\n")
    (out.parent / "record.json.error.3").write_text("oom\\nOutOfMemoryError: 2 GiB wanted\\n")
    sys.exit(1)
elif kind == "nan":
    write(status="failed", reason="nan: loss of step 0 is nan", measured=None)
    sys.exit(1)
elif kind == "killed":
    write(status="failed", reason="rank 0: Error: Connection closed by peer", measured=None)
    sys.stderr.write("exitcode: -9 (pid: 7)\\n")
    sys.exit(1)
elif kind == "on a CPU only":
    if "--device" not in sys.argv:
        write()
    else:
        sys.stderr.write("rematbench execute: --device cuda: torch sees no GPU here\\n======\\n")
        sys.exit(1)
elif kind == "overtaken":
    (first,) = out.parents[2].glob("one.*.json")
    first.rename(out.parents[1] / first.name)
    shutil.rmtree(out.parent)
    sys.exit("ValueError: no folder")
elif kind == "hangs":
    time.sleep(600)
elif kind == "preempted":
    os.kill(os.getppid(), 15)
    time.sleep(600)
else:
    sys.exit("ValueError: no good")
"""


class Bundles:
    """Bundles of a campaign whose cells end as told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.made = folder, patch, campaign(folder)
        self.ends: dict[str, str] = {}
        self.script = folder / "fake.py"
        self.script.write_text(FAKE)
        patch.setattr(runner_module, "torchrun", self._command)

    def twice(self, **top: Any) -> None:
        """A campaign of two cells in one bundle."""
        variants = [{"method": "keep_all", "name": "again"}]
        self.made = campaign(self.folder, methods=["keep_all"], variants=variants, **top)

    def _command(self, words: list[str], **_: object) -> list[str]:
        end = self.ends[next(word for word in words if word in self.ends)]
        return [sys.executable, str(self.script), end, *words]

    def run(self, end: str, method: str = "keep_all", job_id: str = "") -> list[tuple[str, str]]:
        """The status and reason of a bundle's records, of its manifest; its cells end so."""
        self.ends[method] = end
        bundle, output = self.made.bundle(f"{method}.1x2.0"), self.folder / "manifest.json"
        run_bundle(self.made, bundle, Store(self.folder / "store"), output, job_id=job_id)
        return [(row["status"], row["reason"]) for row in json.loads(output.read_bytes())]

    def stored(self) -> list[str]:
        """Names in the store."""
        return sorted(path.name for path in (self.folder / "store").iterdir())


@pytest.fixture
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundles:
    return Bundles(tmp_path, monkeypatch)


@pytest.mark.parametrize(("kind", "status", "words"), tables(__file__)["ends"])
def test_every_end_of_a_cell_is_a_row(bundles: Bundles, kind: str, status: str, words: str) -> None:
    ((found, reason),) = bundles.run(kind)
    assert found == status
    assert words in reason
    (name,) = bundles.stored()
    assert decode((bundles.folder / "store" / name).read_bytes()).status == status


def test_a_cell_over_its_limit_is_a_row(bundles: Bundles) -> None:
    real = runner_module.run_limited
    bundles.patch.setattr(runner_module, "run_limited", lambda words, log, _: real(words, log, 0.5))
    ((status, _),) = bundles.run("hangs")
    assert status == "timeout"


def test_a_failing_cell_does_not_stop_the_next(bundles: Bundles) -> None:
    bundles.twice()
    assert [status for status, _ in bundles.run("broken")] == ["failed", "failed"]


def test_a_preempted_cell_leaves_nothing_and_is_run_again(bundles: Bundles) -> None:
    with pytest.raises(SystemExit):
        bundles.run("preempted")
    assert bundles.stored() == []
    assert bundles.run("ok") == [("ok", "")]


def test_a_finished_cell_is_not_run_again(bundles: Bundles) -> None:
    bundles.run("ok")
    assert bundles.run("broken") == [("ok", "")]


def test_a_cell_that_two_jobs_run_keeps_the_first_record(bundles: Bundles) -> None:
    """The other job ends while ours runs, and removes the folder that our processes write to."""
    bundles.run("ok")
    (name,) = bundles.stored()
    (bundles.folder / "store" / name).rename(bundles.folder / name)
    assert bundles.run("overtaken") == [("ok", "")]
    assert bundles.stored() == [name]


H800 = "gpu: H800-SXM5-80GB\ngeneration: hopper\n"


@pytest.mark.parametrize(
    ("job_id", "gres", "on_gpu"), [("7", "gpu", True), ("7", "", False), ("", "gpu", False)]
)
def test_a_job_that_asked_for_gpus_takes_no_cpus_instead(
    bundles: Bundles, tmp_path: Path, job_id: str, gres: str, on_gpu: bool
) -> None:
    """It would run until its limit; here, and without GPUs asked for, CPUs are meant."""
    cluster = Path(center_file(tmp_path, gres=gres))
    text = cluster.read_text().replace("gpu: cpu\ngeneration: cpu\n", H800)
    for slow, fast in (("1.0e11", "1.0e15"), ("1.0e10", "1.0e12")):  # as a GPU's are
        text = text.replace(f"value: {slow}", f"value: {fast}")
    cluster.write_text(text)
    bundles.twice(cluster=str(cluster))
    refused = ("failed", "exit code 1: rematbench execute: --device cuda: torch sees no GPU here")
    expected = refused if on_gpu else ("ok", "")
    assert bundles.run("on a CPU only", job_id=job_id) == 2 * [expected]


def test_the_line_of_an_output_that_names_the_error() -> None:
    text = "Traceback\nTypeError: no good\nsrun: Force Terminated StepId=42.0\n"
    assert last_words(text) == "TypeError: no good"
    assert last_words("rematbench execute: no\n====\n") == "rematbench execute: no"
    assert last_words("") == "no output"


def test_what_is_forgotten_is_run_again(bundles: Bundles, tmp_path: Path) -> None:
    made = bundles.made
    store, ended = Store(tmp_path / "store"), tmp_path / "bundles"
    (tmp_path / "executed.csv").touch()
    ended.mkdir()
    for method, end in (("keep_all", "broken"), ("full_recompute", "ok")):
        bundles.run(end, method)
        (ended / f"{method}.1x2.0.json").touch()
    assert remove_records(made, store, tmp_path, statuses=["timeout"]) == {}
    other = ["one.full_recompute.0"]
    assert remove_records(made, store, tmp_path, statuses=["failed"], names=other) == {}
    assert (tmp_path / "executed.csv").exists()
    gone = remove_records(made, store, tmp_path, statuses=["failed"])
    assert gone == {"one.keep_all.0": "failed"}
    assert not (tmp_path / "executed.csv").exists()
    assert [path.name for path in ended.iterdir()] == ["full_recompute.1x2.0.json"]
    assert bundles.run("ok") == [("ok", "")]
    with pytest.raises(ConfigError, match="--again: no status 'fail'; did you mean 'failed'"):
        remove_records(made, store, tmp_path, statuses=["fail"])
    with pytest.raises(ConfigError, match="--cell: no cell 'one'"):
        remove_records(made, store, tmp_path, statuses=["failed"], names=["one"])
