"""A real Slurm of two nodes with fake GPUs on this machine, for one test module.

Debian's slurmctld, slurmd (several on one host: `slurmd -N`), munged; everything under one folder,
on free ports.  Every daemon is our child, and nothing else is ever signalled.  Load-bearing in
slurm.conf: EnforcePartLimits=ALL (or impossible requests pend for ever), MinJobAge (finished jobs
must stay visible to squeue), linuxproc and no cgroups (needs no systemd).  The executor's job step
drops SLURM_CONF before its nested srun, so wrappers that set it come first on PATH.

Where it can be, all of it lives in a network namespace with a loopback and nothing else: what a
job can do there, it can do on a compute node without a network.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.tables import tables

SBIN = Path("/usr/sbin")
TOOLS = ("srun", "sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sacctmgr")
CPUS, GPUS, MEM_MB = 2, 2, 4000


def missing() -> str:
    """Why no Slurm can be started here; empty if one can."""
    found = [n for n in ("slurmctld", "slurmd", "munged") if not (SBIN / n).exists()]
    found += [name for name in ("srun", "sbatch") if shutil.which(name) is None]
    if found:
        return f"no {', '.join(found)} here (./bench test --with-slurm installs them, as root)"
    return "" if os.geteuid() == 0 else "Slurm's daemons want root here"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class LocalSlurm:
    """Started by `start`, ended by `stop`; `environment()` is for who talks to it."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.enter: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """This process's environment with the tools of this cluster first."""
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *words: str) -> str:
        """A tool's output, empty if it fails."""
        done = subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, check=False
        )
        return done.stdout

    def start(self) -> None:
        """Write the configuration, start every daemon, wait until all nodes are idle."""
        for name in ("state", "log", "run", "dev", "bin", *(f"spool/{n}" for n in self.names)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        run = self.folder / "run"
        self._isolate()
        self._configure()
        self.spawn(
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={run}/munge.sock"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log"),
            *(f"--seed-file={run}/munged.seed", "--num-threads=2"),
        )
        self._wait((run / "munge.sock").exists, "munged")
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.idle() == len(self.names), "slurmd")

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        clean = [] if any((self.folder / "state").iterdir()) else ["-c", "-i"]
        self.spawn("slurmctld", "-D", *clean)
        self._wait(lambda: "UP" in self.ask("scontrol", "ping"), "slurmctld")

    def start_node(self, name: str) -> None:
        """Start one node's slurmd."""
        self.spawn("slurmd", "-D", "-N", name, called=f"slurmd-{name}")

    def idle(self) -> int:
        """Idle nodes of the default partition."""
        text = self.ask("sinfo", "--noheader", "-p", "main", "-t", "idle", "-o", "%D").strip()
        return int(text or 0)

    def spawn(self, daemon: str, *words: str, called: str = "") -> None:
        """Start a daemon in the foreground mode of its own, in its own session."""
        name = called or daemon
        with (self.folder / f"log/{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.enter, str(SBIN / daemon), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")},
                cwd="/",
            )

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """Signal one daemon and wait for its end."""
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(timeout=8)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End all jobs, then every daemon before what it needs."""
        if "slurmctld" in self.processes:
            user = pwd.getpwuid(os.geteuid()).pw_name
            self.ask("scancel", "-u", user)
            deadline = time.monotonic() + 10
            while self.ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for name in reversed(list(self.processes)):
            self.end(name)

    def _isolate(self) -> None:
        """A network namespace that a sleeping process keeps; none where that is not allowed.

        This host's own name must still lead somewhere: processes of a job meet there.  And names
        are looked up (AI_ADDRCONFIG) only where there is an address beside 127.0.0.1.
        """
        own = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        extra = ["192.0.2.1", *(one for one in own if not one.startswith(("127.", "::1")))]
        steps = ["ip link set lo up", *(f"ip address add {one} dev lo" for one in extra)]
        script = " && ".join([*steps, "echo up", "exec sleep infinity"])
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if holder.stdout.readline() != b"up\n":
            holder.wait()
            return
        self.processes["network"] = holder
        self.enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")

    def _wait(self, ready: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up in {seconds:g} s")
            time.sleep(0.05)

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        control, *ports = free_ports(1 + len(self.names))
        lines = [
            tables(__file__)["conf"].format(
                host=host, user=user, control=control, folder=self.folder
            )
        ]
        gres = ["AutoDetect=off"]
        for name, port in zip(self.names, ports, strict=True):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={CPUS} RealMemory={MEM_MB} Gres=gpu:{GPUS} State=UNKNOWN"
            )
            for number in range(GPUS):  # plain files do: only scheduling is tested
                device = self.folder / f"dev/{name}-gpu{number}"
                device.touch()
                gres.append(f"NodeName={name} Name=gpu File={device}")
        every = f"Nodes={','.join(self.names)} DefaultTime=10 State=UP"
        lines.append(f"PartitionName=main {every} Default=YES MaxTime=INFINITE PriorityTier=1")
        lines.append(f"PartitionName=urgent {every} MaxTime=INFINITE PriorityTier=9")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(gres) + "\n")
        enter = " ".join(self.enter)
        for tool in TOOLS:
            if real := shutil.which(tool):
                wrapper = self.folder / "bin" / tool
                conf = self.folder / "slurm.conf"
                wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {enter} {real} "$@"\n')
                wrapper.chmod(0o755)
