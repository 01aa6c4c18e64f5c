"""Point-to-point: boundary activations and gradients between stages, gradients of tied ends."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.action import Action
from rematbench.torch.groups import Groups
from rematbench.torch.memory import Memory, Site, Value
from rematbench.torch.model import RankModel
from rematbench.torch.streams import Mark

STEP = {"f": 1, "b": -1}
TIED_TAG = 1


class Messages:
    """Sends and receives of one rank; what is under way goes into the action's event."""

    def __init__(self, model: RankModel, groups: Groups, memory: Memory) -> None:
        self.model, self.groups, self.memory = model, groups, memory
        self.under_way: list[dist.Work] = []
        self.then: list[Callable[[], None]] = []
        self.posted: list[tuple[dist.Work, Tensor]] = []
        self.tied = model.parameters.get("embedding.weight")
        ends = (0, model.problem.layout.pp - 1)
        exchanged = model.kind.tied_embeddings and ends[1] > 0 and model.place.pp in ends
        self.arrival: Tensor | None = None
        if exchanged and self.tied is not None:
            self.arrival = torch.empty_like(self.tied.grad_flat)

    def states(self) -> list[Tensor]:
        """Storages that are not activations."""
        return [] if self.arrival is None else [self.arrival]

    def attach(self, mark: Mark) -> None:
        """The event holds when the messages issued since the last one have arrived."""
        mark.works, self.under_way = self.under_way, []
        mark.then, self.then = self.then, []

    def _route(self, action: Action, site: Site, step: int) -> tuple[int, int]:
        """(the other stage, tag): a message is named by the virtual stage it goes to."""
        pp, chunks = self.model.problem.layout.pp, self.model.problem.layout.num_chunks
        here = site.chunk * pp + self.model.place.pp
        to = here + step if step else here
        other = here + (step or -STEP[action.op])
        return other % pp, 2 + (site.micro_batch * chunks + to) * 2 + (action.op == "b")

    def send(self, action: Action, site: Site) -> None:
        """Start sending; the storage stays until the event."""
        if action.op == "tied":
            self._send_tied()
            return
        stage, tag = self._route(action, site, STEP[action.op])
        data = self.memory[site.key(action.reads[0])].data
        if self.groups.buffered:
            self._post(data, stage, action.op, tag)
        else:
            self.under_way.append(self.groups.send(data, stage, action.op, tag))

    def _post(self, data: Tensor, stage: int, direction: str, tag: int) -> None:
        """A buffered send.  Gloo's send ends when the receiver is ready and holds the host up to
        then, where a GPU's host would go on issuing; so a copy (transport memory, no part of the
        ledger) goes, and the event holds at once."""
        with _disable_current_modes():
            copy = data.clone()
        self.posted.append((self.groups.send(copy, stage, direction, tag), copy))

    def flush(self) -> None:
        """Wait until every buffered message is gone."""
        while self.posted:
            self.posted.pop()[0].wait()

    def receive(self, action: Action, site: Site) -> None:
        """Room for a boundary tensor, and the start of its arrival."""
        if action.op == "tied":
            self._receive_tied()
            return
        tensor = self.model.chunks[site.chunk].boundary
        columns = tensor.row_bytes // self.model.dtype.itemsize
        data = torch.empty(tensor.rows, columns, dtype=self.model.dtype, device=self.model.device)
        stage, tag = self._route(action, site, 0)
        self.under_way.append(self.groups.receive(data, stage, action.op, tag))
        whole = Value(data, 0, self.model.shapes.shard_tokens)
        self.memory.put(site.key(action.allocs[0].name), whole)

    def _other_end(self) -> int:
        return self.model.problem.layout.pp - 1 - self.model.place.pp

    def _send_tied(self) -> None:
        tied, arrival = self.tied, self.arrival
        assert tied is not None
        assert arrival is not None
        work = self.groups.send(tied.grad_flat, self._other_end(), "f", TIED_TAG)
        self.under_way.append(work)
        self.then.append(partial(_add, tied.grad_flat, arrival))

    def _receive_tied(self) -> None:
        assert self.arrival is not None
        work = self.groups.receive(self.arrival, self._other_end(), "f", TIED_TAG)
        self.under_way.append(work)


def _add(total: Tensor, arrived: Tensor) -> None:
    total.add_(arrived)
