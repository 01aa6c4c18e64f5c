"""Ulysses: the two orders of a tensor, what each backward reads, and what it takes to go wrong."""

import pytest
import torch
from torch import Tensor

from rematbench.worlds.torch.groups import Group
from rematbench.worlds.torch.heads import heads_to_rows, rows_to_heads
from tests.problems import problem

RANKS, ROWS, WIDTH = 4, 6, 3


class Peers:
    """All ranks of a group in one process: each gives its parts, then takes the others'."""

    def __init__(self, ranks: int) -> None:
        self.size = ranks
        self.sent: list[Tensor] = []

    def all_to_all(self, out: Tensor, whole: Tensor) -> None:
        """Keep what this rank sends; the answer is known when all have sent."""
        self.sent.append(whole.reshape(self.size, -1).clone())

    def parts_of(self, rank: int) -> Tensor:
        """What a rank gets: its part of everyone's."""
        return torch.cat([whole[rank] for whole in self.sent])


def exchanged(rows: list[Tensor]) -> list[Tensor]:
    """Every rank's order of heads from every rank's order of rows."""
    peers = Peers(len(rows))
    for own in rows:
        rows_to_heads(own.new_empty(0), own, peers, WIDTH)  # type: ignore[arg-type]
    return [
        peers.parts_of(rank).view(len(rows) * rows[0].shape[0], -1) for rank in range(len(rows))
    ]


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_a_rank_gets_all_rows_of_its_heads(heads: int) -> None:
    """Row r of rank s is row s ROWS + r of everyone; of fewer heads than ranks each has copies."""
    full = torch.arange(RANKS * ROWS * heads * WIDTH).view(RANKS * ROWS, heads, WIDTH)
    rows = [part.reshape(ROWS, -1) for part in full.split(ROWS)]
    for rank, got in enumerate(exchanged(rows)):
        first, count = rank * heads // RANKS, max(1, heads // RANKS)
        assert torch.equal(got, full[:, first : first + count].reshape(RANKS * ROWS, -1))


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_the_way_back_is_the_transpose(heads: int) -> None:
    """<to_heads(x), y> = <x, to_rows(y)> over all ranks: what a gradient must satisfy."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randn(ROWS, heads * WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(RANKS)
    ]
    there = exchanged(rows)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in there]

    class Answer(Group):
        """A group of which this rank's answer is known."""

        def all_to_all(self, out: Tensor, whole: Tensor) -> None:
            sent = [grad.view(RANKS, -1)[self.rank] for grad in grads]
            out.view(-1).copy_(torch.cat(sent))

    back = []
    for rank in range(RANKS):
        out = torch.empty_like(rows[rank])
        heads_to_rows(out, grads[rank], Answer(RANKS, rank, None), WIDTH)
        back.append(out)
    forth = sum(float((a * b).sum()) for a, b in zip(there, grads, strict=True))
    assert sum(float((a * b).sum()) for a, b in zip(rows, back, strict=True)) == pytest.approx(
        forth
    )


def test_both_orders_of_the_output_are_saved_and_one_of_q_k_v() -> None:
    """Closed form: with Ulysses a layer saves one more tensor of q's width than without."""
    alone = problem(seq_len=32)
    split = problem(seq_len=64, dp=2, ulysses=2)  # as many tokens on a rank
    before, after = (set(p.layer(0).saved) for p in (alone, split))
    assert after - before == {"attn_heads"}
    assert before <= after
    more = split.layer(0).saved_bytes - alone.layer(0).saved_bytes
    model = split.workload.model
    assert more == 32 * model.q_width * split.workload.element_bytes
    reads = {op.name: op.saves for op in split.layer(0).ops}
    assert {"q", "k", "v", "attn_heads", "lse"} == set(reads["attention"])
    assert reads["proj"] == ("attn_out",)


def test_copies_of_few_kv_heads_are_counted() -> None:
    """Two KV heads of 8 elements on four ranks: each rank reads one head of the whole sequence."""
    given = problem(seq_len=64, dp=4, ulysses=4)
    tensors = given.layer(0).activations
    assert tensors["k"].nbytes == 2 * tensors["k_rows"].nbytes == 64 * 8 * 2
    assert tensors["q"].nbytes == tensors["q_rows"].nbytes
