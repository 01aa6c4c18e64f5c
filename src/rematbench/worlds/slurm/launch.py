"""Start a cell's processes by torchrun, on this machine or on every node of an allocation, and end
them."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rematbench.worlds.slurm.nodefacts import NodeFacts

GRACE_S = 10.0


class Allocation(Struct, frozen=True, kw_only=True):
    """Where a bundle's cells run: on the `nodes` nodes of a Slurm job, or, without a job, on this
    machine."""

    nodes: int
    gpus_per_node: int
    job_id: str = ""

    @property
    def spans(self) -> bool:
        """Whether srun must start the processes."""
        return bool(self.job_id) and self.nodes > 1

    @property
    def hosts(self) -> int:
        """The number of hosts; without a Slurm job all ranks share this machine."""
        return self.nodes if self.spans else 1


class Ended(Struct, frozen=True, kw_only=True):
    """How a launch ended.  `code`: the exit code, None for a command that did not end by itself.
    `stderr`: the end of the output."""

    code: int | None
    stderr: str
    seconds: float


def on_every_node(allocation: Allocation, words: Sequence[str]) -> list[str]:
    """The srun command that runs `words` once on every node.  The job step of Snakemake's executor
    drops the SLURM_* variables that sbatch set, so srun gets every number as an option."""
    count = str(allocation.nodes)
    srun = ["srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"]
    return [*srun, "--kill-on-bad-exit=1", "--cpu-bind=none", *words]


def torchrun(allocation: Allocation, words: Sequence[str]) -> list[str]:
    """The command that runs `python -m WORDS` in every process of an allocation.

    Ranks are in node order, so that neighbours in a layout share a node on every run: the
    rendezvous is static, at the first node, where this process runs.
    """
    here = [sys.executable, "-m", "torch.distributed.run"]
    total = allocation.nodes * allocation.gpus_per_node
    if not allocation.spans:
        return [*here, "--standalone", f"--nproc-per-node={total}", "-m", *words]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    start = [
        *here,
        f"--nnodes={allocation.nodes}",
        f"--nproc-per-node={allocation.gpus_per_node}",
        f"--master-addr={socket.gethostname()}",
        f"--master-port={port}",
    ]
    ranks = '--node-rank="$SLURM_NODEID"'
    line = f"exec {shlex.join(start)} {ranks} -m {shlex.join(words)}"
    return on_every_node(allocation, ["sh", "-c", line])


def run_limited(
    words: Sequence[str], log: Path, limit_s: float, stopped: Callable[[], bool]
) -> Ended:
    """Run a command in its own session until it ends, `limit_s` seconds have passed or `stopped()`
    is true; then end all its processes.  The output goes to `log`."""
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        code: int | None = None
        try:
            while code is None and time.monotonic() - start < limit_s and not stopped():
                try:
                    code = process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    return Ended(code=code, stderr=text[-20_000:], seconds=time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process group by SIGTERM (srun passes it to the other nodes), then by SIGKILL."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def all_facts(allocation: Allocation, canary_s: float, count_gpus: bool) -> list[NodeFacts]:
    """The facts of every node, sorted by host name; RuntimeError if a node gives none."""
    words = [sys.executable, "-m", "rematbench.worlds.slurm.check_node", f"{canary_s:g}"]
    words += ["gpus"] if count_gpus else []
    command = on_every_node(allocation, words) if allocation.spans else words
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != allocation.hosts:
        raise RuntimeError(f"the node check failed: {last_words(done.stderr)}")
    facts = [msgspec.json.decode(line, type=NodeFacts) for line in lines]
    return sorted(facts, key=lambda fact: fact.host)


def last_words(text: str) -> str:
    """The line of an output that most probably names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][:400]
