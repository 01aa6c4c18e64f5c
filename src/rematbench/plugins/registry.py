"""Methods by name: their protocol, compositions and settings."""

import re
import sys
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from rematbench.engine.lowering.plan_checks import graph_conflict
from rematbench.host.errors import UserError
from rematbench.inputs.configfile import closest, validation_problem
from rematbench.plan import Plan, Settings, Unsupported
from rematbench.plugins.policies import Policy, applicable_settings
from rematbench.problem import Problem

Value = str | int | float | bool | None | list[Any] | tuple[Any, ...]


RECOMPUTATION_WORDS = {
    "none": "keep_all",
    "no": "keep_all",
    "full": "full_recompute",
    "uniform": "full_recompute",
    "selective": "selective_recompute",
    "balanced": "balanced_checkpointing",
}
"""The method behind each word of launch lines and of the column `recompute` in sheets."""


class MethodError(UserError):
    """A method cannot be found, loaded or built with these parameters; the message is one line."""


class Method(Protocol):
    """The class that a file in methods/ defines: a frozen Struct whose fields are the method's
    parameters.

    Six class variables are optional.  `grid`: a tuple of settings that `compare` and `search` try,
    the fastest first.  `planner` (True): planning takes seconds, so `compare` does not wait for the
    plan and `search` leaves the method out.  `share`: the name of a parameter from 0 to 1, and the
    number of steps in which `search` varies it; the bytes that a pass keeps and copies are linear
    in this parameter.  `pieces` (True): each entry of `grid` costs more time than the entry before
    and frees more transient bytes.  `moves_states` (True): the plan places training states;
    `search` tries such a method only if a person names it, at every value of its grid.
    `moves_passes` (True): the plan changes the order of passes, which a stack must support, so the
    method is tried only if a person names it.  If a method is Unsupported for the same `reason` at
    one value of `share` or `grid` and at the last value, `search` treats it as Unsupported at all
    values, so a reason that depends on the value must contain the value.  An instance may have an
    attribute `unit`: there are plans only for chunks whose number of layers is a multiple of it;
    and an attribute `mechanism`: the name of a method that changes the same things, whose published
    rows count for its band.
    """

    name: ClassVar[str]

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """The plan for a problem on top of `base`, or the reason why there is none; a pure
        function."""
        ...


class MethodEntry(Struct, frozen=True):
    """A discovered method: its class, its docstring, and the file it came from."""

    name: str
    cls: type[Any]
    origin: str
    doc: str

    @property
    def claim(self) -> str:
        """The first line of the method's docstring."""
        return self.doc.strip().splitlines()[0] if self.doc.strip() else ""

    @property
    def parameters(self) -> dict[str, Any]:
        """Default values by parameter name."""
        return _parameters(cast(Hashable, self.cls))

    @property
    def grid(self) -> tuple[Settings, ...]:
        """Settings that `compare` and `search` try in addition to the defaults (see Method)."""
        return tuple(self.declared("grid", ()))

    @property
    def moves_states(self) -> bool:
        """Whether the method places training states (see Method)."""
        return bool(self.declared("moves_states", False))

    @property
    def moves_passes(self) -> bool:
        """Whether the method changes the order of passes (see Method)."""
        return bool(self.declared("moves_passes", False))

    @property
    def waits(self) -> bool:
        """Whether the method is tried only if a person names it."""
        return self.moves_states or self.moves_passes

    @property
    def planner(self) -> bool:
        """Whether planning takes seconds (see Method)."""
        return bool(self.declared("planner", False))

    def declared(self, name: str, default: Any) -> Any:
        """A class variable of the method (see Method), or the default.  A parameter of the same
        name is not such a variable."""
        return default if name in self.parameters else getattr(self.cls, name, default)


IDENTITY = "keep_all"
"""The method that changes nothing.  Methods are compared with it, and a composition's family omits
its name."""


class Composition(Struct, frozen=True):
    """Methods that plan from left to right, each on top of the plan of the preceding methods."""

    methods: tuple[Method, ...]

    @property
    def name(self) -> str:
        """The methods' names, joined as `a+b`."""
        return "+".join(m.name for m in self.methods)

    @property
    def family(self) -> str:
        """The names of the methods' mechanisms (see Method), joined as `a+b`."""
        return "+".join(getattr(m, "mechanism", m.name) for m in self.methods)

    @property
    def text(self) -> str:
        """The text that `resolve` reads as this composition: names with non-default settings."""
        return "+".join(_text(method) for method in self.methods)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The parameter values of each method, as JSON types. Empty texts are left out, and so are
        default values of the parameters that a method lists as `later`, so that the hashes of
        earlier runs stay."""
        plain = {m.name: msgspec.json.decode(msgspec.json.encode(m)) for m in self.methods}
        return {
            m.name: {
                key: value
                for key, value in plain[m.name].items()
                if value != "" and (value or key not in getattr(m, "later", ()))
            }
            for m in self.methods
        }

    def plan(self, problem: Problem, base: Plan | None = None) -> Plan | Unsupported:
        """The composed plan, or the reason of the first method without a plan."""
        plan = problem.base_plan if base is None else base
        for method in self.methods:
            answer = make_plan(method, problem, plan)
            if isinstance(answer, Unsupported):
                return Unsupported(f"{method.name}: {answer.reason}")
            plan = answer
        return plan


def changed_settings(method: Method) -> dict[str, str]:
    """The non-default settings of a method, as they are written in a method's text."""
    kind = type(method)
    assert issubclass(kind, Struct)
    values, defaults = (
        {field: getattr(instance, field) for field in kind.__struct_fields__}
        for instance in (method, kind())
    )
    return {key: _word(value) for key, value in values.items() if value != defaults[key]}


def _text(method: Method) -> str:
    words = [f"{key}={word}" for key, word in changed_settings(method).items()]
    return f"{method.name}:{','.join(words)}" if words else method.name


def _word(value: object) -> str:
    """A parameter value as written in a method's text; a list in brackets."""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode().replace('"', "")


def make_plan(method: Method, problem: Problem, base: Plan) -> Plan | Unsupported:
    """The result of a method's `plan`.  MethodError if it returns neither a Plan nor Unsupported,
    or (with the line of the method's file) if it raises an error that is not one of rematbench."""
    try:
        answer: object = method.plan(problem, base)
    except Exception as error:  # A method's file may fail in any way.
        if type(error).__module__.startswith("rematbench."):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise MethodError(f"{method.name}: plan raised {text} ({_where(method, error)})") from error
    if isinstance(answer, Plan):
        reason = graph_conflict(answer, problem)
        return Unsupported(reason) if reason else answer
    if isinstance(answer, Unsupported):
        return answer
    raise MethodError(f"{method.name}: plan returned {answer!r}, neither a Plan nor Unsupported")


def _where(method: Method, error: Exception) -> str:
    """The innermost line of the method's file in an error's traceback; if there is none, the line
    that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(method).__module__), "__file__", None)
    frame = next((one for one in reversed(frames) if one.filename == file), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}"


class Registry(Struct, frozen=True):
    """All discovered methods; the reasons why files could not be loaded, by file; and the baseline
    policies, whose names mean a method with settings.  `packages` loads the policies of the
    packages in baselines/, which a text may name like methods."""

    methods: dict[str, MethodEntry]
    broken: dict[str, str]
    policies: dict[str, Policy] = {}
    packages: Callable[[], Mapping[str, MethodEntry]] = dict

    def has_planner(self, names: Iterable[str]) -> bool:
        """Whether any of the named methods is a planner."""
        return any(self.entry(name).planner for name in names)

    def resolve(
        self, spec: str, settings: Mapping[str, Value] | None = None, problem: Problem | None = None
    ) -> Composition:
        """The composition of a text `a+b`.  `settings` are named `key` (if only one method has this
        parameter) or `a.key`; settings may also be inside the text, as `a:key=value,key=value+b`.
        A part may be a policy's name (`full_recompute:block 3`); operators of a policy that
        `problem` lacks are left out.  MethodError for an unknown name or setting."""
        told = {key.rpartition(".")[2] for key in settings or {}}
        parts = [self._part(part.strip(), spec, told) for part in self._parts(spec)]
        entries = [entry for entry, _ in parts]
        if len({e.name for e in entries}) < len(entries):
            raise MethodError(f"method {spec!r} contains the same method twice")
        wanted = [
            (f"{entry.name}.{key}", value)
            for entry, words in parts
            for key, value in (applicable_settings(words, problem) if problem else words).items()
        ]
        given: dict[str, dict[str, Value]] = {entry.name: {} for entry in entries}
        for key, value in (*wanted, *(settings or {}).items()):
            owner, _, parameter = key.rpartition(".")
            values = given[_owner(entries, owner, parameter)]
            if parameter in values:
                raise MethodError(f"parameter {parameter!r} is set twice: in {spec!r} and by --set")
            values[parameter] = value
        return Composition(tuple(build(entry, given[entry.name]) for entry in entries))

    def _part(
        self, text: str, spec: str, told: Collection[str]
    ) -> tuple[MethodEntry, dict[str, Value]]:
        """The method of one part of a composition, and the settings in the part's text; `told`: the
        names of settings that are given separately."""
        start, _, tuned = text.rpartition(" ")
        policy = self.policies.get(text) or self.policies.get(start)
        if policy is None:
            name, _, words = text.partition(":")
            entry = self.entry(name.strip())
            own = [key for key, one in self.policies.items() if one.method == entry.name]
            near = start if tuned.isdigit() else text
            return entry, _inline(words, spec, lambda: closest(near, own))
        if text != policy.name and not (policy.smallest and tuned.isdigit()):
            raise MethodError(f"method {text!r}: the policy {policy.name!r} cannot take {tuned!r}")
        if text == policy.name and policy.smallest in told:
            return self.entry(policy.method), dict(policy.settings)
        if text == policy.name and policy.smallest:
            example = f"'{policy.name} 2'"
            raise MethodError(
                f"{policy.name} tunes itself to the problem: set its {policy.smallest}, for "
                f"example {example}"
            )
        amount = {policy.smallest: int(tuned)} if policy.smallest else {}
        return self.entry(policy.method), {**policy.settings, **amount}

    def _parts(self, spec: str) -> list[str]:
        """The parts of a text such as `a:key=x+y+b`.  A plus sign inside settings belongs to a
        value unless the name of a method follows it."""
        found: list[str] = []
        for word in spec.split("+"):
            known = word.partition(":")[0].strip() in self.methods
            if found and ":" in found[-1] and not known:
                found[-1] += f"+{word}"
            else:
                found.append(word)
        return found

    def entry(self, name: str) -> MethodEntry:
        """The method or the package's policy with this name; MethodError for another name."""
        if name in self.methods:
            return self.methods[name]
        if name in self.packages():
            return self.packages()[name]
        for path, reason in self.broken.items():
            if Path(path).stem == name:
                raise MethodError(f"method {name!r} is unavailable: {path}: {reason}")
        broken = [Path(path).stem for path in self.broken]
        word = RECOMPUTATION_WORDS.get(name.lower())
        hint = f"; did you mean {word!r}?" if word else ""
        hint = hint or closest(name, (*self.methods, *self.policies, *broken))
        if name.endswith(".py"):
            file = Path(name)
            hint = f"; use --methods {file.parent} and the name {file.stem}"
        raise MethodError(f"unknown method {name!r}{hint} (known: {', '.join(self.methods)})")


def _inline(text: str, spec: str, hint: Callable[[], str]) -> dict[str, Value]:
    """The settings in a text `key=value,key=value`; `hint` names the nearest policy for errors."""
    found: dict[str, Value] = {}
    for word in re.split(r",(?![^\[]*\])", text) if text else ():  # Lists in brackets stay whole.
        if found and re.fullmatch(r"[\d-]+", word.strip()):  # A list of numbers continues.
            last, before = found.popitem()
            found[last] = f"{before},{word.strip()}"
            continue
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not key or key in found:
            near = "" if equals else hint()
            raise MethodError(
                f"method {spec!r}: expected METHOD:KEY=VALUE,KEY=VALUE, not {word!r}{near}"
            )
        found[key] = value
    return found


def method_text(entry: MethodEntry, settings: Mapping[str, Value]) -> str:
    """The text that `resolve` reads as this method with these settings; defaults are left out."""
    shown = {key: value for key, value in settings.items() if entry.parameters.get(key) != value}
    words = ",".join(f"{key}={value}" for key, value in shown.items())
    return f"{entry.name}:{words}" if words else entry.name


@cache
def _parameters(cls: Any) -> dict[str, Any]:
    return {f.encode_name: f.default for f in msgspec.structs.fields(cls)}


def _owner(entries: list[MethodEntry], owner: str, parameter: str) -> str:
    """The name of the method that has the parameter; MethodError if no method or several methods
    have this parameter."""
    allowed = [f"{e.name}.{p}" for e in entries for p in e.parameters]
    listing = f" (allowed: {', '.join(allowed) or 'none'})"
    if owner and owner not in [e.name for e in entries]:
        raise MethodError(f"setting {owner}.{parameter}: {owner!r} is not in the method{listing}")
    asked = [e for e in entries if owner in ("", e.name)]
    holders = [e for e in asked if parameter in e.parameters]
    if not holders:
        hint = closest(parameter, [p for e in asked for p in e.parameters])
        whose = f" of {owner}" if owner else ""
        raise MethodError(f"unknown parameter {parameter!r}{whose}{hint}{listing}")
    if len(holders) > 1:
        names = " or ".join(f"{e.name}.{parameter}" for e in holders)
        raise MethodError(f"parameter {parameter!r} is ambiguous: write {names}")
    return holders[0].name


def build(entry: MethodEntry, settings: Mapping[str, Value]) -> Method:
    """The method with typed parameters; texts (from a command line) are converted.  MethodError for
    a wrong value."""
    hints = _hints(cast(Hashable, entry.cls))
    values = {key: _parsed(value, hints.get(key)) for key, value in settings.items()}
    try:
        return cast(Method, msgspec.convert(values, entry.cls, strict=False))
    except msgspec.ValidationError as error:
        key, problem = validation_problem(str(error), entry.cls)
        raise MethodError(f"{entry.name}.{key or 'parameters'}: {problem}") from error


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _parsed(value: Value, hint: object) -> Value:
    """A setting's value before conversion.  A text for a list parameter may be JSON, or items
    separated by commas, with or without brackets; `.5` becomes `0.5`."""
    if not isinstance(value, str):
        return value
    if get_origin(hint) not in (tuple, list):
        return f"0{value}" if value.startswith(".") else value
    if value.startswith("["):
        try:
            return cast(Value, msgspec.json.decode(value))
        except msgspec.DecodeError:
            value = value.strip("[]")
    return [item.strip() for item in value.split(",") if item.strip()]
