"""The list of tables and figures, read from their files: adding a file adds a table or figure.

A file NAME.py of `paper/tables/` declares INPUTS, a name and a path for each argument of its
`build`, which returns the Table (or several).  Paths are relative to the checkout.  A path with a
`*` or a placeholder of `VALUES` stands for all paths that match and gives `build` a list; `{suite}`
stands for one suite.  If the file makes tables under names other than NAME, TABLES lists the names.
SHEETS lists the tables without a printed form, READS the files that the code reads by itself.  A
file of `figures/` that uses only tables lists the tables in TABLES.

All declarations are literals, so tables are listed without importing a file.
"""

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rematbench.evidence.published.derived import bundles as sheet_bundles
from rematbench.evidence.published.derived import every_cell
from rematbench.host.console import CommandError
from rematbench.host.table import SUFFIXES
from rematbench.inputs.configfile import ConfigError, convert
from rematbench.paper.matrix.spec import load_matrix
from rematbench.plugins.discover import discover
from rematbench.worlds.records.suite import bundles, load_suite

if TYPE_CHECKING:
    from rematbench.paper.sheet.table import Table

TABLES = Path(__file__).parent / "tables"
PAPER = "paper"
SUITE = "{suite}"
PROBLEMS = re.compile(r"^problems:", re.MULTILINE)
"""The key that makes a file of config/ a suite."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")


class TableFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The declarations of one table file; `name`: the file's name without suffix."""

    name: str
    inputs: dict[str, str]
    reads: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    sheets: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"rematbench.paper.tables.{self.name}"

    @property
    def of_any_suite(self) -> bool:
        """Whether every suite has these tables, and not only the paper's suite."""
        return any(SUITE in pattern for pattern in self.inputs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables and sheets."""
        return (*self.tables, *self.sheets)

    def outputs(self, folder: str) -> list[str]:
        printed = [f"{folder}/{name}{suffix}" for name in self.tables for suffix in SUFFIXES]
        return [*printed, *(f"{folder}/{name}.csv" for name in self.sheets)]

    def write(
        self,
        names: Sequence[str],
        folder: Path,
        suite: str,
        overrides: Mapping[str, Sequence[str]] | None = None,
    ) -> list["Table"]:
        """Make the tables, write those of `names` into a folder and return them.  `overrides`:
        paths in place of declared inputs.  CommandError for a missing input or an empty table."""
        target = f"results/{suite}/tables/{self.names[0]}.csv"
        given = arguments(self.inputs, {"suite": suite}, target, overrides)
        made = importlib.import_module(self.module).build(**given)
        tables = {one.name: one for one in (made if isinstance(made, list) else [made])}
        for name in names:
            if name not in tables:
                raise CommandError(f"{name}: its inputs have no row for this table")
            tables[name].write(folder)
        return [tables[name] for name in names]


def arguments(
    inputs: Mapping[str, str],
    values: Mapping[str, str],
    target: str,
    overrides: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Path | list[Path]]:
    """The paths of inputs by name; `overrides` has paths that replace those of a pattern.
    CommandError for a missing path, with the command that makes it."""
    made: dict[str, Path | list[Path]] = {}
    for name, pattern in inputs.items():
        paths = [Path(path) for path in (overrides or {}).get(name) or expanded(pattern, values)]
        missing = [path for path in paths if not path.exists()]
        if missing or not paths:
            lost = missing[0] if missing else pattern
            text = f"missing input {lost}: create it with `snakemake --cores 1 {target}`"
            raise CommandError(text)
        made[name] = paths if is_many(pattern, values) else paths[0]
    return made


def files(patterns: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """The files that patterns stand for; a committed folder stands for the records below it."""
    found: list[str] = []
    for pattern in patterns:
        for path in expanded(pattern, values):
            folder = not PLACEHOLDER.search(pattern) and Path(path).is_dir()
            records = (str(file) for file in Path(path).rglob("*.json*")) if folder else [path]
            found += sorted(records)
    return found


@cache
def table_files() -> dict[str, TableFile]:
    """Every table file by name; ConfigError for a wrong declaration or a table made by two
    files."""
    found: dict[str, TableFile] = {}
    makers: dict[str, str] = {}
    for path in sorted(TABLES.glob("*.py")):
        if path.stem == "__init__":
            continue
        one = _table_file(path)
        for name in one.names:
            if name in makers:
                raise ConfigError(str(path), name, f"{makers[name]}.py also makes this table")
            makers[name] = one.name
        found[one.name] = one
    return found


def _table_file(path: Path) -> TableFile:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    declared = _literals(tree, path, ("INPUTS", "READS", "TABLES", "SHEETS"))
    if not {"TABLES", "SHEETS"} & declared.keys():
        declared["TABLES"] = [path.stem]
    plain = {key.lower(): value for key, value in declared.items()}
    one = convert({"name": path.stem, **plain}, TableFile, str(path))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "build":
            arguments = [argument.arg for argument in node.args.args]
            if arguments != list(one.inputs):
                raise ConfigError(str(path), "build", "the argument names must equal INPUTS")
            return one
    raise ConfigError(str(path), "build", "this function is missing")


def _literals(tree: ast.Module, path: Path, names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in names:
                try:
                    found[name] = ast.literal_eval(value)
                except ValueError as error:
                    raise ConfigError(str(path), name, "must be a literal") from error
    return found


def maker(table: str) -> TableFile:
    """The file that makes a table; ConfigError for an unknown table."""
    for one in table_files().values():
        if table in one.names:
            return one
    known = ", ".join(name for file in table_files().values() for name in file.names)
    raise ConfigError("", "table", f"unknown table {table!r} (allowed: {known})")


def figures(folder: Path) -> dict[str, tuple[str, ...]]:
    """The figures that are drawn from the paper's tables alone, with the names of the tables."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if declared := _literals(tree, path, ("TABLES",)):
            found[path.stem] = tuple(declared["TABLES"])
    return found


def is_many(pattern: str, values: Mapping[str, str]) -> bool:
    """Whether a pattern gives `build` a list of paths."""
    return "*" in pattern or bool(set(PLACEHOLDER.findall(pattern)) - values.keys())


def expanded(pattern: str, values: Mapping[str, str]) -> list[str]:
    """The paths that a pattern stands for.  `values` replace its placeholders; one further
    placeholder takes each of its VALUES in order; the matches of a `*` are sorted."""
    text = PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), pattern)
    if "*" in text:
        return sorted(str(path) for path in Path().glob(text))
    names = PLACEHOLDER.findall(text)
    if not names:
        return [text]
    if len(names) > 1 or names[0] not in VALUES:
        raise ConfigError("INPUTS", pattern, f"needs one placeholder, of {', '.join(VALUES)}")
    every = VALUES[names[0]](values.get("suite", PAPER))
    return [text.replace(f"{{{names[0]}}}", value) for value in every]


def suites() -> list[str]:
    """The names of the suites: the files of config/ with problems."""
    files = sorted(Path("config").glob("*.yaml"))
    return [path.stem for path in files if PROBLEMS.search(path.read_text(encoding="utf-8"))]


def studies() -> list[str]:
    return sorted(path.stem for path in Path("config/study").glob("*.yaml"))


@cache
def sheets() -> dict[str, list[dict[str, str]]]:
    """The cells to predict, by bundle."""
    return sheet_bundles(every_cell(), discover())


@cache
def matrix_parts() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The parts in which the matrix is computed; each has a model and half of the lengths."""
    spec = load_matrix(Path("config/paper.yaml"))
    half = len(spec.seq_lens) // 2
    halves = {"short": spec.seq_lens[:half], "long": spec.seq_lens[half:]}
    return {
        f"{work.model}.{name}": (work.model, tuple(lengths))
        for work in spec.works
        for name, lengths in halves.items()
    }


VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "bundle": lambda _: sorted(sheets()),
    "method": lambda suite: bundles(load_suite(Path(f"config/{suite}.yaml")), discover()),
    "part": lambda _: matrix_parts(),
    "study": lambda _: studies(),
}
"""The values of each placeholder, as a function of the suite's name."""
