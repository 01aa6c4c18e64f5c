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
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"suite": "config/paper.yaml", "results": "results/paper/matrix/{part}.csv"}
READS = ("config/left_out.csv",)  # bands are learnt from it
TABLES = ("matrix_best_layout", "matrix_fastest", "matrix_longest", "matrix_same_layout")
NAMES = {SAME: "matrix_same_layout", BEST: "matrix_best_layout"}


def build(suite: Path, results: list[Path]) -> list[Table]:
    """All tables of the matrix, from rows with bands, unpublished properties, and ties."""
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
    """The GiB that are missing on the device and on the host, as text; if the line records no
    shortage, its `reason`."""
    short = {where: number(line, f"{where}_short_bytes") for where in ("device", "host")}
    texts = [f"{nbytes / GIB:,.1f} GiB ({where})" for where, nbytes in short.items() if nbytes]
    return f"does not fit by {' and '.join(texts)}" if texts else str(line.get("reason", ""))


def arm_table(lines: Sequence[Line], table: str, spec: MatrixSpec) -> Table:
    """The same-layout or the best-layout table, with one line per arm and cell."""
    rows = [_shown(line) for line in lines if line["table"] == table and line["status"] != NOT_RUN]
    return table_of(NAMES[table], rows, terms=equal_terms(spec))


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
    return table_of(
        "matrix_fastest",
        rows,
        baseline=spec.baseline,
        summary=summary(lines, spec.baseline),
        terms=equal_terms(spec),
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
    return table_of("matrix_longest", found.values())
