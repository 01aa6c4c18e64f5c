"""Every law's mutation fails, and every failure ends in a result with a reason."""

import dataclasses
import math
import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.program import Block, Program
from rematbench.host.ranks import KILLED
from rematbench.worlds.torch import attention_backends, batch, devices, movers, worker
from rematbench.worlds.torch.case import Case, Result, combine
from rematbench.worlds.torch.parameters import AdamW
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.storages import ExecutionError, Value
from tests.worlds.torch import cases, laws
from tests.worlds.torch.cases import TINY_GPT
from tests.worlds.torch.laws import run_here

Edit = Callable[[Action], list[Action]]


def edited(case: Case, edit: Edit) -> Case:
    """The case with another program."""
    program = lower(case.plan, case.problem)
    ranks = tuple(
        replace(
            rank,
            blocks=tuple(
                Block(b.label, tuple(new for a in b.actions for new in edit(a)))
                for b in rank.blocks
            ),
        )
        for rank in program.ranks
    )
    return Case(**{**vars(case), "program": Program(ranks=ranks)})


def drop_a_row(action: Action) -> list[Action]:
    """SPLIT keeps one row less than the plan says."""
    if action.kind is not Kind.SPLIT or len(action.allocs) < 2:
        return [action]
    kept, *others = action.allocs
    row = kept.nbytes // 24  # the plan keeps 24 of 64 rows
    return [replace(action, allocs=(Alloc(kept.storage, kept.nbytes - row), *others))]


def skip_a_piece(action: Action) -> list[Action]:
    """The weight gradient of the second mini-sequence is left out."""
    is_piece = action.kind is Kind.BACKWARD_WEIGHT and action.op == "fc2" and action.rows.offset > 0
    return [] if is_piece and action.rows.offset < 0.5 else [action]


def skip_a_copy(action: Action) -> list[Action]:
    """A tensor never goes to the host."""
    return [] if action.kind is Kind.D2H else [action]


def run(case: Case) -> Result:
    """In processes of its own."""
    return execute_cases([case], timeout_s=60.0)[0]


def test_a_dropped_row_is_found() -> None:
    with pytest.raises(ExecutionError, match="rows"):
        run_here(edited(cases.case("one", "rows"), drop_a_row))


@pytest.mark.parametrize(
    ("parts", "held"),
    [
        ([(0, 4), (4, 4)], 8),
        ([(4, 4), (0, 4)], 8),
        ([(0, 4), (2, 6)], 8),  # rebuilt rows reach into kept ones
        ([(0, 8), (2, 3)], 8),
        ([(0, 3), (4, 4)], 7),
        ([(1, 3), (4, 4)], 7),
        ([(0, 2), (1, 2), (2, 2), (5, 1)], 5),
        ([(0, 10**15), (10**15 - 5, 10**15)], 2 * 10**15 - 5),  # no work for each row
    ],
)
def test_rows_of_parts_are_counted_by_their_ends(parts: list[tuple[int, int]], held: int) -> None:
    """A row counts once, whichever of the parts have it."""
    room = torch.empty(0)
    assert movers._rows_held([Value(room, first, count) for first, count in parts]) == held


def test_a_skipped_piece_spoils_the_gradients() -> None:
    case = edited(cases.case("one", "mini"), skip_a_piece)
    assert laws.gradient_error(case, run_here(case)) > 1e-3


def test_a_skipped_copy_is_found() -> None:
    with pytest.raises(ExecutionError, match=r"no action records it|not allocated"):
        run_here(edited(cases.case("one", "offload"), skip_a_copy))


def test_a_wrong_mean_spoils_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "loss_scale", lambda counted: 1.0 / (counted + 1))
    case = cases.case("one", "keep")
    assert laws.gradient_error(case, run_here(case)) > 1e-3


def test_a_wrong_ledger_is_found() -> None:
    def shorter(action: Action) -> list[Action]:
        allocs = tuple(replace(a, nbytes=a.nbytes - 4) for a in action.allocs)
        return [replace(action, allocs=allocs) if action.op == "proj" else action]

    case = edited(cases.case("one", "keep"), shorter)
    assert laws.bytes_differ(case, run_here(case)) != []


def test_parts_of_a_shared_vocabulary_that_are_not_summed_are_found() -> None:
    """With one barrier the softmax of other stages is missing, too."""

    def alone(action: Action) -> list[Action]:
        return [replace(action, reads=()) if action.op == "vocabulary" else action]

    plans = ("vocab-1", "vocab-2-offload")
    every = [edited(cases.case("pp2", plan), alone) for plan in plans]
    for case, result in zip(every, execute_cases(every, timeout_s=60.0), strict=True):
        assert laws.gradient_error(case, result) > 1e-3


def test_out_of_memory_ends_in_a_result_of_its_own_status() -> None:
    """Really: a vocabulary of ten million million words."""
    result = run(cases.case("one", "keep", model=replace(cases.TINY, vocab=10**13)))
    assert result.status == "oom"
    assert "allocate" in result.reason


@pytest.mark.full
def test_nan_ends_in_a_result() -> None:
    case = cases.case("one", "keep")
    rule = case.optimizer._replace(lr=float("nan"))
    result = run(Case(**{**vars(case), "optimizer": rule}))
    assert (result.status, "nan" in result.reason) == ("nan", True)


@pytest.mark.full
def test_a_gradient_that_is_no_number_ends_in_a_result() -> None:
    """The loss of a single step is finite still."""
    case = cases.case("one", "keep")
    one = worker.run_case(case, 0, torch.device("cpu"), {})
    one.gradients[1]["lm_head.weight"].square_sum = math.inf
    result = combine(case, [one])
    assert result.status == "nan"
    assert result.reason == "NotFinite: gradient of lm_head.weight in step 1 has the norm inf"


class Fatal(AdamW):
    """An optimizer that the kernel ends the rank of this number for."""

    @property
    def lr(self) -> float:
        if dist.get_rank() == int(self[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        return 1e-2


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_the_kernel_killed_is_out_of_memory_and_the_next_case_runs(rank: int) -> None:
    """Whatever its peers say of their connections to it."""
    sound = cases.case("tp2", "keep")
    killed = dataclasses.replace(sound, name="killed", optimizer=Fatal(lr=float(rank)))
    result, later = execute_cases([killed, sound])
    assert (result.status, result.reason) == ("oom", f"rank {rank}: {KILLED}")
    assert later.status == "ok"


def test_more_ranks_than_gpus_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    devices.require_gpus("cuda", 1)
    with pytest.raises(RuntimeError, match="2 ranks need one GPU each, but this host has 1"):
        devices.require_gpus("cuda", 2)


@pytest.mark.full
def test_ranks_that_wait_for_ever_end_in_a_timeout() -> None:
    def never_sent(action: Action) -> list[Action]:
        return [] if action.kind is Kind.SEND else [action]

    result = execute_cases([edited(cases.case("pp2", "keep"), never_sent)], timeout_s=8.0)[0]
    assert result.status in ("timeout", "failed")
    assert result.reason


@pytest.mark.parametrize("plan", ["keep", "full", "mini"])
def test_the_gpt_variant(plan: str) -> None:
    case = cases.case("one", plan, model=TINY_GPT)
    result = run_here(case)
    assert laws.gradient_error(case, result) <= 1e-10
    assert laws.bytes_differ(case, result) == []


def test_the_exact_fallback_equals_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, heads, 8, 16, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    out, lse = attention_backends.flash(q, k, v, True)
    gradients = attention_backends.flash_backward(grad, q, k, v, out, lse, True)
    monkeypatch.setattr(attention_backends, "backend", lambda *_: "exact")
    again, lse2 = attention_backends.flash(q, k, v, True)
    others = attention_backends.flash_backward(grad, q, k, v, again, lse2, True)
    for a, b in zip((out, lse, *gradients), (again, lse2, *others), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
