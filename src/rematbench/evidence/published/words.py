"""What the words in the columns of published rows mean, as config/rows.yaml declares them.

A new sheet is its file, an entry under `sheets`, and entries for the words of its columns.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import replace

from rematbench.evidence.published.sheets import Cell, Row, read_sheet, text
from rematbench.host.declared import facts, plain_type
from rematbench.inputs.configfile import closest, convert, read_mapping
from rematbench.inputs.job import Job
from rematbench.inputs.load import names
from rematbench.inputs.paths import data_dir

NONE = ("", "none", "no", "0", "null", "off", "false", "disabled")
"""Words for a feature that is off."""
UNSAID = ("-", "?", "n/a", "not printed", "not published", "not stated", "unknown")
"""Words for a value that the source does not print; such a cell counts as empty."""
NUMBER = re.compile(r"\d*\.\d+|[1-9]\d*|0")
SEPARATORS = re.compile(r"[\s_:=+/,^()\[\]]+|(?<=\w)-")
INSIDE = re.compile(r"\(([^()]*)\)")


class Meaning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a word states: cells of the row, fields of Model, facts of the stack and of the job, or
    the reason why it is refused."""

    row: dict[str, str] = {}
    model: dict[str, Any] = {}
    stack: dict[str, Any] = {}
    job: dict[str, Any] = {}
    refused: str = ""
    unless: str = "^$"


class Words(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The words of a column: how a cell is cut into words, and what each word means."""

    terms: dict[str, str | Meaning] = {}
    """Each known word with its meaning, or with the reason why it has no effect."""
    split: str = "[,;:]"
    """What separates words.  Words in parentheses are details of the words before them."""
    matters: str | None = None
    """An unknown word is refused if this expression matches in it (None: unless it is a detail)."""
    refused: str = ""
    """The reason for a refusal (empty: the unknown word itself)."""
    of_model: bool = False
    """Whether unknown words are ignored for a model whose file is shipped."""
    inside: dict[str, str] = {}
    """If the words are a part of other columns: each column, and the expression of the part."""
    missing: str = ""
    """The words are read only if this column is empty."""
    without: dict[str, Meaning] = {}
    """The meaning that the absence of each of these words from the cell has."""

    def meaning(self, word: str) -> str | Meaning | None:
        """What a word means, with the number in it in place of N; None if it is unknown."""
        found = spelled(word, self.terms)
        meaning = self.terms[found[0]] if found else None
        digits = found[1] if found else ""
        return _with_number(meaning, digits) if isinstance(meaning, Meaning) else meaning


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The method and its settings that a word for recomputation stands for."""

    method: str
    settings: dict[str, Any] = {}


class Sheet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sheet of results/published.  `given`: values of cells that are empty in its rows; `model`,
    `stack`: facts of all of its rows, with their source."""

    given: dict[str, str] = {}
    model: dict[str, Any] = {}
    stack: dict[str, Any] = {}
    source: str = ""


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    same: dict[str, str]
    sheets: dict[str, Sheet]
    columns: dict[str, Words]
    policies: dict[str, Policy]


class Said(Struct, kw_only=True):
    """What the words of a row state (`row`, `model`, `stack`, `job`: as in Meaning), the columns
    that were read, and a line for each refused word."""

    row: dict[str, Any]
    model: dict[str, Any] = {}
    stack: dict[str, Any] = {}
    job: dict[str, Any] = {}
    read: set[str] = set()
    refused: list[str] = []

    def add(self, meaning: Meaning) -> None:
        self.row |= meaning.row
        self.model |= meaning.model
        self.stack |= meaning.stack
        self.job |= meaning.job


@cache
def _file() -> _File:
    path = data_dir("config") / "rows.yaml"
    return convert(read_mapping(path, "config/rows.yaml"), _File, "config/rows.yaml")


def policies() -> list[str]:
    return [*filter(None, _file().policies)]


def policy(words: str) -> tuple[str, dict[str, Any]] | None:
    """The method and settings that words for recomputation mean (`uniform 2`), or None."""
    known = _file().policies
    found = spelled(words.lower(), known)
    if found is None or found[1] == "0":
        return None
    one = known[found[0]]
    settings = _numbered(one.settings, found[1])
    lists = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    return one.method, lists


def spelled(word: str, terms: Iterable[str]) -> tuple[str, str] | None:
    """The term that a word spells, and the number in it; None if it spells none.  Spellings differ
    in separators, in the order of parts, and in parts of equal meaning (`same` of the file)."""
    parts, known = _parts(word), _index(tuple(terms))
    for number in ("", *filter(NUMBER.fullmatch, parts)):
        spelling = ["N" if part == number else part for part in parts]
        term = known.get("".join(spelling), known.get(" ".join(sorted(spelling))))
        if term is not None:
            return term, number
    return None


@cache
def _index(terms: tuple[str, ...]) -> dict[str, str]:
    """The term of each spelling: its parts without separators, or in alphabetical order."""
    spellings = {term: _parts(term) for term in reversed(terms)}
    joined = {"".join(parts): term for term, parts in spellings.items()}
    return {" ".join(sorted(parts)): term for term, parts in spellings.items()} | joined


def _parts(word: str) -> list[str]:
    same = _file().same
    parts = [same.get(part, part) for part in SEPARATORS.split(word)]
    return [part for part in parts if part]


@cache
def sheets() -> tuple[str, ...]:
    """The names of the sheets of published rows."""
    return tuple(_file().sheets)


@cache
def committed(name: str) -> tuple[Cell, ...]:
    """The rows of a sheet of results/published. Each has the columns `sheet` and `row` (from 1 on),
    the cells that the sheet's entry gives to all of its rows, and the cells that its words
    state."""
    given = _file().sheets[name].given
    rows = enumerate(read_sheet(data_dir("published") / name), start=1)
    filled = (
        {**given, **{k: v for k, v in row.items() if v or k not in given}}
        | {"sheet": name, "row": str(index)}
        for index, row in rows
    )
    return tuple(said(row).row for row in filled)


def said(row: Row) -> Said:
    """What the words of a row mean; if a word is refused, the other words of its cell are not
    read."""
    whole = _file().sheets.get(text(row, "sheet"), Sheet())
    found = Said(row=dict(row), model=dict(whole.model), stack=dict(whole.stack))
    for name, column in _file().columns.items():
        cell = _cell(row, name, column)
        if cell in NONE and column.meaning(cell) is None:
            found.read.add(name)
        elif not text(row, column.missing) and not _is_choice(name, column, cell):
            shipped = column.of_model and text(row, "model") in names("model")
            found.refused += _read(found, name, column, cell, shipped=shipped)
    return found


def _cell(row: Row, name: str, column: Words) -> str:
    """The text of a column, or of a part of another one, in lower case."""
    for other, expression in column.inside.items():
        match = re.search(expression, text(row, other))
        return match[1].lower() if match else ""
    return printed(row, name).lower()


def printed(row: Row, name: str) -> str:
    """The text of a cell; empty if it says that the source does not print the value."""
    cell = text(row, name)
    return "" if cell.lower() in UNSAID else cell


def _read(found: Said, name: str, column: Words, cell: str, *, shipped: bool) -> list[str]:
    """Read a cell; return a line for each refused word, or for the first that a table refuses."""
    words = [(word, False) for word in _cut(INSIDE.sub("", cell), column)]
    words += [(word, True) for part in INSIDE.findall(cell) for word in _cut(part, column)]
    refused: list[str] = []
    meanings = []
    for word, detail in words:
        meaning = column.meaning(word)
        if isinstance(meaning, Meaning) and re.search(meaning.unless, cell):
            continue
        if isinstance(meaning, Meaning) and meaning.refused:
            return [f"column {name}: {word!r}: {meaning.refused}"]
        if isinstance(meaning, Meaning):
            meanings.append(meaning)
        elif (
            meaning is None
            and not shipped
            and word not in NONE
            and _matters(column, word, detail=detail)
        ):
            if column.refused:
                return [f"column {name}: {cell!r}: {column.refused}"]
            refused.append(f"column {name}: {word!r} is not modelled{closest(word, column.terms)}")
    found.read.add(name)
    meanings += [one for word, one in column.without.items() if word not in dict(words)]
    for one in meanings:
        found.add(one)
    return refused


def _cut(cell: str, column: Words) -> list[str]:
    return [word.strip() for word in re.split(column.split, cell) if word.strip()]


def _matters(column: Words, word: str, *, detail: bool) -> bool:
    if column.matters is None:
        return not detail and word not in NONE
    return re.search(column.matters, word) is not None


def _is_choice(name: str, column: Words, cell: str) -> bool:
    """Whether a cell is a plain value of the job's fact of this name, which needs no meaning."""
    known = facts(Job).get(name)
    values = get_args(plain_type(known)) if known else ()
    return cell in values and column.meaning(cell) is None


def _with_number(meaning: Meaning, digits: str) -> Meaning:
    """The meaning with a number in place of each N."""
    names = ("model", "stack", "job")
    row = {key: digits if value == "N" else value for key, value in meaning.row.items()}
    numbered = {name: _numbered(getattr(meaning, name), digits) for name in names}
    return replace(meaning, row=row, **numbered)


def _numbered(values: dict[str, Any], digits: str) -> dict[str, Any]:
    number = float(digits or 0) if "." in digits else int(digits or 0)
    return {key: number if value == "N" else value for key, value in values.items()}
