"""Samples of differing lengths, which raise the bytes that the allocator reserves.

A cached segment cannot serve a larger request, so each longer micro-batch adds new segments to
those of shorter ones. Lengths follow a gamma distribution with the data's mean and spread, cut off
at the sequence length. They come in the order of van der Corput's sequence, so that a prediction
needs no random seed.
"""

import dataclasses
import random
from collections.abc import Callable

from msgspec.structs import replace

from rematbench.engine.program.program import Program, RankProgram, Samples
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.workload import Workload

MICRO_BATCHES = 128
"""The number of replayed micro-batches; the reserved bytes depend on its logarithm (fitted to
ms-swift's sheet of Qwen models up to 2,048 tokens)."""
POPULATION = 4096
"""The number of sorted lengths from which quantiles are taken."""


def with_samples(
    rank: RankProgram, plan: Plan, problem: Problem, lower: Callable[[Plan, Problem], Program]
) -> RankProgram:
    """The rank's program with the lengths of its micro-batches. `lower` expands the plan for two
    shorter sequences. A tensor's bytes are a polynomial of the length, of degree two at most, so
    the bytes at any length follow from those at the three lengths."""
    work = problem.workload
    at = (work.seq_len, work.seq_len // 2, work.seq_len // 4)
    shorter = []
    for length in at[1:]:
        other = replace(work, seq_len=length, sample_len=0, sample_spread=0)
        made = dataclasses.replace(problem, workload=other)
        shorter.append(lower(plan, made).ranks[0].blocks)
    lengths = drawn_lengths(work, problem.layout.micro_batch)
    return replace(rank, samples=Samples(at=at, drawn=lengths, shorter=tuple(shorter)))


def drawn_lengths(work: Workload, micro_batch: int) -> tuple[int, ...]:
    """The lengths, in tokens, of successive micro-batches, each as long as its longest sample."""
    spread, draw = work.sample_spread or work.sample_len, random.Random(0)
    shape, scale = (work.sample_len / spread) ** 2, spread**2 / work.sample_len
    every: list[int] = []
    while len(every) < POPULATION * micro_batch:
        length = int(draw.gammavariate(shape, scale))
        every += [length] if 0 < length <= work.seq_len else []
    most = sorted(max(every[at::POPULATION]) for at in range(POPULATION))
    return tuple(most[int(_quantile(at) * POPULATION)] for at in range(1, MICRO_BATCHES + 1))


def _quantile(at: int) -> float:
    """Term `at` of van der Corput's sequence in base 2: its bits in reverse after the point."""
    return int(f"{at:b}"[::-1], 2) / (1 << at.bit_length())
