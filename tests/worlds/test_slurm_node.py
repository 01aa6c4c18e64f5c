"""Facts of a node against predicted pinned bytes, and what is odd about them."""

import sys
from pathlib import Path

import msgspec
import pytest

from rematbench.worlds.slurm.launch import Allocation, all_facts, last_words
from rematbench.worlds.slurm.nodefacts import NodeFacts, cgroup_limit, oddities, shortages
from tests.campaigns import FACTS


def test_pinned_bytes_against_memory_and_control_group() -> None:
    assert not shortages(FACTS, 50)
    assert "cgroup limit" in " ".join(shortages(FACTS, 51))
    assert len(shortages(FACTS, 96)) == 2, "memory less what the system needs"
    assert not shortages(FACTS, 0, gpus=2), "nobody asked torch"
    assert any("ulimit -l" in text for text in oddities([FACTS], 11))


def test_a_slow_device_and_a_far_gpu_are_named() -> None:
    def rated(host: str, rate: float) -> NodeFacts:
        canary: list[dict[str, float | str]] = [{"device": "gpu 0", "gemm_flop_per_s": rate}]
        return msgspec.structs.replace(FACTS, host=host, canary=canary)

    found = oddities([rated("n1", 100.0), rated("n2", 99.0), rated("n3", 50.0)])
    assert [text for text in found if "median" in text] == [
        "n3: gpu 0: gemm_flop_per_s is 51 % of the median"
    ]
    assert sum("no CPU of NUMA node 1" in text for text in found) == 3


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "cg/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "cg/job/memory.max").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert cgroup_limit(tmp_path / "cg", own) == 1000


def test_what_this_node_says_of_itself_can_be_sent_and_read() -> None:
    """The real check, in a process of its own: torch's version is no plain string."""
    (facts,) = all_facts(Allocation(nodes=1, gpus_per_node=2), 0.0, count_gpus=True)
    assert facts.torch_gpus >= 0
    assert facts.torch
    assert facts.memory_bytes > 0
    assert all(len(shortages(facts, 0, gpus)) == (gpus > facts.torch_gpus) for gpus in (0, 1, 99))


def test_the_words_of_a_failing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the node check failed: no output"):
        all_facts(Allocation(nodes=1, gpus_per_node=2), 0.0, count_gpus=False)
    text = "Traceback\nTypeError: no good\nsrun: Force Terminated StepId=42.0\n"
    assert last_words(text) == "TypeError: no good"
