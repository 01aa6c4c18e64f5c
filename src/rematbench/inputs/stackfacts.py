"""The facts of a stack, each with its value, its source and the file that sets it."""

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
"""Fields of a stack that are not facts."""


class Fact(Struct, frozen=True, kw_only=True):
    """One key of a stack.  `file`: the stack, in the chain of bases, whose file sets the key;
    `source`: the key's own source (empty: the `source:` of that file)."""

    value: object
    source: str
    file: str


def chain(name: str) -> list[tuple[str, dict[str, Any]]]:
    """A stack's file and the files of its bases, nearest first: (name, mapping as written)."""
    found: list[tuple[str, dict[str, Any]]] = []
    while name:
        path = located("system", name)
        data = read_mapping(path, str(name))
        found.append((str(data.get("name", path.stem)), data))
        name = str(data.get("base", ""))
    return found


def facts(name: str) -> dict[str, Fact]:
    """Every fact of a stack by key; facts in its file replace those of its bases."""
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
    """The facts of a stack that no file sets, each with its default."""
    values, present = flat(load_system(name)), facts(name)
    unset = [key for key in FACTS if key not in (*present, *NO_FACTS)]
    return {key: Fact(value=values[key], source=UNSET, file=DEFAULT) for key in sorted(unset)}


def differences(name: str) -> dict[str, Fact]:
    """The facts in a stack's file that override its base; empty for a stack without a base."""
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


@cache  # a search asks for each layout that a stack does not have
def other_versions(name: str) -> dict[str, dict[str, object]]:
    """The shipped stacks that are other versions of a shipped stack, each with the facts in which
    it differs; empty for a user's stack."""
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
