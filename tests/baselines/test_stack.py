"""What a stack keeps beside the operator table is what its trace shows, layer for layer."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from baselines.deepspeed.stack import backward_gradient_bytes
from rematbench.inputs.system import with_facts
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model, Precision
from rematbench.worlds.packages.process import job, policy, run_jobs
from rematbench.worlds.packages.stack import layer_tensors, stack_of
from tests.baselines.cases import GPT, LEFT_OUT, SEQ, TINY, Asked, asked_problem, deep, weighed
from tests.baselines.random_jobs import draw
from tests.installed import needs


class Stacked(NamedTuple):
    """A layout, a model, settings, and the kind of core attention."""

    layout: str
    model: Model
    settings: dict[str, Any]
    attention: AttentionKind = "flash"

    def problem(self, num_layers: int) -> Problem:
        asked = Asked(self.layout, model=self.model, precision="bf16")
        return deep(asked, num_layers, attention=self.attention)


FUSED = {"bias_activation_fusion": True}
LEARNED = replace(TINY, position="learned", max_positions=SEQ)
CASES = [
    Stacked("one", TINY, FUSED),
    Stacked("cp2", TINY, {}),
    Stacked("tp2", GPT, {}, "unfused"),
    Stacked("one", replace(GPT, dropout=0.1), {}, "unfused"),
    Stacked("one", GPT, {}),
]
MORE_STACKED = [
    Stacked("one", TINY, {}),
    Stacked("tp2", TINY, {}),
    Stacked("one", GPT, {}, "unfused"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="few", marks=pytest.mark.full),
        pytest.param(MORE_STACKED, id="more", marks=pytest.mark.soak),
    ],
)
def test_one_more_layer_of_megatron_core_weighs_what_the_stack_says(
    cases: list[Stacked], tmp_path: Path
) -> None:
    """Traced with four and with five layers: the difference is one layer's saved tensors."""
    needs("megatron.core")
    jobs = [
        job(case.problem(count), policy("megatron_core", case.settings), "traced")
        for case in cases
        for count in (4, 5)
    ]
    records = run_jobs("megatron_core", jobs, tmp_path)
    traced, said = [], []
    for number, case in enumerate(cases):
        few, more = (record.measured for record in records[2 * number : 2 * number + 2])
        assert few is not None, records[2 * number].reason
        assert more is not None
        peaks = [one.ranks[0].activation_peak_bytes for one in (few, more)]
        traced.append(peaks[1] - peaks[0])
        problem = case.problem(4)
        method = policy("megatron_core", case.settings).methods[0]
        stack = stack_of("megatron_core", method, problem)
        said.append(stack.problem(problem).layer(0).saved_bytes)
        listed = list(layer_tensors(problem, stack))
        inside = ("in the backward", "in the forward")
        saved = [held for held in listed if not held.why.startswith(inside)]
        assert sum(held.stack_bytes for held in saved) == said[-1]
        assert sum(held.table_bytes for held in listed) == problem.layer(0).saved_bytes
    assert traced == said


FULL = {"recompute": "full"}
LOSS = 4
"""Bytes of a scalar: the count of labels; per micro-batch the loss, its sum, copies, gradients."""


class Whole(NamedTuple):
    """A job, a stage of its pipeline, its core attention, and the bytes of scalars alive at that
    stage's peak; `exact`: no rule moves it that is not replayed (docs/packages.md)."""

    asked: Asked
    scalars: int
    stage: int = 0
    attention: AttentionKind = "flash"
    exact: bool = True

    @property
    def problem(self) -> Problem:
        return dataclasses.replace(asked_problem(self.asked), attention=self.attention)


WIDE = replace(TINY, hidden=128, ffn=384, head_dim=32, vocab=64, num_heads=4)
WIDE_GPT = replace(GPT, hidden=128, ffn=384, head_dim=32, vocab=64, num_heads=4)
ALL = {"recompute": "selective", "modules": ["core_attn", "layernorm", "mlp"]}
NORMS = {"recompute": "selective", "modules": ["layernorm"]}
BLOCK = {**FULL, "method": "block", "num_layers": 2}
AWAY = {"offload_modules": ["core_attn", "attn_proj", "mlp_norm", "attn_norm"]}
CORE = {"recompute": "selective"}
MLP = {"recompute": "selective", "modules": ["mlp"]}
NARROW = replace(WIDE_GPT, head_dim=8, ffn=32, dropout=0.1)
TIED = replace(TINY, name="tiny-tied", tied_embeddings=True)
WHOLE = [
    Whole(Asked("cp2", CORE, replace(WIDE, ffn=128, num_kv_heads=4)), 12 * LOSS),
    Whole(Asked("one", ALL | FUSED, precision="bf16"), 10 * LOSS, exact=False),
    Whole(Asked("pp2", AWAY, replace(WIDE, num_kv_heads=4)), 9 * LOSS, stage=1, exact=False),
    Whole(Asked("pp2-vpp2", FULL, WIDE), 5 * LOSS, exact=False),
    Whole(Asked("tp2", MLP, replace(TINY, dropout=0.1, vocab=64)), 8 * LOSS, exact=False),
    Whole(Asked("pp4", FULL, WIDE), 5 * LOSS, stage=1, exact=False),
    Whole(Asked("one", NORMS, WIDE), 6 * LOSS, attention="unfused", exact=False),
    Whole(Asked("one", model=replace(GPT, dropout=0.1)), 6 * LOSS),
    Whole(
        Asked("pp2-vpp2", {"offload_modules": ["attn_norm"]}, WIDE), 5 * LOSS, stage=1, exact=False
    ),
    Whole(
        Asked("pp2", {"offload_modules": ["core_attn"]}, NARROW),
        4 * LOSS,
        attention="unfused",
        exact=False,
    ),
]
MORE = [
    Whole(Asked("one", model=GPT), 6 * LOSS),
    Whole(Asked("cp2", FULL), 8 * LOSS, exact=False),
    Whole(Asked("pp2-vpp2-one-group", model=WIDE), 7 * LOSS, stage=1, exact=False),
    Whole(
        Asked("one", model=replace(LEARNED, num_kv_heads=1, vocab=64)),
        6 * LOSS,
        attention="unfused",
    ),
    Whole(Asked("one", model=replace(TINY, hidden=32, head_dim=8, vocab=2048)), 6 * LOSS),
    Whole(Asked("one", FULL, TIED), 6 * LOSS, exact=False),
    Whole(Asked("cp2", model=LEARNED), 8 * LOSS),
    Whole(Asked("pp2"), 9 * LOSS, stage=1, exact=False),
    Whole(Asked("pp4", precision="bf16"), 6 * LOSS, stage=3, exact=False),
    Whole(Asked("one", BLOCK), 6 * LOSS),
    Whole(Asked("one", {"offload_modules": ["core_attn"]}), 6 * LOSS, exact=False),
    Whole(Asked("tp2"), 8 * LOSS),
    Whole(Asked("one", {"recompute": "selective"}), 10 * LOSS),
    Whole(Asked("pp2-vpp2"), 9 * LOSS, stage=1, exact=False),
    Whole(Asked("pp2-vpp2", FULL, WIDE_GPT, "bf16"), 4 * LOSS, stage=1, exact=False),
    Whole(Asked("cp2", FULL, replace(WIDE_GPT, ffn=96), "bf16"), 8 * LOSS, exact=False),
    Whole(Asked("cp2"), 8 * LOSS),
    Whole(Asked("one", precision="bf16"), 4 * LOSS),
    Whole(Asked("one", {"recompute": "selective", "modules": ["mlp"]}), 6 * LOSS, exact=False),
    Whole(Asked("one", model=replace(LEARNED, num_kv_heads=1)), 6 * LOSS),
    Whole(Asked("pp4"), 5 * LOSS, stage=1),
    Whole(Asked("one", {**FULL, "num_layers": 2}), 6 * LOSS, exact=False),
    Whole(Asked("one", model=TIED), 6 * LOSS),
    Whole(Asked("one", model=replace(WIDE, num_kv_heads=4)), 6 * LOSS, attention="unfused"),
    Whole(Asked("one", {"recompute": "selective"}, WIDE_GPT), 10 * LOSS, attention="unfused"),
]


def check_whole(cases: list[Whole], folder: Path) -> None:
    """Traced bytes at each case's peak are those that the plan says, and its scalars."""
    needs("megatron.core")
    problems = [case.problem for case in cases]
    policies = [policy("megatron_core", case.asked.settings) for case in cases]
    jobs = [
        job(made, own, "traced", rank=case.stage * made.layout.gpus // made.layout.pp)
        for case, made, own in zip(cases, problems, policies, strict=True)
    ]
    for number, record in enumerate(run_jobs("megatron_core", jobs, folder)):
        case = cases[number]
        assert record.measured is not None, record.reason
        drops = case.asked.model.dropout > 0 and case.attention == "flash"
        assert ("flash" in record.engine.shim) == drops
        held = weighed(policies[number], problems[number], case.stage)
        rest = record.measured.ranks[0].activation_peak_bytes - held.activation_peak
        allowed = 0 if case.exact else LEFT_OUT * held.device_peak
        assert abs(rest - case.scalars) <= allowed, str(case.asked)


@pytest.mark.full
def test_the_whole_peak_of_megatron_core_is_the_plans_and_some_scalars(tmp_path: Path) -> None:
    """No tensor is missing and none is too many."""
    check_whole(WHOLE, tmp_path)


@pytest.mark.soak
def test_more_whole_peaks_of_megatron_core_are_the_plans(tmp_path: Path) -> None:
    check_whole(MORE, tmp_path)


PLAIN = {"checkpointing": "plain"}
Traced = tuple[Model, dict[str, Any], Precision]
DEEPSPEED: list[Traced] = [
    (TINY, {}, "fp32"),
    (GPT, PLAIN, "bf16"),
    (TINY, {}, "bf16"),
    (GPT, {}, "fp32"),
    (GPT, {}, "bf16"),
    (TINY, PLAIN, "fp32"),
    (TINY, PLAIN, "bf16"),
]
SCALARS = 3 * 4
"""The scaled loss, its copy and its gradient."""


@pytest.mark.full
def test_one_more_layer_of_deepspeed_weighs_what_the_plan_says(tmp_path: Path) -> None:
    """Plan and stack against the trace, with so many rows that the peak is in the loss: one more
    layer to the byte, and without a policy in fp32 the whole peak."""
    needs("deepspeed")
    problems = [_wide(case, count) for case in DEEPSPEED for count in (4, 5)]
    policies = [policy("deepspeed", case[1]) for case in DEEPSPEED for _ in (4, 5)]
    jobs = [job(*pair, "traced") for pair in zip(problems, policies, strict=True)]
    traced, said = [], []
    for number, record in enumerate(run_jobs("deepspeed", jobs, tmp_path)):
        assert record.measured is not None, record.reason
        traced.append(record.measured.ranks[0].activation_peak_bytes)
        known = weighed(policies[number], problems[number]).activation_peak
        gradients = backward_gradient_bytes(policies[number].methods[0], problems[number])  # type: ignore[arg-type]
        said.append(known + gradients)  # traced, they are no state
    layers = [b - a for a, b in zip(traced[::2], traced[1::2], strict=True)]
    assert layers == [b - a for a, b in zip(said[::2], said[1::2], strict=True)]
    for number, (_, settings, precision) in enumerate(DEEPSPEED):
        if not settings and precision == "fp32":
            assert traced[2 * number] - said[2 * number] == SCALARS


def _wide(case: Traced, num_layers: int) -> Problem:
    model, settings, precision = case
    asked = Asked("one", settings, replace(model, num_layers=num_layers), precision)
    found = asked_problem(asked, zero_stage=0, micro_batch=16, global_batch=16)
    # F.cross_entropy of fp32 logits keeps these beside its result; the executor's stack does not.
    system = with_facts(found.system, loss_keeps_logits=True)
    return dataclasses.replace(found, system=system)


# -- deepSpeed's plan and stack against traces of jobs that nobody chose ---------------------------


NEAR, FAR, TILED = 1e-3, 0.01, 0.03
"""Of the peak, states and all: most jobs; any; with tiles (docs/packages.md says why)."""
FAST = (28, 118, 133, 171)
"""ZeRO 3 with its optimizer on the host; ZeRO 2 with Ulysses, tied; ZeRO 0 and (tied) ZeRO 1 with
inputs on the host."""
MANY = range(40)
SHARE = 0.85
"""Of many jobs, at least, are near."""


def deviations(seeds: tuple[int, ...] | range, folder: Path) -> dict[int, float]:
    """Predicted over traced, less 1, by seed."""
    needs("deepspeed")
    drawn = {seed: draw(seed) for seed in seeds}
    jobs = [
        job(one.problem, policy("deepspeed", one.settings), "traced", timeout_s=300.0)
        for one in drawn.values()
    ]
    found = {}
    records = run_jobs("deepspeed", jobs, folder)
    for (seed, one), record in zip(drawn.items(), records, strict=True):
        seen = record.measured
        assert seen is not None, (seed, record.reason)
        traced = seen.ranks[0].peak_bytes
        method = policy("deepspeed", one.settings)
        found[seed] = weighed(method, one.problem).device_peak / traced - 1
    return found


@pytest.mark.full
def test_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    far = {seed: off for seed, off in deviations(FAST, tmp_path).items() if abs(off) > NEAR}
    assert not far


@pytest.mark.soak
def test_most_of_many_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    found = deviations(MANY, tmp_path)
    for seed, off in found.items():
        tiled = any(name.endswith("_tiles") for name in draw(seed).settings)
        assert abs(off) < (TILED if tiled else FAR), seed
    assert sum(abs(off) < NEAR for off in found.values()) >= SHARE * len(found)
