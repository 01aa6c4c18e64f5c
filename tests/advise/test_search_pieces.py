"""What a search knows of plans in pieces without measuring them: pieces change neither what layers
store nor host memory, and they take no less time."""

from collections.abc import Iterator
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Refused
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.best_first import MemoryRules, Search
from rematbench.advise.search.limits import not_searched, space_words
from rematbench.advise.search.queue import OpenLayout, QueueEntry
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, in_one_process
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.inputs.system import with_facts
from rematbench.plugins.registry import MethodError
from tests.advise.test_search_everything import LENGTHS
from tests.advise.test_search_fits import GIB, asked, everything
from tests.everything import (
    ENDLESS,
    SHARES,
    Held,
    at_the_edge,
    bounds_at,
    every_plan,
    some,
    trials_at,
)


def groups() -> Iterator[tuple[GroupBounds, Search]]:
    made = SearchJob(asked(seq_len=16384))
    search = made.search()
    for each in search.alike:
        yield from ((make(), search) for make in each.makers)


def test_the_floor_of_an_arm_in_pieces_is_that_without_them() -> None:
    seen = 0
    for bounds, search in groups():
        for candidate in search.family.candidates:
            if candidate.whole not in (candidate, KEEP):
                seen += 1
                assert bounds._stored_like(candidate) == candidate.whole
                assert bounds.floors(candidate) == bounds.floors(candidate.whole)
    assert seen > 10


def test_a_method_that_also_stores_less_in_pieces_has_its_own_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user's own method may."""
    floors = GroupBounds.floors

    def less(self: GroupBounds, candidate: Candidate) -> Any:
        found = floors(self, candidate)
        cuts = candidate.whole != candidate and not isinstance(found, Refused)
        return (found[0]._replace(first=None), found[1]) if cuts else found

    monkeypatch.setattr(GroupBounds, "floors", less)
    bounds, search = next(groups())
    candidates = [
        candidate
        for candidate in search.family.candidates
        if candidate.whole not in (candidate, KEEP)
    ]
    assert all(bounds._stored_like(candidate) == candidate for candidate in candidates)


def test_no_pieces_are_tried_where_host_memory_is_short() -> None:
    """Pieces change no host bytes: what failed there in one piece, or in a few, is not measured in
    more."""
    bounds, search = next(groups())
    at = int((bounds.states_over_bytes <= 0).nonzero()[0][0])
    candidates = [
        candidate
        for candidate in search.family.candidates
        if candidate.pieces and candidate.without(candidate.pieces).parts
    ]
    candidate = next(
        candidate
        for candidate in candidates
        if candidate.parts[0].method == "memo" and len(candidate.parts) == 2
    )
    whole = candidate.without(candidate.pieces)
    for failed, pieces in ((whole, 1), (candidate, 2)):
        place = OpenLayout(bounds, at, {})
        trial = place.trials.trial(failed.text(1, pieces), search.registry)
        assert trial.result.verdict is not None
        verdict = replace(trial.result.verdict, host_headroom_bytes=-1)
        reason = "host memory of a node"
        short = replace(trial.result, status="oom", evaluation=None, verdict=verdict, reason=reason)
        item = place.entry("simulate", failed, 1, pieces)
        search.memory.after_failure(0.0, place, item, replace(trial, result=short))
        assert place.ends == {whole: 1}
        before = len(search.queue)
        for more in range(pieces + 1, 7):
            search.memory.judge(0.0, place, candidate, more)
        assert len(search.queue) == before
        assert not any((candidate, more) in bounds._bounds for more in range(3, 7))
    assert search.excluded.counts["host memory too small for any number of pieces"] == 9


@pytest.mark.full  # the answers of any search are those of everything: test_search_everything.py
@pytest.mark.parametrize(("gib", "fewer"), [(9.8, False), (10.5, True)])
def test_more_pieces_are_tried_unprobed_where_the_allocator_alone_keeps_a_plan_out(
    monkeypatch: pytest.MonkeyPatch, gib: float, fewer: bool
) -> None:
    following = MemoryRules._next

    def probed(
        self: MemoryRules, bound_s: float, place: OpenLayout, item: QueueEntry, **_: bool
    ) -> None:
        following(self, bound_s, place, item)

    stack = with_facts(load_system("megatron-core"), dummy_gradients=False)
    one = asked(system=stack, seq_len=8192, hbm_bytes=int(gib * GIB))
    found = everything(one)
    monkeypatch.setattr(MemoryRules, "_next", probed)
    every = everything(one)
    assert found.best_s == every.best_s
    if found.best_s == inf:
        assert found.short_bytes == every.short_bytes
    layers, all_layers = (
        sum(group.probed_layers for group in each.groups) for each in (found, every)
    )
    assert layers < all_layers or (layers == all_layers and not fewer)


def test_samples_have_room_for_the_states_where_any_layout_has() -> None:
    one = asked(seq_len=16384, hbm_bytes=12 * GIB)
    made = SearchJob(replace(one, fixed=Fixed()))
    made._samples()
    probed = [each for each in made._groups.values() if each.probed_layers]
    assert probed
    assert all(group.has_room for group in probed)
    assert not all(made._group(index).has_room for index in range(len(made._layouts)))


# -- optimizer states in pieces in a search --------------------------------------------------------


OURS = "optimizer_offload"
CLUSTERS = ("h100-80gb-dos", "polaris-a100-40gb-bound", "h100-80gb")
SYSTEMS = ("megatron-core", "rematbench", "megatron-kwai", "torchtitan")
METHODS = ("keep_all", "balanced_checkpointing", "pp_offload", "memo", "full_recompute")
MOST = 300


def drawn(seed: int) -> SearchRequest:
    """A job of a few layers and layouts, with and without states on the host."""
    draw = Random(f"states {seed}")
    model = load_model(draw.choice(("llama-7b", "gpt-1.3b", "qwen2-7b")))
    pp, dp = draw.choice((1, 2, 4)), draw.choice((1, 2))
    layers = pp * draw.choice((1, 2, 3))
    spec = Job(
        model=replace(model, name="drawn", num_layers=layers, attention_window=()),
        cluster=replace(load_cluster(draw.choice(CLUSTERS)), hbm_bytes=ENDLESS),
        system=draw.choice(SYSTEMS),
        seq_len=draw.choice(LENGTHS[:4]),
        gpus=pp * dp,
        global_batch=dp * pp * draw.choice((1, 2)),
    )
    only = (f"{OURS}:size=20000000", *draw.sample(METHODS, 2))
    fixed = Fixed(tp=1, cp=1, pp=pp, vpp=1, micro_batch=1)
    return SearchRequest(spec=spec, only=only, within=0.0, fixed=fixed)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40)),
    ],
)
def test_nothing_faster_is_missed(seed: int, short: bool, held: Held) -> None:
    one = drawn(seed)
    found = some(one, MOST)
    assert any(OURS in trial.result.method for trial in found)
    for share in SHARES[:1] if short else SHARES:
        held(at_the_edge(one, found, share), found)


@pytest.mark.parametrize("seed", [6, *(pytest.param(s, marks=pytest.mark.full) for s in (2, 5, 7))])
def test_bounds_are_below_every_plan(seed: int) -> None:
    """Bytes of the fullest device, and seconds: in closed form, and by the schedule."""
    made = SearchJob(drawn(seed))
    tight = []
    for choice, candidate, text in list(every_plan(made))[:MOST]:
        if not choice.states or candidate.share:
            continue
        result = trials_at(made, choice).trial(text, made.registry).result
        own = bounds_at(made, choice)
        bounds = own.of(candidate)
        if result.evaluation is None or not isinstance(bounds, Bounds) or candidate.pieces:
            continue
        step_s = result.fitting_s
        assert bounds.peak_bytes[0, 0] <= max(result.evaluation.peak_device_bytes)
        assert bounds.step_s[0, 0] <= step_s
        tight.append(own.tight_s(candidate, 1, 1, 0) / step_s)
    assert len(tight) > 3
    assert max(tight) <= 1.0
    assert min(tight) > 0.9


def job(*only: str, **others: object) -> SearchJob:
    spec = Job(
        model="gpt-1.3b", cluster="h100-80gb-dos", system="rematbench", seq_len=2048, gpus=2,
        global_batch=4,
    )  # fmt: skip
    return SearchJob(SearchRequest(spec=spec.changed(**others), only=only))


def test_without_a_host_rate_states_in_pieces_take_the_middle_of_known_rates() -> None:
    one = {"cluster": "h100-80gb", "system": "megatron-core", "hbm_bytes": 16 * GIB}
    made = job(f"{OURS}:visiting=0.5,share=1", "keep_all", **one).ready()
    best, *_ = made.completed(in_one_process(made.search(), most_work=1000)[0])
    assert OURS in best.method
    assert best.error_band is not None
    assert "host rate" in best.error_band.outside


def test_states_are_searched_only_where_they_are_asked_for() -> None:
    plain, both = job(), job(OURS)
    assert not any(choice.states for choice in plain.space.choices)
    assert len(both.states) == 4
    assert len([c for c in both.space.choices if c.states]) == 4 * len(
        [c for c in plain.space.choices if not c.hosted]
    )
    assert both.variants == plain.variants
    assert both.keeps
    assert any("name optimizer_offload with --method" in text for text in not_searched(plain))
    assert not any("name optimizer_offload" in text for text in not_searched(both))
    assert "with states placed by optimizer_offload:share=0.25" in space_words(both)
    only = job(f"{OURS}:share=0.5", "memo")
    assert only.states == (f"{OURS}:share=0.5",)
    assert {variant.method for variant in only.variants} == {"memo"}
    assert not only.keeps


@pytest.mark.parametrize(
    ("only", "others", "words"),
    [
        (("zero_offload",), {}, "gradients that leave in the backward"),
        (("memo+optimizer_offload",), {}, "name single methods only"),
        ((OURS,), {"optimizer": "host"}, "already places the optimizer's states"),
        ((f"{OURS}:order=stale",), {}, "not lossless"),
        ((f"{OURS}:start=ready",), {}, "nothing can be clipped by it; clip must be false"),
        ((f"{OURS}:start=ready,clip=false",), {"tp": 1}, "updates in the backward"),
    ],
)
def test_what_is_not_bounded_is_refused_by_name(
    only: tuple[str, ...], others: dict[str, object], words: str
) -> None:
    with pytest.raises(MethodError, match=words) as told:
        job(*only, **others).ready()
    assert "\n" not in str(told.value)
