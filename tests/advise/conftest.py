"""The law of searches, which several modules hold."""

from functools import partial

import pytest

from tests import everything


@pytest.fixture
def held(short: bool) -> everything.Held:
    """At every gap or, in a short run, at the two that differ most."""
    return partial(everything.held, everything.GAPS[:2] if short else everything.GAPS)
