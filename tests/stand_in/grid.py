"""Run on the stand-in: every case of a layout keeps the laws of bytes; one line for each that does
not.  `python -m tests.stand_in.grid LAYOUT [first]`"""

import sys

from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.single_rank import trace_rank
from tests.worlds.torch import cases, grid, laws


def every_case(layout: str) -> list[Case]:
    """Raw plans in float64 and bf16, methods, compositions, and fp32 plans."""
    half = [cases.case(layout, plan, precision="bf16") for plan in cases.PLANS]
    made = [*grid.raw_cases(layout), *half, *grid.method_cases(layout)]
    return [*made, *grid.composed_cases(layout), *grid.bitwise_cases(layout)]


def wrong_in(layout: str, *, only_first: bool) -> list[str]:
    """What breaks a law, a line each."""
    found = every_case(layout)
    every = [grid.on_gpus(case) for case in (found[:6] if only_first else found)]
    wrong = []
    for case, result in zip(every, execute_cases(every, timeout_s=300.0), strict=True):
        if result.status != "ok":
            wrong.append(f"{case.name}: {result.status} {result.reason}")
            continue
        wrong += [f"{case.name}: {line}" for line in laws.bytes_differ(case, result)[:3]]
        for rank in result.ranks:
            peaks = (rank.peak_bytes, rank.allocated_bytes, rank.reserved_bytes)
            if not (rank.step_s and sorted(peaks) == list(peaks)):
                wrong.append(f"{case.name} {rank.place}: bytes {peaks}, seconds {rank.step_s}")
        if case.problem.layout.gpus == 1 and case.problem.workload.precision == "bf16":
            traced = trace_rank(case.problem, case.plan).peak_bytes
            if traced != result.ranks[0].peak_bytes:
                wrong.append(f"{case.name}: {result.ranks[0].peak_bytes}, traced {traced}")
    return [*wrong, f"{len(every)} cases"]


if __name__ == "__main__":
    for line in wrong_in(sys.argv[1], only_first="first" in sys.argv):
        sys.stdout.write(line + "\n")
