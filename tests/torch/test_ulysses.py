"""Ulysses: the two orders of a tensor, what each backward reads, and what it takes to go wrong."""

import itertools
from functools import cache

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch
from torch import Tensor

from rematbench.program.action import Action, Kind
from rematbench.torch import ulysses
from rematbench.torch.case import Case, Result
from rematbench.torch.groups import Group
from rematbench.torch.launch import execute_cases
from tests.problems import problem
from tests.torch import cases, grid, laws
from tests.torch.cases import TINY_GPT
from tests.torch.test_faults import edited
from tests.torch.test_stress import LONG_S, delayed, no_wait_for

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
        ulysses.to_heads(own.new_empty(0), own, peers, WIDTH)  # type: ignore[arg-type]
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
        ulysses.to_rows(out, grads[rank], Answer(RANKS, rank, None), WIDTH)
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


# -- what it takes to go wrong --------------------------------------------------------------------


def without_heads(case: Case) -> Case:
    """The forward frees the order of heads; everything else is as it was."""
    seen: set[str] = set()

    def edit(action: Action) -> list[Action]:
        if action.kind is Kind.ALL_TO_ALL and action.op == "to_rows" and action.allocs:
            (source,) = action.reads
            if not source.startswith("d:") and source not in seen:
                seen.add(source)
                return [action, Action(kind=Kind.FREE, stream="compute", frees=(source,))]
        return [action]

    return edited(case, edit)


def named(case: Case, name: str) -> Case:
    return Case(**{**vars(case), "name": name, "steps": 1})


def a2a_events(case: Case) -> set[str]:
    """Events of the all-to-alls, by block-local name."""
    program = edited(case, lambda action: [action]).program
    assert program is not None
    blocks = itertools.chain.from_iterable(rank.blocks for rank in program.ranks)
    return {a.event for b in blocks for a in b.actions if a.kind is Kind.ALL_TO_ALL}


@cache
def results() -> dict[str, tuple[Case, Result]]:
    """One launch: sound variants, delayed ones, and each mutation."""
    keep = cases.case("ulysses2", "keep")
    late = delayed(keep, 0, LONG_S)
    made = [
        named(cases.case("ulysses2", "offload", model=TINY_GPT), "gpt offload"),
        named(cases.case("ulysses2", "full", attention="unfused"), "unfused full"),
        *(delayed(cases.case("ulysses2", plan), 1) for plan in ("keep", "offload", "windows")),
        named(without_heads(keep), "one copy"),
        named(edited(late, no_wait_for(a2a_events(keep))), "no wait"),
    ]
    found = execute_cases(made, timeout_s=120.0)
    return {case.name: (case, result) for case, result in zip(made, found, strict=True)}


@pytest.mark.parametrize("name", ["gpt offload", "unfused full"])
def test_biases_learned_positions_and_unfused_attention(name: str) -> None:
    grid.check_twin(*results()[name])
    grid.check_gradients(*results()[name])


@pytest.mark.parametrize("plan", ["keep", "offload", "windows"])
def test_delayed_exchanges_change_nothing(plan: str) -> None:
    grid.check_gradients(*results()[f"ulysses2 {plan} #1"])


def test_one_copy_of_the_output_is_not_enough() -> None:
    _, result = results()["one copy"]
    assert result.status == "failed"
    assert "attn_heads" in result.reason


def test_a_removed_wait_for_an_exchange_is_found() -> None:
    case, result = results()["no wait"]
    assert result.status == "nan" or not laws.gradient_error(case, result) <= grid.TOLERANCE
