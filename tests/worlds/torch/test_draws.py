"""Weights that several threads draw: the same bits, several at once, on a GPU's share of a host."""

import os
import threading

import pytest
import torch

from rematbench.worlds.torch import draws, parameters, rank_model, worker
from rematbench.worlds.torch.draws import Draws, drawing_threads
from rematbench.worlds.torch.groups import Coordinates
from rematbench.worlds.torch.parameters import ParameterSpec
from rematbench.worlds.torch.rank_model import RankModel
from tests.worlds.torch import cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SPECS = [ParameterSpec(f"layers.{n}.weight", (100 + n, 7), mean=n) for n in range(9)]


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_draws_are_the_same_bits(threads: int) -> None:
    found = Draws(SPECS, 7, threads)
    for spec in SPECS:
        assert torch.equal(found.take(spec), parameters.full_weight(spec, 7))


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_model_is_the_same_whoever_draws(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.case(layout, "keep", precision="bf16")
    place = Coordinates(tp=0, cp=0, dp=0, pp=0)
    one = RankModel(case.problem, case.plan, place, CPU, 7).parameters
    used: list[int] = []
    took = Draws.take

    def noted(self: Draws, spec: ParameterSpec) -> torch.Tensor:
        used.append(1)
        return took(self, spec)

    monkeypatch.setattr(rank_model.Draws, "take", noted)
    other = RankModel(case.problem, case.plan, place, CPU, 7, threads=3).parameters
    assert len(used) == len(one) == len(other)
    assert list(one) == list(other)
    for name, parameter in one.items():
        pairs = zip(parameter.tensors(), other[name].tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_device_that_draws_has_weights_of_the_same_kind() -> None:
    """On a CPU even the same bits, as its generator is the one that the threads have."""
    case = cases.case("one", "keep", precision="bf16")
    place = Coordinates(tp=0, cp=0, dp=0, pp=0)
    one = RankModel(case.problem, case.plan, place, CPU, 7).parameters
    other = RankModel(
        case.problem, case.plan, place, CPU, 7, threads=3, device_weights=True
    ).parameters
    assert all(torch.equal(p.flat, other[name].flat) for name, p in one.items())
    spec = ParameterSpec("x", (3, 5), mean=2.0)
    assert parameters.full_weight(spec, 7, "cpu").dtype is torch.float64


def test_as_many_as_threads_are_drawn_at_once_and_no_more_lie_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting, begun = threading.Barrier(3), []

    def draw(spec: ParameterSpec, seed: int) -> torch.Tensor:
        begun.append(spec.name)
        meeting.wait(timeout=60)  # broken, and so an error, unless three come
        return torch.zeros(1)

    monkeypatch.setattr(draws, "full_weight", draw)
    found = Draws(SPECS, 7, 3)
    for number, spec in enumerate(SPECS):
        assert len(begun) <= number + 3
        found.take(spec)
    assert sorted(begun) == sorted(spec.name for spec in SPECS)


@pytest.mark.parametrize(("room", "most"), [(0, 1), (2 * 8 * 7 * 108, 2), (1 << 20, 4)])
def test_no_more_lies_ready_than_there_is_room_for(
    room: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "READY_BYTES", room)
    found = Draws(SPECS, 7, 4)
    for number, spec in enumerate(SPECS):
        assert len(found._ready) == min(most, len(SPECS) - number)
        assert torch.equal(found.take(spec), parameters.full_weight(spec, 7))


def test_a_draw_that_fails_fails_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(spec: ParameterSpec, seed: int) -> torch.Tensor:
        raise MemoryError(spec.name)

    monkeypatch.setattr(draws, "full_weight", draw)
    with pytest.raises(MemoryError, match=r"layers\.0"):
        Draws(SPECS, 7, 2).take(SPECS[0])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"layers\.1\.weight is taken before layers\.0"):
        Draws(SPECS, 7, 2).take(SPECS[1])


@pytest.mark.parametrize(
    ("cores", "gpus", "threads"), [(16, 1, 16), (96, 8, 12), (192, 1, 16), (4, 8, 1), (8, 0, 1)]
)
def test_a_gpu_has_its_share_of_the_processors(
    cores: int, gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert drawing_threads(CUDA) == threads
    assert drawing_threads(CPU) == 1


def test_a_rank_asks_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = cases.case("one", "keep"), []

    class Made(Exception):
        """Enough was seen."""

    def made(*_: object, threads: int, **__: object) -> None:
        asked.append(threads)
        raise Made

    monkeypatch.setattr(worker, "drawing_threads", lambda device: 5)
    monkeypatch.setattr(worker, "RankModel", made)
    with pytest.raises(Made):
        worker.run_case(case, 0, CPU, {})
    assert asked == [5]
