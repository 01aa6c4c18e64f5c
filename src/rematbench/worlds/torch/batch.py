"""The tokens and labels of a step, generated alike for every layout, and a rank's part of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.inputs.layout import Layout
from rematbench.workload import Workload
from rematbench.worlds.torch.arithmetic import IGNORED
from rematbench.worlds.torch.case import NotFinite
from rematbench.worlds.torch.groups import Coordinates


class Batch(NamedTuple):
    """The sequences of a step: input tokens and next-token labels, global_batch x seq_len each."""

    ids: Tensor
    labels: Tensor

    @property
    def counted(self) -> int:
        """The number of labels that are not ignored; the loss is the mean over all of them."""
        return int((self.labels != IGNORED).sum())


class MicroBatch(NamedTuple):
    """A rank's tokens and labels of one micro-batch, (sequence, position) flattened, and the loss's
    scale. `ahead`: tokens and labels of the next positions, to predict one more token."""

    ids: Tensor
    labels: Tensor
    scale: float
    ahead: tuple[Tensor, ...] = ()


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
    """The positions of the slices that a rank holds of each sequence, which is cut into 2 x cp
    slices: one slice of the first half and one of the second half, so that ranks have equal causal
    work. Without context parallelism the rank holds the whole sequence, as one slice."""
    if layout.cp == 1:
        return (0,)  # also under Ulysses, where attention has whole sequences
    return (place.cp, 2 * layout.cp - 1 - place.cp)


def slice_order(cp: int) -> list[int]:
    """For each of a sequence's 2 x cp slices, its index among all ranks' slices, in rank order."""
    held = [position for rank in range(cp) for position in (rank, 2 * cp - 1 - rank)]
    return [held.index(position) for position in range(2 * cp)]


def positions(layout: Layout, place: Coordinates, seq_len: int) -> Tensor:
    """The position of each of a rank's rows in their sequence."""
    if layout.ulysses > 1:
        size = seq_len // layout.ulysses
        return torch.arange(place.cp * size, (place.cp + 1) * size)
    held = slices(layout, place)
    size = seq_len // (len(held) * layout.cp)
    return torch.cat([torch.arange(i * size, (i + 1) * size) for i in held])


def loss_scale(counted: int) -> float:
    """The derivative of the mean loss with respect to the loss of one of `counted` labels.
    NotFinite if all labels are ignored: the mean does not exist (torch's cross_entropy gives NaN),
    and the case ends as `nan`."""
    if counted == 0:
        raise NotFinite("every label of the batch is ignored, so the mean loss is undefined")
    return 1.0 / counted


def micro_batches(
    batch: Batch, layout: Layout, place: Coordinates, device: torch.device, *, ahead: bool = False
) -> list[MicroBatch]:
    """This rank's micro-batches, in order; `ahead`: with tokens and labels of the next
    positions."""
    per_replica = batch.ids.shape[0] // layout.replicas
    first = place.dp * per_replica
    where = positions(layout, place, batch.ids.shape[1])
    scale = loss_scale(batch.counted)
    whole = [batch.ids, batch.labels]
    whole += [_ahead(batch.ids, 0), _ahead(batch.labels, IGNORED)] if ahead else []
    found = []
    for start in range(first, first + per_replica, layout.micro_batch):
        rows = slice(start, start + layout.micro_batch)
        ids, labels, *more = (each[rows][:, where].reshape(-1).to(device) for each in whole)
        found.append(MicroBatch(ids, labels, scale, tuple(more)))
    return found


def _ahead(rows: Tensor, last: int) -> Tensor:
    """Each row one position ahead, with `last` at its end."""
    return torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], last)], 1)
