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


def _loss(system: System) -> str:
    """`fused`, `in place` (the saved softmax becomes the gradient) or `eager`."""
    if system.fused_loss:
        return "fused"
    return "in place" if system.loss_in_place else "eager"
