"""No answer of Slurm is not the end of its jobs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin

from rematbench.slurm.patience import be_patient


class Fake:
    """An executor whose rounds end as told: no answer, all running, all ended."""

    logger = logging.getLogger(__name__)

    def __init__(self) -> None:
        self._status_query_calls = 0
        self.answer = ""

    async def check_active_jobs(self, active_jobs: list[str]) -> AsyncIterator[str]:
        if self.answer:
            self._status_query_calls += 1
        if self.answer == "running":
            for job in active_jobs:
                yield job


async def kept(executor: Any, answer: str) -> list[str]:
    executor.answer = answer
    return [job async for job in executor.check_active_jobs(["a", "b"])]


def test_jobs_outlive_a_silent_controller() -> None:
    assert asyncio.run(kept(Fake(), "")) == [], "what the wrapper mends"
    assert be_patient(Fake)
    assert be_patient(Fake), "a second time changes nothing"
    found = Fake()
    assert asyncio.run(kept(found, "")) == ["a", "b"]
    assert asyncio.run(kept(found, "running")) == ["a", "b"]
    assert asyncio.run(kept(found, "ended")) == []


def test_a_round_before_the_executor_is_made() -> None:
    """Its thread begins in the constructor's first half; a busy machine is slow with the rest."""

    class Half(Fake):
        answer = ""

        def __init__(self) -> None:
            """No counter yet."""

    async def first(executor: Any) -> list[str]:
        return [job async for job in executor.check_active_jobs([])]

    assert be_patient(Half)
    assert asyncio.run(first(Half())) == []


def test_the_plugin_has_what_is_wrapped() -> None:
    assert be_patient(plugin.Executor)
    text = Path(plugin.__file__).read_text(encoding="utf-8")
    assert "self._status_query_calls += 1" in text
