"""Planners at the end of a search: solved at the layouts of its plans, outside of its proof."""

import csv
import json
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import (
    MOST_LAYOUTS,
    SearchJob,
    place_of,
    rounds,
    solve_planners,
)
from rematbench.cli.app import command_line
from rematbench.evaluate.result import Result
from rematbench.host.console import CommandError
from rematbench.inputs.job import Job
from rematbench.plugins.registry import MethodError
from tests.method_files import method_file

RUN = CliRunner()
app = command_line()
SEARCHED = ("balanced_checkpointing",)
WORDS = (
    "search --model gpt-1.3b --cluster a800-80gb --gpus 4 --seq-len 2048 --global-batch 8 "
    "--micro-batch 1 --system rematbench --method balanced_checkpointing --processes 1"
)
BODIES = {
    "ends": "import os; os._exit(1)",
    "never": "return Unsupported('not here')",
    "needs_tp": "return base if problem.layout.tp > 1 else Unsupported('needs tp > 1')",
    "raises": "raise KeyError('x')",
    "spins": "while True: pass",
}


def asked(*more: str, folder: Path | None = None, tp: int | None = None) -> SearchRequest:
    spec = Job(
        model="gpt-1.3b", cluster="a800-80gb", system="rematbench", gpus=4, seq_len=2048,
        global_batch=8,
    )  # fmt: skip
    fixed = Fixed(micro_batch=1, tp=tp)
    folders = (folder,) if folder else ()
    return SearchRequest(spec=spec, fixed=fixed, only=(*SEARCHED, *more), folders=folders)


def found(job: SearchRequest) -> tuple[Result, ...]:
    *_, end = rounds(job, processes=1)
    return end.results


def own(folder: Path) -> SearchRequest:
    for name, body in BODIES.items():
        text = method_file(name, body, fields="planner: ClassVar[bool] = True")
        (folder / f"{name}.py").write_text(text)
    return asked(*BODIES, folder=folder)


def test_each_planner_ends_with_a_plan_or_a_reason(tmp_path: Path) -> None:
    """A planner goes on to the next layout where it has no plan, but not after its time is up; one
    that dies takes no other with it."""
    made = SearchJob(own(tmp_path))
    assert made.planners == tuple(BODIES)
    best = {tp: found(asked(tp=tp))[0] for tp in (1, 2, 4)}
    layouts = (best[1], best[1], best[2], best[4])  # a layout twice is one layout
    ends = {end.method: end for end in solve_planners(made, layouts, limit_s=1, processes=2)}
    assert ends.keys() == BODIES.keys()
    plan = ends["needs_tp"]
    assert place_of(plan) == place_of(best[2])
    assert 0.0 < plan.fitting_s < float("inf")
    assert ends["never"].reason == "no plan: not here"
    assert ends["spins"].reason.startswith("planning took more than 1 CPU seconds")
    assert "KeyError" in ends["raises"].reason
    assert ends["ends"].reason == "the worker process died"


def test_no_more_layouts_than_are_declared(tmp_path: Path) -> None:
    """A planner that needs the fourth layout is not solved there; without layouts nothing is."""
    made = SearchJob(replace(own(tmp_path), only=(*SEARCHED, "needs_tp")))
    plans = found(replace(asked(), fixed=Fixed(micro_batch=1, tp=1)))
    deep = list({place_of(one): one for one in plans}.values())
    assert len(deep) >= MOST_LAYOUTS
    last = found(asked(tp=2))[0]
    (end,) = solve_planners(made, [*deep[:MOST_LAYOUTS], last], limit_s=4, processes=1)
    assert (end.method, end.fits, end.reason) == ("needs_tp", False, "no plan: needs tp > 1")
    assert not list(solve_planners(made, [], limit_s=4, processes=1))


def test_planners_are_said_apart_and_run_again(tmp_path: Path) -> None:
    """Lynx follows the proof, has no place in the table, and its share simulates to its step."""
    target, words = tmp_path / "found.csv", f"{WORDS} --tp 2 --pp 2 --method lynx_heu"
    told = RUN.invoke(app, [*shlex.split(words), "--top", "2", "--notes", "-o", str(target)])
    assert told.exit_code == 0, told.output
    assert "not covered by the proved gap: lynx_heu (planners" in told.output
    before, after = told.output.split("planner: lynx_heu at tp 2")
    assert "proved gap" in before
    assert "than the first row" in " ".join(after.split())
    *rows, planner = csv.DictReader(target.open())
    assert [row["place"] for row in rows] == ["1", "2"]
    assert (planner["place"], planner["bound_s"], planner["name"]) == ("", "", "lynx_heu")
    again = RUN.invoke(app, [*shlex.split(planner["run_with"])[1:], "--json"])
    assert f'"step_s": {float(planner["step_s"])}' in again.output


def test_who_asks_for_none_gets_none() -> None:
    """`--limit 0`, and methods that are no planners."""
    words = [*shlex.split(WORDS), "--tp", "2", "--json", "--top", "1"]
    answer = json.loads(RUN.invoke(app, words).output)
    assert (answer["planners"], answer["planners_without_plan"]) == ([], {})
    answer = json.loads(RUN.invoke(app, [*words, "--method", "lynx_heu", "--limit", "0"]).output)
    assert (answer["planners"], answer["planners_without_plan"]) == ([], {})


def test_a_planner_alone_is_no_search() -> None:
    """Its layouts are those of other plans."""
    with pytest.raises(MethodError, match="lynx_heu: a planner starts from the plans of other"):
        SearchJob(replace(asked(), only=("lynx_heu",)))
    told = RUN.invoke(app, [*shlex.split(WORDS), "--method", "lynx_opt", "--find", "memory"])
    assert isinstance(told.exception, CommandError)
    refusal = "--method lynx_opt: --find takes no planner"
    assert str(told.exception) == refusal
