"""Retry: remove the records of finished cells, and the files made from them, so that the cells are
due."""

from collections.abc import Collection
from pathlib import Path
from typing import get_args

from rematbench.host.console import CommandError
from rematbench.spec.configfile import closest
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.cellrecord import decode
from rematbench.worlds.slurm.cells import Campaign, CellStatus

STATUSES: tuple[str, ...] = get_args(CellStatus)


def forget(
    campaign: Campaign,
    store: Store,
    results: Path,
    *,
    statuses: Collection[str],
    names: Collection[str] = (),
) -> dict[str, str]:
    """Remove the finished records with these statuses (only of the cells `names`, where given) and
    return the status of each removed record by cell.

    The manifests of their bundles and the table in `results` are removed too: Snakemake knows only
    these files, and makes no missing manifest while the table exists.  CommandError for an unknown
    status or cell.
    """
    _check("status", statuses, STATUSES)
    _check("cell", names, [cell.name for cell in campaign.cells])
    gone: dict[str, str] = {}
    for bundle in campaign.bundles.values():
        for cell in bundle.cells:
            key = campaign.key(cell)
            data = store.finished(key)
            if data is None or (names and cell.name not in names):
                continue
            status = decode(data).status
            if status in statuses:
                (results / "executed.csv").unlink(missing_ok=True)
                (results / f"bundles/{bundle.name}.json").unlink(missing_ok=True)
                store.path(key).unlink(missing_ok=True)
                gone[cell.name] = status
    return gone


def _check(what: str, given: Collection[str], known: Collection[str]) -> None:
    for word in given:
        if word not in known:
            hint = closest(word, known)
            raise CommandError(f"{word!r} is no {what}{hint} (known: {', '.join(known)})")
