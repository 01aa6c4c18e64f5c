"""The search: it returns what trying everything returns, its bounds' schedule is legal, and it says
what it proved."""

import csv
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from typer import BadParameter
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.cli.options import percents
from rematbench.lowering.schedule import passes
from rematbench.packages.flags import Engines
from rematbench.plan import Plan
from rematbench.plugins.registry import MethodError
from rematbench.search import answer, questions
from rematbench.search.arms import Arm, Tree
from rematbench.search.events import Turns, in_order
from rematbench.search.halves import Progress, rounds
from rematbench.search.job import Asked, SearchJob
from rematbench.search.probe import Probe
from rematbench.search.shard import Shard
from rematbench.search.space import Choice, Fixed, partitions
from rematbench.search.trial import Tried, tried_plan
from rematbench.simulate.breakdown import PARTS
from rematbench.simulate.evaluate import evaluate
from rematbench.spec.layout import Layout, LayoutError
from rematbench.spec.paths import data_dir
from rematbench.spec.problemspec import ProblemSpec

RUN = CliRunner()
app = command_line()
GIB = 2**30
BOTH = ("balanced_checkpointing", "pp_offload")


def asked(**changes: Any) -> Asked:
    """A job on four small devices, so small that keeping everything does not fit everywhere."""
    spec = {
        "model": "gpt-1.3b",
        "cluster": "a800-80gb",
        "system": "megatron-core",
        "gpus": 4,
        "seq_len": 2048,
        "global_batch": 8,
        "hbm_bytes": 18 * GIB,
        **changes,
    }
    return Asked(spec=ProblemSpec(**spec), only=BOTH)


def last(one: Asked, *, processes: int = 1, shown: int = 1) -> Progress:
    """The end of a search."""
    *_, end = rounds(one, shown=shown, processes=processes)
    return end


def everything(one: Asked) -> list[Tried]:
    """Every plan of the space, tried."""
    made = SearchJob(one)
    arms = _arms(made)
    found = []
    for choice, arm in itertools.product(made.space.choices, arms):
        problem = made.problem(choice)
        most = arm.line.scalar.steps if arm.line and arm.line.scalar else 1
        for step in range(1, most + 1):
            text = arm.text(step)
            tried = tried_plan(choice, problem, text, 0.0, made.registry)
            found += [tried] if tried.evaluation else []
    return found


def _arms(made: SearchJob) -> list[Arm]:
    """All arms, of the tree that leaves none out."""
    choice = next(c for c in made.space.choices if c.layout.pp > 2)
    shard = Shard([choice], made.problem(choice), made.registry)
    probes = {s: p for s in made.singles if isinstance(p := shard.probe(Arm((s,))), Probe)}
    tree = Tree([probes], 3, keeping=not made.asked.only)
    arms = list(tree.roots)
    for arm in arms:
        arms += tree.more(arm)
    return arms


@pytest.mark.parametrize(
    ("hbm_gib", "only"),
    [
        (14, "balanced_checkpointing"),
        pytest.param(18, "memo", marks=pytest.mark.full),
        pytest.param(18, "pp_offload", marks=pytest.mark.full),
        pytest.param(24, "", marks=pytest.mark.soak),
    ],
)
def test_a_small_space_is_searched_as_if_everything_were_tried(hbm_gib: int, only: str) -> None:
    """The fastest plan of all is found where no gap is allowed, and the proof says so."""
    job = replace(asked(hbm_bytes=hbm_gib * GIB), only=(only,) if only else BOTH)
    one = replace(job, within=0.0, fixed=Fixed(tp=1, micro_batch=1, zero_stage=1))
    best = min((tried.step_s for tried in everything(one)), default=float("inf"))
    end = last(one)
    assert end.best_s == pytest.approx(best, rel=1e-9)
    assert end.gap == 0.0
    assert end.bound_s >= end.best_s or best == float("inf")


def test_processes_share_the_work_and_find_the_same() -> None:
    """One process or two: the same best step, and rounds do not depend on time."""
    one = replace(asked(), within=0.0, only=("balanced_checkpointing",))
    alone, shared = last(one), last(one, processes=2)
    assert shared.best_s == pytest.approx(alone.best_s, rel=1e-12)
    assert [t.method for t in last(one, processes=2).found] == [t.method for t in shared.found]


def test_after_the_proof_few_rounds_look_for_more_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand plans are not there, and the rounds after the proof are counted."""
    one = replace(asked(), within=0.5)
    monkeypatch.setattr("rematbench.search.halves.WORK", 20)

    def proved() -> int:
        return sum(at.gap <= one.within for at in rounds(one, shown=1000, processes=1))

    for later in (1, 3):
        monkeypatch.setattr("rematbench.search.halves.LATER", later)
        assert proved() == later + 1


def test_bounds_come_in_order_and_never_above_the_best() -> None:
    """The bound of what is left only rises, and each simulated step is no less than its own."""
    before = 0.0
    for at in rounds(replace(asked(), within=0.0), shown=1, processes=1):
        assert at.bound_s >= before
        before = at.bound_s
        for tried in at.found:
            assert tried.bound_s <= tried.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("pp", "vpp", "count"), [(1, 1, 3), (4, 1, 6), (2, 3, 4), (4, 2, 4)])
def test_the_skeleton_runs_every_pass_after_what_it_waits_for(
    pp: int, vpp: int, count: int
) -> None:
    """A legal order of all passes, each rank's as scheduled."""
    name: Any = "interleaved_1f1b" if vpp > 1 else "1f1b"
    order = in_order(Turns(name, pp, vpp, count))
    for rank in range(pp):
        mine = tuple(item[1:] for item in order if item[0] == rank)
        assert mine == tuple(tuple(item) for item in passes(name, rank, pp, vpp, count))
    at = {
        (forward, micro_batch, chunk * pp + rank): place
        for place, (rank, forward, micro_batch, chunk) in enumerate(order)
    }
    for (forward, micro_batch, stage), place in at.items():
        peer = (forward, micro_batch, stage - 1 if forward else stage + 1)
        assert at.get(peer, -1) < place


def test_uneven_ends_hold_every_layer() -> None:
    """A layer less or more on the ends; the other ranks share the rest."""
    layout = Layout(pp=4, dp=1, global_batch=4)
    found = list(partitions(layout, 24))
    assert found[0].sizes == (6, 6, 6, 6)
    assert all(sum(choice.sizes) == 24 and min(choice.sizes) > 0 for choice in found)
    assert {(5, 7, 7, 5), (7, 5, 5, 7), (5, 7, 6, 6)} <= {choice.sizes for choice in found}
    assert len(found) == len({choice.sizes for choice in found})


def test_what_is_asked_wrongly_is_one_line() -> None:
    """A space without layouts and a method that is none."""
    with pytest.raises(LayoutError, match="gpus 4 must be a multiple of the degrees given = 3"):
        _ = SearchJob(replace(asked(), fixed=Fixed(tp=3))).space
    with pytest.raises(LayoutError, match="no layout of 4 GPUs"):
        _ = SearchJob(replace(asked(global_batch=3), fixed=Fixed(micro_batch=2))).space
    with pytest.raises(MethodError, match="did you mean 'memo'"):
        SearchJob(replace(asked(), only=("memmo",)))


WORDS = (
    "--model gpt-1.3b --cluster a800-80gb --gpus 4 --seq-len 2048 --global-batch 8 --tp 1 "
    "--micro-batch 1 --method balanced_checkpointing --processes 1 --system rematbench"
)


def test_each_line_runs_again(tmp_path: Path) -> None:
    """The CSV has the job, and its command simulates to the same step."""
    target = tmp_path / "found.csv"
    answer = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "3", "-o", str(target)])
    assert answer.exit_code == 0, answer.output
    assert "proved gap: no plan of the space is faster" in answer.output
    kernels = "attention fa2, norm fused, loss in place, on ampere"
    told = f"{kernels}; constants of cluster a800-80gb, stack default"
    assert f"assumes: {told}" in " ".join(answer.output.split())
    rows = list(csv.DictReader(target.open()))
    assert len(rows) == 3
    for row in rows:
        assert row["assumes"] == told
        words = shlex.split(row["run_with"])
        again = RUN.invoke(app, [*words[1:], "--json"])
        assert again.exit_code == 0, again.output
        assert f'"step_s": {float(row["step_s"])}' in again.output


def test_two_plans_are_explained_by_parts_that_add_up() -> None:
    """`--explain` names the terms of the difference; a place that is not there is one line."""
    told = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "2", "--explain", "1", "2"])
    assert told.exit_code == 0, told.output
    table = told.output.split("part of the step")[1]
    cells = [line.split("|") for line in table.splitlines() if line.count("|") == 3]
    terms = {cell[1].strip(): float(cell[2]) for cell in cells}
    assert sum(terms.values()) - terms["step"] == pytest.approx(terms["step"], abs=1e-3)
    wrong = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "2", "--explain", "1", "9"])
    assert "--explain: places of 1 to 2" in str(wrong.exception)


def test_a_job_that_fits_nowhere_says_what_is_short() -> None:
    """NOTHING FITS, and the bytes that the leanest plan lacks."""
    small = ["--hbm-bytes", str(8 * GIB)]
    told = RUN.invoke(app, ["search", *shlex.split(WORDS), *small])
    assert told.exit_code == 0, told.output
    assert "NOTHING FITS: every plan is at least" in told.output


def ask(*words: str) -> str:
    """What `search` prints of the small job."""
    told = RUN.invoke(app, ["search", *shlex.split(WORDS), *words])
    assert told.exit_code == 0, (told.output, told.exception)
    return told.output


def test_an_engine_is_kept_to() -> None:
    """Megatron-core has options for keeping everything and for recomputing whole layers only; the
    best of what it has is not faster than the best of all."""
    every = json.loads(ask("--json", "--top", "1", "--method", "full_recompute"))
    mine = json.loads(
        ask("--json", "--top", "1", "--method", "full_recompute", "--engine", "megatron_core")
    )
    assert mine["rows"][0]["step_s"] >= every["rows"][0]["step_s"]
    assert "balanced" not in mine["rows"][0]["name"]
    assert mine["fell"].get("no options of megatron_core", 0) >= 0
    with pytest.raises(MethodError, match="unknown engine 'megatron'"):
        SearchJob(replace(asked(), engine="megatron"))


def test_percents_may_have_their_sign() -> None:
    """`--within 1%` asks what `--within 1` asks; what is no share of half at most is refused."""
    assert percents("1%") == percents("1 %") == percents("1") == percents(1.0) == 1.0
    assert ask("--within", "20%", "--json") == ask("--within", "20", "--json")
    for text in ("-1", "51%", "nan", "a", "%"):
        with pytest.raises(BadParameter, match=f"'{text}' is not a percentage from 0 to 50"):
            percents(text, 50)
    assert percents("200%") == 200.0  # a plan may take three times as long: `--lose 200`
    with pytest.raises(BadParameter, match="'inf' is not a percentage of 0 or more"):
        percents("inf")


def test_the_least_memory_is_bisected() -> None:
    """Of what is tried, all above the answer reach the speed and all below do not."""
    lines = ask("--find", "memory", "--lose", "1").splitlines()
    tried = [(float(line.split()[0]), "no plan" in line) for line in lines[1:-1]]
    answer = float(lines[-1].removeprefix("ANSWER: ").split()[0])
    assert all(answer <= value for value, short in tried if not short)
    assert all(answer > value for value, short in tried if short)
    assert any(short for _, short in tried)


@pytest.mark.full
def test_the_longest_context_is_doubled_then_bisected() -> None:
    """A multiple of the granule, no shorter than the job's own."""
    small = ("--pp", "1", "--cp", "1", "--hbm-bytes", str(13 * GIB))
    answer = ask("--find", "context", *small).splitlines()[-1]
    assert answer.startswith("ANSWER: ")
    length = int(answer.split()[1].replace(",", ""))
    assert length >= 2048
    assert length % 1024 == 0


def test_the_fewest_gpus_make_the_speed() -> None:
    """Twice as many each time; a speed that nothing reaches is said."""
    assert "NOTHING reaches that" in ask("--find", "gpus", "--speed", "1e12")
    few = ask("--find", "gpus", "--speed", "1000").splitlines()
    assert few[-1].startswith("ANSWER: 1 GPU: ")


@pytest.mark.full
def test_price_tags_only_buy() -> None:
    """More memory or a faster link makes no step longer by more than the gap."""
    lines = [line.split("|") for line in ask("--price-tags", "--within", "0").splitlines()]
    steps = {cell[1].strip(): float(cell[2]) for cell in lines if len(cell) == 5 and "." in cell[2]}
    first = steps.pop("as it is")
    assert {"+16 GiB of device memory", "+10 % of NVLink"} <= set(steps)
    assert all(step <= first * (1 + 1e-3) for step in steps.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--find", "speed"), "--find: one of gpus, context, batch, memory, not 'speed'"),
        (("--find", "gpus"), "say the tokens/s of all GPUs with --speed"),
        (("--find", "batch"), "say the seconds of a step with --step"),
        (("--attention", "fa9"), "'flash', 'unfused', 'fa1'"),
        (("--find", "context", "--json"), "--json: not with --find"),
        (("--find", "context", "-o", "answer.csv"), "-o: not with --find"),
        (("--price-tags", "--explain", "1", "2"), "--explain: not with --price-tags"),
        (("--price-tags", "--find", "context"), "--price-tags: not with --find"),
        (("--json", "--explain", "1", "2"), "--explain: not with --json"),
        (("--speed", "100"), "--speed: only with --find gpus"),
        (("--find", "gpus", "--step", "3"), "--step: only with --find batch"),
    ],
)
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
    wide = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "4"]).output
    monkeypatch.setattr("rematbench.host.console.PIPED_WIDTH", 100)
    narrow = RUN.invoke(app, ["search", *shlex.split(WORDS), "--top", "4"]).output
    assert "no room for: " in narrow
    assert "no room for: " not in wide
    rows = [line.split("|") for line in wide.splitlines() if re.match(r"\| [1-4] ", line)]
    assert len(rows) == 4
    for row in rows:
        assert any(
            {row[10].strip(), row[11].strip()} <= {*text.split()} for text in narrow.splitlines()
        )
    table = narrow[narrow.index("step s") : narrow.index("no room for")]
    assert max(map(len, table.splitlines())) <= 100


def test_a_named_method_is_in_every_plan_of_the_answer() -> None:
    """Keeping everything fits and is faster; that is another method."""
    roomy = replace(asked(hbm_bytes=40 * GIB), only=())
    free, only = last(roomy), last(replace(roomy, only=("full_recompute",)))
    assert free.found[0].method == "keep_all"
    assert all(one.method.startswith("full_recompute") for one in only.found)
    assert only.best_s > free.best_s
    assert only.gap <= roomy.within
    both = last(replace(roomy, only=("full_recompute", "keep_all")))
    assert both.best_s == free.best_s


def test_the_fewest_gpus_need_be_no_power_of_two() -> None:
    """Inside a node every number is tried where four are too few and eight reach the speed."""
    one = asked(gpus=8, global_batch=24, hbm_bytes=40 * GIB)
    one = replace(one, only=("keep_all",), fixed=Fixed(micro_batch=1, zero_stage=1))
    spec = one.spec
    six = last(replace(one, spec=replace(spec, gpus=6)))
    speed = 0.98 * spec.global_batch * spec.seq_len / six.best_s
    found = list(questions.fewest_gpus(one, speed, 1))
    assert [answer.value for answer in found if answer.tried] == [8, 6]


def test_the_fewest_gpus_are_whole_nodes_with_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def reached(one: Asked, step_s: float, processes: int) -> Tried | None:
        tried.append(one.spec.gpus)
        return cast(Tried, "a plan") if one.spec.gpus in (48, 56, 64) else None

    monkeypatch.setattr(questions, "reached", reached)
    one = asked(gpus=64, global_batch=24)  # nodes of eight GPUs
    answers = list(questions.fewest_gpus(one, 1e3, 1))
    assert tried == [1, 2, 4, 8, 16, 32, 64, 40, 48]
    assert [answer.value for answer in answers if answer.tried] == [64, 48]
    tried.clear()
    fixed = replace(one, fixed=Fixed(pp=3))  # of 40 GPUs no layout has three ranks of a pipeline
    list(questions.fewest_gpus(fixed, 1e3, 1))
    assert 40 not in tried
    assert tried[-1] == 48


def test_an_interrupted_question_prints_its_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C loses no answer, and the exit code says that it is not proved."""
    whole = questions.longest_context

    def stopped(one: Asked, processes: int) -> Iterator[questions.Answer]:
        yield next(whole(one, processes))
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
    assert "stopped before anything was bounded or simulated" in answer.output
    assert "0 of 0" not in answer.output


@pytest.mark.full
def test_a_published_layout_stands_beside_the_best(tmp_path: Path) -> None:
    """A line for a row: both steps are simulated, the loss is theirs, and a part decides."""
    target = tmp_path / "layouts.csv"
    sheet = data_dir("published") / "runs.csv"
    told = RUN.invoke(app, ["layouts", str(sheet), "--table", "AE minimum demo", "-o", str(target)])
    assert told.exit_code == 0, (told.output, told.exception)
    rows = list(csv.DictReader(target.open()))
    assert rows
    for row in (row for row in rows if row.get("loss")):
        loss = 1.0 - float(row["step_s"]) / float(row["pred_step_s"])
        assert float(row["loss"]) == pytest.approx(loss)
        assert float(row["gap"]) <= 0.005
        assert row["decides"] in PARTS
    wrong = RUN.invoke(app, ["layouts", str(sheet), "--table", "Figure 99", "-o", str(target)])
    assert "no row of table 'Figure 99'" in str(wrong.exception)


def test_pieces_free_what_a_family_seems_to_keep(tmp_path: Path) -> None:
    """What the head keeps without pieces is no bound of plans with them."""
    stack = tmp_path / "sharded.yaml"
    stack.write_text(
        "name: sharded\nbase: megatron-core\nzero_stages: {value: [3], source: mine}\n"
    )
    spec = ProblemSpec(
        model="llama-3.1-8b", cluster="h100-80gb", system=str(stack), gpus=8, cp=8,
        seq_len=1 << 20, global_batch=1,
    )  # fmt: skip
    only = ("full_recompute", "mst")
    found = last(Asked(spec=spec, fixed=Fixed(cp=8, zero_stage=3), only=only)).found
    assert "full_recompute+mst" in found[0].method


def test_a_method_with_settings_is_searched_as_it_is_typed() -> None:
    """So is a policy by its name; what is a composition already is refused."""
    made = SearchJob(replace(asked(), only=("memo:alpha=0.3", "full_recompute:block 1")))
    assert [one.text for one in made.singles] == ["memo:alpha=0.3", "full_recompute:block 1"]
    assert [one.composes for one in made.singles] == [True, False]
    with pytest.raises(MethodError, match="one method at a time"):
        _ = SearchJob(replace(asked(), only=("memo+mst",))).singles


def test_gpipe_is_no_faster_and_no_leaner() -> None:
    """In a small job without copies; what the space loses without GPipe: benchmarks/gpipe.py."""
    made = SearchJob(asked(hbm_bytes=80 * GIB))
    deep = [one for one in made.space.choices if one.layout.pp > 2 and one.layout.vpp == 1]
    for choice in deep[:6]:
        problem = made.problem(choice)
        for text in ("keep_all", "selective_recompute", "full_recompute"):
            plan = made.registry.resolve(text, None, problem).plan(
                problem, choice.base(problem.base_plan)
            )
            assert isinstance(plan, Plan)
            one, gpipe = (
                evaluate(problem, replace(plan, schedule=name)) for name in ("1f1b", "gpipe")
            )
            assert gpipe.step_s >= one.step_s * (1 - 1e-9)
            assert max(gpipe.peak_device_bytes) >= max(one.peak_device_bytes)


def test_joint_plans_are_counted() -> None:
    """Each layout with each arm, at every step of its scalars."""
    made = SearchJob(asked(gpus=2))
    search = made.search()
    arms = list(search.tree.roots)
    for arm in arms:
        arms += search.tree.more(arm)
    expected = 0
    for choice, arm in itertools.product(made.space.choices, arms):
        scalars = [part.scalar for part in arm.parts if part.scalar]
        sizes = {"share": 32, "layers": max(choice.sizes)}
        assert all(one.steps in (0, 32) for one in scalars)
        counts = [len(one.values) or sizes[one.scale] for one in scalars]
        expected += math.prod(counts)
    assert search.plans == expected > len(made.space.choices)
    assert last(asked(gpus=2)).plans == expected


def test_plans_of_one_layout_tie_by_the_error_of_one_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That error is smaller than the error between layouts."""
    made = SearchJob(asked(hbm_bytes=80 * GIB))
    first, second = made.space.choices[:2]

    def tried(choice: Choice, text: str) -> Tried:
        return tried_plan(choice, made.problem(choice), text, 0.0, made.registry)

    one, same, other = (
        tried(first, "keep_all"), tried(first, "full_recompute"), tried(second, "full_recompute")
    )  # fmt: skip
    slower = max(same.step_s, other.step_s) / one.step_s
    bands = {True: 0.0, False: math.log(slower) + 0.01}
    monkeypatch.setattr(answer, "ratio_band", lambda *, one_layout: bands[one_layout])
    assert [found.tied for found in answer.judged(made, [one, same, other])] == [False, False, True]


def test_the_simplest_plan_of_the_tie_is_named() -> None:
    """Fewest methods first, then fewest host bytes; what does not tie is no choice."""
    made = SearchJob(asked())
    (best,) = answer.judged(made, last(asked()).near(1))
    assert best.methods == len(best.tried.method.split("+"))
    assert answer.with_engines(best).runs_on == Engines(best.job.problem).of(
        made.registry.resolve(best.tried.method, None, best.job.problem).plan(best.job.problem)  # type: ignore[arg-type]
    )
    best = replace(best, methods=2)
    slower, simple = replace(best, methods=0), replace(best, methods=1, tied=True)
    assert answer.simplest([best, slower, simple]) is simple
    assert answer.simplest([best, slower]) is None
    assert answer.simplest([]) is None
    told = RUN.invoke(app, ["search", *shlex.split(WORDS)]).output
    assert re.search(r"\nFASTEST: balanced_checkpointing at dp 4, [\d,]+ tokens/s/GPU \(", told)
    assert "runs on: M megatron_core" in told


def test_a_number_of_gpus_without_a_layout_reaches_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error stays in this process; a worker's would read as a lack of memory."""
    assert questions.reached(asked(gpus=11), math.inf, processes=2) is None
    assert "Traceback" not in capfd.readouterr().err


def test_the_default_stack_of_an_engine_is_its_own() -> None:
    """DeepSpeed runs no stack of Megatron; a stack that is given stays."""
    job = "--model gpt-1.3b --cluster a800-80gb --gpus 2 --seq-len 2048 --global-batch 4 --top 1"
    words = ["search", *shlex.split(job), "--engine", "deepspeed", "--processes", "1"]
    assert "(a800-80gb), stack deepspeed" in RUN.invoke(app, words).output
    given = RUN.invoke(app, [*words, "--system", "huggingface-deepspeed"]).output
    assert "stack huggingface-deepspeed" in given
