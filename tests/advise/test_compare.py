"""The comparison: its numbers are those of a run of one method, its rules hold without names."""

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from rematbench.advise.candidates.candidate import CompareConfig, Scalar, Variant, load_compare
from rematbench.advise.compare.comparison import Comparison
from rematbench.advise.compare.compositions import Contender
from rematbench.advise.compare.tuning import Task, Tuning
from rematbench.cli.compare import cells, safest, verdict
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Exchange, Kind
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.breakdown import PARTS, WithoutTraffic, parts_of
from rematbench.evaluate.evaluator import same_plan
from rematbench.evaluate.result import PlannedJob, Result, evaluate_method
from rematbench.evidence.bands import with_ties
from rematbench.inputs.layout import Layout
from rematbench.problem import Problem
from tests.problems import all_methods, make_problem
from tests.serial import compared

DEMO = Layout(pp=4, vpp=2, global_batch=8, zero_stage=1)


def demo(**changes: Any) -> Problem:
    given = {"model": "llama-7b", "cluster": "a800-80gb", "system": "megatron-kwai"}
    return make_problem(**{**given, "layout": DEMO, "seq_len": 12288, **changes})


def job(problem: Problem) -> PlannedJob:
    return PlannedJob(problem=problem, base=problem.base_plan)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return Comparison(job(demo()), load_compare(), limit_s=60).everything()


@cache
def long() -> tuple[Comparison, list[Task]]:
    """Of a job whose methods do not fit by themselves."""
    return compared(demo(seq_len=24576))


def by_name(results: list[Result]) -> dict[str, Result]:
    return {result.method: result for result in results}


# -- its numbers ------------------------------------------------------------------------------


def test_every_method_has_a_result(results: list[Result]) -> None:
    unnamed = {name for name, one in all_methods().methods.items() if not one.moves_passes}
    assert unnamed <= set(by_name(results))


@pytest.mark.parametrize("name", ["pp_offload", "balanced_checkpointing+pp_offload"])
def test_a_result_is_that_of_a_run_alone(results: list[Result], name: str) -> None:
    alone = evaluate_method(demo(), all_methods().resolve(name))
    result = by_name(results)[name]
    assert (result.status, result.verdict) == (alone.status, alone.verdict)
    assert result.plan is not None
    assert alone.plan is not None
    assert same_plan(result.plan) == same_plan(alone.plan)
    assert result.evaluation == alone.evaluation


def test_a_tuned_policy_takes_the_least_that_fits(results: list[Result]) -> None:
    result = next(one for one in results if one.method.startswith("full_recompute:block "))
    layers = int(result.method.split()[-1])
    assert result.status == "ok"
    assert layers > 1
    for number, status in ((layers, "ok"), (layers - 1, "oom")):
        settings = {"method": "block", "num_layers": number}
        run = evaluate_method(demo(), all_methods().resolve("full_recompute", settings))
        assert run.status == status


def test_fitting_results_come_first_and_fastest_first(results: list[Result]) -> None:
    words = ["ok", "oom", "unsupported", "timed out", "failed"]
    order = [words.index(result.status) for result in results]
    assert order == sorted(order)
    speeds = [result.tokens_per_s_per_gpu for result in results if result.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert {"ok", "oom"} <= {result.status for result in results}


def test_parts_add_up_to_the_step_and_gpu_hours_are_those_of_the_speed(
    results: list[Result],
) -> None:
    for result in results:
        if result.fits:
            assert set(result.parts_s) == set(PARTS)
            assert sum(result.parts_s.values()) == pytest.approx(result.step_s)
            assert all(value >= -1e-9 for value in result.parts_s.values())
            rate = result.tokens_per_s_per_gpu
            assert result.gpu_hours_per_1e9_tokens * 3600 * rate == pytest.approx(1e9)


def test_a_composition_may_be_faster_than_its_last_method_alone() -> None:
    """After a method that rebuilds, one that copies has less to copy."""
    results = long()[0].results()
    fastest = results[0]
    names = fastest.family.split("+")
    assert len(names) > 1
    assert by_name(results)[names[-1]].step_s > 2 * fastest.step_s


def test_no_candidate_is_made_twice_and_only_rows_that_fit_are_taken_apart() -> None:
    """What a comparison costs: its simulations, counted by what asks for them."""
    comparison, tasks = long()
    made = [task for task in tasks if isinstance(task, Contender)]
    names = [(one.name, one.pieces is not None) for one in made]
    assert len(names) == len(set(names))
    hosted = {"deep_optimizer_states", "twinflow", "zero_offload"}  # beside each of activations
    assert len([one for one in made if hosted.isdisjoint(one.name.split("+"))]) < 128
    assert [one for one in made if one.pieces]  # pieces, but none of what the base keeps
    assert not [one for one in made if one.pieces and one.base is None]
    apart = sorted(task[1].method for task in tasks if isinstance(task, tuple))
    assert apart == sorted(result.method for result in comparison.results() if result.fits)


def test_equal_plans_are_named_once(results: list[Result]) -> None:
    same = {result.method: result.same_as for result in results if result.same_as}
    assert same["selective_recompute"] == "keep_all"
    unique = [same_plan(one.plan) for one in results if one.plan and not one.same_as]
    assert len(unique) == len(set(unique))


def test_a_broken_planner_takes_nobody_down(tmp_path: Path) -> None:
    template = (
        '"""{name}: a test.\n\nClaim: none.\n"""\n'
        "import msgspec\n\n"
        "class M(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n"
        '    name = "{name}"\n'
        "    def plan(self, problem, base):\n        {body}\n"
    )
    bodies = {"raises": "raise KeyError('x')", "dies": "__import__('os')._exit(3)",
              "spins": "while True: pass"}  # fmt: skip
    for name, body in bodies.items():
        source = template.format(name=name, body=body).replace("name =", "name: 'ClassVar[str]' =")
        source = source.replace("import msgspec", "import msgspec\nfrom typing import ClassVar")
        (tmp_path / f"{name}.py").write_text(source)
    p = demo()
    config = CompareConfig(policies=(), most_methods=1, shown_share=0.0)
    comparison = Comparison(job(p), config, methods=[tmp_path], limit_s=1)
    named = by_name(comparison.everything())
    assert named["raises"].status == "failed"
    assert "KeyError" in named["raises"].reason
    assert (named["dies"].status, named["dies"].reason) == ("failed", "the worker process died")
    assert named["spins"].status == "timed out"
    assert "1 CPU second" in named["spins"].reason
    assert named["keep_all"].status == "oom"


# -- where the step goes ----------------------------------------------------------------------


def test_free_traffic_leaves_compute_and_bubble() -> None:
    p = demo()
    program = lower(p.base_plan, p)
    seconds = action_seconds(p)
    step_s = simulate(program, seconds).step_s
    found = parts_of(p, program, step_s)
    free = frozenset({"pp_send", "pp_recv", "tp", "cp", "dp", "d2h", "h2d"})
    left = simulate(program, WithoutTraffic(seconds, free))
    busy = max(left.busy_s(rank, "compute") for rank in range(4))
    assert found["compute"] + found["recompute"] == pytest.approx(busy)
    assert found["bubble"] == pytest.approx(left.step_s - busy)
    assert found["pp"] + found["host"] == pytest.approx(step_s - left.step_s)
    assert [found[key] for key in ("copies", "dp", "cp", "tp", "recompute")] == [0.0] * 5


def test_what_rounding_leaves_is_no_bubble() -> None:
    """One stage computes all the step long; its seconds are added up in two orders."""
    work = {"layout": Layout(tp=2, dp=4, global_batch=16), "seq_len": 8192}
    p = demo(system="megatron-core", **work)
    program = lower(p.base_plan, p)
    found = parts_of(p, program, simulate(program, action_seconds(p)).step_s)
    assert found["bubble"] == 0.0
    assert min(found.values()) == 0.0


@pytest.mark.parametrize(("system", "zero_stage"), [("megatron-kwai", 1), ("torchtitan", 3)])
def test_free_traffic_slows_no_kernel(system: str, zero_stage: Any) -> None:
    """Kernels beside a collective that takes no time run as fast as alone; its stalls are gone."""
    layout = Layout(tp=2, sp=True, dp=2, zero_stage=zero_stage, global_batch=8)
    p = demo(layout=layout, system=system)
    seconds = action_seconds(p)
    free = WithoutTraffic(seconds, frozenset({"tp", "dp"}))
    actions = {a for r in lower(p.base_plan, p).ranks for b in r.blocks for a in b.actions}
    slowed = [action for action in actions if action.exchange.overlaps == "tp"]
    stalls = [action for action in actions if action.kind is Kind.STALL]
    assert stalls if zero_stage == 3 else slowed
    for action in slowed:
        alone = seconds(replace(action, exchange=Exchange()), 0)
        assert free(action, 0) == alone < seconds(action, 0)
    for action in stalls:
        assert free(action, 0) == 0.0 < seconds(action, 0)


def test_each_part_is_the_one_that_was_added() -> None:
    registry = all_methods()
    p = demo(layout=replace(DEMO, tp=2, sp=True, dp=1, global_batch=8))
    plans = {
        "recompute": registry.resolve("full_recompute").plan(p),
        "copies": registry.resolve("pp_offload", {"alpha": 1.0}).plan(p),
    }
    for part, plan in plans.items():
        outcome = evaluate_method(p, registry.resolve("keep_all"))
        base = parts_of(p, lower(p.base_plan, p), outcome.evaluation.step_s)
        evaluated = p.cost.evaluate(plan)  # type: ignore[arg-type]  # neither method refuses
        more = parts_of(p, lower(plan, p), evaluated.step_s)  # type: ignore[arg-type]
        assert base[part] == 0.0
        assert more[part] > 0.01 * evaluated.step_s
        assert base["tp"] > 0


# -- ties and rows ----------------------------------------------------------------------------


def test_ties_are_within_the_error_of_ratios(results: list[Result]) -> None:
    fitting = [replace(one, tied=False) for one in results if one.fits and not one.same_as]
    speeds = [one.tokens_per_s_per_gpu or 0.0 for one in fitting]
    gap = math.log(speeds[0] / speeds[1])
    for half_width, equal in ((gap * 1.01, True), (gap * 0.99, False)):
        assert [one.tied for one in with_ties(fitting[:2], half_width)] == [False, equal]


def test_the_safest_of_a_tie_leaves_most_of_the_device_free(results: list[Result]) -> None:
    fitting = [one for one in results if one.fits and not one.same_as]
    tie = [replace(one, tied=bool(index)) for index, one in enumerate(fitting)]
    free = {one.method: one.verdict.headroom_bytes for one in fitting if one.verdict}
    most = max(free, key=free.__getitem__)
    assert most != fitting[0].method
    assert f": {most}, " in safest(tie)
    assert safest([replace(one, tied=False) for one in tie]) == ""


def test_a_row_shows_no_speed_of_what_does_not_fit(results: list[Result]) -> None:
    result = by_name(results)["keep_all"]
    row = cells(result, 0.02, Console(width=160))
    assert row[:2] == ["keep_all", "no"]
    assert row[2].startswith("-")
    assert set(row[3:]) == {"-", "0.0"}
    assert verdict([result]).startswith("NOTHING FITS: the closest method is")
    assert verdict([]) == "NOTHING FITS: no method could plan this problem"


def test_tuned_methods_leave_the_reserve_free() -> None:
    """Its offloaded share, and the least layers that are recomputed, are tuned to the device."""
    reserve = 6 * 2**30
    for name in ("balanced_checkpointing+pp_offload", "keep_all+pp_offload"):
        free = []
        for nbytes in (0, reserve):
            p = dataclasses.replace(demo(), reserve_bytes=nbytes)
            outcome = evaluate_method(p, all_methods().resolve(name))
            free.append(outcome.verdict.headroom_bytes)
        assert free[0] < reserve <= free[1]


def test_a_policy_that_does_what_its_method_does_is_left_out() -> None:
    """All layers of a chunk as blocks are full recomputation by other rules."""
    p = demo(seq_len=65536)
    layers = len(p.base_plan.partition[0][0])
    config = load_compare()
    name = f"full_recompute:method=block,num_layers={layers}"
    block = replace(config.policies[0], name=name, smallest="")
    comparison, _ = compared(p, replace(config, policies=(block,), most_methods=1))
    assert block.name not in by_name(comparison.results())
    assert comparison.left_out == 1


def test_groups_of_layers_are_tuned_where_the_largest_does_not_fit() -> None:
    """Inputs fall with the group, what a rebuilt group holds grows: neither end is best."""
    p = make_problem(model="llama-65b", cluster="a800-80gb", system="megatron-kwai", seq_len=8192,
                     layout=Layout(tp=8, sp=True, global_batch=1))  # fmt: skip
    smaller = replace_usable(p)
    tuning = Tuning(PlannedJob(problem=smaller, base=p.base_plan), ())
    groups = Variant("full_recompute", "full_recompute:uniform {}", Scalar("layers"))
    candidate = Contender((groups,), origin="policy")
    value = int(tuning(candidate).method.removeprefix("full_recompute:uniform "))
    resolve = all_methods().resolve
    margins = {n: evaluate_method(smaller, resolve("full_recompute", {"num_layers": n}))
               for n in (1, 2, 4, 8, 16, 32, 64, 80)}  # fmt: skip
    rooms = {n: run.verdict.headroom_bytes for n, run in margins.items() if run.verdict}
    assert rooms[80] < 0
    fitting = [n for n, room in rooms.items() if room >= 0]
    assert value == (min(fitting) if fitting else max(rooms, key=rooms.__getitem__))
    assert value == 2


def replace_usable(p: Problem) -> Problem:
    """The problem on a device between the best and the worst group of layers."""
    method = all_methods().resolve
    rooms = [
        run.verdict.headroom_bytes
        for n in (1, 2)
        if (run := evaluate_method(p, method("full_recompute", {"num_layers": n}))).verdict
    ]
    less = p.cluster.hbm_bytes - (rooms[0] + rooms[1]) // 2
    cluster = replace(p.cluster, hbm_bytes=less)
    return make_problem(model=p.workload.model, cluster=cluster, system=p.system, layout=p.layout,
                        seq_len=p.workload.seq_len)  # fmt: skip
