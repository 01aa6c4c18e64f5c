"""States that a rank keeps by unit: weights and gradients under ZeRO 2 and 3, or in host memory.

The parameters of a unit (embedding, layer, head) lie one after another in one buffer. Each rank has
an equal share of it, a range that may begin and end inside a parameter, so that one collective
serves the unit. Gathered weights and the gradients of a pass are buffers of the program, and
parameters use ranges of them while they are alive. Parameters that do not train come first and are
shared separately, so that a rank's share of the trained weights covers the same range as its share
of their gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rematbench.inputs.layout import Layout
from rematbench.plan import Plan, gathers_by_layer
from rematbench.worlds.torch.arithmetic import wide
from rematbench.worlds.torch.parameters import Parameter, ParameterSpec, host_memory, local_size
from rematbench.worlds.torch.streams import PendingMessage


@dataclass(frozen=True)
class Sharing:
    """How a rank keeps states by unit: whether weights are gathered before each use, whether sums
    of gradients are kept, and which of the two are in host memory."""

    shards: int
    rank: int
    gathers: bool
    sums: bool
    weights_on_host: bool
    gradients_on_host: bool

    @classmethod
    def of(cls, plan: Plan, layout: Layout, rank: int) -> "Sharing | None":
        """The sharing of a plan; None if the plan keeps states by parameter."""
        parameter, gradient = plan.state("parameter"), plan.state("gradient")
        gathers = gathers_by_layer(parameter, layout)
        if not gathers and gradient.shards == 1 and gradient.home == "device":
            return None
        return cls(
            shards=layout.state_shards,
            rank=rank,
            gathers=gathers,
            sums=plan.state("optimizer").update != "backward",
            weights_on_host=parameter.home == "host",
            gradients_on_host=gradient.home == "host",
        )

    def ranges(self, specs: Sequence[ParameterSpec], layout: Layout) -> dict[str, tuple[int, int]]:
        found = {}
        for trained in (False, True):
            among = [spec for spec in specs if spec.trained == trained]
            sizes = [local_size(spec, layout) for spec in among]
            size = sum(sizes) // self.shards
            first = size * self.rank
            for spec, length in zip(among, sizes, strict=True):
                start, stop = (min(max(end, 0), length) for end in (first, first + size))
                found[spec.name] = (start, stop)
                first -= length
        return found


@dataclass
class UnitStates:
    """This rank's range [start, stop) of a unit's trained parameters, which follow `held` elements
    that do not train.

    `weights`: the range in compute precision, or all weights if they are not gathered. `gradients`:
    the sums of the range, empty if the update is inside the backward. `arrival`: the host buffer
    into which gradients are copied before they are added to the sums; `added`: the last addition.
    """

    sharing: Sharing
    parameters: list[Parameter]
    start: int
    stop: int
    weights: Tensor
    gradients: Tensor
    arrival: Tensor | None = None
    added: PendingMessage | None = None
    held: int = 0

    @property
    def size(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's range of a buffer of the unit's trained parameters."""
        return whole[self.start : self.stop]

    def gather(self, whole: Tensor, gather: Callable[[Tensor, Tensor], None]) -> None:
        """Gather a unit's weights into the buffer `whole`. If ranks keep whole weights, only the
        trained weights are gathered, in place, because only they have changed."""
        trained = whole[self.held :]
        if not self.sharing.gathers:
            gather(trained, self.part(trained))
            return
        held = self.held // self.sharing.shards
        for room, share in (
            (whole[: self.held], self.weights[:held]),
            (trained, self.weights[held:]),
        ):
            if room.numel():
                gather(room, share)

    def lend_weights(self, whole: Tensor) -> None:
        """Let the parameters use their ranges of a buffer of gathered weights."""
        parts = torch.split(whole, [parameter.size for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.lend(part)

    def drop_weights(self) -> None:
        for parameter in self.parameters:
            parameter.lend(parameter.flat.new_empty(0))

    def reduce(self, whole: Tensor, scatter: Callable[[Tensor, Tensor], None]) -> None:
        """Reduce a buffer of gradients over the peers; add this rank's range to sums on the
        device."""
        part = self.part(whole)
        scatter(part, whole)
        if self.sharing.sums and not self.sharing.gradients_on_host:
            self.gradients.add_(part)

    def at_home(self, *, on_host: bool) -> list[Tensor]:
        homes = (self.sharing.weights_on_host, self.sharing.gradients_on_host)
        pairs = zip((self.weights, self.gradients), homes, strict=True)
        found = [tensor for tensor, home in pairs if home == on_host]
        return [*found, self.arrival] if on_host and self.arrival is not None else found


def share(sharing: Sharing, parameters: list[Parameter]) -> UnitStates:
    """Move the states of a unit's new parameters into buffers of the unit."""
    first = parameters[0].flat
    parameters = sorted(parameters, key=lambda one: one.spec.trained)
    trained = [parameter for parameter in parameters if parameter.spec.trained]
    size = sum(parameter.size for parameter in trained) // sharing.shards
    own = [parameter.stop - parameter.start for parameter in parameters]
    weights = torch.cat(
        [p.flat[p.start : p.stop] if sharing.gathers else p.flat for p in parameters]
    )
    gradients = torch.zeros(size * sharing.sums, dtype=wide(first.dtype), device=first.device)
    if sharing.weights_on_host:
        weights = host_memory(weights)
    arrival = None
    if sharing.gradients_on_host:
        arrival, gradients = host_memory(first.new_empty(size)), host_memory(gradients)
    start = size * sharing.rank
    states = UnitStates(sharing, parameters, start, start + size, weights, gradients, arrival)
    states.held = states.size - size * sharing.shards
    if sharing.gathers:
        states.drop_weights()
        for parameter, part in zip(parameters, torch.split(weights, own), strict=True):
            parameter.value_shard = part
    else:
        states.lend_weights(weights)
    if sharing.sums:
        own = [parameter.stop - parameter.start for parameter in trained]
        for parameter, part in zip(trained, torch.split(gradients, own), strict=True):
            parameter.grad_shard = part
    _use_host_memory(states)
    return states


def _use_host_memory(states: UnitStates) -> None:
    """Let updates on the host use the unit's host buffers as gradients and weights."""
    sharing = states.sharing
    for parameter in states.parameters:
        host = parameter.host
        if host is not None and sharing.weights_on_host and parameter.value_shard is not None:
            host = host._replace(value=parameter.value_shard)
        if host is not None and sharing.gradients_on_host and parameter.grad_shard is not None:
            host = host._replace(grad=parameter.grad_shard)
        parameter.host = host
