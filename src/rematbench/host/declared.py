"""Structs whose fields declare themselves: the type of a field with its range, its default, the
sentence below it in the source, and a `Fact` where its option or its column is unlike its name."""

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
from msgspec.structs import FieldInfo, fields

T = TypeVar("T", bound=Struct)


class Fact(Struct, frozen=True, kw_only=True):
    """What a field declares beside its type.  `option`: its option on a command line (empty: its
    name with dashes); `metavar`: the word for its value in the help; `column`: whether the rows of
    tables have it always, where its value is given (unlike the default), or in a way of their
    own."""

    option: str = ""
    metavar: str = ""
    column: Literal["always", "given", "own"] = "given"


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of another struct under a name of their own.  A file, a command line and keywords have
    them beside the other fields of that struct (`nested`, `flat`).  A struct is a part if Part is a
    base of its own, so that what a part's subclass adds stays with it."""


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
    """The values of a struct and of its parts, by name."""
    found: dict[str, Any] = {}
    for name in value.__struct_fields__:
        one = getattr(value, name)
        found |= flat(one) if name in parts(type(value)) else {name: one}
    return found


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """The struct with these values, which `flat` gives back; TypeError for a missing or unknown
    one."""
    whole = nested(values, kind)
    whole |= {name: made(part, whole[name]) for name, part in parts(kind).items()}
    return kind(**whole)


def nested(values: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Values by name, as a file or keywords have them, with those of each part in a mapping."""
    left, found = dict(values), {}
    for name, part in parts(kind).items():
        if name not in left:
            found[name] = {key: left.pop(key) for key in facts(part) if key in left}
    return left | found


def nested_inside(data: Any, hint: Any) -> Any:
    """Plain data of the type `hint` with `nested` values wherever the type has parts."""
    if isinstance(hint, type) and issubclass(hint, Struct) and isinstance(data, dict):
        inner = {field.name: field.type for field in fields(hint)}
        data = nested(data, hint)
        return {key: nested_inside(one, inner.get(key)) for key, one in data.items()}
    if get_origin(hint) in (tuple, list) and isinstance(data, list | tuple):
        return [nested_inside(one, get_args(hint)[0]) for one in data]
    return data


def without_parts(path: str, hint: Any) -> str:
    """The path of a value in data of the type `hint` (`problems[0].degrees.tp`), as the data have
    it, without the names of parts."""
    while get_origin(hint) in (tuple, list):
        hint = get_args(hint)[0]
    if not (isinstance(hint, type) and issubclass(hint, Struct)):
        return path
    step, dot, rest = path.partition(".")
    name = step.partition("[")[0]
    rest = without_parts(rest, {field.name: field.type for field in fields(hint)}.get(name))
    return rest if name in parts(hint) else f"{step}{dot}{rest}"


def flat_inside(value: Any) -> Any:
    """A value for an encoder: the fields of parts stand beside those of their struct."""
    if isinstance(value, Struct):
        return {name: flat_inside(one) for name, one in flat(value).items()}
    return value


# -- what a field declares ---------------------------------------------------------------------


def fact(field: FieldInfo) -> Fact:
    """What a field declares beside its type."""
    return next((one for one in _metadata(field.type) if isinstance(one, Fact)), Fact())


def _metadata(hint: Any) -> Iterator[object]:
    """What Annotated adds to a type or to the members of a union."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        hint = hint.__origin__
    for member in get_args(hint):
        yield from _metadata(member)


def plain_type(field: FieldInfo) -> Any:
    """The type of a field without its range and without None; of a union, the first type.  A choice
    of whole numbers is int."""
    hint = _plain(field.type)
    return int if _numbers(hint) else hint


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _plain(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(one for one in get_args(hint) if one is not NoneType))
    return hint


def _numbers(hint: Any) -> list[int]:
    """The values of a choice of whole numbers; none of other types."""
    return [one for one in get_args(hint) if isinstance(one, int)]


def limits(field: FieldInfo) -> tuple[float | None, float | None]:
    """The least and the largest whole number of a field, and the least of another number; None
    where it has no bound."""
    if numbers := _numbers(_plain(field.type)):
        return min(numbers), max(numbers)
    for one in _metadata(field.type):
        if isinstance(one, Meta):
            whole = plain_type(field) is int
            least = one.ge if one.gt is None else one.gt + 1
            return least, one.le if whole else None
    return None, None


def columns(value: Struct) -> dict[str, Any]:
    """The values of a struct that every row of a table has, and those that are given."""
    found = {}
    for field in facts(type(value)).values():
        when, one = fact(field).column, getattr(value, field.name)
        if when == "always" or (when == "given" and one != field.default):
            found[field.name] = one
    return found


@cache
def sentences(kind: type[Struct]) -> dict[str, str]:
    """The sentences below the fields of a struct, of its parts and of its bases, by name, as one
    line each; a field without sentences is left out.  Reads the source files."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if issubclass(cls, Struct) and cls is not Struct:
            found |= _below_fields(cls)
    for part in parts(kind).values():
        found |= sentences(part)
    return found


def _below_fields(cls: type) -> dict[str, str]:
    """The sentences of a class, by field; only its lines are parsed, which takes a tenth of the
    time of its file."""
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
