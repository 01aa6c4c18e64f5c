"""The first rank of a pipeline without its neighbours: messages with nobody at the other end.

Sends go nowhere and receives are there at once, with numbers like those at the end of a layer, so
that kernels and power are those of training.  Losses and gradients mean nothing.
"""

import torch.distributed as dist
from torch import Tensor

from rematbench.spec.layout import Layout
from rematbench.worlds.torch.groups import Channel, Groups
from rematbench.worlds.torch.model import NotExecutable


class Done(dist.Work):
    """A message that has arrived."""

    def wait(self, timeout: object = None) -> bool:
        """Nothing to wait for."""
        return True


class Alone(Groups):
    """The groups of the first rank of one pipeline, in a process without a process group."""

    def __init__(self, layout: Layout, order: tuple[str, ...]) -> None:
        """NotExecutable for a layout that needs other ranks for more than messages."""
        if layout.gpus > layout.pp:
            raise NotExecutable("a rank runs alone only without tensor, context or data peers")
        super().__init__(layout, order, 0)

    def _channels(self) -> dict[Channel, dist.ProcessGroup]:
        return {}

    def send(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """A send that is done."""
        return Done()

    def receive(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """Draw what would arrive, on the current stream."""
        tensor.normal_()
        return Done()
