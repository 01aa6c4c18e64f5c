"""fp32 and fp64 have their own bytes and rates, or are refused by name; fp16 is bf16."""

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Result, evaluate_method
from rematbench.evidence.bands import with_band
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.load import load_cluster, load_model, load_system, names
from rematbench.inputs.precision import in_precision
from rematbench.inputs.system import with_facts
from rematbench.workload import Precision
from tests.problems import all_methods, stacks
from tests.typed import typed

PEAKS = {
    "a800-80gb": {"fp32": 19.5e12, "tf32": 156e12, "fp64": 19.5e12},
    "h100-80gb": {"fp32": 67e12, "tf32": 494.75e12, "fp64": 67e12},
    "h800-80gb": {"fp32": 67e12, "tf32": 494.75e12, "fp64": 1e12},
    "b200-180gb": {"fp32": 75e12, "tf32": 1125e12, "fp64": 37e12},
}
"""Dense peaks of NVIDIA's data sheets in FLOP/s."""
STATES = {"fp32": (4, 4, 8), "fp64": (8, 8, 16)}
"""Bytes of a parameter, its gradient and Adam's moments."""


def simulated(method: str = "full_recompute", **given: Any) -> Result:
    """The result of a method on a job of eight GPUs."""
    sizes = {"model": "llama-7b", "system": "megatron-core", "gpus": 8, "tp": 4}
    sizes |= {"seq_len": 4096, "global_batch": 64, "cluster": "a800-80gb"}
    problem = make_problem(Job(**{**sizes, **given}))
    return with_band(evaluate_method(problem, all_methods().resolve(method, None, problem)))


@pytest.mark.parametrize("precision", STATES)
@pytest.mark.parametrize("name", names("system"))
def test_states_have_the_width_of_the_precision(name: str, precision: Precision) -> None:
    """16 bytes a parameter in fp32 with Adam, twice as many in fp64; a stack that copies parameters
    of every width has a copy more, and no stack changes twice."""
    system = load_system(name)
    for stage in (0, 1, 3):
        wide = in_precision(system, precision, stage)
        parameter, gradient, moments = STATES[precision]
        copies = system.states.fp32_copy == "always" or (
            system.states.fp32_copy == "zero" and stage > 0
        )
        assert (wide.states.param_bytes, wide.states.grad_bytes) == (parameter, gradient)
        assert wide.states.optimizer_bytes == moments + parameter * copies
        assert wide.states.late_state_bytes <= wide.states.optimizer_bytes
        assert (
            min(wide.states.reduce_bytes, wide.states.gather_bytes, wide.host.host_grad_bytes)
            >= parameter
        )
        assert in_precision(wide, precision, stage) == wide
        for half in ("bf16", "fp16"):
            assert in_precision(system, half, stage) is system


def test_fp16_is_priced_as_bf16() -> None:
    bf16, fp16 = (simulated(precision=precision).evaluation for precision in ("bf16", "fp16"))
    assert bf16 == fp16


@pytest.mark.parametrize(("cluster", "precision"), [(c, p) for c in PEAKS for p in STATES])
def test_peaks_are_those_of_the_data_sheets(cluster: str, precision: Precision) -> None:
    given = {"cluster": cluster, "precision": precision, "attention": "unfused"}
    found = simulated(**given).problem
    assert found.cost.peak_flop_per_s == pytest.approx(PEAKS[cluster][precision], rel=0.01)
    tf32 = with_facts(load_system("megatron-core"), tf32=True)
    wider = PEAKS[cluster]["tf32" if precision == "fp32" else precision]
    assert simulated(**given, system=tf32).problem.cost.peak_flop_per_s == pytest.approx(
        wider, rel=0.01
    )


def test_a_file_may_give_its_own_peak() -> None:
    own = replace(load_cluster("h100-80gb"), fp32_flop_per_s=4.4e13)  # as an H20
    given = {"precision": "fp32", "attention": "unfused"}
    slow, fast = (simulated(**given, cluster=one) for one in (own, "h100-80gb"))
    assert slow.problem.cost.peak_flop_per_s == 4.4e13
    assert slow.step_s > fast.step_s


OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("h800-80gb", "b200-180gb")]


KERNELS = ("attention", "wide_attention", "compiled", "eager_operators", "model_parallel", "tf32")
"""Facts that decide which kernels a step has, and their rates."""


@pytest.mark.parametrize("cluster", ["a800-80gb", *OTHERS])
@pytest.mark.parametrize("name", stacks(*KERNELS))
def test_every_stack_is_below_the_peak_of_the_precision_or_says_why(
    name: str, cluster: str
) -> None:
    system = load_system(name)
    layout = {"tp": 4} if "tp" in system.accepts.model_parallel else {"tp": 1, "zero_stage": 3}
    for precision in get_args(Precision):
        given = {"system": name, "cluster": cluster, "precision": precision, **layout}
        given |= {"seq_len": 2048, "global_batch": 8}
        try:
            found = simulated(**given)
        except RateError as error:
            refused = str(error)
            if "FlashAttention-3" not in refused:  # of this GPU, in whatever precision
                assert precision in STATES
                assert f"in {precision}: " in refused
                assert refused.endswith("(--attention unfused has a kernel)")
            found = simulated(**given, attention="unfused")
        if found.not_timed:
            assert found.not_timed.startswith("time not modelled: attention ")
            continue
        assert 0 < found.evaluation.hfu < 1
        assert ("precision" in found.error_band.outside) == (precision in STATES)
        if precision in STATES:
            rate = found.evaluation.hfu * found.problem.cost.peak_flop_per_s
            assert rate < PEAKS[cluster][precision]


def test_fp32_is_as_slow_as_its_peak_and_as_large_as_its_parameters() -> None:
    """llama-7b on eight A800, tp 4 and dp 2: 6.28 GiB of parameters and of gradients a rank, half
    of 8 bytes of moments, and no flash kernel."""
    words = (
        "simulate", "full_recompute", "--model", "llama-7b", "--cluster", "a800-80gb", "--gpus",
        "8", "--tp", "4", "--seq-len", "4096", "--global-batch", "64", "--precision",
    )  # fmt: skip
    for precision in STATES:
        ran = typed(*words, precision)
        assert ran.code not in (0, None)
        assert ran.err.count("\n") == 1
        assert f"attention 'fa2' in {precision}: " in ran.err
        assert "--attention unfused has a kernel" in ran.err
        told = " ".join(typed(*words, precision, "--attention", "unfused").out.split())
        assert f"precision {precision} (published: 16 bits)" in told
    half, wide = simulated(), simulated(precision="fp32", attention="unfused")
    assert 5 < wide.step_s / half.step_s < 16
    (rank,) = wide.evaluation.ranks
    assert rank.parameter == rank.gradient == rank.optimizer
    assert rank.parameter / 2**30 == pytest.approx(6.28, abs=0.005)
    assert wide.error_band.half_width >= half.error_band.half_width
    double = simulated(precision="fp64", attention="unfused").evaluation.ranks[0]
    assert (double.parameter, double.gradient) == (2 * rank.parameter, 2 * rank.gradient)


def test_tf32_is_a_fact_of_the_stack() -> None:
    tf32 = with_facts(load_system("megatron-core"), tf32=True)
    given = {"precision": "fp32", "attention": "unfused"}
    steps = [simulated(**given, system=one).step_s for one in ("megatron-core", tf32)]
    assert simulated(attention="unfused").step_s < steps[1] < steps[0]
    bytes_of = [simulated(**given, system=one).reserved_bytes for one in ("megatron-core", tf32)]
    assert bytes_of[0] == bytes_of[1]


def test_sdpa_takes_its_memory_efficient_kernel_where_it_can() -> None:
    """With as many heads of keys as of queries; with fewer only where keys are repeated before."""
    given = {"tp": 1, "zero_stage": 3, "precision": "fp32"}
    assert simulated(system="huggingface-flash", **given).step_s
    grouped = load_model("llama-3.1-8b")
    with pytest.raises(RateError, match="memory-efficient kernel does not take 32 heads"):
        simulated(system="huggingface-flash", model=grouped, **given)
    assert simulated(system="torchtitan", model=grouped, **given).step_s
    with pytest.raises(RateError, match=r"attention 'fa2' in fp64: .* torchtitan take fp32"):
        simulated(system="torchtitan", **given | {"precision": "fp64"})
    with pytest.raises(RateError, match=r"attention 'fa3' in fp32: the kernel takes only 16 bits"):
        simulated(system="torchtitan", cluster="h100-80gb", attention="fa3", **given)


def test_a_generation_without_a_peak_has_no_time() -> None:
    made = simulated(precision="fp32", attention="unfused").problem
    gpu = replace(made.calibration.gpus["ampere"], fp32_peak_share=0.0)
    constants = replace(made.calibration, gpus={**made.calibration.gpus, "ampere": gpu})
    spec = Job(
        model="llama-7b", cluster="a800-80gb", system="megatron-core", gpus=8, tp=4, seq_len=4096,
        global_batch=64, precision="fp32", attention="unfused",
    )  # fmt: skip
    problem = make_problem(spec, constants)
    found = evaluate_method(problem, all_methods().resolve("keep_all", None, problem))
    assert found.fits
    assert found.not_timed == (
        "time not modelled: no fp32 peak of a800-80gb (its file may give fp32_flop_per_s)"
    )


def test_the_cpu_world_is_as_it_was() -> None:
    """Its problems keep the bytes of bf16 training, and every kernel has nominal rates."""
    given = {"cluster": "this-machine", "system": "rematbench", "model": "tiny-llama", "tp": 1}
    given |= {"seq_len": 64, "gpus": 1, "global_batch": 4}
    for precision in get_args(Precision):
        found = simulated("keep_all", precision=precision, **given)
        assert found.problem.system == load_system("rematbench")
        assert found.step_s
