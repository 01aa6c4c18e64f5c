"""The commands about sheets: `predict` predicts every row, `row` makes one of a trainer's log."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.options import RunOptions, request, takes_problem
from rematbench.cli.targets import Methods, need_file
from rematbench.evidence.predict import predict_rows, prediction_columns
from rematbench.evidence.published.derived import all_cells, bundles
from rematbench.evidence.published.row_cases import ASSUMED
from rematbench.evidence.published.sheets import read_cells
from rematbench.foreign.logs import read_log
from rematbench.host.console import CommandError, progress_bar, worded
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.inputs.configfile import closest, require_among
from rematbench.inputs.load import load_system, names
from rematbench.plugins.discover import discover

ROWS = Annotated[
    Path, Argument(metavar="ROWS.csv", help="A sheet like the one that `examples` writes.")
]
PROCESSES = Annotated[int, Option(min=1, help="Worker processes.")]
PREDICTED = ("ok", "oom")
OURS = ("kernel", "schedule", "rematbench", "constants", "assumes")
"""Facts of a prediction, which a measured row lacks."""
NAMED = 3
"""Maximum number of rows without a prediction that the terminal lists."""


def predict(
    rows: ROWS,
    output: Annotated[Path, Option("-o", "--output", metavar="PRED.csv")],
    processes: PROCESSES = 2,
    methods: Methods = None,
    system: Annotated[
        str, Option(metavar="Y", help="Use this stack for every row; replaces the column `system`.")
    ] = "",
    bundle: Annotated[
        str,
        Option(
            metavar="M", help="Predict the published cells with the plans of M (a method or a+b)."
        ),
    ] = "",
) -> None:
    """Predict every row of a sheet and add pred_* columns.

    An empty offload_fraction means the smallest that fits; an empty dp follows from gpus, tp, cp
    and pp.  A row that cannot be predicted gets a pred_status and a pred_reason.

    \b
    Example:
      rematbench examples .
      rematbench predict sheet.csv -o predictions.csv
    """
    need_file("-o", output)
    collect_rarely()
    sheet = read_cells(rows, "ROWS.csv")
    columns = sheet.columns
    if bundle:
        by_name = bundles(all_cells(sheet), discover(methods or ()))
        require_among([bundle], tuple(by_name), ("", "--bundle", "bundle"))
        sheet[:], columns = by_name[bundle], (*columns, "cell")
    if system:
        load_system(system)
        for row in sheet:
            row["system"] = system
    with progress_bar("predicting") as advance:
        found = predict_rows(sheet, processes=processes, methods=methods or (), progress=advance)
    write_sheet(output, found, [*columns, *prediction_columns(found)])
    counts = Counter(row["pred_status"] for row in found)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    typer.echo(f"{output}: {len(found)} rows ({summary or 'the sheet is empty'})")
    missed = [(n, row) for n, row in enumerate(found, 1) if row["pred_status"] not in PREDICTED]
    lines = [f"row {n}: {row['pred_status']}: {row['pred_reason']}" for n, row in missed[:NAMED]]
    more = len(missed) - len(lines)
    for line in lines + ([f"and {more} more rows (see column pred_reason)"] if more else []):
        typer.echo(line)
    for name in dict.fromkeys(row["model"] for row in found if ASSUMED in row["pred_reason"]):
        near = closest(name, names("model"))
        typer.echo(
            f"unknown model {name!r}{near}: its shapes come from the row, and all "
            "else from a similar model (see column pred_reason)"
        )


@takes_problem
def row(  # every option is a parameter
    run: RunOptions,
    log: Annotated[Path, Argument(metavar="LOG", help="The trainer's output.")],
    output: Annotated[Path, Option("-o", "--output", metavar="ROWS.csv")],
    source: Annotated[str, Option(metavar="TEXT", help="Who ran the job, and where it is shown.")],
    command: Annotated[str, Option(metavar="TEXT", help="The job's command.")],
    commit: Annotated[str, Option(metavar="TEXT", help="The trainer's commit or version.")],
    gpu: Annotated[str, Option(metavar="TEXT", help="The GPU, as nvidia-smi names it.")],
    recompute: Annotated[str, Option(metavar="TEXT", help="A method, or the source's word.")] = "",
) -> None:
    """Write a trainer's log as a row of a sheet, with its card: command, commit and GPU.

    The row is added to ROWS.csv; `predict`, `validate --rows` and `calibrate --rows` read it.  The
    log is one of Megatron, torchtitan or Transformers.

    \b
    Example:
      rematbench row train.log -o rows.csv --model llama-7b --cluster a100-80gb --gpus 8 --tp 2
        --seq-len 4096 --global-batch 64 --source "me, 2026" --command "torchrun pretrain_gpt.py"
        --commit core_v0.16.1 --gpu "NVIDIA A100-SXM4-80GB"
    """
    need_file("-o", output)
    made = request(run)
    try:
        cells = read_log(log.read_text(encoding="utf-8", errors="replace"), str(log))
    except OSError as error:
        raise CommandError(f"{log}: cannot be read ({error.strerror})") from error
    card = {"command": command, "commit": commit, "gpu": gpu}
    note = "; ".join(f"{key} {value}" for key, value in card.items())
    facts = {key: made.job.facts()[key] for key in made.job.facts() if key not in OURS}
    facts |= {**cells, **card, "model": str(run.problem["model"])}
    facts |= {"source": source, "recompute": recompute, "status": "ok", "note": note}
    before = list(read_cells(output, "-o")) if output.is_file() else []
    write_sheet(output, [*before, {key: "" if x is None else x for key, x in facts.items()}])
    said = ", ".join(f"{key} {worded(value)}" for key, value in cells.items())
    typer.echo(f"{output}: row {len(before) + 1}: {said}")
