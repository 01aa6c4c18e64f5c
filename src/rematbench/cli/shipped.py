"""The commands that list what is shipped (`methods` also checks a file), and `examples`."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from rematbench.cli.targets import Methods, need_folder
from rematbench.evaluate.method_contract import check_file
from rematbench.host.console import CommandError, align_left, console, grid, plain, worded
from rematbench.host.table import GIB
from rematbench.inputs.load import calibration, load_cluster, load_model, load_system, names
from rematbench.inputs.paths import data_dir
from rematbench.inputs.stackfacts import chain, defaults, facts, listed
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError, Registry


def methods(
    folder: Methods = None,
    check: Annotated[
        Path | None,
        Option(metavar="FILE.py", help="Check that this method file fulfils the contract."),
    ] = None,
) -> None:
    """List the methods with their claims and parameters.

    --check runs the tests of the shipped methods on a file, on tiny problems and on top of every
    other method.  It prints a line per check, and ends with exit code 1 at the first failure.

    \b
    Example:
      rematbench methods
      rematbench methods --methods my-methods/
      rematbench methods --check my-methods/mine.py
    """
    registry = discover(folder or ())
    if check is not None:
        _check(check, registry)
        return
    table = align_left(grid("method", "claim", "parameters"), 1, 2)
    for entry in registry.methods.values():
        parameters = ", ".join(f"{key}={worded(value)}" for key, value in entry.parameters.items())
        table.add_row(entry.name, plain(entry.claim.partition(": ")[2]), plain(parameters))
    console().print(table)
    for path, reason in registry.broken.items():
        console(error=True).print(plain(f"unavailable: {path}: {reason}"))


def _check(path: Path, registry: Registry) -> None:
    if not path.is_file():
        raise CommandError(f"--check {path}: no such file")
    try:
        for passed in check_file(path, registry):
            typer.echo(f"ok: {passed}")
    except MethodError as error:
        typer.echo(f"broken: {error}", err=True)
        raise typer.Exit(1) from error


def models() -> None:
    """List the shipped models: parameters, layers, widths, heads and vocabulary.

    \b
    Example:
      rematbench models
    """
    columns = (
        "model",
        "parameters",
        "layers",
        "hidden",
        "heads",
        "KV heads",
        "ffn",
        "vocab",
        "mlp",
    )
    table = align_left(grid(*columns), 8)
    for name in names("model"):
        model = load_model(name)
        heads = (model.num_heads, model.num_kv_heads)
        sizes = (model.num_layers, model.hidden, *heads, model.ffn, model.vocab)
        parameters = f"{model.parameters / 1e9:.2f} B"
        table.add_row(plain(name), parameters, *map(str, sizes), plain(model.mlp))
    console().print(table)


def clusters() -> None:
    """List the shipped clusters: GPUs, memory, and the rates of a GPU, a node and its network.

    \b
    Example:
      rematbench clusters
    """
    units = ("TFLOP/s", "GiB", "NVLink GB/s", "NICs GB/s", "host GiB")
    table = align_left(grid("cluster", "GPU", "generation", "GPUs a node", *units), 1, 2)
    for name in names("cluster"):
        cluster = load_cluster(name)
        numbers = (
            str(cluster.gpus_per_node),
            f"{cluster.peak_flop_per_s / 1e12:.0f}",
            f"{cluster.hbm_bytes / GIB:.0f}",
            f"{cluster.nvlink_bytes_per_s / 1e9:.0f}",
            f"{cluster.node_network_bytes_per_s / 1e9:.0f}",
            f"{cluster.host_bytes / GIB:.0f}",
        )
        table.add_row(plain(name), plain(cluster.gpu), plain(cluster.generation), *numbers)
    console().print(table)


def systems(
    name: Annotated[
        str, Argument(metavar="[NAME]", help="Stack to describe: name or YAML file.")
    ] = "",
) -> None:
    """List the stacks and their differences from their base; with NAME, show its facts and sources.

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
    stack = {**facts(name), **defaults(name)}
    table = align_left(grid("fact", "value", "file", "source"), 1, 2, 3)
    for key, fact in stack.items():
        cells = (key, worded(fact.value), fact.file, " ".join(fact.source.split()) or "(*) below")
        table.add_row(*(plain(cell) for cell in cells))
    out.print(table)
    for file, data in chain(name):
        if data.get("source"):
            out.print(plain(f"(*) {file}: {' '.join(str(data['source']).split())}"))


def _all() -> Table:
    table = align_left(
        grid("stack", "version", "base", "attention", "differs from its base"), 1, 2, 3, 4
    )
    for name, version, base, changed in listed():
        differences = ", ".join(f"{key} {worded(fact.value)}" for key, fact in changed.items())
        cells = (name, version, base or "-", load_system(name).kernels.attention, differences)
        table.add_row(*(plain(cell) for cell in cells))
    return table


TRY = (
    "simulate full_recompute --model config.json --cluster my-cluster.yaml --gpus 8 "
    "--seq-len 8192 --global-batch 16 --tp 2",
    "compare --model config.json --cluster my-cluster.yaml --system my-stack.yaml --gpus 8 "
    "--seq-len 32768 --global-batch 16 --methods .",
    "methods --check recompute_mlp.py",
    "predict sheet.csv -o predictions.csv",
    "validate --rows sheet.csv",
)
"""Commands to try in the written folder."""


def examples(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder to write to.")],
) -> None:
    """Write an example of a model's config.json, a cluster, a stack, a sheet and a method.

    Existing files are not overwritten.

    \b
    Example:
      rematbench examples my-work
    """
    need_folder("DIR", folder)
    shipped = sorted(path for path in (data_dir("config") / "examples").iterdir() if path.is_file())
    if there := [path.name for path in shipped if (folder / path.name).exists()]:
        raise CommandError(f"{folder} already has {', '.join(there)}; nothing was written")
    for path in shipped:
        shutil.copyfile(path, folder / path.name)
        typer.echo(f"wrote {folder / path.name}")
    typer.echo(f"in {folder}:")
    for words in TRY:
        typer.echo(f"  rematbench {words}")
