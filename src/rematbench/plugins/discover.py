"""Finds methods (files of `methods/` and of `--methods DIR`) and baselines (folders of
`baselines/`).

This module contains no names of methods.  If a file cannot be loaded, only its methods are
unavailable, and the registry has the reason.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct

from rematbench.inputs.paths import data_dir
from rematbench.plugins.file_checks import CONTRACT_CHECKS, MethodFile, first_problem
from rematbench.plugins.policies import shipped_policies
from rematbench.plugins.registry import MethodEntry, MethodError, Registry, build

BASELINES = "baselines"
"""The package that the folders of baselines form, in a checkout and in a wheel."""
POLICY_FUNCTIONS = ("candidates", "facts_with_options", "flags", "inexpressible", "partition")
"""Functions that a baseline's policy needs in addition to those of a method."""


def discover(extra: Iterable[Path] = ()) -> Registry:
    """Every method of the shipped folder and of the `extra` folders; MethodError for a missing
    folder."""
    methods: dict[str, MethodEntry] = {}
    broken: dict[str, str] = {}
    shipped = data_dir("methods")
    folders = [shipped, *(path for path in extra if path.resolve() != shipped.resolve())]
    for folder in folders:
        if not folder.is_dir():
            raise MethodError(f"no such folder of methods: {folder}")
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                load_file(path, methods, broken, foreign=folder is not folders[0])
    packages = cache(lambda: load_baselines()[0])
    return Registry(dict(sorted(methods.items())), broken, shipped_policies(), packages)


def entry_of(path: Path) -> MethodEntry:
    """The method that one file defines; no plan is made. MethodError if the file cannot be
    loaded."""
    if not path.is_file():
        raise MethodError(f"no file {path}")
    methods: dict[str, MethodEntry] = {}
    broken: dict[str, str] = {}
    load_file(path, methods, broken)
    if not methods:
        raise MethodError(f"{path}: {broken[str(path)]}")
    return next(iter(methods.values()))


def load_file(
    path: Path,
    methods: dict[str, MethodEntry],
    broken: dict[str, str],
    *,
    foreign: bool = False,
    load: Callable[[Path], ModuleType] | None = None,
) -> None:
    """Add the methods of a file to `methods`; if the file cannot be loaded, add the reason to
    `broken`.  A `foreign` file must also pass the checks that need no plan; for shipped files,
    tests run all checks."""
    try:
        module = (load or load_module)(path)
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and value.__module__ == module.__name__
            and isinstance(vars(value).get("name"), str)
        ]
        if not classes:
            raise MethodError("the file defines no class with a `name` and a `plan`")
        for cls in classes:
            _enter(cls, str(path), module.__doc__, methods, check_file=foreign)
    except Exception as error:  # A method's file may fail in any way.
        broken[str(path)] = _one_line(error)


def load_module(path: Path) -> ModuleType:
    """The file as a module.  Its name is unique, because two folders may have equal file names."""
    name = f"rematbench_methods.{path.parent.name}_{abs(hash(str(path.resolve())))}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MethodError("not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # get_type_hints looks the module up by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_baselines() -> tuple[dict[str, MethodEntry], dict[str, str]]:
    """The policies of all baselines whose `plan.py` can be loaded, by name; and the reasons why
    others cannot, by file."""
    found: dict[str, MethodEntry] = {}
    broken: dict[str, str] = {}
    for path in sorted(data_dir("baselines").glob("*/plan.py")):
        try:
            found |= check_baseline(path.parent)
        except MethodError as error:
            broken[str(path)] = str(error)
    return dict(sorted(found.items())), broken


def check_baseline(folder: Path) -> dict[str, MethodEntry]:
    """The policy of a baseline's folder by its name; MethodError if its plan.py cannot be loaded,
    or if its policy lacks a function that `compare` or `flags` calls."""
    path = folder / "plan.py"
    found: dict[str, MethodEntry] = {}
    broken: dict[str, str] = {}
    load_file(path, found, broken, load=load_baseline)
    if broken or not path.is_file():
        raise MethodError(broken.get(str(path), "no such file"))
    for entry in found.values():
        if lacks := [name for name in POLICY_FUNCTIONS if not hasattr(entry.cls, name)]:
            raise MethodError(f"{entry.cls.__name__} has no {', '.join(lacks)}")
    return found


def load_baseline(path: Path) -> ModuleType:
    """A file of `baselines/NAME/` as the module `baselines.NAME.STEM`, the name by which the files
    of a baseline import each other; the folder `baselines` need not be on sys.path."""
    folder = path.resolve().parents[1]
    package = sys.modules.get(BASELINES)
    if package is None:
        spec = importlib.util.spec_from_file_location(
            BASELINES, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        package = sys.modules[BASELINES] = importlib.util.module_from_spec(spec)
    elif str(folder) not in package.__path__:
        package.__path__.append(str(folder))
    return importlib.import_module(f"{BASELINES}.{path.parent.name}.{path.stem}")


def _enter(
    cls: type[Any],
    origin: str,
    doc: str | None,
    methods: dict[str, MethodEntry],
    *,
    check_file: bool = False,
) -> None:
    """Check a method class (and its file, if `check_file`) and add it to `methods`; MethodError for
    the first broken rule."""
    text = doc or cls.__doc__ or ""
    if not (isinstance(cls, type) and issubclass(cls, Struct)):
        raise MethodError(f"{cls.__name__} must be a msgspec Struct")
    config = cls.__struct_config__
    if not (config.frozen and config.forbid_unknown_fields):
        raise MethodError(f"{cls.__name__} must be frozen and forbid unknown fields")
    if not callable(getattr(cls, "plan", None)):
        raise MethodError(f"{cls.__name__} has no `plan(problem, base)`")
    if not text.strip():
        raise MethodError(f"{cls.__name__} has no docstring (citation, claim, deviations)")
    name = str(vars(cls)["name"])
    if name in methods:
        raise MethodError(f"method {name!r} is already defined by {methods[name].origin}")
    try:
        cls()
    except TypeError as error:
        raise MethodError(f"{cls.__name__}: every parameter needs a default") from error
    file = MethodFile(path=Path(origin), name=name, cls=cls, doc=text)
    problem = first_problem(file, CONTRACT_CHECKS) if check_file else ""
    if problem:
        raise MethodError(problem)
    entry = MethodEntry(name, cls, origin, text)
    for settings in entry.grid:
        if unknown := sorted(settings.keys() - entry.parameters.keys()):
            raise MethodError(f"{cls.__name__}: unknown parameter {unknown[0]!r} in `grid`")
        build(entry, settings)
    methods[name] = entry


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MethodError) else f"{type(error).__name__}: {text}"
