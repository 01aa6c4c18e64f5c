"""Searches of many jobs: what their lines say, and that they are simulated again; hosted states."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from rematbench.advise.search import questions
from rematbench.advise.search.request import Progress, SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.cli.app import command_line
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster
from rematbench.inputs.paths import data_dir
from rematbench.paper.studies.package_spaces import SpaceJob, Spaces, load_spaces, searched_spaces
from rematbench.paper.studies.published_layouts import search_question
from rematbench.paper.studies.published_sweeps import searched_sweeps
from rematbench.paper.tables.searched import checked, layout_text, searched_table
from rematbench.worlds.packages.flags import Engines
from tests.everything import ALONE
from tests.problems import all_methods

GIB = 2**30
JOB = {"model": "gpt-1.3b", "cluster": "a800-80gb", "system": "megatron-core", "seq_len": 2048}
SEARCHED = data_dir("config").parent / "results" / "searched"
RUN, app = CliRunner(), command_line()


def asked(*only: str, **changes: Any) -> SearchRequest:
    """A job on four small devices."""
    spec = {**JOB, "gpus": 4, "global_batch": 8, "hbm_bytes": 18 * GIB, **changes}
    return SearchRequest(spec=Job(**spec), only=only)


NAMES = ("layouts", "spaces", "sweeps", "experts")


@pytest.mark.parametrize("name", NAMES)
def test_committed_answers_are_simulated_again(name: str) -> None:
    """The first and the last plan take their steps still; a step that is wrong is told."""
    rows = [row for row in read_sheet(SEARCHED / f"{name}.csv") if row["step_s"]]
    some = [rows[0], rows[-1]]
    assert checked(name != "sweeps", some) == ""
    wrong = {**rows[0], "step_s": str(1.01 * float(rows[0]["step_s"]))}
    if wrong["run_with"]:
        assert "the cost model has changed; search again" in checked(name != "sweeps", [wrong])
    text = searched_table(name, rows).csv()
    assert all(row["name"] in text for row in some)


def test_a_layout_says_what_is_unusual() -> None:
    usual = {"tp": "4", "cp": "1", "pp": "8", "vpp": "6", "dp": "8", "ulysses": "1"}
    usual |= {"micro_batch": "1", "zero_stage": "1", "partition": "1,1", "run_with": ""}
    assert layout_text(usual) == "4-1-8-6-8"
    other = {"vpp": "1", "zero_stage": "3", "micro_batch": "2", "partition": "3,4,4,3"}
    other |= {"run_with": "rematbench simulate keep_all --partition 3,4,4,3"}
    assert layout_text({**usual, **other}) == "4-1-8-1-8 mb 2 z 3 ends 3 3"
    assert layout_text({"tp": ""}) == ""


def test_no_more_rounds_are_worked_than_are_asked_for() -> None:
    assert len(list(rounds(asked(), shown=10, processes=1, most_rounds=1))) == 1


def test_a_package_alone_is_not_faster_than_the_whole_space() -> None:
    spec = {**JOB, "gpus": 4, "global_batch": 8, "hbm_bytes": 16 * GIB}
    job = SpaceJob(name="small", why="a test", source="none", published_mfu={"all": 0.5}, **spec)
    found = searched_spaces(
        Spaces(within=0.005, jobs=(job,), spaces=("all", "megatron_core")), processes=1
    )
    every, mine = found
    assert every["step_s"] <= mine["step_s"] * 1.005
    assert (every["published_mfu"], mine["published_mfu"]) == (0.5, None)
    assert load_spaces(data_dir("config") / "searched.yaml").jobs[0].published_mfu["all"] == 0.427


def test_no_option_of_megatron_core_here_hosts_the_optimizer() -> None:
    job = SearchJob(asked(cluster="h100-80gb-dos"))
    layout = job.space.choices[0].layout
    on_device, hosted = (c for c in job.space.choices if c.layout == layout)
    assert (on_device.hosted, hosted.hosted) == (False, True)
    for choice, runs in ((on_device, ("megatron_core",)), (hosted, ())):
        problem = job.problem(choice)
        assert Engines(problem, "megatron_core").of(problem.base_plan) == runs


def test_an_engine_asked_alone_answers_as_beside_the_others() -> None:
    made = SearchJob(asked())
    choices = [choice for choice in made.space.choices if choice.layout.pp == 4][:2]
    for choice in choices:
        problem = made.problem(choice)
        every, alone = Engines(problem), Engines(problem, "megatron_core")
        for name in ("keep_all", "full_recompute", "pp_offload:alpha=0.5", "keep_all"):
            plan = made.registry.resolve(name, None, problem).plan(problem)
            assert alone.of(plan) == tuple(n for n in every.of(plan) if n == "megatron_core")


def test_a_sweep_loses_what_its_pick_loses() -> None:
    """Of four measured layouts the one predicted to be fastest loses what it is slower; one that
    fills the device is picked only where nothing stays free."""
    rows = read_sheet(data_dir("published") / "runs_more.csv")
    first = next(row for row in rows if "single node" in row["source"] and row["pp"] == "1")
    layouts = (("1", "1"), ("2", "1"), ("1", "2"), ("2", "2"))
    own = [
        {**first, "gpus": "4", "tp": tp, "pp": pp, "dp": str(4 // int(tp) // int(pp)),
         "tokens_per_s_per_gpu": str(1000 * (n + 1)), "pred_tokens_per_s_per_gpu": str(10 + n),
         "pred_status": "ok", "pred_headroom_bytes": str(48 * GIB if n < 3 else 0),
         "pred_device_total_bytes": str(30 * GIB if n < 3 else 78 * GIB)}
        for n, (tp, pp) in enumerate(layouts)
    ]  # fmt: skip
    own.append({**own[0], "recompute": "nobody's", "pred_status": "unsupported"})
    (line,) = searched_sweeps(own, within=0.02, processes=1)
    assert (line["model"], line["rows"]) == (first["model"], 5)
    assert line["regret"] == pytest.approx(0.25)
    assert line["regret_filled"] == 0.0
    assert line["tokens_per_s_per_gpu"] == pytest.approx(12 * (1 + line["over_pick"]))


def test_what_has_no_name_is_searched_as_it_is() -> None:
    """A model and a stack that a command can name are named; one of a user's own is not."""
    rows = read_sheet(data_dir("published") / "runs.csv")
    case = read_case(next(row for row in rows if row["table"] == "Figure 9"), all_methods())
    assert search_question(case, 0.01).spec.system == case.system.name
    assert search_question(case, 0.01).spec.model == case.model.name
    mine = replace(case.system, name="mine")
    assert search_question(replace(case, system=mine), 0.01).spec.system is mine


def test_what_would_fit_is_found_by_a_search() -> None:
    """Each change is a plan that fits with it; and the answer as JSON has them too."""
    words = "--model gpt-1.3b --cluster a800-80gb --gpus 1 --seq-len 2048 --global-batch 8"
    small = [*shlex.split(words), "--hbm-bytes", str(12 * GIB), "--method", "full_recompute"]
    told = RUN.invoke(app, ["search", *small, "--json"])
    assert told.exit_code == 0, told.output
    answer = json.loads(told.output)
    assert answer["rows"] == []
    assert answer["assumes"].startswith("attention fa2, ")
    more, gpus = answer["would_fit"]
    assert more.startswith("with ")
    assert re.match(r"(on|with) at most [24] GPUs: ", gpus)
    enough = float(next(word for word in more.split() if word[0].isdigit())) + 12
    wide = [*small[:-4], "--hbm-bytes", str(round((enough + 0.1) * GIB)), *small[-2:]]
    assert "NOTHING FITS" not in RUN.invoke(app, ["search", *wide]).output


def test_device_memory_is_not_asked_for_where_none_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all plans fell to host memory only that and more GPUs are tried."""
    tried: list[Job] = []

    def none(one: SearchRequest, *_: object) -> None:
        tried.append(one.spec)

    monkeypatch.setattr(questions, "reached", none)
    assert list(questions.would_fit(asked(), Progress(excluded={"host memory": 3}), ALONE)) == []
    hosts = [one.cluster.host_bytes for one in tried if isinstance(one.cluster, Cluster)]
    assert hosts == [2 * load_cluster("a800-80gb").host_bytes]
    assert [one.gpus for one in tried[1:]] == [8, 16]


def test_states_go_to_the_host_where_that_is_costed(tmp_path: Path) -> None:
    """On one device that does not hold them the best has its optimizer on the host, and replays so;
    without a rate of the host nothing is hosted."""
    words = "--model gpt-1.3b --cluster h100-80gb-dos --gpus 1 --seq-len 2048 --global-batch 4"
    small = [*shlex.split(words), "--hbm-bytes", str(16 * GIB), "--method", "full_recompute"]
    target = tmp_path / "found.csv"
    told = RUN.invoke(app, ["search", *small, "--top", "2", "-o", str(target)])
    assert told.exit_code == 0, told.output
    assert "optimizer on host" in told.output
    row = next(csv.DictReader(target.open()))
    assert row["optimizer"] == "host"
    assert "--optimizer host" in row["run_with"]
    again = RUN.invoke(app, [*shlex.split(row["run_with"])[1:], "--json"])
    assert f'"step_s": {float(row["step_s"])}' in again.output
    kept = RUN.invoke(app, ["search", *small, "--optimizer", "device"])
    assert "NOTHING FITS" in kept.output
    spec = Job(**{**JOB, "gpus": 1, "global_batch": 4})
    assert not any(
        c.hosted for c in SearchJob(SearchRequest(spec=spec)).space.choices
    )  # no rate there


def test_no_search_moves_parameters_to_the_host() -> None:
    homes = {"optimizer": "host", "parameters": "host", "system": "deepspeed"}
    spec = Job(**{**JOB, **homes, "cluster": "h100-80gb-dos", "gpus": 1, "global_batch": 4})
    with pytest.raises(ConfigError, match="parameters: 'host': search does not support parameters"):
        SearchJob(SearchRequest(spec=spec))


def test_an_interrupt_keeps_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it looks for what would fit, or solves planners, the search itself has ended."""

    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("rematbench.cli.search_answer.would_fit", interrupted)
    monkeypatch.setattr("rematbench.cli.search_answer.solve_planners", interrupted)
    words = "--model gpt-1.3b --cluster a800-80gb --gpus 1 --seq-len 2048 --global-batch 8 --json"
    told = RUN.invoke(app, ["search", *shlex.split(words), "--hbm-bytes", str(4 * GIB)])
    assert (told.exit_code, told.stderr.count("interrupted")) == (0, 1)
    answer = json.loads(told.stdout)
    assert (answer["rows"], answer["would_fit"]) == ([], [])
    told = RUN.invoke(app, ["search", *shlex.split(words), "--top", "1"])
    assert (told.exit_code, told.stderr.count("interrupted")) == (0, 1)
    answer = json.loads(told.stdout)
    assert (len(answer["rows"]), answer["planners"]) == (1, [])


SEARCHED_TABLES = (
    *("table", "searched_layouts", "-o", "tables"),
    *(word for name in NAMES for word in ("--input", f"{name}=layouts.csv")),
)


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (("make", "results/paper/matrix/llama3-8b.short.csv"), "seq_len"),
        (("make", "build/searched/sweeps.csv"), "pred_headroom_bytes"),
        (("make", "build/searched/layouts.csv"), "tp"),
        (SEARCHED_TABLES, "partition"),
    ],
)
def test_a_sheet_without_its_columns_is_one_line(
    words: tuple[str, ...], lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ("searched/cells", "published/runs", "paper/tables/predictions")
    places = [f"results/{name}.csv" for name in (*results, "paper/predictions_more")]
    for name in ("layouts.csv", *places):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "candidate,status,layout,pred_status,gap,run_with,step_s\n,ok,,ok,0,x,1\n"
        )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(data_dir("config"))
    told = RUN.invoke(app, list(words))
    assert told.exit_code != 0
    assert "lacks the columns" in str(told.exception)
    assert lacks in str(told.exception)


def test_searches_made_again_may_differ_by_rounding_alone(tmp_path: Path) -> None:
    """Another order of sums is no other answer; another step, layout or count is one, and said."""
    rows = list(csv.reader((SEARCHED / "cells.csv").read_text(encoding="utf-8").splitlines()))
    at = {name: rows[0].index(name) for name in ("step_s", "gap", "tp", "simulations")}
    line = next(i for i, row in enumerate(rows) if row[at["gap"]] not in ("", "gap"))
    folders = tmp_path / "made", tmp_path / "committed"

    def again(column: str, text: str) -> Result:
        changed = [list(row) for row in rows]
        changed[line][at[column]] = text
        for folder, cells in zip(folders, (changed, rows), strict=True):
            folder.mkdir(exist_ok=True)
            with (folder / "cells.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(cells)
        return RUN.invoke(app, ["expect", "--searches", *map(str, folders)])

    step = float(rows[line][at["step_s"]])
    assert again("step_s", str(step * (1 + 1e-12))).exit_code == 0
    assert again("gap", str(float(rows[line][at["gap"]]) + 1e-13)).exit_code == 0
    for column, text in (("step_s", str(step * 1.0001)), ("tp", "64"), ("simulations", "999")):
        told = str(again(column, text).exception)
        assert f"made/cells.csv: 1 cells differ; the first: row {line}, {column}: '{text}'" in told
    (folders[0] / "cells.csv").unlink()
    told = str(RUN.invoke(app, ["expect", "--searches", *map(str, folders)]).exception)
    assert "made/cells.csv: no such file" in told
    assert "no committed searches" in str(
        RUN.invoke(app, ["expect", "--searches", str(folders[0]), str(folders[0])]).exception
    )
