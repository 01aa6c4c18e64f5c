"""A search for any plan that fits: it says no only where trying everything says no."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.candidates import trials
from rematbench.advise.candidates.candidate import Candidate
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.candidates.trials import planned_at
from rematbench.advise.search import questions
from rematbench.advise.search.best_first import Search
from rematbench.advise.search.queue import leaner
from rematbench.advise.search.request import Rounds, SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.evaluator import Reserved, weighed
from rematbench.inputs.job import Job
from tests.everything import ALONE

GIB = 2**30


def asked(**changes: Any) -> SearchRequest:
    """A job on four devices."""
    spec = {"model": "gpt-1.3b", "cluster": "a800-80gb", "system": "megatron-core", "gpus": 4}
    return SearchRequest(
        spec=Job(**{**spec, "seq_len": 32768, "global_batch": 8, **changes}),
        only=("balanced_checkpointing", "memo", "mst"),
        fixed=Fixed(tp=1, zero_stage=1),
    )


def methods_alone(one: SearchRequest) -> Search:
    """The ended search for the best layout of each method alone."""
    made = SearchJob(replace(one, within=0.0))
    search = made.search_of([Candidate((variant,)) for variant in made.variants])
    for _ in search.run():
        pass
    return search


def everything(one: SearchRequest) -> Search:
    """The ended search for the fastest plan of all methods and compositions."""
    search = SearchJob(replace(one, within=0.0)).search()
    for _ in search.run():
        pass
    return search


METHODS = (asked().only, ("balanced_checkpointing", "pp_offload", "mst"))


@pytest.mark.parametrize("only", [METHODS[0], pytest.param(METHODS[1], marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "searched", [methods_alone, pytest.param(everything, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("seq_len", "gib", "fits"),
    [(32768, 12, False), pytest.param(4096, 16, True, marks=pytest.mark.full)],
)
def test_arms_that_fall_unprobed_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
    seq_len: int,
    gib: int,
    fits: bool,
    searched: Callable[[SearchRequest], Search],
    only: tuple[str, ...],
) -> None:
    """Neither the best step nor, where nothing fits, the least bytes that a plan lacks."""
    one = replace(asked(seq_len=seq_len, hbm_bytes=gib * GIB), only=only)
    found = searched(one)
    monkeypatch.setattr(GroupBounds, "short", lambda *_: None)
    every = searched(one)
    assert found.best_s == every.best_s
    assert (found.best_s < inf) == fits
    if not fits:
        assert found.excluded.device_short_bytes == every.excluded.device_short_bytes
    probed, of_all = (
        sum(group.probed_layers for group in search.groups) for search in (found, every)
    )
    assert probed < of_all or (probed == of_all and searched is everything)


def test_replays_that_end_early_change_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the allocator alone keeps plans from fitting, and where a plan fits."""
    hbm, seen, ended = int(10.78 * GIB), set(), list[bool]()

    def noted(*given: Any, **enough: float) -> Reserved:
        ended.append((found := weighed(*given, **enough)).at_least)
        return found

    for _ in range(24):
        one = asked(seq_len=2048, hbm_bytes=hbm)
        monkeypatch.setattr(trials, "weighed", lambda *given, **_: weighed(*given))
        every = methods_alone(one)
        monkeypatch.setattr(trials, "weighed", noted)
        ended.clear()
        found = methods_alone(one)
        assert found.best_s == every.best_s
        assert found.excluded.counts == every.excluded.counts
        if found.best_s == inf:
            assert found.short_bytes == every.short_bytes
        seen.add((any(ended), found.best_s < inf))
        if {(True, False), (True, True)} <= seen:
            return
        hbm += 2**25
    pytest.fail(f"seen: {seen}")


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full), 4])
def test_more_sequences_in_a_micro_batch_need_no_fewer_bytes(pp: int) -> None:
    """Of every method and its compositions, where as many passes are in flight."""
    made = SearchJob(asked(seq_len=2048, global_batch=32))
    texts = ("keep_all", "full_recompute", "balanced_checkpointing", "memo:alpha=0.5", "pp_offload",
             "mst:mlp_chunks=4,head_chunks=4", "selective_recompute",
             "balanced_checkpointing+memo:alpha=1.0+mst:mlp_chunks=8,head_chunks=8")  # fmt: skip
    compared = 0
    for choice in made.space.choices:
        lay, one = choice.layout, leaner(choice)
        if (lay.pp, lay.cp, lay.micro_batch) != (pp, 1, 2) or one is None or not choice.even:
            continue
        for text in texts:
            few, many = (_bytes(made, each, text) for each in (one, choice))
            compared += few is not None
            assert (few is None) == (many is None)
            assert few is None or many is None or max(few) <= max(many), (text, choice)
    assert compared


def _bytes(made: SearchJob, choice: Any, text: str) -> tuple[int, ...] | None:
    problem = made.problem(choice)
    plan = planned_at(made.job(choice), text, made.registry)
    return None if isinstance(plan, str) else tuple(evaluate(problem, plan).peak_device_bytes)


def test_few_micro_batches_are_not_compared() -> None:
    """One micro-batch adds up no gradients, and fewer than ranks are not all in flight."""
    for choice in SearchJob(asked()).space.choices:
        one, lay = leaner(choice), choice.layout
        assert (one is None) == (lay.micro_batch == 1 or lay.num_micro_batches <= lay.pp)
        assert one is None or one.layout.num_micro_batches > lay.num_micro_batches


def test_the_longest_context_is_proved_where_a_short_look_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shortest length without a plan is proved, and no other; lengths that a look missed are
    asked again."""
    longest, missed, proofs = 11 * 1024, {8192, 10240}, []

    def reached(one: SearchRequest, step_s: float, run: Rounds, rounds: int | None = None) -> Any:
        seq_len = one.spec.work.seq_len
        if rounds is None:
            proofs.append(seq_len)
        return seq_len if seq_len <= longest and (rounds is None or seq_len not in missed) else None

    monkeypatch.setattr(questions, "reached", reached)
    found: Iterator[questions.Answer] = questions.longest_context(asked(seq_len=2048), ALONE)
    answers = list(found)
    assert max(seq_len for seq_len, plan in answers if plan) == longest
    assert [seq_len for seq_len, plan in answers if not plan] == [12 * 1024]
    assert proofs[-1] == 12 * 1024
    assert len(proofs) == len(set(proofs))


def test_a_search_for_any_plan_ends_with_the_first() -> None:
    """A process does not look for a second one."""
    search = SearchJob(replace(asked(), any_fit=True)).search()
    fits: list[bool] = []
    for trial in search.run():
        fits += [trial.result.fits] if trial else []
        if search.ended:
            break
    assert fits == [False] * (len(fits) - 1) + [True]
    assert search.queue
    assert search.bound_s == 0.0
