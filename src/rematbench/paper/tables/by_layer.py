"""One block of DeepSeek-V3: at stated stages, the shortest lists of layers to recompute beside the
fastest method on all layers."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.by_layer import ByLayer
from rematbench.advise.search.job import SearchSpace, search_row
from rematbench.advise.search.request import SearchRequest
from rematbench.host.table import GIB
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.job import Job
from rematbench.paper.sheet.table import Column, Table, columns, fixed, hidden, signed_percent

INPUTS = {"jobs": "config/by_layer.yaml"}
LISTED = "layers="


class Block(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Methods to try, and the facts of jobs: `shared` by all, and those of each."""

    source: str
    methods: tuple[str, ...]
    shared: dict[str, Any]
    jobs: tuple[dict[str, Any], ...]


def build(jobs: Path) -> Table:
    """The table of the jobs of a file."""
    block = convert(read_mapping(jobs, str(jobs)), Block, str(jobs))
    return Table(
        name="by_layer",
        title="One block of DeepSeek-V3, tuned layer by layer (simulated)",
        columns=(
            *columns("model cluster gpus seq_len tp cp pp ep stages"),
            Column("default", "fastest on all layers"),
            Column("default_s", "step s", fixed(2)),
            Column("listed", "with a list"),
            Column("listed_s", "step s", fixed(2)),
            Column("longer", "step %", signed_percent),
            Column("left_gib", "left GiB", fixed(1)),
            *hidden("run_with"),
        ),
        rows=tuple(_row(block, facts) for facts in block.jobs),
        note=(
            "Stages in the letters of --layout. A list has the fewest layers of each stage with "
            "which its passes fit; `search --by-layer` finds it, and simulates it as every other "
            "plan. No bound covers stages without layers or without experts, so these are the best "
            f"of {', '.join(block.methods)}. Experts balanced."
        ),
    )


def _row(block: Block, facts: dict[str, Any]) -> dict[str, Any]:
    """The row of a job; no step where nothing fits."""
    spec = Job(**block.shared, **facts)
    degrees = {name: getattr(spec.layout, name) for name in Fixed.__struct_fields__}
    degrees["vpp"] = None  # the stages say it
    request = SearchRequest(spec=spec, only=block.methods, fixed=Fixed(**degrees), by_layer=True)
    space = SearchSpace(request)
    found = space.completed(ByLayer(space).stated())
    whole, listed = (
        next((item for item in found if (LISTED in item.method) == wanted), None)
        for wanted in (False, True)
    )
    row: dict[str, Any] = {**block.shared, **facts, "reason": "" if found else "nothing fits"}
    if whole is not None:
        row |= {"default": whole.method, "default_s": whole.fitting_s}
    if listed is not None:
        line = search_row(1, listed)
        row |= {"listed": listed.method, "listed_s": listed.fitting_s}
        row |= {"left_gib": line["headroom_bytes"] / GIB, "run_with": line["run_with"]}
    if whole is not None and listed is not None:
        row["longer"] = listed.fitting_s / whole.fitting_s - 1.0
    return row
