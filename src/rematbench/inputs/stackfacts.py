"""The facts of a stack, each with its value, its source and the stack whose file sets it."""

from functools import cache
from typing import Any

from msgspec import Struct

from rematbench.host.declared import flat
from rematbench.inputs.configfile import read_mapping, source_of
from rematbench.inputs.load import NOT_FACTS, OWN_KEYS, load_system, located, names
from rematbench.inputs.system import FACTS

DEFAULT = "default"
UNSET = "not set in any file: the default of every stack"
NO_FACTS = (*OWN_KEYS, "sources", "constants", "scales")
"""Fields of System that are not facts."""


class Fact(Struct, frozen=True, kw_only=True):
    """One fact of a stack.  `file`: the stack, in the chain of bases, whose file sets it; `source`:
    the fact's own source (empty: that of the file)."""

    value: object
    source: str
    file: str


def chain(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The files of a stack and of its bases, nearest first: (name, mapping as written)."""
    found: list[tuple[str, dict[str, Any]]] = []
    while name:
        path = located("system", name)
        data = read_mapping(path, str(name))
        found.append((str(data.get("name", path.stem)), data))
        name = str(data.get("base", ""))
    return found


def facts(name: str) -> dict[str, Fact]:
    """The facts that files set for a stack, by key; its own file overrides its bases."""
    found: dict[str, Fact] = {}
    for file, data in reversed(chain(name)):
        for key, entry in data.items():
            if key in (*OWN_KEYS, *NOT_FACTS["system"]):
                continue
            sourced = isinstance(entry, dict)
            value = entry["value"] if sourced else entry
            source = source_of(entry) if sourced else ""
            found[key] = Fact(value=value, source=source, file=file)
    return found


def defaults(name: str) -> dict[str, Fact]:
    """The facts of a stack that no file sets, with their defaults."""
    values, present = flat(load_system(name)), facts(name)
    unset = [key for key in FACTS if key not in (*present, *NO_FACTS)]
    return {key: Fact(value=values[key], source=UNSET, file=DEFAULT) for key in sorted(unset)}


def differences(name: str) -> dict[str, Fact]:
    """The facts in which a stack's file overrides its base; empty without a base."""
    first, data = chain(name)[0]
    if "base" not in data:
        return {}
    return {key: fact for key, fact in facts(name).items() if fact.file == first}


def listed() -> list[tuple[str, str, str, dict[str, Fact]]]:
    """(name, version, base, facts that differ from the base) of every shipped stack."""
    rows = []
    for name in names("system"):
        data = chain(name)[0][1]
        rows.append(
            (name, str(data.get("version", "")), str(data.get("base", "")), differences(name))
        )
    return rows


@cache  # a search calls it for every layout that the stack refuses
def other_versions(name: str) -> dict[str, dict[str, object]]:
    """The other shipped versions of a shipped stack, each with the facts in which it differs; empty
    for a user's stack."""
    if name not in names("system"):
        return {}
    family = {stem: str(chain(stem)[0][1].get("version_of", stem)) for stem in names("system")}
    mine = flat(load_system(name))
    return {
        other: {
            key: value
            for key, value in flat(load_system(other)).items()
            if key not in NO_FACTS and value != mine[key]
        }
        for other, of in family.items()
        if other != name and of == family[name]
    }
