"""What a prediction assumes: the kernels of the stack, and whose fitted constants."""

from rematbench.problem import Problem
from rematbench.spec.system import System


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
    """The attention kernels of the GPU generation whose published rates are above those of the
    kernel in use, in one line; empty where there are none, or none are published."""
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
