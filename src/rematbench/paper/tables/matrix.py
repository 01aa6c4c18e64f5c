"""The matrix as tables: same layout, best layout, fastest arms, longest contexts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rematbench.evaluate.breakdown import PARTS, losses
from rematbench.evidence.published.sheets import number, read_sheet
from rematbench.host.table import GIB
from rematbench.inputs.load import load_system
from rematbench.paper.matrix.best import ANY, BEST, CELL, SAME
from rematbench.paper.matrix.spec import MatrixSpec, load_matrix
from rematbench.paper.matrix.sweep import LAYOUT, NOT_RUN
from rematbench.paper.matrix.verdicts import Line, by_cell, judged, speed, summary
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    fixed,
    hidden,
    percent,
    signed_percent,
    whole,
)

INPUTS = {"suite": "config/paper.yaml", "results": "results/paper/matrix/{part}.csv"}
READS = ("config/left_out.csv",)  # from which bands are learnt
TABLES = ("matrix_best_layout", "matrix_fastest", "matrix_longest", "matrix_same_layout")
NAMES = {SAME: "matrix_same_layout", BEST: "matrix_best_layout"}
SHOWN = 40


def build(suite: Path, results: list[Path]) -> list[Table]:
    """All tables, with bands, unpublished properties, and ties."""
    spec = load_matrix(suite)
    rows = [row for path in results for row in read_sheet(path, ["arm"])]
    return matrix_tables(judged(rows, spec), spec)


def matrix_tables(lines: Sequence[Line], spec: MatrixSpec) -> list[Table]:
    return [
        arm_table(lines, SAME, spec),
        arm_table(lines, BEST, spec),
        fastest_table(lines, spec),
        longest_table(lines),
    ]


def equal_terms(spec: MatrixSpec) -> str:
    """The settings that are equal for all arms."""
    system = load_system(spec.system)
    states = system.states
    gpus = ", ".join(f"{work.model} {work.gpus}" for work in spec.works)
    where = "host" if system.host.optimizer_on_host else "device"
    return (
        f"Equal for all arms: stack {spec.system} (simulated), {spec.tokens_per_step:,} tokens "
        f"per step, {spec.precision}, bytes per parameter {states.param_bytes} + "
        f"{states.grad_bytes} gradient + {states.optimizer_bytes} optimizer on the {where}, "
        f"ZeRO {spec.zero_stage}, micro-batch {spec.micro_batch}, {spec.attention} attention; "
        f"GPUs: {gpus}."
    )


HOW = (
    "low, high: 80 % band of the speed, learnt from errors with constants fitted without a row's "
    "source. outside: the stack, generation, scale (GPUs), context or mechanism is not in any "
    "published row. tie: slower than the best by less than our error when comparing two methods "
    "(the error at one layout, or between layouts if they differ). tight: fits, but the headroom "
    "is smaller than our memory error."
)


GAP = (
    "gap: no layout that divides the GPUs (uneven ends included) makes the arm faster by more "
    "than this. Searched plans leave our memory error free. If an arm chooses its own share "
    "(memo), the search tries quarters, and the arm then chooses at the best layout. If nothing "
    "fits, the table shows the smallest shortage of any plan."
)
PROVED = columns("gap layouts")


def layout_text(line: Mapping[str, Any]) -> str:
    """The degrees above 1 of a line's layout (tp 2 pp 4 vpp 10 dp 16), and the layers at uneven
    ends; empty without a layout."""
    if not line.get("tp"):
        return ""
    words = [f"{key} {line[key]}" for key in LAYOUT if int(line[key]) > 1]
    if "--partition" in line["run_with"]:
        sizes = line["partition"].split(",")
        words.append(f"ends {sizes[0]} {sizes[-1]}")
    return " ".join(words) or "one rank"


def binds(line: Mapping[str, Any]) -> str:
    """The missing bytes if the arm does not fit, otherwise the largest losses of the step (known
    only for the fastest arm of a cell)."""
    if line["status"] == "oom":
        return shortage(line)
    return losses({part: number(line, f"part_{part}") or 0.0 for part in PARTS})


def shortage(line: Mapping[str, Any]) -> str:
    """The missing bytes in GiB by place, or the reason if there are none."""
    short = {where: number(line, f"{where}_short_bytes") for where in ("device", "host")}
    texts = [f"{nbytes / GIB:,.1f} GiB ({where})" for where, nbytes in short.items() if nbytes]
    return f"does not fit by {' and '.join(texts)}" if texts else str(line.get("reason", ""))


def arm_table(lines: Sequence[Line], table: str, spec: MatrixSpec) -> Table:
    """The same-layout or the best-layout table, with one line per arm and cell."""
    rows = [_shown(line) for line in lines if line["table"] == table and line["status"] != NOT_RUN]
    one = (
        "one layout per cell, the baseline's best"
        if table == SAME
        else "each arm's best layout, by search with the proved gap"
    )
    return Table(
        name=NAMES[table],
        title=f"The matrix, {table}: {one} (simulated)",
        columns=(
            *columns("model cluster seq_len arm"),
            Column("status", "verdict"),
            *columns(
                "fits tokens_per_s_per_gpu rank mfu_causal mfu_dense headroom_bytes reserved_bytes "
                "host_node_bytes binds layout"
            ),
            Column("alpha", "alpha", fixed(2)),
            *columns("low high outside"),
            *(PROVED if table == BEST else ()),
            *hidden("run_with"),
        ),
        rows=tuple(rows),
        note=f"{equal_terms(spec)} {HOW} {'' if table == SAME else GAP} An arm that is not "
        "declared for a length has no row for it.",
        shown=SHOWN,
    )


def _shown(line: Line) -> Line:
    return {**line, "layout": layout_text(line), "binds": binds(line)}


def fastest_table(lines: Sequence[Line], spec: MatrixSpec) -> Table:
    """The fastest arm of every cell at best layouts, the arms that tie with it, its gain over the
    baseline, and the fastest plan of all methods and compositions."""
    rows = []
    anything = by_cell(line for line in lines if line["table"] == ANY)
    for where, cell in by_cell(line for line in lines if line["table"] == BEST).items():
        best = max(cell, key=speed)
        row: Line = dict(zip(CELL, where, strict=True))
        if speed(best):
            base = next(line for line in cell if line["arm"] == spec.baseline)
            ties = [line["arm"] for line in cell if line.get("rank") == "tie"]
            gain = speed(best) / speed(base) - 1.0 if speed(base) else None
            row |= _shown(best) | {"ties": ", ".join(ties), "gain": gain}
            row |= _any_plan(anything.get(where, ()), speed(best))
        else:
            least = [line for line in cell if line["status"] == "oom"]
            nearest = min(least, key=_short) if least else best
            row |= {"arm": "", "status": "oom", "binds": f"{nearest['arm']} {shortage(nearest)}"}
        rows.append(row)
    return Table(
        name="matrix_fastest",
        title="The matrix: the fastest of each cell, each at its best layout (simulated)",
        columns=(
            *columns("model cluster seq_len"),
            Column("arm", "fastest"),
            *columns("tokens_per_s_per_gpu mfu_causal"),
            Column("gain", f"over {spec.baseline} %", signed_percent),
            Column("ties", "tied with"),
            *columns("headroom_bytes binds layout low high fits outside"),
            *PROVED,
            Column("any_name", "fastest plan of all"),
            Column("any_layout", "its layout"),
            Column("any_tokens_per_s_per_gpu", "its tokens/s/GPU", fixed(1)),
            Column("any_gain", "over the fastest arm %", signed_percent),
            Column("any_gap", "its gap %", percent),
            *hidden("any_run_with"),
            *(Column(f"part_{part}", "") for part in PARTS),
        ),
        rows=tuple(rows),
        note=summary(lines, spec.baseline) + f" {equal_terms(spec)} {HOW} {GAP} "
        "fastest plan of all: over all methods, settings and compositions, including those that "
        "are not arms.",
    )


def _any_plan(lines: Sequence[Line], arm_speed: float) -> Line:
    """The columns of the fastest plan of all; `arm_speed`: the speed of the fastest arm."""
    if not lines:
        return {}
    line, keys = _shown(lines[0]), ("name", "layout", "tokens_per_s_per_gpu", "gap", "run_with")
    return {f"any_{key}": line[key] for key in keys} | {"any_gain": speed(line) / arm_speed - 1.0}


def _short(line: Line) -> float:
    found = [number(line, f"{where}_short_bytes") or 0.0 for where in ("device", "host")]
    return max(found) or float("inf")


def longest_table(lines: Sequence[Line]) -> Table:
    """The longest sequence length of the matrix that fits, by model, cluster and arm."""
    found: dict[tuple[str, str, str], Line] = {}
    own = [line for line in lines if line["table"] == BEST]
    top = max((int(line["seq_len"]) for line in own), default=0)
    last = {
        line["arm"] for line in own if int(line["seq_len"]) == top and line["status"] != NOT_RUN
    }
    for line in own:
        if line["arm"] not in last or line["status"] == NOT_RUN:
            continue
        key = (line["model"], line["cluster"], line["arm"])
        row = found.setdefault(key, {**dict(zip(("model", "cluster", "arm"), key, strict=True))})
        length = int(line["seq_len"])
        if speed(line) and length > row.get("longest", 0):
            row |= {"longest": length, "mfu_causal": line["mfu_causal"]}
        elif not speed(line) and "fails_at" not in row:
            row |= {"fails_at": length, "reason": shortage(line)}
    return Table(
        name="matrix_longest",
        title="The longest of the matrix's lengths that fits, at an arm's best layout (simulated)",
        columns=(
            *columns("model cluster arm"),
            Column("longest", "longest tokens", whole),
            *columns("mfu_causal"),
            Column("fails_at", "fails at", whole),
            Column("reason", "by"),
        ),
        rows=tuple(found.values()),
        note="The true limit lies between the two columns. The table omits methods that were not "
        "run at the last length. If the longest length is `none`, the shortest length that was "
        "run already fails.",
        shown=SHOWN,
    )
