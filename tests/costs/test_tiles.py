"""Shapes that do not tile cost what the rounded shape costs, and a line says so."""

import math
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.cli.show import job_notes
from rematbench.costs.operators.kernels import Attention, Gemm
from rematbench.costs.tiles import HEAD_DIM_MULTIPLE, rounded, tiled
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import evaluate_method
from rematbench.evidence.bands import band_of, ratio_band
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model, names
from rematbench.inputs.shapes import shapes
from rematbench.problem import Problem
from rematbench.workload import Model
from tests.problems import all_methods, on, problem

WIDTHS = st.integers(1, 20_000)


def seconds(gemm: Gemm, direction: Any = "forward") -> float:
    return problem().cost.kernel_s(gemm, direction)


@drawn(WIDTHS, WIDTHS, st.integers(1, 300))
def test_a_gemm_costs_what_its_whole_tiles_cost_and_more_for_more(
    n: int, k: int, more: int
) -> None:
    plain = Gemm(4096, n, k)
    assert seconds(plain) == seconds(Gemm(4096, rounded(n, 64), rounded(k, 64)))
    assert seconds(plain) <= seconds(Gemm(4096, n + more, k)) * (1 + 1e-9)
    assert seconds(plain) <= seconds(Gemm(4096, n, k + more)) * (1 + 1e-9)


@drawn(WIDTHS, WIDTHS, st.integers(1, 5000))
def test_tokens_are_never_rounded(a: int, b: int, tokens: int) -> None:
    forward = tiled(Gemm(tokens, a, b), 2, weight_gradient=False)
    weight = tiled(Gemm(a, b, tokens), 2, weight_gradient=True)
    assert forward.m == weight.k == tokens
    assert (forward.n, forward.k) == (weight.m, weight.n)


HEADS = st.integers(1, 32).map(lambda eighths: 8 * eighths)


def attention_s(dim: int, direction: Any, *, fused: bool, eager: bool) -> float:
    given = problem(system_changes={"eager_operators": eager})
    pairs = 2048 * 2049 // 2 if fused else 2048 * 2048
    return given.cost.kernel_s(Attention(2, 16, 16, dim, 2048, 2048, pairs, fused=fused), direction)


UNFUSED = [{"fused": False, "eager": eager} for eager in (False, True)]
KINDS = st.sampled_from([{"fused": True, "eager": False}, *UNFUSED])


@drawn(HEADS, st.integers(0, 100), KINDS, st.sampled_from(["forward", "backward_input"]))
def test_aligned_heads_cost_their_rounded_head_and_more_for_more(
    dim: int, more: int, kind: dict[str, bool], direction: str
) -> None:
    own = attention_s(dim, direction, **kind)
    assert own == attention_s(rounded(dim, HEAD_DIM_MULTIPLE), direction, **kind)
    assert own <= attention_s(dim + 8 * more, direction, **kind) * (1 + 1e-9)


@drawn(st.integers(1, 256).filter(lambda dim: dim % 8), KINDS)
def test_heads_without_alignment_cost_more_than_padded_ones(
    dim: int, kind: dict[str, bool]
) -> None:
    padded = attention_s(rounded(dim, HEAD_DIM_MULTIPLE), "forward", **kind)
    assert attention_s(dim, "forward", **kind) > padded


def test_batched_gemms_without_alignment_are_as_slow_as_published() -> None:
    """PyTorch issue 83272, A100, bf16: (384, 1024, 1024) x 140 columns in 9.232 ms."""
    a100 = load_cluster("a100-80gb-single")
    facts = ("generation", "peak_flop_per_s", "hbm_bytes_per_s")
    cost = on(problem(), **{name: getattr(a100, name) for name in facts}).cost
    gemm = (1024, 160, 1024, 384)
    slow, fast = (Attention(384, 1, 1, d, 1024, 1024, 1 << 20, fused=False) for d in (140, 160))
    assert cost._least_s(slow, gemm) == pytest.approx(9.232e-3, rel=0.002)
    assert cost._least_s(fast, gemm) == 0.0
    assert float(cost._gemm_s(Gemm(*gemm))) < 0.2 * cost._least_s(slow, gemm)


# -- models -----------------------------------------------------------------------------------


def widths(given: Problem) -> list[int]:
    s, model = shapes(given.workload, given.layout, given.system), given.workload.model
    router = [model.experts.count] if model.experts else []
    return [model.hidden, s.q_width, s.q_width + 2 * s.kv_width, s.ffn, s.vocab, *router]


def shipped(name: str) -> Problem:
    """A problem of a shipped model, with a kernel that has its sinks."""
    model = load_model(name)
    kernel = {"attention": "cudnn"} if model.attention_sinks else {}
    return problem(model=model, system_changes=kernel)


TILING = [
    name for name in names("model")
    if all(width % 64 == 0 for width in widths(shipped(name)))
    and load_model(name).head_dim % HEAD_DIM_MULTIPLE == 0
]  # fmt: skip


def test_most_shipped_models_tile() -> None:
    assert len(TILING) > len(names("model")) * 2 / 3


@pytest.mark.parametrize("name", TILING)
def test_shipped_models_that_tile_have_the_kernels_they_had(name: str) -> None:
    given = shipped(name)
    for table in (given.layer(0), given.head):
        for op in table.ops:
            for direction in ("forward", "backward_input", "backward_weight"):
                for kernel in getattr(op, direction):
                    if isinstance(kernel, Gemm):
                        assert given.cost._tiled(kernel, direction) == kernel
    assert not [line for line in job_notes(given) if "does not tile" in line]


def test_a_cpu_rounds_nothing() -> None:
    given = on(problem(model=wide(14400, 96)), generation="cpu")
    assert given.cost._tiled(Gemm(8, 9, 10), "forward") == Gemm(8, 9, 10)
    assert not [line for line in job_notes(given) if "does not tile" in line]


# -- published steps ----------------------------------------------------------------------------


def wide(hidden: int, heads: int, layers: int = 80) -> Model:
    """A GPT of BLOOM's kind: ALiBi, biases, 250,880 words."""
    return replace(
        load_model("gpt-175b"), name=f"gpt-{hidden}", num_layers=layers, hidden=hidden,
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden, vocab=250880,
        position="alibi", max_positions=0, dropout=0.0,
    )  # fmt: skip


def of_bigscience(model: Model, **layout: Any) -> Problem:
    return make_problem(Job(
        model=model, cluster="a100-80gb-selene", system="megatron-deepspeed", seq_len=2048,
        global_batch=2048, tp=8, micro_batch=4, sp=False, attention="unfused",
        precision="fp16", **layout,
    ))  # fmt: skip


def step_s(given: Problem) -> float:
    found = evaluate_method(given, all_methods().resolve("full_recompute"), given.base_plan).step_s
    assert found is not None
    return found


RATIOS = [
    ((14400, 96), (13824, 64), {"gpus": 320, "pp": 10}, 80, 208.18 / 147.43),
    ((13824, 128), (13824, 64), {"gpus": 384, "pp": 6}, 78, 162.72 / 121.28),
    ((13312, 128), (13312, 64), {"gpus": 384, "pp": 6}, 84, 129.17 / 122.93),
    ((14336, 256), (14336, 64), {"gpus": 384, "pp": 6}, 72, 132.85 / 120.18),
]
"""(hidden, heads) of two models, their layout and layers, and the ratio of their published seconds
(BigScience, train/tr11-176B-ml/chronicles-prequel.md, tables of 2022-02-20 to 02-24)."""


@pytest.mark.parametrize(("odd", "even", "layout", "layers", "published"), RATIOS)
def test_published_steps_of_odd_shapes_beside_even_ones(
    odd: tuple[int, int],
    even: tuple[int, int],
    layout: dict[str, int],
    layers: int,
    published: float,
) -> None:
    """The ratio, because the machine's links are not those of a shipped cluster."""
    ours = [step_s(of_bigscience(wide(*one, layers), **layout)) for one in (odd, even)]
    off = math.log(ours[0] / ours[1] / published)
    assert abs(off) < ratio_band(one_layout=False)


def test_a_line_names_each_width_that_does_not_tile() -> None:
    given = of_bigscience(wide(14400, 96), gpus=320, pp=10)
    lines = [line for line in job_notes(given) if "does not tile" in line]
    assert [line.removeprefix("does not tile: ") for line in lines] == [
        "hidden 14400/8 = 1800 is not a multiple of 64: its GEMMs take as long as with 1856",
        "ffn 57600/8 = 7200 is not a multiple of 64: its GEMMs take as long as with 7232",
        "head_dim 150 is not a multiple of 8: attention takes as long as with 160, at 0.045 of the "
        "peak, without tensor cores",
    ]
    assert "head_dim 150" in band_of(given, "full_recompute").outside["shape"]
    fused = make_problem(Job(
        model=wide(14400, 96), cluster="a100-80gb-selene", system="megatron-core", gpus=8, tp=8,
        seq_len=2048, global_batch=8,
    ))  # fmt: skip
    assert "copies of queries, keys, values and output" in "".join(job_notes(fused))
