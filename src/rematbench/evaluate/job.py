"""A job: a problem as columns of a table and as command-line options, and its assumptions."""

import shlex
from typing import Any

from msgspec import Struct

import rematbench
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.spec.layout import Layout
from rematbench.spec.system import System

WORDS = tuple(name for name in Layout.__struct_fields__ if name != "sp")


class Job(Struct, frozen=True, kw_only=True):
    """A problem with the plan that methods begin with. `words` are the command-line options of
    this problem (empty: no options can express it)."""

    problem: Problem
    base: Plan
    words: tuple[str, ...] = ()

    def run_with(self, method: str, *more: str) -> str:
        """The command that simulates a method on this job; empty if no options express it."""
        words = ("rematbench", "simulate", method, *self.words, *more)
        return shlex.join(words) if self.words else ""

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


def assumed(problem: Problem) -> str:
    """The kernels and the fitted constants that a prediction assumes, in one line.  Kernels that
    the model does not have (RoPE, a gated activation) are left out."""
    generation, network, stack = problem.constants
    model, system = problem.workload.model, problem.system
    kernels = {
        "attention": problem.kernel,
        "norm": "fused" if model.norm == "layernorm" else system.norm_kernel,
        "RoPE": system.rope_kernel if model.position == "rope" else "",
        "activation": ("fused" if system.fused_swiglu else "eager") if model.gated else "",
        "loss": _loss(system),
    }
    named = ", ".join(f"{key} {kernel}" for key, kernel in kernels.items() if kernel)
    return f"{named}, on {generation}; constants of cluster {network}, stack {stack}"


def faster_attention(problem: Problem) -> str:
    """The attention kernels of the GPU generation with higher published rates than the kernel in
    use, in one line; empty if there are none."""
    if problem.kernel == "unfused":
        return ""
    rates = problem.calibration.kernels.generation(problem.cluster.generation).attention
    own = rates[problem.kernel]
    faster = [
        name
        for name, one in rates.items()
        if one.forward.efficiency > own.forward.efficiency
        and one.backward.efficiency > own.backward.efficiency
    ]
    if not faster:
        return ""
    named = ", ".join(sorted(faster))
    return f"faster attention on {problem.cluster.generation} than {problem.kernel}: {named}"


def _loss(system: System) -> str:
    """`fused`, `in place` (the saved softmax becomes the gradient) or `eager`."""
    if system.fused_loss:
        return "fused"
    return "in place" if system.loss_in_place else "eager"
