"""The law of searches, which several modules hold."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from rematbench.advise.candidates.trials import Trial
from rematbench.advise.search.request import SearchRequest
from tests import everything


@pytest.fixture
def held(short: bool) -> everything.Held:
    """At every gap or, in a short run, at the two that differ most."""
    return partial(everything.held, everything.GAPS[:2] if short else everything.GAPS)


@pytest.fixture
def held_at_edges(
    short: bool, held: everything.Held
) -> Callable[[SearchRequest, Sequence[Trial]], None]:
    """The law on devices that hold three in four plans or, in a long run, also the least one."""

    def law(one: SearchRequest, found: Sequence[Trial]) -> None:
        for share in everything.SHARES[3:4] if short else everything.SHARES[:4:3]:
            held(everything.at_the_edge(one, found, share), found)

    return law
