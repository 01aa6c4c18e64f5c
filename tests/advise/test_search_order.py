"""The order in which a search works: what is taken when, and that nothing is tried twice."""

from collections import Counter
from typing import Any

import pytest

from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.candidates.trials import LayoutTrials
from rematbench.advise.search.queue import Queue
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.inputs.job import Job

GIB = 2**30


def test_a_ripe_entry_may_come_ahead_of_its_turn_and_comes_once() -> None:
    queue: Queue[str] = Queue()
    for bound, name, ripe in ((1.0, "a", False), (3.0, "c", True), (2.0, "b", True)):
        queue.push(bound, name, ripe=ripe)
    assert (queue.bound, queue.ripe_bound, len(queue)) == (1.0, 2.0, 3)
    assert queue.pop(ripe=True) == (2.0, "b")
    assert [queue.pop() for _ in range(len(queue))] == [(1.0, "a"), (3.0, "c")]
    assert queue.bound == queue.ripe_bound == float("inf")


def test_no_plan_of_a_layout_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan as short as itself would say that more pieces free nothing."""
    seen: Counter[tuple[int, str]] = Counter()
    trial = LayoutTrials.trial

    def counted(there: LayoutTrials, method: str, *others: Any, **more: Any) -> Any:
        seen[id(there.job), method] += 1
        return trial(there, method, *others, **more)

    monkeypatch.setattr(LayoutTrials, "trial", counted)
    spec = Job(
        model="gpt-1.3b", cluster="a800-80gb", system="megatron-core",
        gpus=4, seq_len=8192, global_batch=16, hbm_bytes=16 * GIB,
    )  # fmt: skip
    fixed = Fixed(pp=4, micro_batch=1, zero_stage=1)
    asked = SearchRequest(spec=spec, only=("pp_offload", "mst"), fixed=fixed, within=0.0)
    search = SearchJob(asked).search()
    for _ in search.run():
        pass
    assert search.best_s < float("inf")
    assert any("+mst" in method for _, method in seen)
    assert max(seen.values()) == 1
