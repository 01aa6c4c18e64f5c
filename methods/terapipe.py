"""terapipe: a pipeline over slices of one sequence that take equal time.

Claim: a slice does not need later tokens in a decoder, so one sequence fills a pipeline: 5 times
faster than pipelining by micro-batches alone for 175B parameters on 384 V100.
Source: Li et al., TeraPipe, ICML 2021 (arXiv 2102.07988): all forwards, then the backwards of
slices in reverse order. Slices minimise m sum t_i + (pp - 1) max t_j, by dynamic programming over
equal pieces of the sequence. t is the time of a slice's passes and messages; because of attention
it grows with the number of tokens before the slice.
Deviations: t comes from our kernels' rates, not from a regression on measured slices, and excludes
the update. Whether the stack has the schedule is not checked.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Plan, PositiveInt, Problem, Settings, Unsupported
from rematbench.solve.slices import even, least_time, refused, unit_tokens


class TeraPipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slices`: the number of slices of equal length (None: the slices with the shortest step, cut
    at multiples of 1 / `pieces` of the sequence)."""

    name: ClassVar[str] = "terapipe"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"slices": 2**n} for n in range(1, 6))
    slices: PositiveInt | None = None
    pieces: PositiveInt = 32

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        seq_len = problem.workload.seq_len
        if reason := refused(problem, base) or problem.untimed * (self.slices is None):
            return Unsupported(reason)
        if self.slices is not None:
            lengths = even(problem, self.slices)
        else:
            pieces, unit = self.pieces, unit_tokens(problem)
            while pieces > 1 and (seq_len % pieces or seq_len // pieces % unit):
                pieces -= 1
            lengths = least_time(problem, base, pieces)
        if not lengths:
            return Unsupported(f"{seq_len} tokens do not divide into {self.slices} equal slices")
        made = replace(base, slices=lengths if len(lengths) > 1 else (), schedule="gpipe")
        return made.noting(slices=",".join(map(str, lengths)))
