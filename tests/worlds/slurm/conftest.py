"""One local Slurm for each module, and a checkout whose Snakemake submits to it."""

import compileall
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workflow.checkout import Checkout
from tests.workflow.test_bench import FUNCTIONS
from tests.worlds.slurm.local_slurm import LocalSlurm, missing

FAST = (
    *("--slurm-init-seconds-before-status-checks", "1"),
    *("--seconds-between-status-checks", "1"),
    *("--latency-wait", "5"),
)
"""For a test's queue only: a real controller is asked less often."""


class Cluster(Checkout):
    """A checkout beside a local Slurm."""

    slurm: LocalSlurm

    def environment(self) -> dict[str, str]:
        """The checkout's, with this Slurm's tools first."""
        bin_dir = str(Path(sys.executable).parent)
        found = self.slurm.environment()
        first = f"{self.slurm.folder}/bin"
        path = os.pathsep.join([first, bin_dir, found["PATH"]])
        return found | {"PATH": path, "PYTHONPATH": str(self.path / "src")}

    def submit(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`snakemake --profile slurm` to its end."""
        process = self.begin(*words)
        text, _ = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, text, "")

    def resume(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """What `./bench resume` does, with its own function in the shell."""
        (self.path / "bench").write_text(f"{FUNCTIONS}unlock\n")
        done = self.tool("sh", "bench")
        assert done.returncode == 0, done.stderr
        return self.submit(*words)

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """The same, not waited for; in a session of its own, so that a kill ends all of it."""
        return subprocess.Popen(
            ["snakemake", *words, "--profile", "slurm", *FAST],
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def tool(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command in this environment."""
        return subprocess.run(
            words,
            cwd=self.path,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    def jobs(self, form: str = "%i %T", *words: str) -> list[str]:
        """The queue's lines."""
        return self.slurm.ask("squeue", "--noheader", f"--format={form}", *words).splitlines()

    def until(self, ready: Callable[[], object], what: str, seconds: float = 300.0) -> None:
        """Wait for something to be so."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
            time.sleep(0.2)


def kill_session(process: "subprocess.Popen[str]") -> None:
    """kill -9 of Snakemake and all it started here; its Slurm jobs live on."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A checkout and its Slurm."""
    if reason := missing():
        pytest.skip(reason)
    slurm = LocalSlurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        made = Cluster(tmp_path_factory.mktemp("checkout"))
        made.slurm = slurm
        compileall.compile_dir(made.path / "src", quiet=1)  # for three interpreters in every job
        yield made
    finally:
        slurm.stop()
