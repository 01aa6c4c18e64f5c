"""Run on the stand-in: what torch's caching allocator holds for a layout's methods, beside the
simulated one.  A line for each rank: case, allocated and reserved bytes, each real then simulated.
`python -m tests.stand_in.allocators LAYOUT METHOD...`"""

import sys
from typing import Any

import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import AllocatorPeaks
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.replay import replay
from rematbench.inputs.layout import Layout
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.single_rank import fake_job, stage_rank
from tests.problems import LLAMA, make_problem

WIDE = replace(
    LLAMA, name="wide", num_layers=4, hidden=1024, num_heads=8, num_kv_heads=8, head_dim=128,
    ffn=2816, vocab=8192,
)  # fmt: skip
"""Large enough for activations to be most of the memory, with few weights to make."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"global_batch": 2},
    "pp2": {"pp": 2, "global_batch": 4},
    "tp2": {"tp": 2, "global_batch": 1},
}
WORKSPACE = 32 << 20
"""What cuBLAS keeps for the compute stream (CUBLAS_WORKSPACE_CONFIG=:4096:8)."""


def state_sizes(problem: Problem, plan: Plan, stage: int, program: RankProgram) -> tuple[int, ...]:
    """Bytes of every storage that a rank holds for good."""
    lay, order = problem.layout, problem.system.parallel.rank_order
    rank, device = stage_rank(lay, order, stage), torch.device("meta")
    with fake_job(rank, lay.gpus), device:
        groups = Groups(lay, order, rank)
        model = RankModel(problem, plan, groups.place, device, seed=0)
        every = Executor(program, model, groups).states()
    return tuple(size for t in every if (size := t.untyped_storage().nbytes()))


def simulated(case: Case) -> list[AllocatorPeaks]:
    """The simulated allocator of every pipeline rank, after the states that the runtime makes."""
    program = lower(case.plan, case.problem)
    return [
        replay(rank, (*state_sizes(case.problem, case.plan, stage, rank), WORKSPACE), None)
        for stage, rank in enumerate(program.ranks)
    ]


def main(layout: str, methods: list[str]) -> None:
    """Print the lines."""
    problem = make_problem(
        model=WIDE, cluster="h200-141gb", system="rematbench", layout=Layout(**LAYOUTS[layout]),
        seq_len=8192,
    )  # fmt: skip
    cases = []
    for name in methods:
        plan = discover().resolve(name).plan(problem)
        assert isinstance(plan, Plan), plan
        cases.append(
            Case(name=name, problem=problem, plan=plan, device="cuda", shards=False, steps=2,
                 timed_steps=1)
        )  # fmt: skip
    for case, result in zip(cases, execute_cases(cases, timeout_s=300.0), strict=True):
        assert result.status == "ok", (case.name, result.reason)
        expected = simulated(case)
        for rank in result.ranks:
            peaks = expected[rank.place.pp]
            pairs = (
                (rank.allocated_bytes, peaks.allocated_bytes),
                (rank.reserved_bytes, peaks.reserved_bytes),
            )
            numbers = [str(number) for pair in pairs for number in pair]
            sys.stdout.write(" ".join([case.name, *numbers]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
