"""Seconds of `search`, the gaps that it proves on the way, and the rate of its bounds.

Run it on a quiet machine: `./bench run python benchmarks/search.py`.  `--small` runs a small job
once, as a check.  `--matrix` only searches cells of the matrix: all of them (six minutes), or the
cells of the given models and lengths (`llama-65b:262144`).  `--times N` searches each cell N times
and takes the smallest CPU seconds of each question, because other processes can only add seconds.

Targets, two cores: llama-175b on 256 H800 (Yuan et al., USENIX ATC 2024), the whole space: a proved
gap of 2 % after 10 s and of 0.5 % within 60 s, at most 400 simulations, 2 GB of all processes;
bounds of 10^6 layouts a second; a cell of the matrix, all its questions to 1 %, in 4 CPU seconds.
On a loaded machine a run takes up to twice as long; a loop that is timed first shows the load.
Published rates of other searches: Calculon 600 evaluations a second and core, Astra 1.27 s,
Aceso 92 configurations a second.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from math import fsum
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.layout_group import group_key
from rematbench.advise.bounds.lines import Probe
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.cli.doctor import cpu_name
from rematbench.inputs.job import Job
from rematbench.paper.matrix.best import Line, Task, Worker
from rematbench.paper.matrix.spec import MatrixSpec, load_matrix

GAPS = (0.02, 0.005)
LAYOUTS = 100_000
ROUNDS, ADDITIONS = 9, 2_000_000
CELLS = [("llama3-8b", 4096), ("llama3-8b", 131072), ("llama-175b", 4096), ("llama-175b", 131072)]
"""Models and lengths of the matrix; each has a cell on every cluster, and these share programs."""


def quiet() -> None:
    """Print the Python version, the processor, and how evenly a loop of additions runs on it."""
    taken = []
    for _ in range(ROUNDS):
        start, total = time.process_time(), 0
        for number in range(ADDITIONS):
            total += number
        taken.append(time.process_time() - start)
    sys.stdout.write(
        f"CPython {platform.python_version()}, {cpu_name()}; {ADDITIONS / 1e6:.0f} million "
        f"additions take {min(taken):.3f} to {max(taken):.3f} CPU seconds (quiet: within 10 %)\n"
    )


def job(small: bool) -> SearchRequest:
    """The published problem, or with `small` a problem of a few hundred layouts."""
    if small:
        spec = Job(
            model="gpt-1.3b", cluster="a800-80gb", system="megatron-core",
            gpus=4, seq_len=2048, global_batch=8,
        )  # fmt: skip
        return SearchRequest(spec=spec, only=("balanced_checkpointing",))
    spec = Job(
        model="llama-175b", cluster="h800-80gb", system="megatron-kwai",
        gpus=256, seq_len=8192, global_batch=256,
    )  # fmt: skip
    return SearchRequest(spec=spec)


def searched(asked: SearchRequest) -> None:
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


def bounded(asked: SearchRequest, layouts: int) -> None:
    """Print how many closed-form bounds (of seconds and bytes) are computed per second, on the
    layouts of the largest group, repeated up to `layouts`."""
    made = SearchJob(asked)
    groups: dict[object, list[LayoutChoice]] = {}
    for choice in made.space.choices:
        groups.setdefault(group_key(choice), []).append(choice)
    largest = max(groups.values(), key=len)
    many = largest * -(-layouts // len(largest))
    bounds = GroupBounds(many, made.problem(largest[0]), made.registry)
    bounds.of(KEEP)  # not timed: arrays that a group computes once for all candidates
    candidate = Candidate((made.variants[0],))
    probe = bounds.probe(candidate)
    assert isinstance(probe, Probe)
    _ = probe.facts, probe.nbytes
    start = time.perf_counter()
    found = bounds.of(candidate)
    assert isinstance(found, Bounds)
    _ = found.step_s
    seconds = time.perf_counter() - start
    count = len(many)
    rate = f"{count / seconds:,.0f} a second"
    sys.stdout.write(f"bounds of {count:,} layouts in {seconds:.3f} s: {rate}\n")


def questions(spec: MatrixSpec, task: Task) -> tuple[list[float], list[Line]]:
    """CPU seconds of each question of the cells of one model and length, and the answers."""
    search = Worker(spec)
    spent, lines, start = [], [], time.process_time()
    for line in search.lines(task):
        lines.append(line)
        spent.append(time.process_time() - start)
        start = time.process_time()
    return spent, lines


def cells(tasks: Sequence[tuple[str, int]], clusters: Sequence[str] = (), times: int = 1) -> None:
    """Print the CPU seconds that the searches of matrix cells take.  Each cell is searched `times`
    times, each time in a new process without caches.  Without tasks or clusters: all of them."""
    spec = load_matrix(Path(__file__).parent.parent / "config" / "paper.yaml")
    spec = replace(spec, clusters=tuple(clusters) or spec.clusters)
    works = {work.model: work for work in spec.works}
    tasks = tasks or [(model, seq_len) for model in works for seq_len in spec.seq_lens]
    each, count, fork = [], len(spec.clusters), get_context("fork")
    for model, seq_len in tasks:
        with fork.Pool(1, maxtasksperchild=1) as pool:
            asked = [(spec, (works[model], seq_len))] * times
            runs = pool.starmap(questions, asked, chunksize=1)
        seconds = fsum(min(one) for one in zip(*(spent for spent, _ in runs), strict=True))
        lines = runs[0][1]
        each.append(seconds / count)
        sys.stdout.write(
            f"{count} cells of {model} at {seq_len}: {seconds:.1f} CPU seconds, "
            f"{len(lines)} answers, {sum(line['simulations'] for line in lines)} simulations\n"
        )
    sys.stdout.write(
        f"a cell of {count * len(tasks)}: {fmean(each):.1f} CPU seconds, {max(each):.2f} at most\n"
    )


def main(arguments: list[str]) -> None:
    """Run the benchmarks that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--matrix", nargs="*", metavar="MODEL:TOKENS")
    parser.add_argument("--times", type=int, default=1, metavar="N")
    chosen = parser.parse_args(arguments)
    quiet()
    if chosen.matrix is not None:
        named = (text.split(":") for text in chosen.matrix)
        cells([(model, int(tokens)) for model, tokens in named], times=chosen.times)
        return
    small = chosen.small
    asked = job(small)
    made = SearchJob(asked)
    sys.stdout.write(f"{len(made.space.choices):,} layouts, {len(made.variants)} methods alone\n")
    bounded(asked, 1_000 if small else LAYOUTS)
    searched(asked)
    cells(*((CELLS[:1], ["h800-80gb"]) if small else (CELLS,)))


if __name__ == "__main__":
    main(sys.argv[1:])
