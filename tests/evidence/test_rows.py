"""A comparison can be acted on: its rows run again, say their job, and can be asked for."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rematbench.advise.candidates.candidate import load_compare
from rematbench.advise.compare.comparison import Comparison, table
from rematbench.cli.compare import Ranking
from rematbench.cli.options import Request, RunOptions, request
from rematbench.cli.plots import write_plot
from rematbench.evaluate.breakdown import PARTS
from rematbench.evaluate.evaluation import rated
from rematbench.evaluate.result import PlannedJob
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host import chart_style
from rematbench.host.console import gib, grid, print_uncut
from rematbench.plan import Plan, Recompute, Rule, Select, Window
from rematbench.plugins.registry import MethodError
from rematbench.worlds.packages.flags import costs, flags_of
from tests.problems import all_methods, plan_of
from tests.typed import typed

JOB = {"model": "llama-7b", "cluster": "a800-80gb", "system": "megatron-core", "gpus": 4}
TYPED = ["--gpus", "4", "--seq-len", "4096", "--global-batch", "8", "--pp", "4"]
WORDS = ["--model", "llama-7b", "--cluster", "a800-80gb", "--system", "megatron-core", *TYPED]
ONLY = ["keep_all", "full_recompute:block", "selective_recompute:mlp", "memo:alpha=0.3+mst"]


def asked(**problem: Any) -> Request:
    given = {**JOB, "seq_len": 4096, "global_batch": 8, "pp": 4, **problem}
    return request(RunOptions(method="keep_all", problem=given))


@pytest.fixture(scope="module")
def made() -> tuple[Request, list[dict[str, Any]]]:
    one = asked()
    comparison = Comparison(one.job, load_compare(), limit_s=60)
    return one, table(comparison.everything())


def test_every_row_runs_again_by_its_name(made: tuple[Request, list[dict[str, Any]]]) -> None:
    one, rows = made
    registry = all_methods()
    assert {row["origin"] for row in rows} >= {"method", "policy", "composition"}
    for row in rows:
        plan = registry.resolve(row["name"], None, one.problem).plan(one.problem, one.base)
        if row["status"] == "unsupported":
            assert not isinstance(plan, Plan)
            continue
        assert isinstance(plan, Plan), row["name"]
        there = rated(one.problem, plan)  # the host of this cluster has no rate of its own
        assert there.cost.evaluate(plan).step_s == row["step_s"], row["name"]


def test_a_row_has_its_job_and_its_command(made: tuple[Request, list[dict[str, Any]]]) -> None:
    _, rows = made
    tuned = next(row for row in rows if row["name"].startswith("full_recompute:block "))
    words = shlex.split(tuned["run_with"])
    assert words[:3] == ["rematbench", "simulate", tuned["name"]]
    again = json.loads(typed(*words[1:], "--json").out)
    assert again["step_s"] == tuned["step_s"]
    assert again["run_with"] == tuned["run_with"]
    for key, value in again["job"].items():
        assert key == "method" or tuned[key] == value
    assert (tuned["model"], tuned["gpus"], tuned["pp"], tuned["dp"]) == ("llama-7b", 4, 4, 1)
    assert tuned["partition"] == "8,8,8,8"


def test_only_and_also_are_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    plot = tmp_path / "rows.svg"
    chosen = [word for name in ONLY for word in ("--only", name)]
    ran = typed("compare", *WORDS, *chosen, "--limit", "60", "--json", "-o", str(path),
                "--plot", str(plot))  # fmt: skip
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    names = {row["name"].rpartition(" ")[0] or row["name"] for row in answer["rows"]}
    assert names == set(ONLY)
    assert answer["job"]["model"] == "llama-7b"
    rows = read_sheet(path)
    assert [row["name"] for row in rows] == [row["name"] for row in answer["rows"]]
    assert {row["system"] for row in rows} == {"megatron-core"}
    assert "full_recompute:block" in plot.read_text()


def test_also_adds_a_row_and_changes_no_other(made: tuple[Request, list[dict[str, Any]]]) -> None:
    one, rows = made
    more = Comparison(one.job, load_compare(), also=["memo:alpha=0.4"], limit_s=60)
    found = table(more.everything())
    assert [row for row in found if row["origin"] != "asked"] == rows
    assert [row["name"] for row in found if row["origin"] == "asked"] == ["memo:alpha=0.4"]


def test_a_policy_leaves_out_operators_that_a_model_lacks() -> None:
    """A GELU MLP has no product: the policy's `mul` is not asked of it."""
    one = asked(model="gpt-7b", cluster="h100-80gb", gpus=8, pp=8)
    method = all_methods().resolve("selective_recompute:mlp", None, one.problem)
    assert isinstance(method.plan(one.problem, one.base), Plan)
    assert not isinstance(all_methods().resolve("selective_recompute:mlp").plan(one.problem), Plan)


def test_a_composition_is_read_back_from_its_text() -> None:
    registry = all_methods()
    for text in ("memo:alpha=0.3+mst", "selective_recompute:ops=[fc1,act],scope=layer"):
        found = registry.resolve(text)
        assert registry.resolve(found.text) == found
    with pytest.raises(MethodError, match="expected METHOD:KEY=VALUE"):
        registry.resolve("selective_recompute:ops=[fc1,act],layer")


# -- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 160])
def test_numbers_are_whole_at_any_width(width: int) -> None:
    one = asked()
    comparison = Comparison(one.job, load_compare(), only=["keep_all", "memo"])
    results = comparison.everything()
    out = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    printed = Ranking(out, comparison, every=True)
    printed.table(results)
    printed.notes(results)
    text = out.export_text()
    assert "\u2026" not in text
    for result in results:
        assert f" {result.evaluation.step_s:.4g} " in text
        assert f" {gib(result.verdict.headroom_bytes)} " in text
    assert ("columns not shown" in text) == (width < 160)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_of_stages_keeps_its_digits(width: int) -> None:
    """Ten columns with frames need more than 80; headings fold, numbers do not."""
    table = grid(*("activations" for _ in range(10)))
    numbers = [f"{100 + i}.{i}5" for i in range(10)]
    table.add_row(*numbers)
    out = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_uncut(out, table)
    text = out.export_text()
    assert all(number in text for number in numbers)
    assert ("|" in text) == (width == 120)
    assert out.width == width


@pytest.mark.parametrize("first", [0, 1])
def test_a_late_row_is_not_cut_either(first: int) -> None:
    """It may be wider than those before it, or there may be none before it."""
    one = asked()
    names = ["keep_all", "balanced_checkpointing+memo:alpha=0.25+mst"]
    comparison = Comparison(one.job, load_compare(), only=names)
    results = comparison.everything()
    out = Console(width=30, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    printed = Ranking(out, comparison)
    printed.table(results[:first])
    printed.rows(results[first:])
    text = out.export_text()
    assert "\u2026" not in text
    assert text.count("headroom") == 1
    for word in ("+memo:", "alpha=0.25", "+mst"):
        assert word in text
    for result in results:
        assert f" {result.evaluation.step_s:.4g} " in text


@pytest.mark.usefixtures("no_assumed_facts")
def test_the_table_says_host_memory_and_engines() -> None:
    one = asked(model="llama-7b", pp=1, tp=2, seq_len=16384)
    ran = Comparison(one.job, load_compare(), only=["memo", "full_recompute"])
    rows = {row["name"]: row for row in table(ran.everything())}
    assert rows["memo"]["host_node_bytes"] > 0
    assert rows["memo"]["host_bytes"] == one.problem.cluster.host_bytes
    assert rows["memo"]["runs_on"] == "ours"
    assert rows["full_recompute"]["runs_on"] == "megatron_core ours"
    plan = plan_of(one.problem, "full_recompute")
    assert not flags_of(one.problem, plan, "megatron_core").missing


def test_a_figure_is_drawn_where_nothing_fits(tmp_path: Path) -> None:
    write_plot([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_every_part_of_a_step_has_a_look() -> None:
    assert set(chart_style.PARTS) == set(PARTS)


# -- flags, --check, the heading --------------------------------------------------------------


@pytest.mark.usefixtures("no_assumed_facts")
def test_the_nearest_options_lose_the_fewest_bytes() -> None:
    """Megatron drops the whole MLP with its norm's output."""
    one = asked(tp=2, pp=1)
    dropped = ["attn_norm_out", "gate_out", "up_out"]
    plan = plan_of(one.problem, "selective_recompute", activations=dropped)
    answer = flags_of(one.problem, plan, "megatron_core")
    assert answer.settings["modules"] == ("mlp",)
    names = [line.partition(":")[0] for line in answer.missing]
    assert names == ["attn_norm_out", "mlp_norm_out", "fc2_in"]
    assert answer.plan is not None
    lost = costs(one.problem, plan, answer.plan)
    assert lost.peak_bytes < 0  # fc2_in and the norm's output are dropped there
    assert lost.step_share > 0  # and run again
    ran = typed("flags", "selective_recompute:mlp", *WORDS)
    assert ran.code == 1
    assert "\nnearest:\n--tensor-model-parallel-size" in ran.out
    assert "compared with selective_recompute:mlp: peak -" in ran.out


@pytest.mark.usefixtures("no_assumed_facts")
def test_a_missing_line_says_two_different_things() -> None:
    """Windows are named, and a scope is nothing where nothing is rebuilt."""
    windows = Recompute(window=Window(op="proj", direction="backward"))
    one = asked(tp=2, pp=1)
    norms = Rule(Select(activations=("attn_norm_out",)), windows)
    for plan in (one.base.with_rules(norms), plan_of(one.problem, "memo")):
        missing = flags_of(one.problem, plan, "megatron_core").missing
        told = [re.fullmatch(r"\S+: (.*) \(nearest: (.*)\)", line) for line in missing]
        pairs = [match.groups() for match in told if match]
        assert pairs
        assert not [pair for pair in pairs if pair[0] == pair[1]]


def test_check_says_what_it_proved() -> None:
    ran = typed("simulate", "full_recompute", *WORDS, "--check", "--json")
    proof = json.loads(ran.out)["proof"]
    assert proof["ranks"] == 4
    assert proof["actions"] > proof["allocations"] > 0
    told = typed("simulate", "full_recompute", *WORDS, "--check").out
    words = f"proved safe: {proof['actions']:,} actions of 4 pipeline ranks"
    assert words in told
    alone = typed("simulate", "full_recompute", *WORDS, "--pp", "1", "--check").out
    assert "of 1 pipeline rank; each" in " ".join(alone.split())
    assert "proof" not in json.loads(typed("simulate", "full_recompute", *WORDS, "--json").out)


def test_a_job_that_has_no_words_has_no_command() -> None:
    one = asked()
    assert PlannedJob(problem=one.problem, base=one.base).run_with("keep_all") == ""
