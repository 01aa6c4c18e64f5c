"""What a search knows of plans in pieces without measuring them: pieces change neither what layers
store nor host memory, and they take no less time."""

from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.search.best_first import Search
from rematbench.advise.search.candidates import KEEP, Candidate
from rematbench.advise.search.memory_rules import MemoryRules
from rematbench.advise.search.probes import Refused
from rematbench.advise.search.queue import Item, Place
from rematbench.advise.search.search_job import SearchJob
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard
from rematbench.advise.search.space import Fixed
from tests.advise.test_search_fits import GIB, asked, everything


def shards() -> Iterator[tuple[ShardBounds, Search]]:
    made = SearchJob(asked(seq_len=16384))
    search = made.search()
    for bounds in search.shards:
        yield bounds, search


def test_the_floor_of_an_arm_in_pieces_is_that_without_them() -> None:
    seen = 0
    for bounds, search in shards():
        shard = bounds.shard
        for candidate in search.tree.candidates:
            if candidate.whole not in (candidate, KEEP):
                seen += 1
                assert bounds.minimum._stored_like(candidate) == candidate.whole
                assert shard.floors(candidate) == shard.floors(candidate.whole)
    assert seen > 10


def test_a_method_that_also_stores_less_in_pieces_has_its_own_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user's own method may."""
    floors = Shard.floors

    def less(self: Shard, candidate: Candidate) -> Any:
        found = floors(self, candidate)
        cuts = candidate.whole != candidate and not isinstance(found, Refused)
        return (found[0]._replace(first=None), found[1]) if cuts else found

    monkeypatch.setattr(Shard, "floors", less)
    bounds, search = next(shards())
    candidates = [
        candidate
        for candidate in search.tree.candidates
        if candidate.whole not in (candidate, KEEP)
    ]
    assert all(bounds.minimum._stored_like(candidate) == candidate for candidate in candidates)


def test_no_pieces_are_tried_where_host_memory_is_short() -> None:
    """Pieces change no host bytes: what failed there in one piece, or in a few, is not measured in
    more."""
    bounds, search = next(shards())
    at = int((bounds.shard.states_over_bytes <= 0).nonzero()[0][0])
    candidates = [
        candidate
        for candidate in search.tree.candidates
        if candidate.pieces and candidate.without(candidate.pieces).parts
    ]
    candidate = next(
        candidate
        for candidate in candidates
        if candidate.parts[0].method == "memo" and len(candidate.parts) == 2
    )
    whole = candidate.without(candidate.pieces)
    for failed, pieces in ((whole, 1), (candidate, 2)):
        place = Place(bounds, at, {})
        trial = place.site.trial(failed.text(1, pieces), search.registry)
        assert trial.result.verdict is not None
        verdict = replace(trial.result.verdict, host_headroom_bytes=-1)
        reason = "host memory of a node"
        short = replace(trial.result, status="oom", evaluation=None, verdict=verdict, reason=reason)
        item = Item("simulate", place, None, failed, 1, pieces)
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

    def probed(self: MemoryRules, bound_s: float, place: Place, item: Item, **_: bool) -> None:
        following(self, bound_s, place, item)

    one = asked(seq_len=8192, hbm_bytes=int(gib * GIB))
    found = everything(one)
    monkeypatch.setattr(MemoryRules, "_next", probed)
    every = everything(one)
    assert found.best_s == every.best_s
    if found.best_s == inf:
        assert found.short_bytes == every.short_bytes
    layers, all_layers = (
        sum(s.shard.prober.layers for s in each.shards) for each in (found, every)
    )
    assert layers < all_layers or (layers == all_layers and not fewer)


def test_samples_have_room_for_the_states_where_any_layout_has() -> None:
    one = asked(seq_len=16384, hbm_bytes=12 * GIB)
    made = SearchJob(replace(one, fixed=Fixed()))
    made._samples()
    probed = [each.shard for each in made._shards.values() if each.shard.prober.layers]
    assert probed
    assert all(shard.has_room for shard in probed)
    assert not all(made._shard(index).shard.has_room for index in range(len(made._cuts)))
