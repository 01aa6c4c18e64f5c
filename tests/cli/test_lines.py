"""Command lines and what they say.

A title of the table has the start of its lines, then rows: the rest of the `line`, its exit `code`
(0), words that it `says` and does not (`absent`), in output and errors with single spaces, and
values of its `json` by path.
"""

import json
import shlex
from functools import reduce
from typing import Any

import pytest

from tests.cli.test_cli import DEMO
from tests.tables import tables
from tests.typed import typed

LINES = [
    pytest.param(f"{start} {row['line']}", row, id=f"{title} {number}")
    for title, (start, *rows) in tables(__file__).items()
    for number, row in enumerate(rows)
]


@pytest.mark.parametrize(("line", "row"), LINES)
def test_a_line_says_its_words(line: str, row: dict[str, Any]) -> None:
    words = [each for word in shlex.split(line) for each in (DEMO if word == "DEMO" else [word])]
    ran = typed(*words)
    said = " ".join(f"{ran.out} {ran.err}".split())
    assert (ran.code or 0) == row.get("code", 0), said
    assert all(word in said for word in row.get("says", [])), said
    assert not [word for word in row.get("absent", []) if word in said]
    for path, value in row.get("json", {}).items():
        assert reduce(lambda found, key: found[key], path.split("."), json.loads(ran.out)) == value
