"""Runs of real packages, executed or traced, each in its own process."""

import time
from pathlib import Path
from typing import Literal

from rematbench.evaluate.evaluation import fullest
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.worlds.packages.process import PackageJob, job, run_jobs, run_rank
from rematbench.worlds.records.measured import Measured
from rematbench.worlds.records.record import Record
from rematbench.worlds.run_records import write_rank_record

Option = int | float | bool | str
LIMIT_S = 600.0


def run(
    problem: Problem, method: Composition, world: Literal["executed", "traced"], **options: Option
) -> Record:
    """Run a baseline's job on a problem and return its record (`options`: fields of PackageJob)."""
    made = job(problem, method, world, **{"timeout_s": LIMIT_S, **options})
    (record,) = run_jobs(method.name, [made])
    return record


def rerun(record: Record) -> Record:
    """Run the job of a baseline's record, made from the record alone, and return the new record."""
    seen, engine = record.measured or Measured(), record.engine
    asked = PackageJob(
        run=record.spec,
        steps=seen.steps,
        warmup=max(1, seen.warmup_steps - seen.steps),
        timed_steps=len(seen.step_s),
        device="cuda" if engine and engine.backend == "nccl" else "cpu",
        rank=seen.ranks[0].rank if seen.ranks else 0,
        timeout_s=LIMIT_S,
    )
    (made,) = run_jobs(record.spec.method, [asked])
    return made


def run_stage(problem: Problem, method: Composition, base: Plan, stage: int | None) -> Record:
    """Trace the first rank of the pipeline rank `stage` (None: the pipeline rank with the largest
    simulated peak under the baseline's plan) and return the record."""
    if stage is None:
        plan = method.plan(problem, base)
        stage = 0 if isinstance(plan, Unsupported) else fullest(problem, plan)
    lay = problem.layout
    return run(problem, method, "traced", rank=stage * lay.stage_ranks)


def run_as_rank(
    problem: Problem, method: Composition, rank: int, out: Path | None, **options: Option
) -> Record | None:
    """Execute a job as a rank that a launcher started.  Return the record on rank 0, None on other
    ranks.  A failed rank returns the record of its failure and writes its error next to `out`."""
    started = time.time()
    made = job(problem, method, "executed", **{"timeout_s": LIMIT_S, **options})
    record = run_rank(method.name, made)
    return write_rank_record(record, out, rank, started) if record and out is not None else record
