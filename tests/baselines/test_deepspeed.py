"""The real DeepSpeed: the same loss and gradients as the project's executor, on every path."""

import pytest

from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.baselines.cases import (
    SEQ,
    STEPS,
    TINY,
    Asked,
    Ran,
    asked_of,
    asked_problem,
    assert_equal,
    run_all,
)
from tests.installed import needs
from tests.worlds.torch.cases import in_host_memory

needs("deepspeed")

FP32 = 1e-5
BF16 = 1e-2
"""Weights, activations and ZeRO's gradients round to 2^-8."""

ASKED = asked_of(__file__)
FAST = ASKED["fast"]
MORE = ASKED["more"]
ON_HOST = [
    (Asked("dp2-zero3"), ()),
    (MORE[3], ("optimizer", "gradient")),
    (FAST[9], ("optimizer", "gradient", "parameter")),
]
"""ZeRO 3 and the kinds of states that the package then has in host memory."""
SLOW = ASKED["slow"]


REFUSED = [
    (Asked("tp2"), "tensor parallelism"),
    (Asked("pp2"), "pipeline parallelism"),
    (Asked("cp2"), "set ulysses"),
    (Asked("dp2", {"offload_param": True}), "needs zero_stage 3"),
]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, short: bool) -> list[Ran]:
    """What runs and what is refused, in one process: importing the package takes seconds."""
    asked = [*FAST, *([] if short else MORE), *(asked for asked, _ in REFUSED)]
    return run_all("deepspeed", asked, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def fast(together: list[Ran]) -> list[Ran]:
    return together[: len(FAST)]


@pytest.mark.parametrize("number", range(len(FAST)), ids=[str(asked) for asked in FAST])
def test_loss_and_gradients_equal_the_executors(fast: list[Ran], number: int) -> None:
    assert_equal(FAST[number], fast[number], FP32)


@pytest.fixture(scope="module")
def more(together: list[Ran]) -> list[Ran]:
    return together[len(FAST) : len(FAST) + len(MORE)]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(MORE)), ids=[str(asked) for asked in MORE])
def test_more_layouts_equal_the_executors(more: list[Ran], number: int) -> None:
    assert_equal(MORE[number], more[number], FP32)


@pytest.fixture(scope="module")
def zero3() -> list[Result]:
    """The executor's own ZeRO 3, with the same states in host memory."""
    given = asked_problem(Asked("dp2-zero3"))
    options = {"problem": given, "steps": STEPS, "gradients": True, "measure": False}
    base = Case(name="zero 3", plan=given.base_plan, **options)
    return execute_cases([in_host_memory(base, *kinds) for _, kinds in ON_HOST])


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(ON_HOST)), ids=[str(asked) for asked, _ in ON_HOST])
def test_zero_3_equals_the_executors_zero_3(
    together: list[Ran], zero3: list[Result], number: int
) -> None:
    asked, executed = ON_HOST[number][0], zero3[number]
    assert executed.status == "ok", executed.reason
    assert_equal(asked, together[[*FAST, *MORE].index(asked)], FP32, executed)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    return run_all("deepspeed", SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(SLOW)), ids=[str(asked) for asked in SLOW])
def test_more_stages_and_precisions(slow: list[Ran], number: int) -> None:
    bf16 = SLOW[number].precision == "bf16"
    assert_equal(SLOW[number], slow[number], BF16 if bf16 else FP32)


def test_the_record_says_what_ran(fast: list[Ran]) -> None:
    seen, engine = fast[0].record.measured, fast[0].record.engine
    assert (engine.label, engine.shim) == ("deepspeed + CPU shim", ("norm",))
    assert engine.stack["deepspeed"]
    assert not any(rank.host_bytes for rank in seen.ranks)


def test_what_is_kept_on_the_host_is_counted_apart(fast: list[Ran]) -> None:
    """And the record names the shim that tells the two apart on a CPU."""
    ran = {str(asked): ran.record for asked, ran in zip(FAST, fast, strict=True)}
    plain = ran["one checkpointing=plain"].measured
    cpu, engine = ran["one checkpointing=cpu"].measured, ran["one checkpointing=cpu"].engine
    assert (engine.label, engine.shim) == ("deepspeed + CPU shim", ("places", "streams", "norm"))
    inputs = 2 * SEQ * TINY.hidden * 4  # of one layer's micro-batch: two sequences in fp32
    assert cpu.ranks[0].host_peak_bytes >= (TINY.num_layers - 1) * inputs  # the last one stays
    assert cpu.ranks[0].activation_peak_bytes < plain.ranks[0].activation_peak_bytes
    offloaded = ran["dp2-zero3 offload_optimizer=True offload_param=True"].measured
    # over two ranks: the part itself, its master copy, two moments, and gradients twice
    assert offloaded.ranks[0].host_state_bytes >= 6 * 4 * TINY.parameters // 2


def test_what_it_does_not_run_is_refused_by_name(together: list[Ran]) -> None:
    for ran, (asked, words) in zip(together[-len(REFUSED) :], REFUSED, strict=True):
        assert ran.record.status == "unsupported", str(asked)
        assert words in ran.record.reason
