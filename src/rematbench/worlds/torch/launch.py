"""Starts the processes of a job, collects their results, and turns every failure into a result.

One launch runs a list of cases of one world size. A case that dies, hangs or is wrong gets a status
and a reason; the launch then ends its processes, and a new launch runs the remaining cases.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from rematbench.host.files import scratch
from rematbench.host.ranks import RankError, error_of_job, run_ranks
from rematbench.worlds.torch import worker
from rematbench.worlds.torch.case import Case, Result, Status
from rematbench.worlds.torch.gather import combine
from rematbench.worlds.torch.model import NotExecutable, require_executable


def execute_cases(cases: Sequence[Case], *, timeout_s: float = 120.0) -> list[Result]:
    """The results of cases of one world size, in their order; `timeout_s` for each case."""
    if len({(case.world_size, case.device) for case in cases}) > 1:
        raise ValueError("the cases of a launch have one world size and one device")
    results: dict[int, Result] = {}
    waiting = []
    for number, case in enumerate(cases):
        try:
            require_executable(case.problem, case.plan)
            waiting.append(number)
        except NotExecutable as error:
            results[number] = Result(name=case.name, status="unsupported", reason=str(error))
    while waiting:
        done = _launch([cases[number] for number in waiting], timeout_s)
        results.update(zip(waiting, done, strict=False))
        waiting = waiting[len(done) :]
    return [results[number] for number in range(len(cases))]


def _launch(cases: list[Case], timeout_s: float) -> list[Result]:
    """The results up to the first failure (at least one result)."""
    size = cases[0].world_size
    with scratch() as folder:
        ranks = [(rank, size, folder, cases, timeout_s) for rank in range(size)]
        failure = run_ranks("spawn", worker.run, ranks, folder, timeout_s)
        results: list[Result] = []
        for number, case in enumerate(cases):
            paths = [folder / f"{number}.{rank}.pt" for rank in range(size)]
            if not all(path.exists() for path in paths):
                status, reason = _reason(folder, number, failure)
                return [*results, Result(name=case.name, status=status, reason=reason)]
            loaded = [torch.load(path, weights_only=False) for path in paths]
            results.append(combine(case, loaded))
    return results


def _reason(folder: Path, number: int, failure: RankError) -> tuple[Status, str]:
    """The status and the reason of a case without a result."""
    cause = error_of_job(sorted(folder.glob(f"{number}.*.error")), failure)
    return cast(Status, cause.status), cause.reason
