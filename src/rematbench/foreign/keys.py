"""What each key of a training package's files means, as config/foreign/DIALECT.yaml declares it.

A key that its section does not declare is reported as unknown.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import Struct

from rematbench.foreign.reading import AUTO, Options, Reading, first_value, switch, whole
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir

REST = [(-1, "shards"), (-1, "shard_degree"), (-1, "global_batch")]
"""(value, number of the job) pairs: this value means that the number follows from the others."""
OFF = {"", "false", "none", "null", "no", "off", "0", "0.0", "[]", "{}"}


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one section of a file."""

    numbers: dict[str, str] = {}
    """Keys with a positive whole number, each with the value of the job that it sets."""
    shapes: dict[str, str] = {}
    """Keys with a positive whole number, each with the field of Model that it sets."""
    facts: dict[str, dict[str, Any]] = {}
    """Switches, each with the facts of the stack that it sets."""
    words: dict[str, dict[str, dict[str, Any]]] = {}
    """Keys with a word: for each known word the values of the job, and `facts` of the stack."""
    refused: dict[str, str] = {}
    """Switches that turn on something that is not modelled, each with the reason."""
    read: list[str] = []
    """Keys that the dialect's own reader reads."""
    no_effect: list[str] = []
    """Keys without an effect on bytes or seconds."""
    prefix: str = ""
    """A text with which the keys may begin (`fsdp_`)."""

    @property
    def keys(self) -> set[str]:
        named = (self.numbers, self.shapes, self.facts, self.words, self.refused)
        return {*self.read, *self.no_effect, *(key for kind in named for key in kind)}


class Dialect(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sections of a package's files by their path ("" is the top level).  `base`: dialects
    whose keys this dialect has too; `names`: for each key, the equal key of another package;
    `defaults`: the values of keys that a file lacks; `older`: keys that show an earlier version."""

    source: str
    sections: dict[str, Section] = {}
    base: list[str] = []
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    older: list[str] = []


@cache
def declared(name: str) -> Dialect:
    path = data_dir("config") / "foreign" / f"{name}.yaml"
    return convert(read_mapping(path, str(path)), Dialect, str(path))


@cache
def dialect(name: str) -> dict[str, Section]:
    made = declared(name)
    sections: dict[str, Section] = {}
    for part in [*(dialect(base) for base in made.base), made.sections]:
        for at, section in part.items():
            sections[at] = _joined(sections.get(at, Section()), section)
    return sections


def _joined(base: Section, more: Section) -> Section:
    """Both sections as one; if both declare a key, the declaration of `more` counts."""
    fields: dict[str, Any] = {}
    for name in Section.__struct_fields__:
        ours, theirs = getattr(base, name), getattr(more, name)
        if name == "prefix":
            fields[name] = theirs or ours
        elif isinstance(ours, dict):
            fields[name] = {key: ours[key] for key in ours if key not in more.keys} | theirs
        else:
            fields[name] = [key for key in ours if key not in more.keys] + theirs
    return Section(**fields)


def read_keys(
    reading: Reading, data: Mapping[str, Any], name: str, at: str = "", prefix: str = ""
) -> None:
    """Read the keys of the section `at` of a dialect, and of the sections inside it.  Keys that are
    refused, have no effect or are unknown are listed in the reading.  ConfigError for a wrong
    number or word."""
    sections = dialect(name)
    for key, value in data.items():
        plain = str(key).replace("-", "_").lower().removeprefix(sections[at].prefix)
        inside = f"{at}.{plain}".lstrip(".")
        if value is None:
            continue
        if inside in sections and isinstance(value, Mapping):
            read_keys(reading, value, name, inside, f"{prefix}{key}.")
        else:
            _read_key(reading, sections[at], plain, value, f"{prefix}{key}")


def _read_key(reading: Reading, section: Section, key: str, value: Any, where: str) -> None:
    if key in section.numbers or key in section.shapes:
        _number(reading, section, key, value, where)
    elif key in section.facts:
        on = not is_off(value) and switch(value, reading.file, where)
        reading.facts |= section.facts[key] if on else {}
    elif key in section.words:
        _set(reading, section.words[key], value, where)
    elif key in section.refused:
        if not is_off(value):
            reading.refused.append(f"{where}: {section.refused[key]}")
    elif key in section.no_effect:
        reading.ignored.append(where)
    elif key not in section.read:
        reading.unknown.append(where)


def _number(reading: Reading, section: Section, key: str, value: Any, where: str) -> None:
    if value is True:
        reading.notes.append(f"{where} has no value: give its variable with --set NAME=VALUE")
        reading.unknown.append(where)
    elif value != AUTO and (value, section.numbers.get(key)) not in REST:
        size = whole(value, reading.file, where)
        if key in section.numbers:
            reading.put(section.numbers[key], size, where)
        else:
            reading.model[section.shapes[key]] = size


def read_sizes(reading: Reading, options: Options) -> None:
    """Set GPUs and nodes from a launcher's options.  One node is assumed if an option of theirs has
    no number."""
    empty: set[str] = set()
    for option, name in declared("launchers").names.items():
        for written in {option, option.replace("_", "-")} & options.keys():
            text = first_value(options, written)
            if text.isdigit() and int(text):
                reading.put(name, int(text), f"--{written}")
            else:
                empty.add(name)
    if "nodes" in empty and "gpus_per_node" in reading.values and "nodes" not in reading.values:
        reading.assumed.append("the number of nodes is empty: one node (--gpus N)")


def is_off(value: Any) -> bool:
    """Whether a value, or a section with a switch `enabled`, turns its key off."""
    value = value.get("enabled", value) if isinstance(value, Mapping) else value
    return str(value).strip().lower() in OFF


def _set(reading: Reading, words: Mapping[str, dict[str, Any]], value: Any, where: str) -> None:
    """Set the values that a word stands for, or refuse an unknown word."""
    word = str(value).lower()
    if word not in words:
        reading.refused.append(f"{where}: {value} (allowed: {', '.join(words)})")
        return
    for name, target in words[word].items():
        if name == "facts":
            reading.facts |= target
        else:
            reading.put(name, target, where)
