"""Structs from whose fields options, help texts and table columns are made.  A field declares its
type and range, its default, a sentence below it in the source, and a `Fact` if its option or
column does not follow from its name."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, asdict, fields

T = TypeVar("T", bound=Struct)


class Fact(Struct, frozen=True, kw_only=True):
    """What a field declares in addition to its type.  `option`: its command-line option (empty: the
    field's name with dashes); `metavar`: the placeholder for its value in the help; `column`:
    whether a table has the field always, only if its value is not the default (`given`), or in
    columns that the table itself defines (`own`)."""

    option: str = ""
    metavar: str = ""
    column: Literal["always", "given", "own"] = "given"


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of a struct that groups some fields of a larger struct.  Files, command lines and
    keyword arguments do not show the group: they list its fields beside those of the larger struct
    (`nested` and `flat` convert).  Only direct subclasses of Part are parts."""


@cache
def parts(kind: type[Struct]) -> dict[str, type[Part]]:
    """The parts of a struct, by the names of their fields."""
    found = {field.name: field.type for field in fields(kind)}
    return {name: one for name, one in found.items() if Part in getattr(one, "__bases__", ())}


@cache
def facts(kind: type[Struct]) -> dict[str, FieldInfo]:
    """The fields of a struct and of its parts, by name."""
    found: dict[str, FieldInfo] = {}
    for field in fields(kind):
        part = parts(kind).get(field.name)
        found |= facts(part) if part else {field.name: field}
    return found


def flat(value: Struct) -> dict[str, Any]:
    """The values of a struct's fields and of its parts' fields, by name."""
    if not parts(type(value)):
        return asdict(value)
    found: dict[str, Any] = {}
    for name in value.__struct_fields__:
        one = getattr(value, name)
        found |= flat(one) if name in parts(type(value)) else {name: one}
    return found


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """The struct with these flat values (the inverse of `flat`); TypeError for a missing or unknown
    name."""
    whole = nested(values, kind)
    whole |= {name: made(part, whole[name]) for name, part in parts(kind).items()}
    return kind(**whole)


def nested(values: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Flat values regrouped: the values of each part move into a mapping under the part's name."""
    left, found = dict(values), {}
    for name, part in parts(kind).items():
        if name not in left:
            found[name] = {key: left.pop(key) for key in facts(part) if key in left}
    return left | found


def nested_inside(data: Any, hint: Any) -> Any:
    """Plain data of the type `hint`, regrouped by `nested` at every struct inside it."""
    if isinstance(hint, type) and issubclass(hint, Struct) and isinstance(data, dict):
        inner = {field.name: field.type for field in fields(hint)}
        data = nested(data, hint)
        return {key: nested_inside(one, inner.get(key)) for key, one in data.items()}
    if get_origin(hint) in (tuple, list) and isinstance(data, list | tuple):
        return [nested_inside(one, get_args(hint)[0]) for one in data]
    return data


def without_parts(path: str, hint: Any) -> str:
    """A path such as `problems[0].degrees.tp` in data of the type `hint`, without the names of
    parts, which the user's file does not contain."""
    while get_origin(hint) in (tuple, list):
        hint = get_args(hint)[0]
    if not (isinstance(hint, type) and issubclass(hint, Struct)):
        return path
    step, dot, rest = path.partition(".")
    name = step.partition("[")[0]
    rest = without_parts(rest, {field.name: field.type for field in fields(hint)}.get(name))
    return rest if name in parts(hint) else f"{step}{dot}{rest}"


def flat_inside(value: Any) -> Any:
    """A value for an encoder, in which the fields of parts are listed beside those of their
    struct."""
    if isinstance(value, Struct):
        return {name: flat_inside(one) for name, one in flat(value).items()}
    return value


# -- what a field declares ---------------------------------------------------------------------


def fact(field: FieldInfo) -> Fact:
    """The `Fact` of a field, or the default Fact."""
    return next((one for one in _metadata(field.type) if isinstance(one, Fact)), Fact())


def _metadata(hint: Any) -> Iterator[object]:
    """The metadata that Annotated adds to a type, or to the members of a union."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        hint = hint.__origin__
    for member in get_args(hint):
        yield from _metadata(member)


def plain_type(field: FieldInfo) -> Any:
    """The type of a field without its range and without None.  A union counts as its first type, a
    Literal of whole numbers as int."""
    hint = _plain(field.type)
    return int if _numbers(hint) else hint


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _plain(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(one for one in get_args(hint) if one is not NoneType))
    return hint


def _numbers(hint: Any) -> list[int]:
    """The values of a Literal of whole numbers; empty for other types."""
    return [one for one in get_args(hint) if isinstance(one, int)]


def limits(field: FieldInfo) -> tuple[float | None, float | None]:
    """The lower and upper bound of a field's value, None where there is no bound.  Only whole
    numbers get an upper bound."""
    if numbers := _numbers(_plain(field.type)):
        return min(numbers), max(numbers)
    for one in _metadata(field.type):
        if isinstance(one, Meta):
            whole = plain_type(field) is int
            least = one.ge if one.gt is None else one.gt + 1
            return least, one.le if whole else None
    return None, None


def columns(value: Struct) -> dict[str, Any]:
    """The values of a struct that a table row shows: those of columns that are always present, and
    those that differ from their default."""
    found = {}
    for field in facts(type(value)).values():
        when, one = fact(field).column, getattr(value, field.name)
        if when == "always" or (when == "given" and one != field.default):
            found[field.name] = one
    return found


@cache
def sentences(kind: type[Struct]) -> dict[str, str]:
    """The docstring below each field of a struct, its parts and its bases, by name, on one line.
    Fields without a docstring are left out.  Reads the source files."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if issubclass(cls, Struct) and cls is not Struct:
            found |= _below_fields(cls)
    for part in parts(kind).values():
        found |= sentences(part)
    return found


def _below_fields(cls: type) -> dict[str, str]:
    """The docstrings of a class's fields.  Only the lines of the class are parsed, which takes a
    tenth of the time that the whole file would."""
    text = inspect.getsource(sys.modules[cls.__module__])
    lines = re.search(rf"^class {cls.__name__}\b.*?(?=^[A-Za-z_@#]|\Z)", text, re.S | re.M)
    assert lines is not None
    (node,), found = ast.parse(lines[0]).body, {}
    assert isinstance(node, ast.ClassDef)
    for field, below in pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                found[name] = " ".join(words.split())
    return found
