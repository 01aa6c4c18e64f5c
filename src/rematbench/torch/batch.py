"""One batch generator for every layout: tokens and labels of a step, and a rank's share of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.spec.layout import Layout
from rematbench.torch.failures import NotFinite
from rematbench.torch.groups import Coordinates
from rematbench.torch.kernels import IGNORED
from rematbench.workload import Workload


class Batch(NamedTuple):
    """A step's sequences: inputs and next-token labels, global_batch x seq_len each."""

    ids: Tensor
    labels: Tensor

    @property
    def counted(self) -> int:
        """Labels that count: the loss is their mean over the whole global batch."""
        return int((self.labels != IGNORED).sum())


class MicroBatch(NamedTuple):
    """A rank's rows of one micro-batch, (sequence, position) flattened, and the loss's scale."""

    ids: Tensor
    labels: Tensor
    scale: float


def make_batch(
    workload: Workload, global_batch: int, seed: int, step: int, ignored: float = 0.0
) -> Batch:
    """Random tokens of a step; a share of the labels may be ignored."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    shape = (global_batch, workload.seq_len + 1)
    tokens = torch.randint(workload.model.vocab, shape, generator=generator)
    labels = tokens[:, 1:].clone()
    if ignored:
        labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    return Batch(tokens[:, :-1].contiguous(), labels)


def slices(layout: Layout, place: Coordinates) -> tuple[int, ...]:
    """Which of a sequence's 2 x cp slices a rank holds: one from the head, one from the tail, so
    that causal work is balanced (all of the sequence without context parallelism)."""
    if layout.cp == 1:
        return (0,)  # under Ulysses attention sees whole sequences
    return (place.cp, 2 * layout.cp - 1 - place.cp)


def positions(layout: Layout, place: Coordinates, seq_len: int) -> Tensor:
    """Positions of a rank's rows inside a sequence."""
    if layout.ulysses > 1:
        size = seq_len // layout.ulysses
        return torch.arange(place.cp * size, (place.cp + 1) * size)
    held = slices(layout, place)
    size = seq_len // (len(held) * layout.cp)
    return torch.cat([torch.arange(i * size, (i + 1) * size) for i in held])


def loss_scale(counted: int) -> float:
    """The gradient of the mean loss by one label's loss.  A batch without any label that counts has
    no mean (torch's cross_entropy says NaN): NotFinite, so that its case ends as `nan`."""
    if counted == 0:
        raise NotFinite("no label of the batch counts, so its mean loss is 0 / 0")
    return 1.0 / counted


def micro_batches(
    batch: Batch, layout: Layout, place: Coordinates, device: torch.device
) -> list[MicroBatch]:
    """This rank's micro-batches, in order."""
    per_replica = batch.ids.shape[0] // layout.replicas
    first = place.dp * per_replica
    where = positions(layout, place, batch.ids.shape[1])
    scale = loss_scale(batch.counted)
    found = []
    for start in range(first, first + per_replica, layout.micro_batch):
        rows = slice(start, start + layout.micro_batch)
        ids, labels = batch.ids[rows][:, where], batch.labels[rows][:, where]
        found.append(MicroBatch(ids.reshape(-1).to(device), labels.reshape(-1).to(device), scale))
    return found
