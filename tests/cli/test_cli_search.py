"""The command `search`: its table, its CSV, its questions, and what it refuses."""

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter
from typer.testing import CliRunner

from rematbench.advise.search import questions
from rematbench.advise.search.request import Progress, Rounds, SearchRequest
from rematbench.cli.app import command_line
from rematbench.cli.options import percents
from rematbench.evaluate.breakdown import PARTS
from rematbench.inputs.paths import data_dir
from rematbench.paper.builders import searched
from tests.tables import tables

RUN = CliRunner()
app = command_line()
GIB = 2**30

WORDS = (
    "--model gpt-1.3b --cluster a800-80gb --gpus 4 --seq-len 2048 --global-batch 8 --tp 1 "
    "--micro-batch 1 --method balanced_checkpointing --processes 1 --system rematbench"
)


def test_each_line_runs_again(tmp_path: Path) -> None:
    """The CSV has the job, and its command simulates to the same step; the first lines name the
    fastest plan with its layout and speed, the notes the packages that run the plans."""
    target, plot = tmp_path / "found.csv", tmp_path / "plans.svg"
    words = [*shlex.split(WORDS), "--top", "3", "--notes", "-o", str(target), "--plot", str(plot)]
    answer = RUN.invoke(app, ["search", *words])
    assert answer.exit_code == 0, answer.output
    assert "proved gap: no plan of this space is more than" in answer.output
    assert "balanced_checkpointing" in plot.read_text()
    assert "not searched: " in answer.output
    kernels = "attention fa2, norm fused, loss in place, on ampere"
    told = f"{kernels}; constants of cluster a800-80gb, stack default"
    assert f"assumes: {told}" in " ".join(answer.output.split())
    assert re.search(
        r"\nFASTEST: balanced_checkpointing at dp 4 zero \d, [\d,]+ tokens/s/GPU \(", answer.output
    )
    assert "runs on: M megatron_core" in answer.output
    rows = list(csv.DictReader(target.open()))
    steps = [float(row["step_s"]) for row in rows]
    assert (len(rows), steps) == (3, sorted(steps))
    for row in rows:
        assert row["assumes"] == told
        words = shlex.split(row["run_with"])
        again = RUN.invoke(app, [*words[1:], "--json"])
        assert again.exit_code == 0, again.output
        assert f'"step_s": {float(row["step_s"])}' in again.output


@pytest.mark.parametrize(("method", "why"), tables(__file__)["unbounded"])
def test_a_method_whose_passes_no_bound_covers_is_refused_in_one_line(
    method: str, why: str
) -> None:
    """Nothing was searched, and it said NOTHING FITS."""
    job = shlex.split(
        WORDS.replace("balanced_checkpointing", method).replace("gpt-1.3b", "llama-7b")
    )
    told = RUN.invoke(app, ["search", *job])
    assert told.exit_code
    assert f"search has no bound for {why}" in str(told.exception)
    assert str(told.exception).endswith(f"use compare --also {method.partition(':')[0]}")


def ask(*words: str) -> str:
    """What `search` prints of the small job."""
    told = RUN.invoke(app, ["search", *shlex.split(WORDS), *words])
    assert told.exit_code == 0, (told.output, told.exception)
    return told.output


def test_an_engine_is_kept_to() -> None:
    """Each plan of a package is simulated again under its name, and has options."""
    own = ("--engine", "megatron_core", "--method", "megatron_core")
    job = WORDS.replace("--method balanced_checkpointing ", "")
    told = RUN.invoke(app, ["search", *shlex.split(job), *own, "--json", "--top", "1"])
    (row,) = json.loads(told.output)["rows"]
    assert row["name"].startswith("megatron_core:")
    assert "megatron_core" in row["runs_on"].split()
    words = shlex.split(row["run_with"])[2:]
    again = json.loads(RUN.invoke(app, ["simulate", *words, "--json"]).output)
    assert again["step_s"] == pytest.approx(row["step_s"])
    printed = RUN.invoke(app, ["flags", *words])
    assert printed.exit_code == 0, printed.output
    assert "--recompute-granularity" in printed.output or "--offload-modules" in printed.output


def test_percents_may_have_their_sign() -> None:
    """`1%` is `1`; what is no share of half at most is refused."""
    assert percents("1%") == percents("1 %") == percents("1") == percents(1.0) == 1.0
    for text in ("-1", "51%", "nan", "a", "%"):
        with pytest.raises(BadParameter, match=f"'{text}' is not a percentage from 0 to 50"):
            percents(text, 50)
    for text in ("200", "inf"):  # `--lose 200`: more than all of the speed
        with pytest.raises(BadParameter, match=f"'{text}' is not a percentage from 0 to 100"):
            percents(text)


def test_the_least_memory_is_bisected() -> None:
    """Of what is tried, all above the answer reach the speed and all below do not."""
    lines = ask("--find", "memory", "--lose", "1%", "--within", "1%").splitlines()
    assert lines[-2].startswith("not tried: ")
    tried = [(float(line.split()[0]), "no plan" in line) for line in lines[1:-2]]
    answer = float(lines[-1].removeprefix("ANSWER: ").split()[0])
    assert all(answer <= value for value, short in tried if not short)
    assert all(answer > value for value, short in tried if short)
    assert any(short for _, short in tried)


@pytest.mark.full
def test_the_longest_context_is_doubled_then_bisected() -> None:
    """The answer has a plan, and the next length that was tried, as near as is asked, has none."""
    small = ("--pp", "1", "--cp", "1", "--hbm-bytes", str(13 * GIB))
    lines = ask("--find", "context", *small).splitlines()
    rows = [line for line in lines[1:-1] if not line.startswith("not tried: ")]
    tried = [(int(line.split()[0].replace(",", "")), "no plan" in line) for line in rows]
    short = min(length for length, none in tried if none)
    longest = max(length for length, none in tried if not none and length < short)
    assert lines[-1].startswith(f"ANSWER: {longest:,} ")
    assert [length for length, _ in tried][:2] == [2048, 4096]
    assert short - longest <= max(1024, longest // 16)
    assert "FASTEST" in ask("--seq-len", str(longest), *small)
    assert "NOTHING FITS" in ask("--seq-len", str(short), *small)


def test_the_rank_and_the_base_that_fit_are_at_the_edge() -> None:
    """The next larger rank and the next wider base have no plan; each answer fits by itself."""
    words = ["search", *shlex.split(
        "--model llama-3.1-8b --cluster a100-80gb-single --system huggingface-flash --gpus 1 "
        "--seq-len 4096 --global-batch 1 --hbm-bytes 25769803776 --trained-dtype autocast "
        "--method full_recompute --lora-rank"
    )]  # fmt: skip
    base = RUN.invoke(app, [*words, "16", "--find", "base"]).output.splitlines()
    assert base[-1].startswith("ANSWER: 8 bits per frozen weight")
    assert any(line.startswith("16 bits") and "no plan" in line for line in base)
    packed = ("--base-dtype", "int8")
    lines = RUN.invoke(app, [*words, "16", "--find", "rank", *packed]).output.splitlines()
    rank = int(lines[-1].removeprefix("ANSWER: ").split()[0])
    tried = {
        int(line.split()[0]): "no plan" in line for line in lines if " columns per" in line[:20]
    }
    assert min(one for one, none in tried.items() if none) <= rank + max(1, rank // 16)
    assert "FASTEST" in RUN.invoke(app, [*words, str(rank), *packed]).output


@pytest.mark.full
def test_a_package_without_options_for_a_few_layouts_has_them_for_others() -> None:
    """DeepSpeed runs none of the first, the middle and the last layout; with more GPUs, of which
    the search for what would fit makes jobs of its own, nothing is an error either."""
    words = (
        "search --model llama-65b --cluster a800-80gb --gpus 8 --seq-len 4096 --global-batch 8 "
        "--engine deepspeed --processes 1"
    )
    told = RUN.invoke(app, shlex.split(words))
    assert told.exit_code == 0, (told.output, told.exception)
    assert "NOTHING FITS" in told.output
    assert "WOULD FIT: " in told.output


def test_a_plan_in_a_line_is_whole(tmp_path: Path) -> None:
    """Uneven ends and micro-batches too: the line alone names one plan."""
    target = tmp_path / "found.csv"
    words = ("--pp", "4", "--global-batch", "7", "--method", "lynx_heu", "--limit", "0")
    text = " ".join(ask(*words, "--notes", "-o", str(target)).split())
    line = text[text.index("FASTEST") : text.index(" GiB left")]
    best = next(csv.DictReader(target.open()))
    assert ("--partition" in best["run_with"]) == ("--partition" in line)
    assert "pp 4" in line
    assert (
        "not covered by the proved gap: lynx_heu (planners) assumes" in text
    )  # --limit 0: not solved
    assert "no plan missing from the table is faster than a row by more than the gap" in text


@pytest.mark.parametrize(("words", "told"), tables(__file__)["wrong"])
def test_a_wrong_question_is_one_line(words: tuple[str, ...], told: str) -> None:
    """What is allowed is said, and nothing that is asked for is left out in silence."""
    answer = RUN.invoke(app, ["search", *shlex.split(WORDS), *words])
    assert answer.exit_code in (1, 2)
    assert told in f"{answer.exception} {answer.output}"


def test_a_table_of_a_narrow_terminal_drops_columns_and_no_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred columns hold every layout and step whole; what has no room is named."""
    monkeypatch.setattr("rematbench.host.console.PIPED_WIDTH", 240)
    wide = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "4", "--notes"]).output
    monkeypatch.setattr("rematbench.host.console.PIPED_WIDTH", 100)
    narrow = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "4", "--notes"]).output
    assert "columns not shown: " in narrow
    assert "columns not shown: " not in wide
    rows = [line.split() for line in wide.splitlines() if re.match(r"[1-4] ", line)]
    assert len(rows) == 4
    for row in rows:
        assert any({row[9], row[10]} <= {*text.split()} for text in narrow.splitlines())
    table = narrow[narrow.index("step s") : narrow.index("proved gap")]
    assert max(map(len, table.splitlines())) <= 100


def test_an_interrupted_question_prints_its_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C loses no answer, and the exit code says that it is not proved."""
    whole = questions.longest_context

    def stopped(one: SearchRequest, run: Rounds) -> Iterator[questions.Answer]:
        yield next(whole(one, run))
        raise KeyboardInterrupt

    monkeypatch.setattr("rematbench.cli.inverse.longest_context", stopped)
    answer = RUN.invoke(app, ["search", *shlex.split(WORDS), "--find", "context"])
    assert answer.exit_code == 130
    assert answer.output.startswith("assumes: attention fa2, ")
    assert "best so far: " in answer.output
    assert "ANSWER" not in answer.output


def test_a_search_interrupted_at_once_counts_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first round nobody knows how many joint plans there are."""

    def stopped(*_: Any, **__: Any) -> Iterator[Progress]:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr("rematbench.cli.search.rounds", stopped)
    answer = RUN.invoke(app, ["search", *shlex.split(WORDS)])
    assert answer.exit_code == 130
    assert "stopped before any plan was evaluated" in answer.output
    assert "0 of 0" not in answer.output


@pytest.mark.soak
def test_a_published_layout_stands_beside_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for a row: both steps are simulated, the loss is theirs, and a part decides."""
    target = tmp_path / "layouts.csv"
    sheet = data_dir("published") / "runs.csv"
    monkeypatch.setattr(searched, "FIGURE", "AE minimum demo")
    searched.build(target, {"kind": "layouts", "within": "2"}, sheet=sheet)
    rows = list(csv.DictReader(target.open()))
    assert rows
    for row in (row for row in rows if row.get("loss")):
        loss = 1.0 - float(row["step_s"]) / float(row["pred_step_s"])
        assert float(row["loss"]) == pytest.approx(loss)
        assert float(row["gap"]) <= 0.02
        assert row["decides"] in PARTS
