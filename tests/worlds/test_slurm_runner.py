"""What a bundle makes of a cell's end: always a row."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rematbench.host.console import CommandError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm import runner as runner_module
from rematbench.worlds.slurm.cell_records import MAX_ATTEMPTS, decode, is_final, remove_records
from rematbench.worlds.slurm.launch import last_words
from rematbench.worlds.slurm.runner import Runner
from tests.campaigns import campaign, center_file

RECORD = Path(__file__).parents[2] / "results/measured/executed/tp2.keep_all.0.json"
FAKE = f"""
import json, os, sys, time
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

    def run(self, end: str, method: str = "keep_all", job_id: str = "") -> tuple[Any, str]:
        """A bundle's records, and what it said; its cells end so."""
        said: list[str] = []
        self.ends[method] = end
        store = Store(self.folder / "store", is_final=is_final)
        bundle = self.made.bundle(f"{method}.1x2.0")
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            records = Runner(self.made, bundle, store, job_id=job_id, say=said.append).run()
        finally:
            signal.signal(signal.SIGTERM, before[0])
            signal.signal(signal.SIGINT, before[1])
        return records, " ".join(said)


@pytest.fixture
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundles:
    return Bundles(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("ok", "ok", ""),
        ("oom", "oom", "OutOfMemoryError"),
        ("killed", "oom", "signal 9"),
        ("nan", "nan", "loss of step 0"),
        ("broken", "failed", "no good"),
    ],
)
def test_every_end_of_a_cell_is_a_row(bundles: Bundles, kind: str, status: str, words: str) -> None:
    (record,), _ = bundles.run(kind)
    assert (record.status, record.final, record.attempts) == (status, True, 1)
    assert words in record.reason


def test_a_cell_over_its_limit_is_a_row(bundles: Bundles) -> None:
    real = runner_module.run_limited
    bundles.patch.setattr(runner_module, "run_limited", lambda w, log, _, s: real(w, log, 0.5, s))
    (record,), _ = bundles.run("hangs")
    assert record.status == "timeout"


def test_a_failing_cell_does_not_stop_the_next(bundles: Bundles) -> None:
    bundles.twice()
    records, _ = bundles.run("broken")
    assert [record.status for record in records] == ["failed", "failed"]


def test_a_preempted_cell_is_tried_again_and_then_final(bundles: Bundles, tmp_path: Path) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        records, said = bundles.run("preempted")
        assert (records is None) == (attempt < MAX_ATTEMPTS)
        assert "SIGTERM" in said
        (path,) = (tmp_path / "store").glob("*.json")
        record = decode(path.read_bytes())
        assert (record.status, record.attempts) == ("preempted", attempt)
        assert record.final == (attempt == MAX_ATTEMPTS)
    (record,), _ = bundles.run("preempted")
    assert record.status == "preempted", "now a result: it stops no other cell"


def test_a_finished_cell_is_not_run_again(bundles: Bundles) -> None:
    bundles.run("ok")
    (record,), _ = bundles.run("broken")
    assert record.status == "ok"


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
    records, _ = bundles.run("on a CPU only", job_id=job_id)
    refused = ("failed", "exit code 1: rematbench execute: --device cuda: torch sees no GPU here")
    expected = refused if on_gpu else ("ok", "")
    assert [(record.status, record.reason) for record in records] == 2 * [expected]


def test_the_line_of_an_output_that_names_the_error() -> None:
    text = "Traceback\nTypeError: no good\nsrun: Force Terminated StepId=42.0\n"
    assert last_words(text) == "TypeError: no good"
    assert last_words("rematbench execute: no\n====\n") == "rematbench execute: no"
    assert last_words("") == "no output"


def test_what_is_forgotten_is_run_again(bundles: Bundles, tmp_path: Path) -> None:
    made = bundles.made
    store, ended = Store(tmp_path / "store", is_final=is_final), tmp_path / "bundles"
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
    (record,), _ = bundles.run("ok")
    assert (record.status, record.attempts) == ("ok", 1)
    with pytest.raises(CommandError, match="unknown status 'fail'; did you mean 'failed'"):
        remove_records(made, store, tmp_path, statuses=["fail"])
    with pytest.raises(CommandError, match="unknown cell 'one'"):
        remove_records(made, store, tmp_path, statuses=["failed"], names=["one"])
