"""What a stack says of itself: each fact with its value, its source and the file that says it."""

from typing import Any

from msgspec import Struct

from rematbench.spec.configfile import read_mapping
from rematbench.spec.load import NOT_FACTS, OWN_KEYS, located, names


class Fact(Struct, frozen=True, kw_only=True):
    """One key of a stack; `file` is the stack in the chain of bases that set it, `source` its own
    ("": the `source:` of that file)."""

    value: object
    source: str
    file: str


def chain(name: str) -> list[tuple[str, dict[str, Any]]]:
    """A stack's file and those of its bases, the nearest first: (name, mapping as written)."""
    found: list[tuple[str, dict[str, Any]]] = []
    while name:
        path = located("system", name)
        data = read_mapping(path, str(name))
        found.append((str(data.get("name", path.stem)), data))
        name = str(data.get("base", ""))
    return found


def facts(name: str) -> dict[str, Fact]:
    """Every fact of a stack, its own in place of its bases'."""
    found: dict[str, Fact] = {}
    for file, data in reversed(chain(name)):
        for key, entry in data.items():
            if key in (*OWN_KEYS, *NOT_FACTS["system"]):
                continue
            told = isinstance(entry, dict)
            value = entry["value"] if told else entry
            source = str(entry.get("source", entry.get("fitted"))) if told else ""
            found[key] = Fact(value=value, source=source, file=file)
    return found


def differences(name: str) -> dict[str, Fact]:
    """The facts that a stack's own file sets where it has a base; else none."""
    first, data = chain(name)[0]
    if "base" not in data:
        return {}
    return {key: fact for key, fact in facts(name).items() if fact.file == first}


def listed() -> list[tuple[str, str, str, dict[str, Fact]]]:
    """(name, version, base, what differs from the base) of every shipped stack."""
    rows = []
    for name in names("system"):
        data = chain(name)[0][1]
        rows.append(
            (name, str(data.get("version", "")), str(data.get("base", "")), differences(name))
        )
    return rows
