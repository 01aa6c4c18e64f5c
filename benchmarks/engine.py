"""Seconds of the engine's stages on llama-175b at 256 GPUs (Yuan et al., USENIX ATC 2024), and how
they grow with micro-batches.  Run it on a quiet machine: `./bench run python benchmarks/engine.py`;
`--small` runs each stage once on the smallest size, as a check.

Targets, two cores: the 175B row under 3 s at op level and under 0.15 s at chunk level, and every
stage linear in micro-batches.  It prints a table and tests nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import issue_order
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate, program_bytes
from rematbench.evaluate.evaluator import reserved
from rematbench.evaluate.proof import check
from rematbench.inputs.constants import load_calibration
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.inputs.paths import data_dir
from rematbench.plan import ByteBudget, Keep, Plan, Rule, Select
from rematbench.problem import Problem
from rematbench.workload import Workload

REPEATS = 5
BATCHES = (128, 256, 512, 1024)
"""Global batches at dp 4 and micro-batch 1; the number of micro-batches is a quarter of each."""


class Stage(NamedTuple):
    """One stage of the engine: its name in the table and the call to time."""

    name: str
    run: Callable[[], object]


def row_175b(global_batch: int) -> tuple[Problem, Plan]:
    """llama-175b with tp 2, cp 2, pp 16, vpp 6, dp 4 on H800s, and a plan that offloads 52 % of the
    activation bytes."""
    layout = Layout(
        tp=2, sp=True, cp=2, pp=16, vpp=6, dp=4, zero_stage=1, global_batch=global_batch
    )
    problem = Problem(
        Workload(model=load_model("llama-175b"), seq_len=4096),
        load_cluster("h800-80gb"),
        load_system("megatron-kwai"),
        layout,
        load_calibration(data_dir("config") / "calibration.yaml"),
    )
    exempt = Rule(Select(stages=(15,), chunks=(5,), phases=("steady",)), Keep())
    return problem, problem.base_plan.with_rules(Rule(Select(), ByteBudget(alpha=0.522)), exempt)


def stages(problem: Problem, plan: Plan) -> list[Stage]:
    """The stages of a prediction in order, and last the whole prediction.  Copies, messages and
    collectives of the program slow each other (stage `contention`)."""
    program = lower(plan, problem)
    seconds = action_seconds(problem, program)
    ranks = program_bytes(problem, plan, program)
    return [
        Stage("lower", lambda: lower(plan, problem)),
        Stage("check", lambda: check(program)),
        Stage("contention", lambda: action_seconds(problem, program)),
        Stage("op level", lambda: simulate(program, seconds)),
        Stage("chunk level", lambda: simulate_chunks(program, seconds)),
        Stage("ledger", lambda: issue_order(program)),
        Stage("allocator", lambda: reserved(problem, program, ranks).nbytes),
        Stage("evaluate, all in", lambda: evaluate(problem, plan)),
    ]


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` calls; for several calls after one untimed warm-up call."""
    if repeats > 1:
        run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[repeats // 2]


def num_actions(program: Program) -> int:
    """The number of actions of all ranks, expanded."""
    return sum(
        len(rank.blocks[step.block].actions) for rank in program.ranks for step in rank.steps
    )


def main() -> None:
    """Print seconds by stage (rows) and micro-batches (columns), and seconds per micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one size, each stage once")
    small = parser.parse_args().small
    batches, repeats = (BATCHES[:1], 1) if small else (BATCHES, REPEATS)
    columns: list[dict[str, float]] = []
    actions: list[int] = []
    for global_batch in batches:
        problem, plan = row_175b(global_batch)
        actions.append(num_actions(lower(plan, problem)))
        columns.append(
            {stage.name: median_s(stage.run, repeats) for stage in stages(problem, plan)}
        )
    counts = [batch // 4 for batch in batches]
    lines = [
        f"{'micro-batches':<18}" + "".join(f"{count:>10}" for count in counts) + "  ms/micro-batch",
        f"{'actions':<18}" + "".join(f"{number:>10,}" for number in actions),
    ]
    for name in columns[0]:
        cells = "".join(f"{column[name]:>9.3f}s" for column in columns)
        growth = (columns[-1][name] - columns[0][name]) / max(1, counts[-1] - counts[0])
        lines.append(f"{name:<18}{cells}  {growth * 1e3:>14.3f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
