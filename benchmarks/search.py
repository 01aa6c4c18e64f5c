"""Seconds of `search`, proved gaps on the way, and how near its bounds are: `./bench run python
benchmarks/search.py`, on a quiet machine; `--small` runs a small job once, to see that it runs.

Targets, two cores: llama-175b on 256 H800 (Yuan et al., USENIX ATC 2024), the whole space: a proved
gap of 2 % after 10 s and of 0.5 % within 60 s, at most 400 simulations, 2 GB of all processes;
bounds of 10^6 layouts a second.  Others print, for searches of their own: Calculon 600 evaluations
a second and core, Astra 1.27 s, Aceso 92 configurations a second.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from rematbench.search.arms import KEEP, Arm
from rematbench.search.halves import rounds
from rematbench.search.job import Asked, SearchJob
from rematbench.search.shard import Shard, key
from rematbench.search.space import Choice
from rematbench.spec.problemspec import ProblemSpec

GAPS = (0.02, 0.005)
LAYOUTS = 100_000


def job(small: bool) -> Asked:
    """The published problem, or with `small` a problem of a few hundred layouts."""
    if small:
        spec = ProblemSpec(
            model="gpt-1.3b", cluster="a800-80gb", system="megatron-core",
            gpus=4, seq_len=2048, global_batch=8,
        )  # fmt: skip
        return Asked(spec=spec, only=("balanced_checkpointing",))
    spec = ProblemSpec(
        model="llama-175b", cluster="h800-80gb", system="megatron-kwai",
        gpus=256, seq_len=8192, global_batch=256,
    )  # fmt: skip
    return Asked(spec=spec)


def searched(asked: Asked) -> None:
    """Print the seconds until the search proves each gap, and the memory of all processes."""
    start, left, most = time.perf_counter(), list(GAPS), 0.0
    for at in rounds(asked, shown=1):
        most = max(most, resident_gb())
        while left and at.gap <= left[0]:
            seconds = time.perf_counter() - start
            sys.stdout.write(
                f"gap {100 * left.pop(0):.1f} % proved after {seconds:.1f} s, "
                f"{at.simulations} plans simulated, best {at.best_s:.4f} s\n"
            )
    sys.stdout.write(f"memory of all processes: {most:.2f} GB\n")


def resident_gb() -> float:
    """Resident memory in GB of this process and its descendants, from Linux's /proc; a page that
    several processes share counts once for each."""
    parents, resident = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "status").read_text(encoding="utf-8")
        except OSError:  # the process has ended
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        parents[int(folder.name)] = int(fields["PPid"])
        resident[int(folder.name)] = int(fields.get("VmRSS", "0 kB").split()[0])
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(resident.get(pid, 0) for pid in own) / 1e6


def bounded(asked: Asked, layouts: int) -> None:
    """Print how many closed-form bounds (of seconds and bytes) one second makes, on the layouts of
    one shard, repeated."""
    made = SearchJob(asked)
    groups: dict[object, list[Choice]] = {}
    for choice in made.space.choices:
        groups.setdefault(key(choice), []).append(choice)
    largest = max(groups.values(), key=len)
    many = largest * -(-layouts // len(largest))
    shard = Shard(many, made.problem(largest[0]), made.registry)
    shard.bounds(KEEP)  # untimed: arrays that a shard makes once for all arms
    arm = Arm((made.singles[0],))
    shard.probe(arm)
    start = time.perf_counter()
    shard.bounds(arm)
    seconds = time.perf_counter() - start
    count = len(many)
    rate = f"{count / seconds:,.0f} a second"
    sys.stdout.write(f"bounds of {count:,} layouts in {seconds:.3f} s: {rate}\n")


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args(arguments).small
    asked = job(small)
    made = SearchJob(asked)
    sys.stdout.write(f"{len(made.space.choices):,} layouts, {len(made.singles)} methods alone\n")
    bounded(asked, 1_000 if small else LAYOUTS)
    searched(asked)


if __name__ == "__main__":
    main(sys.argv[1:])
