"""What a search knows of plans in pieces without measuring them: pieces change neither what layers
store nor host memory, and they take no less time."""

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Refused
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.best_first import MemoryRules, Search
from rematbench.advise.search.queue import OpenLayout, QueueEntry
from rematbench.advise.search.rounds import SearchJob
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from tests.advise.test_search_fits import GIB, asked, everything


def groups() -> Iterator[tuple[GroupBounds, Search]]:
    made = SearchJob(asked(seq_len=16384))
    search = made.search()
    for bounds in search.groups:
        yield bounds, search


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


@pytest.mark.parametrize(
    ("gib", "fewer"), [pytest.param(9.8, False, marks=pytest.mark.full), (10.5, True)]
)
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
