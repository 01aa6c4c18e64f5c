"""One step again and again from the same weights: whether its gradients have the same bits.

Streams that are not ordered as a plan needs show up as bits that change from one repetition to
another.  Nothing waits for the device between the repetitions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.parameters import Parameter

Gradients = dict[str, Tensor]


def want_same_bits() -> None:
    """Ask torch, in this process, for kernels that give the same bits every time."""
    torch.use_deterministic_algorithms(True)
    # The stream that allocates an action's outputs is not the stream that writes them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Again(NamedTuple):
    """Repetitions of a step.  `differing`: how many have another loss or gradient than the first;
    `worst`: the parameter (or `loss`) that differs most often; `first`: the gradients of the first
    repetition, by parameter."""

    repetitions: int
    differing: int
    worst: str
    first: Gradients


def repeat(executor: Executor, repetitions: int) -> Again:
    """Repeat the executor's step, each time from the weights and moments that the model has now,
    which it keeps."""
    parameters = list(executor.model.parameters.values())
    kept = [(tensor, tensor.clone()) for p in parameters for tensor in _written(p)]
    names = [p.spec.name for p in parameters]
    first: Gradients = {}
    losses = torch.zeros(repetitions, dtype=torch.float64, device=executor.loss.device)
    wrong = torch.zeros(repetitions, len(names), dtype=torch.bool, device=executor.loss.device)

    def look(found: list[Parameter]) -> None:
        if not first:
            first.update({p.spec.name: p.grad_flat.clone() for p in found})
        for column, p in enumerate(found):
            wrong[number, column] = (p.grad_flat != first[p.spec.name]).any()

    executor.before_update = look
    for number in range(repetitions):
        try:
            executor.issue_step()
        finally:
            for tensor, before in kept:
                tensor.copy_(before)
        losses[number] = executor.loss
    columns = [*wrong.cpu().T, (losses != losses[0]).cpu()]
    every = torch.stack(columns).any(0)
    counts = [int(column.sum()) for column in columns]
    most = max(range(len(counts)), key=counts.__getitem__)
    worst = [*names, "loss"][most] if counts[most] else ""
    return Again(repetitions, int(every.sum()), worst, first)


def _written(parameter: Parameter) -> tuple[Tensor, ...]:
    """The tensors that an update writes."""
    return parameter.flat, parameter.master, parameter.moment1, parameter.moment2


def same_bits(one: Gradients, other: Gradients) -> bool:
    """Whether two repetitions have the same gradients, bit by bit (NaN is equal to nothing)."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
