"""A job in the words of a table and of a command, so that each row also says what was asked."""

import shlex
from typing import Any

from msgspec import Struct

import rematbench
from rematbench.evaluate.assumptions import assumed
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.spec.layout import Layout

WORDS = tuple(name for name in Layout.__struct_fields__ if name != "sp")


class Job(Struct, frozen=True, kw_only=True):
    """A problem with the plan that methods begin with. `words` are the command-line options that
    say this problem (empty: no command can say it)."""

    problem: Problem
    base: Plan
    words: tuple[str, ...] = ()

    def run_with(self, method: str, *more: str) -> str:
        """The command that simulates a method on this job; empty where no command says the job."""
        words = ("rematbench", "simulate", method, *self.words, *more)
        return shlex.join(words) if self.words else ""

    @property
    def uneven_layers(self) -> str:
        """The number of layers of each chunk, in the form of `--partition`; empty for the even
        partition."""
        even = self.base.partition == self.problem.base_plan.partition
        return "" if even else _layers(self.base)

    def facts(self) -> dict[str, Any]:
        """The facts of the job under the column names of sheets, so that joined tables can be told
        apart. Facts are model, cluster, stack, layout, sequence length, precision, attention, the
        date of the calibration constants, and which of them and which kernels are assumed."""
        problem = self.problem
        lay, work = problem.layout, problem.workload
        return {
            "model": work.model.name,
            "cluster": problem.cluster.name,
            "gpu": problem.cluster.gpu,
            "system": problem.system.name,
            "gpus": lay.gpus,
            "seq_len": work.seq_len,
            **{name: getattr(lay, name) for name in WORDS},
            "sp": lay.sequence_parallel,
            "precision": work.precision,
            "attention": problem.attention,
            "kernel": problem.kernel,
            "schedule": self.base.schedule,
            "optimizer": self.base.state("optimizer").home,
            "partition": _layers(self.base),
            "rematbench": rematbench.__version__,
            "constants": problem.calibration.date,
            "assumes": assumed(problem),
        }


def _layers(base: Plan) -> str:
    """The number of layers of each chunk in pipeline order, in the form of `--partition`."""
    chunks = [rank[c] for c in range(len(base.partition[0])) for rank in base.partition]
    return ",".join(str(len(chunk)) for chunk in chunks)
