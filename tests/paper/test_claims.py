"""The ledger of claims: every row is compared or says why, and verdicts follow the numbers."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from rematbench.paper.studies.answers import StudyAnswer
from rematbench.paper.studies.declarations import (
    Claim,
    Claims,
    Ours,
    Part,
    Query,
    Tolerance,
    Unscored,
    evaluate_query,
    load_claims,
    published,
)
from rematbench.paper.studies.study import Study, load_study
from rematbench.paper.tables.claims import (
    ALSO,
    BESIDE,
    CLAIM_VERDICTS,
    MET,
    MISSED,
    OUTSIDE,
    PRIMARY,
    WITHIN,
    claim_verdict,
    claims_table,
    prediction_answers,
)
from tests.problems import all_methods
from tests.tables import tables

CLAIMS = load_claims()
ROWS = read_sheet(data_dir("published") / "claims.csv")
STUDIES: dict[str, Study] = {
    path.stem: load_study(path) for path in sorted((data_dir("config") / "study").glob("*.yaml"))
}
ELSEWHERE = {"predictions"}
"""Answers that come from predicted sheets, not from a study."""


def answer(workload: str = "w", method: str = "ours", **changes: Any) -> StudyAnswer:
    made = StudyAnswer(
        study="s",
        ask="run",
        workload=workload,
        method=method,
        layout="tp 2, zero 1",
        values={"step_s": 2.0, "tokens_per_s_per_gpu": 50.0},
        command=f"rematbench simulate {method} {workload}",
    )
    return replace(made, **changes)


def query(**changes: Any) -> Query:
    made = Query(study="s", of=("w",), methods=("ours",), metric="tokens_per_s_per_gpu")
    return replace(made, **changes)


def ledger(
    value: str, *parts: Part, answers: list[StudyAnswer] | None = None
) -> list[dict[str, Any]]:
    """Lines of a claim with this published value and a tolerance of a tenth."""
    told = {"id": "c", "value": value, "unit": "tokens", "conditions": "4x and 50 GB"}
    row = dict.fromkeys(ROWS[0], "") | told
    declared = Claims(
        tolerances={"tenth": Tolerance(value=0.1, reason="a test", declared="before")},
        claims=(Claim(id="c", tolerance="tenth", parts=parts or (Part(query=query()),)),),
    )
    found = [answer()] if answers is None else answers
    return [dict(line) for line in claims_table([row], declared, found).rows]


# -- the committed declarations ---------------------------------------------------------------


def test_every_published_claim_is_declared_once() -> None:
    ids = {row["id"] for row in ROWS}
    assert len(ids) == len(ROWS)
    assert {claim.id for claim in CLAIMS.claims} == ids


def test_every_tolerance_has_a_reason_and_is_used() -> None:
    assert all(tolerance.reason.strip() for tolerance in CLAIMS.tolerances.values())
    used = {claim.tolerance for claim in CLAIMS.claims if claim.parts}
    assert used == set(CLAIMS.tolerances)


def test_every_query_asks_what_a_study_answers() -> None:
    """A misspelt workload or method would silently read as "no such answer"."""
    for claim in CLAIMS.claims:
        for part in claim.parts:
            asked = part.query
            if asked.study in ELSEWHERE:
                continue
            questions = [q for q in STUDIES[asked.study].questions if q.ask == asked.ask]
            known = {
                (workload.name, method.label)
                for question in questions
                for workload in STUDIES[asked.study].of(question)
                for method in question.methods
            }
            wanted = {(w, m) for w in asked.of for m in asked.methods}
            others = asked.to or asked.of
            wanted |= {(w, m) for w in others for m in asked.to_methods}
            wanted |= {(w, asked.only_if_short) for w in asked.of if asked.only_if_short}
            assert wanted <= known, f"{claim.id}: {sorted(wanted - known)}"


def test_every_part_has_a_published_number() -> None:
    rows = {row["id"]: row for row in ROWS}
    for claim in CLAIMS.claims:
        row = rows[claim.id]
        for part in claim.parts:
            assert published(row["value"]).part_number(part, row["conditions"]) is not None, (
                claim.id
            )


SETTINGS = re.compile(
    r"seq \d+|batch \d+|TP \d+|\d+-bit|\bbf16|\d+ mini-sequences|beyond 576K tokens"
    r"|an estimate below 80 % of device memory"
)
"""Words of a row's conditions that say what was run, or the rule of the claim."""


def test_no_number_of_a_row_stays_unsaid() -> None:
    """Every number of `conditions` is a setting, or scored, or declared unscored with a reason;
    where nothing of a row is compared, the claim's reason says that."""
    claims = {claim.id: claim for claim in CLAIMS.claims}
    for row in ROWS:
        claim, left = claims[row["id"]], SETTINGS.sub("", row["conditions"])
        for one in claim.unscored:
            assert one.reason.strip()
            assert one.words in row["conditions"] or one.words in row["value"], claim.id
            left = left.replace(one.words, "")
        for part in claim.parts:
            left = left.replace(part.beside, "")
        if not claim.not_comparable:
            assert not re.search(r"\d", left), f"{claim.id}: {left}"


def test_a_row_says_what_it_does_not_score() -> None:
    rows = {line["id"]: line for line in claims_table(ROWS, CLAIMS, []).rows}
    assert "not scored: 99 % less" in rows["lynx-heu-search"]["remark"]
    told = {"id": "c", "value": "50", "conditions": "48 beside"}
    row = dict.fromkeys(ROWS[0], "") | told
    aside = (Unscored(words="48", reason="of another run"),)
    parts = (Part(query=query()), Part(query=query(), also=True, name="another way"))
    declared = Claims(
        tolerances={"tenth": Tolerance(value=0.1, reason="a test", declared="before")},
        claims=(Claim(id="c", tolerance="tenth", parts=parts, unscored=aside),),
    )
    lines = claims_table([row], declared, [answer()]).rows
    assert ["not scored: 48 (of another run)" in line["remark"] for line in lines] == [True, False]


def test_every_method_of_a_study_resolves() -> None:
    registry = all_methods()
    for study in STUDIES.values():
        for question in study.questions:
            for method in question.methods:
                registry.resolve(method.method, method.settings)
                if method.fewest:
                    registry.resolve(method.method, {**method.settings, method.fewest: 1})


def test_a_claim_without_an_entry_says_so() -> None:
    row = dict.fromkeys(ROWS[0], "") | {"id": "new", "value": "1"}
    (line,) = claims_table([row], CLAIMS, []).rows
    assert line["verdict"] == "not comparable: config/claims.yaml has no entry for it"


def test_lines_of_one_claim_say_what_tells_them_apart() -> None:
    ways = [Part(name=name, query=query(), also=bool(at)) for at, name in enumerate(("one", "two"))]
    assert [line["how"] for line in ledger("8", *ways)] == ["one", "two"]
    for claim in CLAIMS.claims:
        names = [part.name or part.beside for part in claim.parts]
        assert len(set(names)) == len(names), claim.id


def test_no_answer_is_no_agreement() -> None:
    table = claims_table(ROWS, CLAIMS, [])
    assert {line["id"] for line in table.rows} == {row["id"] for row in ROWS}
    assert all(line["verdict"].startswith("not comparable: ") for line in table.rows)
    assert f"0 {CLAIM_VERDICTS[0]}, 0 {CLAIM_VERDICTS[1]}, 0 {MISSED}" in table.note


# -- verdicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        ("50", WITHIN),
        ("54.9", WITHIN),
        ("56", OUTSIDE),
        ("up to 47", WITHIN),
        ("up to 45", OUTSIDE),
        ("< 60", MET),
        ("< 50.1", MET),
        ("< 49.9", MISSED),
        ("> 49.9", MET),
        ("> 50.1", MISSED),
    ],
)
def test_a_mutated_published_value_changes_the_verdict(value: str, verdict: str) -> None:
    (line,) = ledger(value)
    assert (line["ours"], line["verdict"]) == (50.0, verdict)


def test_a_plan_that_does_not_fit_never_agrees() -> None:
    short = answer(status="oom", reason="3 GiB short")
    (line,) = ledger("50", answers=[short])
    assert line["verdict"] == f"{OUTSIDE}: ours oom: 3 GiB short"
    (line,) = ledger("50", Part(query=query(may_not_fit=True)), answers=[short])
    assert line["verdict"] == WITHIN


def test_what_is_also_asked_never_counts() -> None:
    lines = ledger("80", Part(query=query()), Part(query=query(scale=1.6), also=True))
    assert [(line["asked"], line["verdict"]) for line in lines] == [
        (PRIMARY, OUTSIDE),
        (ALSO, WITHIN),
    ]
    assert claim_verdict(lines) == MISSED
    lines = ledger("50", Part(query=query()), Part(query=query(scale=1.6), also=True))
    assert claim_verdict(lines) == CLAIM_VERDICTS[0]


@pytest.mark.parametrize(
    ("beside", "told", "verdict"),
    [("50 GB", "50", CLAIM_VERDICTS[0]), ("4x", "4", CLAIM_VERDICTS[1])],
)
def test_what_a_row_says_beside_its_headline_is_scored(
    beside: str, told: str, verdict: str
) -> None:
    lines = ledger("50", Part(query=query()), Part(query=query(), beside=beside))
    assert (lines[1]["asked"], lines[1]["published"]) == (BESIDE, told)
    assert claim_verdict(lines) == verdict


def test_a_ratio_has_no_unit_of_its_row() -> None:
    """`12x vanilla` beside a longest sequence are not 12 tokens."""
    twice = Part(query=query(to_methods=("ours",), form="ratio"), beside="4x")
    quotient = Part(query=query(), over=0)
    lines = ledger("50", Part(query=query()), twice, quotient)
    assert [line["unit"] for line in lines] == ["tokens", "x", "x"]


@pytest.mark.parametrize(
    ("part", "verdict"),
    [({"beside": "5x"}, "'50' has no '5x'"), ({"number": 1}, "'50' has no number 1")],
)
def test_what_was_not_published_is_not_compared(part: dict[str, Any], verdict: str) -> None:
    line = ledger("50", Part(query=query()), Part(query=query(), **part))[1]
    assert line["verdict"] == f"not comparable: {verdict}"


def test_a_claim_whose_configuration_is_ours_is_not_held_out() -> None:
    ours = [claim for claim in CLAIMS.claims if claim.basis == "own configuration"]
    assert {"lynx-speedup-v4", "memo-ratio-v3", "memo-frag"} < {claim.id for claim in ours}
    for claim in CLAIMS.claims:
        unread = "could not be read" in claim.remark + claim.because
        assert claim.basis != "held-out" or not claim.parts or not unread, claim.id


def test_a_tolerance_says_whether_it_came_before_our_value() -> None:
    lines = ledger("50", Part(query=query()), Part(query=query(), beside="4x", declared="after"))
    assert [line["declared"] for line in lines] == ["before", "after"]
    assert lines[0]["command"] == "rematbench simulate ours w"
    assert (lines[0]["world"], lines[0]["basis"]) == ("simulated", "held-out")
    (bound,) = ledger("> 40")
    assert bound["tolerance"] is None


# -- queries ----------------------------------------------------------------------------------


def test_numbers_of_published_texts() -> None:
    assert published("1048576 / 655360 / 262144").numbers == (1048576, 655360, 262144)
    assert published("73.5 / 65.7 and 76.5 / 68.2").numbers == (73.5, 65.7, 76.5, 68.2)
    assert [published(text).bound for text in ("< 300", "> 90", "up to 2")] == ["<", ">", ""]
    over = Part(query=query(), number=0, over=1)
    assert published("6 / 4").part_number(over) == 1.5


def layouts(*cells: tuple[str, str, float, str]) -> list[StudyAnswer]:
    """(method, layout, speed, status) on one workload."""
    return [
        answer(method=m, layout=lay, status=s, values={"tokens_per_s_per_gpu": v, "step_s": 1 / v})
        for m, lay, v, s in cells
    ]


def test_best_against_best_and_same_layout() -> None:
    cells = layouts(
        ("ours", "a", 60.0, "ok"),
        ("ours", "b", 90.0, "oom"),
        ("rival", "a", 40.0, "ok"),
        ("rival", "b", 50.0, "ok"),
    )
    asked = query(to_methods=("rival",), form="ratio")
    assert evaluate_query(asked, cells).value == pytest.approx(60 / 50)
    same = replace(asked, same_layout=True, reduce="max")
    found = evaluate_query(same, cells)
    assert found.value == pytest.approx(60 / 40)  # at b ours does not fit
    assert (found.counted, found.total) == (1, 2)
    percent = replace(asked, form="more_pct")
    assert evaluate_query(percent, cells).value == pytest.approx(20)


def test_only_layouts_where_another_method_is_short() -> None:
    cells = layouts(
        ("ours", "a", 60.0, "ok"),
        ("rival", "a", 40.0, "ok"),
        ("keep", "a", 70.0, "oom"),
        ("ours", "b", 50.0, "ok"),
        ("rival", "b", 50.0, "ok"),
        ("keep", "b", 70.0, "ok"),
    )
    asked = query(to_methods=("rival",), form="ratio", same_layout=True, reduce="min")
    assert evaluate_query(asked, cells).value == 1.0
    tight = replace(asked, only_if_short="keep")
    assert evaluate_query(tight, cells).value == pytest.approx(1.5)


def test_means_and_scales_over_workloads() -> None:
    cells = [answer("w"), answer("x", values={"tokens_per_s_per_gpu": 150.0})]
    asked = query(of=("w", "x"), reduce="mean", scale=0.01)
    found = evaluate_query(asked, cells)
    assert (found.value, found.counted, len(found.answers)) == (1.0, 2, 2)


def test_dividing_by_nothing_is_said() -> None:
    cells = [answer(), answer(method="zero", values={"tokens_per_s_per_gpu": 0.0})]
    found = evaluate_query(query(to_methods=("zero",), form="ratio"), cells)
    assert found == Ours(value=None, total=1, problem="the divisor is 0")


# -- mistakes in the file ---------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words"), tables(__file__)["contradictions"])
def test_contradictions_are_one_line(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = "{query: {study: s, of: [w], methods: [m], metric: x}}"
    lines = text.replace("P", part).replace("R", part.replace("x}", "x, form: ratio}"))
    head = "tolerances: {t: {value: 0.1, reason: because, declared: before}}\nclaims:\n"
    (tmp_path / "claims.yaml").write_text(head + lines)
    monkeypatch.setattr("rematbench.paper.studies.declarations.data_dir", lambda kind: tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_claims()
    assert str(raised.value).startswith("config/claims.yaml: ")
    assert words in str(raised.value)


# -- predictions and tables -------------------------------------------------------------------


def test_the_eighty_percent_rule_counts_what_is_published() -> None:
    """A row whose status is a dash does not say what happened; one that ran out below counts."""
    sheet = read_sheet(data_dir("published") / "runs.csv")
    rows = [row | {"pred_status": "ok"} for row in sheet]
    own = [row for row in rows if "Fujii" in row["source"]]
    (found,) = prediction_answers(own)
    assert found.values["oom_below"] == 0
    below = int(found.values["below"])
    assert 0 < below < len(own)
    broken = [row | {"status": "oom"} for row in own]
    (found,) = prediction_answers(broken)
    assert int(found.values["oom_below"]) >= below
    dashes = [row | {"status": "dash"} for row in own]
    (found,) = prediction_answers(dashes)
    assert found.values == {"oom_below": 0, "below": 0}
