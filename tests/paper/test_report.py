"""The page is self-contained and silent about what is not there; claims pass or say why not."""

import csv
import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.evidence.bands import POOLED
from rematbench.host import chart_style
from rematbench.host.declared import facts
from rematbench.host.table import write_sheet
from rematbench.inputs.system import System
from rematbench.paper import expected
from rematbench.paper.expected import (
    Artifact,
    Bound,
    Find,
    TableClaim,
    check,
    counted,
    differences,
    load_artifact,
    measured,
    read_cells,
)
from rematbench.paper.html import matrix_grids, page_html
from rematbench.paper.page import (
    Page,
    gather,
    load_report,
    never_measured,
    no_gpu_sentence,
    what_is_not_modelled,
    whether_bands_hold,
)
from rematbench.paper.sheet.table import Column, Table, gib, whole
from rematbench.workload import Workload
from tests.typed import typed

ROOT = Path(__file__).resolve().parents[2]


def table(name: str, *rows: dict[str, object]) -> Table:
    columns = (Column("who", "who"), Column("size", "GiB", gib), Column("n", "n", whole))
    return Table(name=name, title=f"About {name}", columns=columns, rows=rows, note="A < B & C.")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    row = {"who": "a|b <i>", "size": 2**31, "n": 3}
    for name in NAMES:
        table(name, row).write(folder / "paper" / "tables")
    figures = folder / "paper" / "figures"
    figures.mkdir()
    for name in ("pareto", "fastest"):
        (figures / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + name.encode())
    return folder


NAMES = ("claims_ledger", "accuracy_by_source", "something_new", "pareto", "evidence")


def page(results: Path) -> Page:
    config = load_report()
    return Page(
        config=config,
        measured="24 < 25 searches.",
        outcome="5 % < 6 %",
        trusted="Bands hold.",
        unmeasured=("No GPU.",),
        facts=(("GPUs", "none"),),
        filled=gather(config, results),
    )


def test_every_table_that_exists_is_shown_once_and_absent_ones_are_silent(results: Path) -> None:
    found = [part.name for _, parts in page(results).filled for part in parts]
    assert sorted(found) == sorted((*NAMES, "pareto", "fastest"))
    titles = [section.title for section, parts in page(results).sections if parts]
    assert titles == ["Claims ledger", "Accuracy by source", "Memory", "Everything else"]


def test_answers_come_first_and_a_figure_before_its_table(results: Path) -> None:
    """Question, outcome, figure, how far to trust it, what was never measured, and then claims."""
    config, text = load_report(), page_html(page(results))
    order = (
        *(config.question, "fastest.pdf", config.trust.title, "Bands hold.", "About evidence"),
        *("What was never measured", "No GPU.", "About claims_ledger", "figures/pareto.pdf"),
        *("tables/pareto.csv", "tables/something_new.csv"),
    )
    places = [re.search(re.escape(words), text) for words in order]
    found = [place.start() for place in places if place]
    assert len(found) == len(order)
    assert found == sorted(found)


def test_what_was_never_measured_is_counted(results: Path) -> None:
    folder = results / "paper" / "tables"
    assert whether_bands_hold(folder) == ""
    assert never_measured(folder, results) == (no_gpu_sentence(results),)
    shares = zip(POOLED, ("0.805", "0.635"), strict=True)
    pooled = [{"source": name, "rows": "7", "inside": share} for name, share in shares]
    write_sheet(folder / "bands.csv", [{"source": "one", "rows": "7", "inside": "0"}, *pooled])
    won = [{"outside": "scale, context"}, {"outside": ""}, {"outside": "context"}]
    write_sheet(folder / "matrix_fastest.csv", won)
    told = [{"published": "oom", "cells": "49"}, {"published": "ok", "cells": "9"}]
    write_sheet(folder / "oom_verdicts.csv", told)
    weighed = "contain 80 % if each source weighs 1, 64 % if each row weighs 1 (7 rows)"
    assert weighed in whether_bands_hold(folder)
    _, strange, few = never_measured(folder, results)
    assert strange.startswith("2 of the 3 winners")
    assert strange.endswith("published range: context in 2, scale in 1.")
    assert few.startswith("49 published cells ran out of memory")
    write_sheet(folder / "oom_verdicts.csv", [{"published": "oom", "cells": "50"}])
    assert len(never_measured(folder, results)) == 2


def test_the_page_needs_no_other_file_and_escapes_what_it_shows(results: Path) -> None:
    text = page_html(page(results))
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "<script" not in text
    assert "@import" not in text
    assert "a|b &lt;i&gt;" in text
    assert "24 &lt; 25 searches." in text
    assert "5 % &lt; 6 %" in text
    for name in NAMES:
        assert f"paper/tables/{name}.csv" in text
        assert f"./bench reproduce results/paper/tables/{name}.csv" in text
    assert "data:image/png;base64," in text


def shown(folder: Path, rows: list[dict[str, str]]) -> str:
    """The page of one table of texts, without the spaces between tags."""
    made = Table(
        name="claims",
        title="Claims",
        columns=tuple(Column(key, key) for key in rows[0]),
        rows=tuple(rows),
    )
    made.write(folder / "paper" / "tables")
    return re.sub(r">\s+<", "><", page_html(page(folder)))


def test_folded_columns_open_at_a_click(tmp_path: Path) -> None:
    rows = [{"who": "a", "n": "1", "command": "run <it>"}, {"who": "b", "n": "", "command": "x"}]
    text = shown(tmp_path, rows)
    assert '<th>who</th><th class="n">n</th><th title="command">more</th>' in text
    assert "<summary>show</summary><p><b>command</b> run &lt;it&gt;</p></details>" in text
    assert '<td>b</td><td class="n">-</td>' in text  # no number, among numbers
    assert "<th title" not in shown(tmp_path, [{"who": "a"}])


def test_a_long_text_is_said_once_where_all_before_it_repeats(tmp_path: Path) -> None:
    long = "the same claim of the same paper, asked in two ways"
    rows = [("a", long, "first"), ("a", long, "second"), ("b", long, "third"), ("b", "short", "")]
    names = ("claim", "what", "how")
    text = shown(tmp_path, [dict(zip(names, row, strict=True)) for row in rows])
    assert text.count(f">{long}<") == 2  # of claim a and of claim b
    assert text.count('class="ditto"') == 1
    assert text.count(">a<") == 2


def test_gpus_are_named_only_when_records_name_them(results: Path) -> None:
    assert no_gpu_sentence(results).startswith("GPUs used: none. Not used: H800, A800,")
    folder = results / "measured" / "executed"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text('{"world": "executed", "device": "NVIDIA H200"}')
    (folder / "x.txt").write_text('{"device": "NVIDIA A100"}')
    assert no_gpu_sentence(results) == "GPUs used: H200. Not used: H800, A800, A100, H100."
    (folder / "y.jsonl").write_text('{"cell":"a","provenance":{"device":"NVIDIA H100 80GB HBM3"}}')
    assert no_gpu_sentence(results) == "GPUs used: H100, H200. Not used: H800, A800, A100."


def test_differences_are_numbers_beyond_tolerance_or_other_texts() -> None:
    ours = [["a", "b"], ["x", "1.0000001"]]
    assert differences(ours, [["a", "b"], ["x", "1.0"]], 1e-6) == []
    assert differences(ours, [["a", "b"], ["x", "1.1"]], 1e-6) == [
        "row 1, b: '1.0000001', expected '1.1'"
    ]
    assert differences(ours, [["a", "b"], ["y", "1.0"]], 1e-6)
    assert differences(ours, [["a", "b"]], 1e-6) == ["1 rows, expected 0"]


def test_a_bound_is_over_absolute_values_and_needs_some() -> None:
    cells = [["who", "error"], ["a", "-0.04"], ["b", ""], ["c", "0.02"]]
    assert measured(Bound(table="t", column="error", statistic="largest", most=1), cells) == 0.04
    mean = measured(Bound(table="t", column="error", statistic="mean", most=1), cells)
    assert mean == pytest.approx(0.03)
    assert measured(Bound(table="t", column="x", statistic="mean", most=1), cells) is None


def test_claims_fail_on_missing_changed_and_unbounded_tables(tmp_path: Path) -> None:
    artifact = load_artifact()
    names = {name for claim in artifact.claims for name in claim.tables}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    columns = sorted({claim.bound.column for claim in artifact.claims if claim.bound})
    for name in names:
        (ours / f"{name}.csv").write_text(
            f"{','.join(columns)}\n{','.join('0.001' for _ in columns)}\n"
        )
    assert all(finding.problems for finding in check(artifact, ours, theirs))
    shutil.copytree(ours, theirs)
    artifact = replace(artifact, claims=tuple(replace(c, finds=()) for c in artifact.claims))
    assert not any(finding.problems for finding in check(artifact, ours, theirs))
    for folder in (ours, theirs):
        (folder / "atc24_figure9_scaling.csv").write_text("error\n0.5\n")
    failed = [f for f in check(artifact, ours, theirs) if f.problems]
    assert [f.claim.id for f in failed] == ["C2"]
    assert failed[0].line.startswith("FAIL C2")


FIND = Find(says="fastest", table="t", rows={"arm": "a"}, count=2, of=3)


def test_a_finding_counts_rows_and_those_that_agree_with_others(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arm,kept,cost\na,1,2\nb,1,2\na,3,4\n,5,6\n")
    cells = read_cells(tmp_path / "t.csv") or []
    assert counted(FIND, cells) == (2, 3)
    agree = replace(FIND, same=("kept", "cost"), beside={"arm": "b"})
    assert counted(agree, cells) == (1, 2)
    claim = TableClaim(id="C1", text="Text.", place="here", tables=("t",), finds=(FIND,))
    artifact = Artifact(claims=(claim,), tolerance=1e-6)
    (passed,) = check(artifact, tmp_path, tmp_path)
    assert passed.line == "PASS C1 Text. Found: fastest: 2 of 3."
    wrong = replace(claim, finds=(replace(FIND, count=1),))
    (failed,) = check(replace(artifact, claims=(wrong,)), tmp_path, tmp_path)
    assert failed.line == "FAIL C1 Text. [fastest: 2 of 3, claimed 1 of 3]"


def test_what_was_not_made_has_not_failed(tmp_path: Path) -> None:
    committed = ROOT / "results" / "expected"
    name = "atc24_figure7_memory.csv"
    shutil.copy(committed / name, tmp_path / name)
    ran = typed("expect", str(tmp_path), str(committed), "--claim", "C1")
    lines = ran.out.splitlines()
    assert ran.code in (0, None)
    assert lines[0].startswith("PASS C1")
    assert lines[1:] == ["1 of 1 claims of the artifact are as committed"]
    assert typed("expect", str(tmp_path), str(committed), "--claim", "C2").code == 1
    assert typed("expect", str(tmp_path), str(committed)).code == 1
    assert "no claim 'C99'" in typed("expect", str(tmp_path), str(committed), "--claim", "C99").err


def test_the_tables_of_claims_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("arm,kept,cost\na,1,2\nb,1,2\na,3,4\n,5,6\n")
    read: list[Path] = []

    def reader(path: Path) -> list[list[str]] | None:
        read.append(path)
        return read_cells(path)

    monkeypatch.setattr(expected, "read_cells", reader)
    bound = Bound(table="t", column="cost", statistic="largest", most=6)
    claim = TableClaim(id="C1", text=".", place="", tables=("t",), finds=(FIND,), bound=bound)
    findings = check(Artifact(claims=(claim, claim), tolerance=1e-6), tmp_path, tmp_path)
    assert [one.problems for one in findings] == [(), ()]
    assert len(read) == 2


def test_the_committed_tables_find_what_is_claimed() -> None:
    committed = ROOT / "results" / "expected"
    findings = check(load_artifact(), committed, committed)
    assert not [finding.line for finding in findings if finding.problems]


CELL = {
    "model": "llama3-8b", "cluster": "h800-80gb", "seq_len": "4096", "arm": "balanced + offload",
    "status": "ok", "rank": "best", "layout": "tp 2 pp 4 vpp 2 dp 4", "mfu_causal": "0.4",
    "tokens_per_s_per_gpu": "7900", "headroom_bytes": "1e9", "low": "7000", "high": "8800",
    "outside": "", "binds": "", "fits": "yes", "any_gain": "0.0",
    "run_with": "rematbench simulate balanced_checkpointing+pp_offload:alpha=0.3 --model llama3-8b",
}  # fmt: skip


def test_a_cell_of_the_matrix_has_its_command(tmp_path: Path) -> None:
    """The page shows the command that replays a plan, and the name that one types for an arm."""
    write_sheet(tmp_path / "matrix_best_layout.csv", [CELL])
    table("matrix_best_layout").write(tmp_path / "results" / "paper" / "tables")
    names = {CELL["arm"]: "balanced_checkpointing+pp_offload:steps=20"}
    text = page_html(page(tmp_path / "results"), matrix_grids(tmp_path, names))
    assert f"<code>{html.escape(CELL['run_with'])}</code>" in text
    assert "<code>balanced_checkpointing+<wbr>pp_offload:steps=20</code>" in text


@pytest.mark.full
def test_the_figure_of_winners_is_drawn_where_one_wins_alone_and_where_nothing_fits(
    tmp_path: Path,
) -> None:
    job = {"model": "llama3-8b", "cluster": "h800-80gb"}
    won = {**CELL, "ties": "", "seq_len": 4096}
    tied = {**CELL, "ties": "memo, mst", "seq_len": 16384, "outside": "context", "fits": "tight"}
    lost = {**dict.fromkeys(won, ""), **job, "seq_len": 65536}
    script = ROOT / "figures" / "fastest.py"
    write_sheet(tmp_path / "matrix_fastest.csv", [{**won, "any_gain": 0.2}, tied, lost])
    words = [str(tmp_path / "matrix_fastest.csv"), str(tmp_path / "f.pdf")]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_more_stacks_than_colours_and_markers_are_all_drawn(tmp_path: Path) -> None:
    count = len(chart_style.MARKERS) + 1
    job = {"cluster": "c", "rows": 12, "after_0": 0.2, "after_1": 0.1, "mfu_1": 0.3}
    rows = [{"source": f"Group{at // 2} (part {at})", **job} for at in range(count)]
    write_sheet(tmp_path / "calibrated.csv", rows)
    script = ROOT / "figures" / "calibrated.py"
    words = [str(tmp_path / "calibrated.csv"), str(tmp_path / "f.pdf")]
    code = (
        "import runpy, sys, matplotlib.figure as f;"
        "old = f.Figure.savefig;"
        "f.Figure.savefig = lambda s, *a, **k: ("
        "print(len(s.axes[0].get_legend().texts)), old(s, *a, **k));"
        f"sys.path.insert(0, {str(script.parent)!r}); sys.argv = {[str(script), *words]!r};"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(count + 1)  # and the line of one MFU


def test_a_method_of_the_user_fails_no_claim(tmp_path: Path) -> None:
    """More rows in a table of arms, another winner of a cell and another name among the ties."""
    committed = ROOT / "results" / "expected"
    (claim,) = (each for each in load_artifact().claims if each.id == "C7")
    for name in claim.tables:
        head, *lines = read_cells(committed / f"{name}.csv") or [[]]
        mine = [*lines[0]]
        mine[head.index("arm")] = "mine"
        if name == "matrix_fastest":
            ties = head.index("ties")
            lines[0] = mine
            lines[1][ties] = f"{lines[1][ties]}, mine"
        else:
            lines.append(mine)
        with (tmp_path / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([head, *lines])
    artifact = Artifact(claims=(claim,), tolerance=1e-6)
    (finding,) = check(artifact, tmp_path, committed)
    assert finding.line.startswith("PASS C7")
    assert finding.line.endswith("4 rows of your own methods were not compared.")
    head, *lines = read_cells(committed / "matrix_longest.csv") or [[]]
    with (tmp_path / "matrix_longest.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *lines[1:]])
    (finding,) = check(artifact, tmp_path, committed)
    assert finding.line.startswith("FAIL C7")


INPUTS = {
    "CUDA graphs": (System, "cuda_graphs"),
    "packed": (Workload, "document_len"),
    "context parallel": (System, "cp_kind"),
    "parameters in host memory": (System, "parameters_on_host"),
    "expandable": (System, "expandable_segments"),
}
"""Words for what a job can say, each with its field."""


def test_nothing_that_a_job_can_say_is_said_to_be_refused() -> None:
    refused = " ".join(what_is_not_modelled(load_report()))
    for word, (kind, name) in INPUTS.items():
        assert name in facts(kind)
        assert word.lower() not in refused.lower()
    assert "experts" not in refused
    assert "Precisions other than bf16, fp16," in refused
