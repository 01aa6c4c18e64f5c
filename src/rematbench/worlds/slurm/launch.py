"""Start a cell's processes by torchrun, here or on every node of an allocation, and end them."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

GRACE_S = 10.0


class LaunchResult(Struct, frozen=True, kw_only=True):
    """How a launch ended.  `code`: the exit code, None for a command that did not end by itself.
    `stderr`: the end of the output."""

    code: int | None
    stderr: str
    seconds: float


def torchrun(words: Sequence[str], *, nodes: int, gpus_per_node: int, job_id: str) -> list[str]:
    """The command that runs `python -m WORDS` in every process of a Slurm job; without a job all
    processes share this machine.

    Ranks are in node order, so that neighbours in a layout share a node on every run. Therefore the
    rendezvous is static, at the first node, where this process runs. The job step of Snakemake's
    executor drops the SLURM_* variables that sbatch set, so srun gets every number as an option.
    """
    here = [sys.executable, "-m", "torch.distributed.run"]
    if not job_id or nodes == 1:
        total = nodes * gpus_per_node
        return [*here, "--standalone", f"--nproc-per-node={total}", "-m", *words]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    start = [*here, f"--nnodes={nodes}", f"--nproc-per-node={gpus_per_node}"]
    start += [f"--master-addr={socket.gethostname()}", f"--master-port={port}"]
    ranks = '--node-rank="$SLURM_NODEID"'
    line = f"exec {shlex.join(start)} {ranks} -m {shlex.join(words)}"
    srun = ["srun", "--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1"]
    return [*srun, "--kill-on-bad-exit=1", "--cpu-bind=none", "sh", "-c", line]


def run_limited(words: Sequence[str], log: Path, limit_s: float) -> LaunchResult:
    """Run a command in a new session for at most `limit_s` seconds, with its output in `log`. At
    the end, at the limit, and after an exception (as for SIGTERM) its processes are ended."""
    start = time.monotonic()
    code: int | None = None
    with log.open("w+b") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit_s)
        finally:
            _end(process)
        # Read through the open file: another job that finishes the same cell may remove the folder.
        out.seek(0)
        text = out.read().decode(errors="replace")
    return LaunchResult(code=code, stderr=text[-20_000:], seconds=time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group by SIGTERM (srun passes it to the other nodes), then by SIGKILL."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def last_words(text: str) -> str:
    """The line of an output that most probably names the error: the last line with an exception, or
    with an error that our command printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if line.startswith("rematbench ") or ("Error" in line and "ChildFailedError" not in line)
    ]
    return (errors or lines or ["no output"])[-1][:400]
