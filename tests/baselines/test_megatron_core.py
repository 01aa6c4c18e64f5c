"""The real Megatron-core: the same loss and gradients as the project's executor, on every path."""

import pytest

from rematbench.worlds.packages.process import job, policy
from tests.baselines.cases import (
    GPT,
    Asked,
    Ran,
    asked_job,
    asked_of,
    asked_problem,
    assert_equal,
    printed_settings,
    run_all,
    run_together,
    weighed,
)
from tests.installed import needs

needs("megatron.core")

FP32 = 1e-5
BF16 = 1e-2
"""Weights and activations round to 2^-8; RoPE and norms round at other places in each engine."""

FULL = {"recompute": "full"}
PLAIN = Asked("one")
BLOCK = Asked("one", {**FULL, "method": "block", "num_layers": 3})
AWAY = Asked("one", {"offload_modules": ["qkv_linear", "mlp_norm"]})
SCALARS = 6 * 4
"""The loss, its sum, their copies and gradients, and the count of labels: no tensor is missing."""
ASKED = asked_of(__file__)
FAST = ASKED["fast"]
MORE = ASKED["more"]
VOCABULARIES = [asked for asked in (*FAST, *MORE) if asked.layout == "tp2"]
"""Even and padded."""
SLOW = ASKED["slow"]


REFUSED = [
    (Asked("pp2-vpp2", {"batch_p2p": True}), "wrong gradients"),
    (Asked("one", {"recompute": "selective", "modules": ["mlp"]}, GPT), "never ends"),
    (Asked("one", {"offload_modules": ["attn_proj"]}), "attn_proj without core_attn"),
    (Asked("dp2-zero3"), "zero_stage 3"),
    (Asked("pp2-vpp2", {"overlap_p2p": True}), "wrong losses"),
    (Asked("pp2-vpp2", {"overlap_p2p": True, "batch_p2p": True}), "wrong gradients"),
]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, short: bool) -> list[Ran]:
    """What runs and what is refused, then the default policy under printed arguments and a trace,
    in one process: importing the package takes seconds."""
    asked = [*FAST, *([] if short else MORE), *(asked for asked, _ in REFUSED)]
    jobs = [asked_job("megatron_core", one) for one in asked]
    if not short:
        default = policy("megatron_core")
        jobs += [job(asked_problem(one), default, "traced", rank=1) for one in VOCABULARIES]
    words = policy("megatron_core", BLOCK.settings).methods[0].flags(asked_problem(BLOCK))  # type: ignore[attr-defined]
    jobs.append(asked_job("megatron_core", PLAIN, settings=printed_settings(words)))
    own = policy("megatron_core", AWAY.settings)
    jobs.append(job(asked_problem(AWAY), own, "traced", steps=2))  # the second is like all others
    return run_together("megatron_core", jobs, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def fast(together: list[Ran]) -> list[Ran]:
    return together[: len(FAST)]


@pytest.mark.parametrize("number", range(len(FAST)), ids=[str(asked) for asked in FAST])
def test_loss_and_gradients_equal_the_executors(fast: list[Ran], number: int) -> None:
    assert_equal(FAST[number], fast[number], FP32)


def peaks(ran: Ran) -> tuple[int, int]:
    """Of the first rank: activations on the device, and on the host."""
    assert ran.record.measured is not None, ran.record.reason
    rank = ran.record.measured.ranks[0]
    return rank.activation_peak_bytes, rank.host_peak_bytes


def test_printed_arguments_alone_run_as_the_policy(together: list[Ran]) -> None:
    """More methods: test_flags.py."""
    assert_equal(BLOCK, together[-2], FP32)
    assert peaks(together[-2]) == peaks(together[FAST.index(BLOCK)])


def test_fake_tensors_and_the_stack_weigh_what_ran(together: list[Ran]) -> None:
    """More layouts: test_traced.py and test_stack.py."""
    assert peaks(together[-1]) == peaks(together[FAST.index(AWAY)])
    held = weighed(policy("megatron_core"), asked_problem(PLAIN)).activation_peak
    assert peaks(together[0]) == (held + SCALARS, 0)


@pytest.fixture(scope="module")
def more(together: list[Ran]) -> list[Ran]:
    return together[len(FAST) : len(FAST) + len(MORE)]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(MORE)), ids=[str(asked) for asked in MORE])
def test_more_settings_equal_the_executors(more: list[Ran], number: int) -> None:
    assert_equal(MORE[number], more[number], FP32)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    return run_all("megatron_core", SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(SLOW)), ids=[str(asked) for asked in SLOW])
def test_more_layouts_and_precisions(slow: list[Ran], number: int) -> None:
    bf16 = SLOW[number].precision == "bf16"
    assert_equal(SLOW[number], slow[number], BF16 if bf16 else FP32)


def test_the_record_says_what_ran(fast: list[Ran]) -> None:
    seen = fast[0].record.engine
    assert seen.label == "megatron-core + CPU shim"
    assert "dev" in seen.shim
    assert seen.stack["megatron-core"]
    assert seen.kernels["core_attention"] == "torch scaled_dot_product_attention"


@pytest.mark.full
def test_a_padded_vocabulary_weighs_as_much_as_one_that_needs_none(
    together: list[Ran], fast: list[Ran], more: list[Ran]
) -> None:
    """Its padding's logits are masked in place, and the record says so.  Bytes are the traced ones:
    gloo's threads hold a collective's buffer for a moment now and then."""
    ran = zip([*FAST, *MORE], [*fast, *more], strict=True)
    even, odd = (ran.record.engine for asked, ran in ran if asked.layout == "tp2")
    plain, padded = (ran.record.measured for ran in together[-4:-2])
    assert plain is not None
    assert padded is not None
    peaks = [one.ranks[0].activation_peak_bytes for one in (plain, padded)]
    assert peaks[0] == peaks[1]
    assert "masks" in odd.kernels["vocabulary"]
    assert "vocabulary" not in even.kernels


def test_recomputation_and_offloading_free_activations(fast: list[Ran]) -> None:
    check_freed(FAST, fast, fast[0])


@pytest.mark.full
def test_more_settings_free_activations(fast: list[Ran], more: list[Ran]) -> None:
    check_freed(MORE, more, fast[0])


def check_freed(asked_for: list[Asked], found: list[Ran], base: Ran) -> None:
    peaks = {
        str(asked): ran.record.measured.ranks[0].activation_peak_bytes
        for asked, ran in zip(asked_for, found, strict=True)
        if ran.record.measured is not None
    }
    none = base.record.measured.ranks[0].activation_peak_bytes
    for asked, peak in peaks.items():
        attention = asked.endswith("modules=['core_attn']")  # with flash kernels it frees nothing
        if asked.startswith(("one rec", "one off")) and not attention:
            assert peak < none, asked
    hosts = [ran.record.measured.ranks[0].host_peak_bytes for ran in found if ran.record.measured]
    offloading = ["offload" in str(asked) for asked in asked_for]
    assert [host > 0 for host in hosts] == offloading


def test_known_traps_are_refused_by_name(together: list[Ran], short: bool) -> None:
    first = len(FAST) + (0 if short else len(MORE))
    found = together[first : first + len(REFUSED)]
    for ran, (asked, words) in zip(found, REFUSED, strict=True):
        assert ran.record.status == "unsupported", str(asked)
        assert words in ran.record.reason
