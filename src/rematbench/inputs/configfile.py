"""Strict reading of configuration files: every number has a source, and every error is one line.

A value is plain, `{value: V, source: "..."}`, `{value: V, fitted: "..."}` or, if it is only the
usual value and no source states it, `{value: V, assumed: "..."}`.  A `source:` at the top level of
a file covers the plain values of that file.
"""

import difflib
import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import FieldInfo

from rematbench.host.declared import facts, flat, nested_inside, without_parts
from rematbench.host.errors import UserError
from rematbench.inputs.paths import data_dir

T = TypeVar("T", bound=Struct)
_KINDS = ("source", "fitted", "assumed")
"""The keys that may state the origin of a value."""
ASSUMED = "assumed: "
"""Start of the source of a value that is only the usual one, because no source states it."""
FEW = 8
"""An error names all allowed words if there are at most this many and none is similar."""


class ConfigError(UserError):
    """A wrong configuration.  The message is one line with the file, the key and the problem."""

    def __init__(self, file: str, key: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (file, key, problem) if part))


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `9.895e14` as a number (YAML 1.2) and refuses duplicate keys and
    aliases that contain themselves."""


class _ShippedLoader(yaml.CSafeLoader):
    """A loader with the same rules on libyaml, which is six times faster.  It reads only shipped
    files: its error messages are less precise, and deep nesting can exhaust its stack."""


_RECURSIVE = ("found unconstructable recursive node", "an alias contains itself")
"""PyYAML's message for a mapping or list inside itself, and ours."""
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
MERGE = "tag:yaml.org,2002:merge"


def _sequence(loader: yaml.SafeLoader | yaml.CSafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)  # so a list inside itself is an error


def _mapping(loader: yaml.SafeLoader | yaml.CSafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[object] = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            continue  # a merged anchor only adds keys, so it cannot repeat one
        key = loader.construct_object(key_node)
        twice = isinstance(key, Hashable) and key in seen
        if twice or not isinstance(key, Hashable):
            problem = (
                f"key {key!r} is given twice"
                if twice
                else ("a key of a mapping must not be a mapping or a list")
            )
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node)


for each in (_Loader, _ShippedLoader):
    each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    each.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
    each.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG, _sequence)


def closest(word: str, allowed: Iterable[str]) -> str:
    """A did-you-mean clause for `word`; empty if no allowed word is similar.  Case is ignored.
    Words that begin with `word` are preferred, then words with the same text before a hyphen."""
    by_lower = {name.lower(): name for name in sorted(allowed, reverse=True)}
    low = word.lower()
    longer = sorted(name for name in by_lower if low and name.startswith(low))
    family = [name for name in by_lower if name.split("-")[0] == low.split("-")[0]]
    match = (
        longer[:1]
        or difflib.get_close_matches(low, family, n=1, cutoff=0.5)
        or difflib.get_close_matches(low, list(by_lower), n=1, cutoff=0.5)
    )
    return f"; did you mean {by_lower[match[0]]!r}?" if match else ""


def require_unique(names: Sequence[str], label: str, key: str) -> None:
    """ConfigError if a name occurs twice in `names`, the names of the entries under `key`."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(label, key, f"name {twice!r} appears twice")


def require_among(
    names: Iterable[str], allowed: Sequence[str], where: tuple[str, str, str]
) -> None:
    """ConfigError for the first of `names` that is not in `allowed`, with the closest allowed name,
    or all of them if they are few.  `where`: (file, key, kind of the named things)."""
    label, key, kind = where
    for name in names:
        if name not in allowed:
            few = f" (known: {', '.join(allowed)})" if len(allowed) <= FEW else ""
            raise ConfigError(label, key, f"no {kind} {name!r}{closest(name, allowed) or few}")


def read_text(path: Path, label: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark; `label` names it in errors."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(label, "", f"cannot be read ({reason})") from error


def read_mapping(path: Path, label: str) -> dict[str, Any]:
    """The top-level mapping of a YAML or JSON file; `label` names the file in errors."""
    text = read_text(path, label)
    try:
        data = _json(text) if path.suffix == ".json" else _yaml(path, text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(label, "", _syntax_problem(error)) from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(label, "", "the top level must be a mapping of names to values")
    return data


class _GivenTwice(ValueError):
    """A JSON mapping has a duplicate key."""


def _json(text: str) -> Any:
    """The value of a JSON text; ValueError for invalid JSON and for duplicate keys."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _GivenTwice(f"key {key!r} is given twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=mapping)


def _yaml(path: Path, text: str) -> Any:
    """The value of a YAML text; YAMLError with a line number for invalid YAML."""
    if path.absolute().is_relative_to(data_dir("config")):
        with suppress(yaml.YAMLError):
            return yaml.load(text, Loader=_ShippedLoader)
    return yaml.load(text, Loader=_Loader)


def _syntax_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}: {error.msg}"
    if isinstance(error, yaml.MarkedYAMLError):
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = (error.problem or "not valid YAML").replace(*_RECURSIVE)
        return f"line {line}: {problem}"
    if isinstance(error, _GivenTwice):
        return str(error)
    return f"cannot be read ({' '.join(str(error).split())})"


def flatten(data: Mapping[str, Any], label: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(plain values, sources) by key; ConfigError for a number without a source."""
    everywhere = data.get("source", "")
    if not isinstance(everywhere, str):
        raise ConfigError(label, "source", "expected a string")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, entry in data.items():
        if key == "source":
            continue
        value, source = _entry(entry, label, key)
        source = source or everywhere
        if not source and _has_number(value):
            raise ConfigError(
                label,
                key,
                f"{value!r} has no source: write {{value: ..., source: ...}}, "
                "or one `source:` for the file",
            )
        values[key] = value
        if source and (_has_number(value) or source.startswith(ASSUMED)):
            sources[key] = source
    return values, sources


def _entry(entry: object, label: str, key: str) -> tuple[object, str]:
    """(value, source) of an entry, which is a plain value or a mapping with both."""
    if not isinstance(entry, dict):
        return entry, ""
    kind = next((word for word in _KINDS if word in entry), "")
    if not kind or "value" not in entry or len(entry) != 2:
        raise ConfigError(
            label, key, "expected {value: ..., source: ...} or {value: ..., fitted: ...}"
        )
    return entry["value"], source_of(entry, label, key)


def source_of(entry: Mapping[str, Any], label: str = "", key: str = "") -> str:
    """The source of a value that is written as a mapping, prefixed by `fitted:` or `assumed:` if
    that is its origin; ConfigError for an empty source."""
    kind = next(word for word in _KINDS if word in entry)
    text = entry[kind]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(label, key, "the source must be a non-empty string")
    return text if kind == "source" else f"{kind}: {text}"


def _has_number(value: object) -> bool:
    """Whether a value is a number or a boolean, or a list that contains one."""
    if isinstance(value, list | tuple):
        return any(_has_number(item) for item in value)
    return isinstance(value, int | float)


def convert(data: Mapping[str, Any], kind: type[T], label: str) -> T:
    """The struct of type `kind` with these plain values.  ConfigError for an unknown key or a value
    of a wrong type, with the key and the allowed values."""
    fields = [field.encode_name for field in facts(kind).values()]
    for key in data:
        if key not in fields:
            raise ConfigError(
                label,
                key,
                f"unknown key{closest(key, fields)} (allowed: {', '.join(sorted(fields))})",
            )
    try:
        return msgspec.convert(nested_inside(data, kind), kind)
    except msgspec.ValidationError as error:
        key, problem = validation_problem(str(error), kind)
        raise ConfigError(label, key, problem) from error


def wrong_field(struct: msgspec.Struct, kind: type[msgspec.Struct]) -> tuple[str, str] | None:
    """(field, problem) of the first field whose value has a wrong type; None if there is none.  For
    structs that code constructs, because msgspec checks types only when it decodes."""
    values = flat(struct)
    with suppress(msgspec.ValidationError):  # all fields at once are checked much faster
        msgspec.convert(values, _unchecked(kind))
        return None
    for field in facts(kind).values():
        value = values[field.name]
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            _, problem = validation_problem(str(error), kind)
            return field.name, f"{value!r}: {_with_allowed(problem, field)}"
    return None


@cache
def _unchecked(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the fields of `kind` that does not check them again when it is made."""
    return msgspec.defstruct(kind.__name__, [(one.name, one.type) for one in facts(kind).values()])


def _values(hint: object) -> tuple[object, ...]:
    """The values of a Literal type, also if it is inside a tuple or a union; empty for other
    types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in _values(part))


def validation_problem(message: str, kind: type) -> tuple[str, str]:
    """(key path, problem) of a msgspec message; the problem lists the values of a Literal type."""
    text, _, where = message.partition(" - at `$.")
    key = without_parts(where.rstrip("`"), kind)
    text = text[:1].lower() + text[1:].replace("`", "")
    if missing := re.match(r"object missing required field (\w+)", text):
        return missing[1], "required key is missing"
    field = facts(kind).get(key.split("[")[0])
    return key, _with_allowed(text, field) if field else text


def _with_allowed(problem: str, field: FieldInfo) -> str:
    """A problem of a field's value, followed by the values that the field allows."""
    if "matching regex" in problem:  # the pattern describes a list of words
        words = dict.fromkeys(re.findall(r"\w+", problem.partition("regex ")[2]))
        return f"expected some of {', '.join(words)} between commas"
    allowed = ", ".join(map(str, _values(field.type)))
    return f"{problem} (allowed: {allowed})" if allowed else problem
