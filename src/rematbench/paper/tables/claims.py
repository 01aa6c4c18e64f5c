"""The ledger of claims: each row of claims.csv with our number, its error, basis and verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rematbench.evaluate.result import Status
from rematbench.evidence.published.derived import LAYOUTS, PUBLISHED
from rematbench.evidence.published.estimators import SAFE_SHARE, fujii_estimate, fujii_refusal
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import RowError, number, read_predicted, read_sheet
from rematbench.host.table import grouped
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import LayoutError
from rematbench.paper.sheet.table import Table, table_of
from rematbench.paper.studies.answers import Number, StudyAnswer, load_answers
from rematbench.paper.studies.declarations import (
    Claim,
    Claims,
    Ours,
    Part,
    evaluate_query,
    load_claims,
    published,
)
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry

INPUTS = {
    "answers": "results/paper/studies/{study}.json",
    "predictions": "results/paper/tables/predictions.csv",
    "published": "results/published/claims.csv",
}
READS = ("config/claims.yaml",)
Row = Mapping[str, str]
WITHIN, OUTSIDE = "within tolerance", "outside"
MET, MISSED = "met", "not met"
"""Verdicts of an inequality, which has no tolerance."""
PRIMARY, BESIDE, ALSO = "primary", "beside the headline", "also asked"
"""The question of a line: the headline, another number of its row, or a further question."""
PREDICT = "rematbench predict results/published/runs.csv -o predictions.csv"
BUNDLE = "rematbench predict results/published/runs.csv --bundle {} -o predictions.csv"


def build(answers: list[Path], predictions: Path, published: Path) -> Table:
    predicted = prediction_answers(read_predicted(predictions))
    found = [*load_answers(answers), *predicted]
    return claims_table(read_sheet(published), load_claims(), found)


def claims_table(rows: Sequence[Row], claims: Claims, answers: list[StudyAnswer]) -> Table:
    """The table of all claims in the order of claims.csv: a line per part, or the reason why it is
    missing."""
    known = {claim.id: claim for claim in claims.claims}
    lines = [
        line for row in rows for line in claim_lines(row, known.get(row["id"]), claims, answers)
    ]
    return table_of(
        "claims",
        lines,
        {
            "published": _as_printed,
            "ours": _short,
            "tolerance": lambda value: f"{100 * float(value):g}",
        },
        short=in_short(lines),
    )


CLAIM_VERDICTS = (
    "met in all printed numbers",
    "met in the headline only",
    MISSED,
    "not comparable",
)


def in_short(lines: Sequence[Mapping[str, Any]]) -> str:
    """How many numbers and claims have which verdict, from the lines of the table."""
    claims = grouped((line["id"], line) for line in lines)
    counts = Counter(map(claim_verdict, claims.values()))
    summary = ", ".join(f"{counts[word]} {word}" for word in CLAIM_VERDICTS)
    within = sum(line["verdict"] == WITHIN for line in lines)
    return (
        f"Of the papers' {len(lines)} numbers {within} are {WITHIN}; of {len(claims)} claims: "
        f"{summary}"
    )


# Why: docs/decisions/paper.md, Which question counts for a claim?
def claim_verdict(lines: Sequence[Mapping[str, Any]]) -> str:
    """The verdict of one claim, one of CLAIM_VERDICTS, from its PRIMARY and BESIDE lines.  BESIDE
    lines that are not comparable do not change it."""
    headline, beside = (
        [_agrees(line["verdict"]) for line in lines if line["asked"] == word]
        for word in (PRIMARY, BESIDE)
    )
    if None in headline or not headline:
        return CLAIM_VERDICTS[3]
    if False in headline:
        return CLAIM_VERDICTS[2]
    return CLAIM_VERDICTS[1 if False in beside else 0]


def _agrees(text: str) -> bool | None:
    return None if text.startswith("not comparable") else text in (WITHIN, MET)


def _short(value: Any) -> str:
    """Four significant digits, with separators for large numbers; in billions from 1e9 on."""
    amount = float(value)
    if abs(amount) >= 1e9:
        return f"{amount / 1e9:,.4g} billion"
    return f"{amount:,.0f}" if abs(amount) >= 1e3 else f"{amount:.4g}"


def _as_printed(text: str) -> str:
    """A published number as its source prints it, but without an exponent."""
    word, _, value = text.rpartition(" ")
    return f"{word} {_short(value)}".strip() if "e+" in value else text


def claim_lines(
    row: Row, claim: Claim | None, claims: Claims, answers: list[StudyAnswer]
) -> list[dict[str, Any]]:
    """The lines of one claim: one per part, or one line with the reason why it is not compared."""
    head: dict[str, Any] = {
        "id": row["id"],
        "system": row["system"],
        "asked": PRIMARY,
        "how": "",
        "what": "; ".join(
            text for text in (row["metric"], row["model"], row["conditions"]) if text
        ),
        "published": row["value"],
        "unit": row["unit"],
        "source": row["source"],
        "evidence": row["evidence"],
        "world": "",
        "basis": "untested",
        "remark": "",
        "command": "",
    }
    if claim is None or claim.not_comparable:
        why = claim.not_comparable if claim else "config/claims.yaml has no entry for it"
        said = {"remark": _not_scored(claim) if claim else ""}
        return [{**head, **said, "verdict": f"not comparable: {why}"}]
    return [{**head, **_part_line(part, claim, row, claims, answers)} for part in claim.parts]


def _part_line(
    part: Part, claim: Claim, row: Row, claims: Claims, answers: list[StudyAnswer]
) -> dict[str, Any]:
    tolerance = claims.tolerances[claim.tolerance]
    ours, value = evaluate_query(part.query, answers), published(row["value"])
    line: dict[str, Any] = {
        "world": "simulated",
        "basis": claim.basis,
        "asked": ALSO if part.also else BESIDE if part.beside else PRIMARY,
        "how": part.name or part.beside,
        "unit": "x" if part.over is not None or part.query.form == "ratio" else row["unit"],
    }
    published_value = value.part_number(part, row["conditions"])
    if published_value is None:
        where = f"{part.beside!r}" if part.beside else f"number {part.number}"
        return {**line, "verdict": f"not comparable: {value.text!r} has no {where}"}
    bound = "" if part.beside else value.bound
    counted = f"{ours.counted} of {ours.total} cells count" if ours.total > 1 else ""
    layouts = {a.layout for a in ours.answers if a.ask in ("run", "longest") and "," in a.layout}
    layout = f"at {layouts.pop()}" if len(layouts) == 1 else ""
    beside = _not_scored(claim) if part is claim.parts[0] else ""
    words = (claim.remark, part.remark, beside, counted, layout, claim.because)
    return line | {
        "published": f"{'' if part.beside else value.prefix} {published_value:.7g}".strip(),
        "ours": ours.value,
        "error": None
        if ours.value is None or not published_value
        else ours.value / published_value - 1,
        "tolerance": None if bound else tolerance.value,
        "declared": part.declared or tolerance.declared,
        "verdict": verdict(ours, published_value, bound, tolerance.value),
        "command": _command(part, ours),
        "remark": "; ".join(" ".join(text.split()) for text in words if text),
    }


def verdict(ours: Ours, published_value: float, bound: str, tolerance: float) -> str:
    """Whether our number agrees with the published number, or meets a published bound. A plan that
    does not fit never agrees."""
    if ours.value is None:
        return f"not comparable: {ours.problem}"
    if ours.problem:
        return f"{MISSED if bound else OUTSIDE}: {ours.problem}"
    if bound:
        return (
            MET
            if (ours.value < published_value if bound == "<" else ours.value > published_value)
            else MISSED
        )
    if published_value == 0:
        return WITHIN if ours.value == 0 else OUTSIDE
    return WITHIN if abs(ours.value / published_value - 1) <= tolerance else OUTSIDE


def _not_scored(claim: Claim) -> str:
    """The numbers of a row that no line scores, with the reasons."""
    return "; ".join(f"not scored: {one.words} ({one.reason})" for one in claim.unscored)


def _command(part: Part, ours: Ours) -> str:
    commands = list(dict.fromkeys(answer.command for answer in ours.answers))
    if 0 < len(commands) <= 2:
        return "; ".join(commands)
    if part.query.study == "predictions":
        return commands[0] if commands else PREDICT
    return f"rematbench make results/paper/studies/{part.query.study}.json"


def prediction_answers(cells: Sequence[Mapping[str, Any]]) -> list[StudyAnswer]:
    """Answers from predicted sheets. They cover our layouts for ATC'24's abstract, and Fujii's 80 %
    rule on the runs for which it was stated."""
    found = [_layout_answer(cell) for cell in cells if cell.get("cell") == LAYOUTS]
    own = [cell for cell in cells if cell.get("cell", PUBLISHED) == PUBLISHED]
    return [*found, *_rule_answer([cell for cell in own if "Fujii" in cell["source"]])]


def _layout_answer(cell: Mapping[str, Any]) -> StudyAnswer:
    values: dict[str, Number] = {}
    for key in ("tokens_per_s_per_gpu", "mfu_causal", "peak_device_bytes"):
        value = number(cell, f"pred_{key}")
        if value is not None:
            values[key] = value
    statuses: dict[str, Status] = {"ok": "ok", "oom": "oom", "unsupported": "unsupported"}
    degrees = ", ".join(f"{key} {cell[key]}" for key in ("tp", "cp", "pp", "vpp", "dp"))
    name = "full_recompute" if cell["recompute"] == "full" else "balanced_checkpointing+pp_offload"
    return StudyAnswer(
        study="predictions",
        ask="run",
        workload="atc24-abstract",
        method=cell["recompute"],
        layout=degrees,
        model=cell["model"],
        cluster=cell["cluster"],
        status=statuses.get(cell["pred_status"], "failed"),
        reason=cell["pred_reason"],
        values=values,
        command=BUNDLE.format(name),
    )


def _rule_answer(cells: Sequence[Mapping[str, Any]]) -> list[StudyAnswer]:
    """The answer that counts published out-of-memory runs with an estimate below 80 %.

    The claim is one-sided (arXiv 2411.06465: runs below 80 % of the device never met an
    out-of-memory error), so only such a run refutes it.  A run that fits although the rule does not
    call it safe costs only a layout that nobody tries.
    """
    if not cells:
        return []
    told = [cell for cell in scored_cells(cells, discover()) if cell["status"] in ("ok", "oom")]
    safe = [cell for cell in told if cell["safe"]]  # `told` lacks rows without an outcome
    broken = sum(cell["status"] == "oom" for cell in safe)
    values: dict[str, Number] = {"oom_below": broken, "below": len(safe)}
    made = StudyAnswer(
        study="predictions",
        ask="estimate",
        workload="fujii-runs",
        method="Fujii's formula",
        values=values,
        command=PREDICT,
    )
    return [made]


def scored_cells(rows: Sequence[Mapping[str, Any]], registry: Registry) -> list[dict[str, Any]]:
    """The cells that Fujii's formula covers (nothing recomputed or offloaded, and no refusal), each
    with its estimated share of device memory and the verdict of the 80 % rule."""
    shares = ((row, _share(row, registry)) for row in rows)
    return [
        {**row, "share": share, "safe": share < SAFE_SHARE}
        for row, share in shares
        if share is not None
    ]


def _share(row: Mapping[str, Any], registry: Registry) -> float | None:
    """Estimated bytes over the device's bytes; None where the formula does not cover the cell."""
    if row["status"] not in ("ok", "oom", "dash"):
        return None
    try:
        case = read_case(row, registry)
        if case.method != "keep_all" or case.offload != 0.0:
            return None
        problem = case.problem()
    except (RowError, LayoutError, ConfigError):
        return None
    if fujii_refusal(problem):
        return None
    estimate = fujii_estimate(problem.workload.model, problem.layout, problem.workload.seq_len)
    return estimate.total_bytes / problem.cluster.hbm_bytes
