"""The command `systems`: lists and explains software stacks."""

from typing import Annotated

from rich.table import Table
from typer import Argument

from rematbench.host.console import align_left, console, grid, plain
from rematbench.spec.load import calibration, load_system
from rematbench.spec.stackfacts import Fact, chain, defaults, facts, listed


def systems(
    name: Annotated[str, Argument(metavar="[NAME]", help="A stack to explain, or its file.")] = "",
) -> None:
    """List the stacks and their differences from their base; with NAME, all facts and sources.

    \b
    Example:
      rematbench systems
      rematbench systems nemo-24.12
    """
    out = console()
    if not name:
        out.print(_all())
        return
    system = load_system(name)
    bases = [file for file, _ in chain(name)[1:]]
    entry = calibration().system_entry(system.constants)
    based = f", based on {', then '.join(bases)}" if bases else ""
    out.print(plain(f"{system.name} ({system.version}){based}"), style="bold")
    out.print(plain(f"fitted constants: {entry}"))
    out.print(_facts({**facts(name), **defaults(name)}))
    for file, data in chain(name):
        if data.get("source"):
            out.print(plain(f"(*) {file}: {' '.join(str(data['source']).split())}"))


def _all() -> Table:
    table = align_left(
        grid("stack", "version", "base", "attention", "differs from its base"), 1, 2, 3, 4
    )
    for name, version, base, changed in listed():
        differences = ", ".join(f"{key} {fact.value}" for key, fact in changed.items())
        cells = (name, version, base or "-", load_system(name).attention, differences)
        table.add_row(*(plain(cell) for cell in cells))
    return table


def _facts(stack: dict[str, Fact]) -> Table:
    table = align_left(grid("fact", "value", "file", "source"), 1, 2, 3)
    for key, fact in stack.items():
        cells = (key, str(fact.value), fact.file, " ".join(fact.source.split()) or "(*) below")
        table.add_row(*(plain(cell) for cell in cells))
    return table
