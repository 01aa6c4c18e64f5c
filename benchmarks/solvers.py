"""Seconds of the searches that papers time: Lynx's heuristic and optimum, MEMO's memory plan.

Search times depend on the machine, so generated tables leave them out.  Run it on
a quiet machine: `./bench run python benchmarks/solvers.py`.  For comparison: Chen et al. (arXiv
2406.08756 v1) 0.16 s on average for the heuristic, 99 % less than the optimum; Zhao et al. (arXiv
2407.12117 v3) under 300 s for every memory plan (Gurobi).  Target: the heuristic under 0.2 s.
`--small` takes one problem of each, as a check.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.inputs.paths import data_dir
from rematbench.paper.studies.study import Study, load_study
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.solve.memory_plan import memory_plan
from rematbench.solve.relocate import Relocation

REPEATS = 3
STUDIES = data_dir("config") / "study"
TARGET_S = 0.2


def seconds(run: Callable[[], object]) -> float:
    """Median wall seconds of REPEATS calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def policies(problem: Problem, *, exact: bool) -> object:
    """The policies of every stage within a quarter of the device's usable bytes, about the room of
    a lean plan: the search alone, without the ledger."""
    base = problem.base_plan
    relocation = Relocation(problem, base, exact=exact)
    budget = 0.25 * problem.usable_bytes
    return [
        stage.solve(relocation.layer, relocation.front, budget, relocation.per_chunk)
        for stage in relocation.stages(base)
    ]


def searches(study: Study) -> list[float]:
    """Print the seconds of the heuristic and of the optimum for each workload; return the seconds
    of the heuristic."""
    heuristic = []
    sys.stdout.write("problem, heuristic s, optimum s, heuristic / optimum\n")
    for workload in study.workloads:
        problem = workload.at_layouts()[0].problem()
        fast, slow = (
            seconds(lambda p=problem, e=exact: policies(p, exact=e)) for exact in (False, True)
        )
        heuristic.append(fast)
        sys.stdout.write(f"{workload.name}, {fast:.4f}, {slow:.4f}, {fast / slow:.2f}\n")
    return heuristic


def plans(study: Study) -> None:
    """Print the seconds of MEMO's memory plan of one step, for workloads on 8 GPUs."""
    sys.stdout.write("problem, memory plan s\n")
    method = discover().resolve("memo")
    for workload in study.workloads:
        if "average" in workload.name or workload.system == "deepspeed" or workload.gpus != 8:
            continue
        problem = workload.at_layouts()[0].problem()
        plan = method.plan(problem)
        assert isinstance(plan, Plan)
        rank = lower(plan, problem).ranks[0]
        sys.stdout.write(f"{workload.name}, {seconds(lambda r=rank: memory_plan(r)):.4f}\n")


def main() -> None:
    """Print both tables; exit 1 if the heuristic misses its target on average."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one problem, no target")
    small = parser.parse_args().small
    ladder, memo = (load_study(STUDIES / f"{name}.yaml") for name in ("lynx", "memo"))
    if small:
        ladder, memo = (replace(study, workloads=study.workloads[:1]) for study in (ladder, memo))
    mean = statistics.fmean(searches(ladder))
    sys.stdout.write(f"heuristic: {mean:.4f} s on average, target {TARGET_S} s\n\n")
    plans(memo)
    sys.exit(0 if small or mean < TARGET_S else 1)


if __name__ == "__main__":
    main()
