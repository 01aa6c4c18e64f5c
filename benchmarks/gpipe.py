"""What a search loses that leaves GPipe out: plans under GPipe beside plans under 1F1B.

    ./bench run python benchmarks/gpipe.py [--small]

Layouts with a pipeline are drawn from four jobs, and every method below is planned, lowered and
simulated on each under both schedules.  Two ratios of seconds of a step, least first: GPipe over
1F1B with the same method, and GPipe over the fastest of these plans under 1F1B on that layout that
has no more bytes at its peak.  `--small`: one layout of the smallest job, to see that it runs.
"""

import sys
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.advise.search.job import Asked, SearchJob
from rematbench.advise.search.space import Choice
from rematbench.evaluate.evaluation import evaluate
from rematbench.plan import Plan
from rematbench.spec.problemspec import ProblemSpec

SEED, LAYOUTS, SHOWN = 7, 6, 6
METHODS = [
    *("keep_all", "selective_recompute", "full_recompute", "balanced_checkpointing"),
    *(f"pp_offload:alpha={alpha}" for alpha in (0.125, 0.25, 0.5, 0.75, 1)),
    *(f"memo:alpha={alpha}" for alpha in (0.25, 0.5, 1)),
    "full_recompute+pp_offload:alpha=0.5",
]
JOBS = [  # model, cluster, stack, GPUs, tokens, global batch
    ("gpt-1.3b", "a800-80gb", "megatron-core", 4, 2048, 8),
    ("llama3-8b", "a800-80gb", "megatron-core", 16, 16384, 32),
    ("llama2-70b", "h800-80gb", "megatron-core", 64, 8192, 64),
    ("llama-175b", "h800-80gb", "rematbench", 128, 8192, 64),
]
MOST_MICRO_BATCHES = 32


class Compared(NamedTuple):
    """A plan under GPipe: seconds of its step over those of 1F1B with the same method, and of the
    fastest plan under 1F1B with no more bytes."""

    alike: float
    best: float
    name: str


def compared(job: SearchJob, choice: Choice) -> list[Compared]:
    """The methods that have a plan at a layout."""
    problem = job.problem(choice)
    found = {}
    for text in METHODS:
        method = job.registry.resolve(text, None, problem)
        plan = method.plan(problem, choice.base(problem.base_plan))
        if isinstance(plan, Plan):
            both = (evaluate(problem, replace(plan, schedule=name)) for name in ("1f1b", "gpipe"))
            found[text] = [(one.step_s, max(one.peak_device_bytes)) for one in both]
    lay = choice.layout
    where = f"{job.model.name} tp {lay.tp} pp {lay.pp} micro-batches {lay.num_micro_batches}"
    return [
        Compared(
            gpipe[0] / one[0],
            gpipe[0] / min(s for (s, nbytes), _ in found.values() if nbytes <= gpipe[1]),
            f"{where} {text}",
        )
        for text, (one, gpipe) in found.items()
    ]


def main(small: bool) -> None:
    """Print the least ratios."""
    random, lines = Random(SEED), list[Compared]()
    for model, cluster, system, gpus, seq_len, batch in JOBS[: 1 if small else None]:
        spec = ProblemSpec(
            model=model, cluster=cluster, system=system, gpus=gpus, seq_len=seq_len,
            global_batch=batch,
        )  # fmt: skip
        job = SearchJob(Asked(spec=spec))
        deep = [
            one
            for one in job.space.choices
            if one.layout.pp > 2 and one.layout.vpp == 1 and not one.hosted
            if one.layout.num_micro_batches <= MOST_MICRO_BATCHES
        ]
        for choice in random.sample(deep, 1 if small else LAYOUTS):
            lines += compared(job, choice)
    for column, told in ((0, "1F1B, same method"), (1, "fastest 1F1B with no more bytes")):
        faster = sum(line[column] < 1 - 1e-6 for line in lines)
        head = f"GPipe over {told}: below 1 in {faster} of {len(lines)} plans; the least:"
        least = sorted(lines, key=lambda one: one[column])[:SHOWN]
        told_each = (f"  {line[column]:.4f}  {line.name}" for line in least)
        sys.stdout.write("\n".join((head, *told_each, "")))


if __name__ == "__main__":
    main("--small" in sys.argv)
