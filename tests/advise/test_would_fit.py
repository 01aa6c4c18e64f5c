"""What would make a job fit: each change that is named holds, and a little less does not."""

import json
import re
from dataclasses import replace as replaced
from typing import Any

from msgspec.structs import replace

import rematbench
from rematbench.advise.candidates.candidate import Variant
from rematbench.advise.compare.compositions import Contender
from rematbench.advise.compare.tuning import Tuning
from rematbench.advise.compare.would_fit import GIB, MIB, STEP_BYTES, would_fit
from rematbench.evaluate.result import PlannedJob, Result, evaluate_plan
from rematbench.inputs.layout import Layout
from rematbench.problem import Problem
from tests.problems import all_methods, make_problem
from tests.typed import typed


def short(**cluster: int) -> Problem:
    layout = Layout(dp=4, zero_stage=1, global_batch=4)
    problem = make_problem(model="llama-7b", cluster="a800-80gb", system="megatron-kwai",
                           layout=layout, seq_len=8192)  # fmt: skip
    return replaced(problem, cluster=replace(problem.cluster, **cluster))


def results(problem: Problem, *names: str) -> list[Result]:
    tuning = Tuning(PlannedJob(problem=problem, base=problem.base_plan), ())
    return [tuning(Contender((Variant(name, name),), origin="method")) for name in names]


def test_bytes_that_are_named_are_enough_and_hardly_more() -> None:
    problem = short(hbm_bytes=60 * GIB)
    found = results(problem, "keep_all", "full_recompute")
    line = would_fit(problem, found, all_methods())[0]
    assert line.endswith("(full_recompute)")
    more = float(re.findall(r"[0-9.]+", line)[0]) * GIB
    for extra, status in ((more + 6 * MIB, "ok"), (more - STEP_BYTES - 6 * MIB, "oom")):
        larger = short(hbm_bytes=60 * GIB + round(extra))
        plan = found[1].plan
        assert plan is not None
        assert evaluate_plan(larger, plan).status == status


def test_a_short_host_is_named_as_such() -> None:
    problem = short(host_bytes=8 * GIB)
    result = results(problem, "memo")[0]
    device, host = result.verdict.headroom_bytes < 0, result.verdict.host_headroom_bytes < 0
    assert host
    line = would_fit(problem, [result], all_methods())[0]
    assert ("on each device" in line, "host memory on each node" in line) == (device, host)


def test_twice_the_gpus_is_the_fastest_layout_that_fits() -> None:
    problem = short(hbm_bytes=44 * GIB)
    found = results(problem, "full_recompute")
    lines = would_fit(problem, found, all_methods())
    twice = next(line for line in lines if line.startswith("on 8 GPUs"))
    degrees = {key: int(value) for key, value in re.findall(r"(tp|cp|pp|dp) (\d+)", twice)}
    layout = replace(problem.layout, **degrees)
    larger = make_problem(model="llama-7b", cluster=problem.cluster, system="megatron-kwai",
                          layout=layout, seq_len=8192)  # fmt: skip
    plan = all_methods().resolve("full_recompute").plan(larger)
    outcome = evaluate_plan(larger, plan)  # type: ignore[arg-type]  # it plans everything
    assert outcome.status == "ok"
    assert f"{outcome.evaluation.tokens_per_s_per_gpu:.4g} tokens" in twice


def test_what_nothing_helps_has_no_line() -> None:
    assert would_fit(short(), [], all_methods()) == []


# -- a job's memory in one answer: the same bytes as simulate, and options that fit when tried -----


JOB: dict[str, Any] = {"cluster": "a100-80gb", "gpus": 4, "micro_batch": 2, "seq_len": 4096}
JOB |= {"system": "huggingface-flash"}
WORDS = "--cluster a100-80gb --gpus 4 --seq-len 4096 --global-batch 8 --system huggingface-flash"


def test_the_bytes_are_those_of_simulate_and_add_up() -> None:
    answer = rematbench.estimate("llama-3.1-8b", **JOB)
    job = rematbench.Problem(model="llama-3.1-8b", global_batch=8, **JOB)
    run = rematbench.simulate(job, "keep_all")
    assert not answer.fits
    assert answer.headroom_bytes == run.headroom_bytes
    assert sum(answer.ranks[0].values()) == run.device_total_bytes
    assert str(answer).splitlines()[0].startswith("OUT OF MEMORY: ")


def test_a_tight_plan_beyond_its_margin_says_what_is_called_tight() -> None:
    facts = {"cluster": "h100-80gb", "gpus": 8, "seq_len": 12288}
    answer = rematbench.estimate("llama-3.1-8b", method="full_recompute", **facts)
    assert answer.margin_bytes < answer.headroom_bytes
    assert re.search(r"FITS, TIGHT: .*; below [.\d]+ GiB a plan is called tight", answer.verdict)


def test_options_fit_when_they_are_tried() -> None:
    answer = rematbench.estimate("llama-3.1-8b", **JOB)
    tried = [
        one.removeprefix("would fit: ").partition(":")[0].split(", ") for one in answer.options
    ]
    assert ["full_recompute"] in tried
    assert ["--micro-batch 1"] in tried
    for words in tried:
        options = [word for text in words if text.startswith("--") for word in text.split()]
        method = [
            word for text in words if not text.startswith("--") for word in ("--method", text)
        ]
        batch = [] if "--micro-batch" in options else ["--micro-batch", "2"]
        ran = typed("fit", "llama-3.1-8b", *WORDS.split(), *options, *method, *batch, "--json")
        assert ran.code in (0, None), (words, ran.err)
        assert json.loads(ran.out)["verdict"].startswith("FITS: ")
