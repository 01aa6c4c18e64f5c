"""A rank runs near its GPU: on the CPUs of the NUMA node that the kernel names for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rematbench.worlds.torch.devices import (
    bind_to_numa_node,
    pin_requested_size,
    release_pinned,
    set_expandable_segments,
)
from tests.tables import tables

TABLES = tables(__file__)


@pytest.fixture
def own_cpus() -> Iterator[list[int]]:
    """CPUs of this process, given back at the end; two at least."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU cannot be bound to fewer")
    yield sorted(before)
    os.sched_setaffinity(0, before)


def system(tmp_path: Path, node: int, cpus: str) -> Path:
    """Files of a kernel with one GPU at 0000:1b:00.0."""
    gpu = tmp_path / "bus/pci/devices/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{node}\n")
    place = tmp_path / "devices/system/node/node1"
    place.mkdir(parents=True)
    (place / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


def found(monkeypatch: pytest.MonkeyPatch, bus: int | None) -> None:
    """torch names the GPU's place."""
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)


def test_a_rank_is_bound_to_the_cpus_of_its_gpus_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cpus: list[int]
) -> None:
    found(monkeypatch, 0x1B)
    last = own_cpus[-1]
    assert bind_to_numa_node(torch.device("cuda", 0), system(tmp_path, 1, f"{last},100000")) == 1
    assert os.sched_getaffinity(0) == {last}


@pytest.mark.parametrize(
    ("bus", "node", "cpus"), [(0x1B, 1, "100000"), (0x1B, -1, "0"), (0x2B, 1, "0"), (None, 1, "0")]
)
def test_nothing_is_bound_where_nothing_is_known_or_allowed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_cpus: list[int],
    bus: int | None,
    node: int,
    cpus: str,
) -> None:
    found(monkeypatch, bus)
    bind_to_numa_node(torch.device("cuda", 0), system(tmp_path, node, cpus))
    assert sorted(os.sched_getaffinity(0)) == own_cpus


@pytest.mark.parametrize("refusal", [RuntimeError, ValueError])
def test_a_torch_that_cannot_pin_exactly_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    """2.10 and 2.11 have the call and raise a ValueError for the key."""

    def refuse(words: str) -> None:
        raise refusal(f"Unrecognized key in {words}")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    pin_requested_size()


def settings_asked(patch: pytest.MonkeyPatch, given: str) -> list[str]:
    """The settings that torch's allocator, which has `given`, is asked for from now on."""
    asked: list[str] = []
    told = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": given}}
    patch.setattr(torch.cuda.memory, "_snapshot", lambda: told)
    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    return asked


@pytest.mark.parametrize(("given", "said"), TABLES["allocators"])
def test_what_was_set_of_the_allocator_stays_set(
    monkeypatch: pytest.MonkeyPatch, given: str, said: list[str]
) -> None:
    asked = settings_asked(monkeypatch, given)
    pin_requested_size()
    assert asked == said


@pytest.mark.parametrize(("given", "expandable", "said"), TABLES["segments"])
def test_segments_grow_where_the_stack_says_so(
    monkeypatch: pytest.MonkeyPatch, given: str, expandable: bool, said: list[str]
) -> None:
    asked = settings_asked(monkeypatch, given)
    set_expandable_segments(expandable=expandable)
    assert asked == said
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if said:
        with pytest.raises(RuntimeError, match="cannot set expandable_segments"):
            set_expandable_segments(expandable=expandable)


def test_segments_grow_where_torch_refused_another_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 reports the settings of a call that it refused (seen on an H200)."""
    asked: list[str] = []

    def refuse(words: str) -> None:
        told["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = words
        if "pinned" in words:
            raise ValueError(f"Unrecognized key in {words}")
        asked.append(words)

    told = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: told)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    pin_requested_size()
    set_expandable_segments(expandable=True)
    assert asked == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize("public", [True, False])
def test_pinned_memory_is_given_back_by_the_call_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    """2.11 has the call without its public name; there, memory of earlier turns counted as pinned,
    and pinning a block that lay in the cache took 4 microseconds (seen on an H200)."""
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: asked.append("own"), raising=False)
    if public:
        monkeypatch.setattr(
            torch.accelerator, "empty_host_cache", lambda: asked.append("public"), raising=False
        )
    else:
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    release_pinned()
    assert asked == ["public" if public else "own"]
