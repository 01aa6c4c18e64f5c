"""No answer of Slurm is not the end of its jobs, and it is asked as often as told."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin

from rematbench.worlds.slurm.slurm_queue import wrap_executor


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
    assert wrap_executor(30.0, Fake)
    assert wrap_executor(30.0, Fake), "a second time changes nothing"
    found = Fake()
    assert asyncio.run(kept(found, "")) == ["a", "b"]
    assert asyncio.run(kept(found, "running")) == ["a", "b"]
    assert asyncio.run(kept(found, "ended")) == []


def test_rounds_come_no_rarer_than_told() -> None:
    class Slower(Fake):
        """Asks later and later, as the plugin does."""

        is_wrapped = False  # as it was made; Fake is wrapped by now
        _next_seconds_between_status_checks = 5.0

        @property
        def next_seconds_between_status_checks(self) -> float:
            return self._next_seconds_between_status_checks

        @next_seconds_between_status_checks.setter
        def next_seconds_between_status_checks(self, value: float) -> None:
            self._next_seconds_between_status_checks = value

        async def check_active_jobs(self, active_jobs: list[str]) -> AsyncIterator[str]:
            self._status_query_calls += 1
            self.next_seconds_between_status_checks += 10.0
            for job in active_jobs:
                yield job

    assert wrap_executor(30.0, Slower)
    found, waits = Slower(), []
    for _ in range(5):
        asyncio.run(kept(found, "running"))
        waits.append(found.next_seconds_between_status_checks)
    assert waits == [15.0, 25.0, 30.0, 30.0, 30.0]


def test_a_round_before_the_executor_is_made() -> None:
    """Its thread begins in the constructor's first half; a busy machine is slow with the rest."""

    class Half(Fake):
        answer = ""

        def __init__(self) -> None:
            """No counter yet."""

    async def first(executor: Any) -> list[str]:
        return [job async for job in executor.check_active_jobs([])]

    assert wrap_executor(30.0, Half)
    assert asyncio.run(first(Half())) == []


def test_the_plugin_has_what_is_wrapped() -> None:
    assert wrap_executor(30.0, plugin.Executor)
    text = Path(plugin.__file__).read_text(encoding="utf-8")
    assert "self._status_query_calls += 1" in text
    assert "self.next_seconds_between_status_checks + 10," in text
