"""Published steps and peaks of models with experts (results/published/moe.csv), predicted."""

from functools import cache
from typing import Any

from rematbench.costs.flops import megatron_flop_per_token
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.expert_columns import has_experts
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED, Row, RowError, read_sheet, text
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import discover

MEGATRON_FLOP = "Megatron-LM num_floating_point_operations"
"""The count of FLOPs from whose TFLOP/s a row's tokens/s follow."""


@cache
def expert_rows() -> tuple[dict[str, Any], ...]:
    """The rows with experts that are predicted, with their pred_* columns, and tokens/s where their
    source prints TFLOP/s.  Rows that are refused, each by its column, are left out."""
    sheet = read_sheet(data_dir("published") / "moe.csv")
    rows = [{**row, SPEED: published_speed(row)} for row in sheet if has_experts(row)]
    return tuple(
        row for row in predict_rows(rows, processes=1) if row["pred_status"] in ("ok", "oom")
    )


def published_speed(row: Row) -> str:
    """Tokens/s per GPU that a row prints, or that follow from its TFLOP/s; empty without either,
    or without the dispatcher on which they depend."""
    if text(row, SPEED):
        return text(row, SPEED)
    counted = text(row, "tflops_convention").startswith(MEGATRON_FLOP)
    if not counted or not text(row, "dispatcher"):
        return ""
    flop_per_s = float(text(row, "tflops_per_gpu_as_published") or 0) * 1e12
    found = flop_per_s / flop_per_token(row) if flop_per_s else 0.0
    return f"{found:.1f}" if found else ""


def flop_per_token(row: Row) -> float:
    """FLOPs of a token as Megatron-LM counts them; infinite for a row that is refused."""
    try:
        case = read_case(row, discover(()))
        vocab = case.problem().system.padded_vocab(case.model.vocab, case.layout.tp)
    except RowError:
        return float("inf")
    return megatron_flop_per_token(case.model, case.work.seq_len, vocab)


def timed_rows() -> list[dict[str, Any]]:
    """The rows of `expert_rows` with a published speed."""
    return [row for row in expert_rows() if row[SPEED]]
