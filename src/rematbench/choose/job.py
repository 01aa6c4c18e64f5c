"""A job in the words of a table and of a command: what was asked, so that a row says it too."""

import shlex
from typing import Any

from msgspec import Struct

import rematbench
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.spec.layout import Layout

WORDS = tuple(name for name in Layout.__struct_fields__ if name != "sp")


class Job(Struct, frozen=True, kw_only=True):
    """A problem with the plan that methods begin with; `words` are the options of a command that
    mean them (none: no command can say them)."""

    problem: Problem
    base: Plan
    words: tuple[str, ...] = ()

    def run_with(self, method: str, *more: str) -> str:
        """The command that simulates a method on this job."""
        words = ("rematbench", "simulate", method, *self.words, *more)
        return shlex.join(words) if self.words else ""

    def facts(self) -> dict[str, Any]:
        """Model, cluster, stack, layout, length, precision and attention, under the names that
        sheets have for them, and whose constants speak: tables that are joined can be told apart.
        """
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
        }


def _layers(base: Plan) -> str:
    """Layers of each chunk in pipeline order, as --partition takes them."""
    chunks = [rank[c] for c in range(len(base.partition[0])) for rank in base.partition]
    return ",".join(str(len(chunk)) for chunk in chunks)
