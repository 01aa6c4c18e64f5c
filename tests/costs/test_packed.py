"""Packed documents: attention inside documents, everything else over tokens."""

from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.costs.operators.kernels import Attention
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import PlannedJob, evaluate_method
from rematbench.evidence.bands import band_of, with_band
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.shapes import causal_pairs, packed_pairs
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from rematbench.worlds.records.plan_replay import spec_problem
from rematbench.worlds.records.record import run_spec
from tests.problems import LLAMA, all_methods, problem, remade
from tests.tables import tables

DEGREES: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "ulysses": 2, "global_batch": 1},
]


def packed(given: Problem, document_len: int) -> Problem:
    return remade(given, workload=replace(given.workload, document_len=document_len))


def attention(given: Problem, layer: int = 0) -> Attention:
    kernels = [kernel for op in given.layer(layer).ops for kernel in op.forward]
    (found,) = [kernel for kernel in kernels if isinstance(kernel, Attention)]
    return found


@drawn(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60))
def test_pairs_are_those_of_the_mask(seq_len: int, document_len: int, window: int) -> None:
    def seen(query: int, key: int) -> bool:
        same = query // document_len == key // document_len
        return same and query - key >= 0 and (window == 0 or query - key < window)

    counted = sum(seen(query, key) for query in range(seq_len) for key in range(query + 1))
    assert packed_pairs(seq_len, document_len, window) == counted


@drawn(st.sampled_from(DEGREES), st.integers(4, 31), st.integers(0, 40))
def test_only_attention_costs_less_and_never_more_for_shorter_documents(
    layout: dict[str, Any], document_len: int, window: int
) -> None:
    system = "deepspeed" if "ulysses" in layout else "rematbench"
    model = replace(LLAMA, attention_window=(window,) * LLAMA.num_layers)
    whole = problem(model=model, system=system, **layout)
    short, longer = (packed(whole, length) for length in (document_len, document_len + 1))
    pairs = [attention(some).pairs for some in (short, longer, whole)]
    assert pairs == sorted(pairs)
    assert pairs[0] == packed_pairs(32, document_len, window) // whole.layout.cp
    for before, after in zip(whole.layer(0).ops, short.layer(0).ops, strict=True):
        same = (
            after
            if after.name != "attention"
            else replace(after, forward=before.forward, backward_input=before.backward_input)
        )
        assert same == before


@pytest.mark.parametrize("length", [0, 32])
def test_one_document_is_todays_sequence(length: int) -> None:
    whole = problem()
    assert packed(whole, length).layer(0) == whole.layer(0)


def test_documents_are_timed_as_sequences_of_their_length() -> None:
    """A sequence of four documents takes the kernels of a micro-batch of four short sequences."""
    long = packed(problem(seq_len=4096), 1024)
    four = problem(seq_len=1024, micro_batch=4, global_batch=4)
    for direction in ("forward", "backward_input"):
        one, other = (p.cost.kernel_s(attention(p), direction) for p in (long, four))
        assert one == pytest.approx(other, rel=1e-12)


def test_unfused_attention_computes_the_whole_square() -> None:
    whole = problem(attention="unfused")
    assert attention(packed(whole, 8)) == attention(whole)


@pytest.mark.parametrize(("length", "layout", "words"), tables(__file__)["documents"])
def test_documents_that_no_kernel_takes_are_refused(
    length: int, layout: dict[str, Any], words: str
) -> None:
    given = problem(**layout)
    work = replace(given.workload, document_len=length)
    with pytest.raises(LayoutError, match=words):
        check_layout(given.layout, work, given.system)


def qwen(**changes: Any) -> Job:
    """Qwen2.5-7B with 32,768 tokens of documents of some 10,000 on four A100 (megatron-core
    0.12 with fused loss and expandable segments)."""
    facts = {"fused_loss": True, "loss_keeps_logits": False, "expandable_segments": True}
    return Job(
        model=load_model("qwen2-7b"),
        cluster="a100-80gb-roce1600",
        system=with_facts(load_system("megatron-core"), **facts),
        gpus=4, tp=4, seq_len=32768, global_batch=8, **changes,
    )  # fmt: skip


def test_a_published_step_of_packed_documents_lies_in_its_band() -> None:
    """23 s, published with Megatron-SWIFT (megatron-core 0.12); as whole sequences 29 s."""
    job = PlannedJob(problem=(made := make_problem(qwen(document_len=10240))), base=made.base_plan)
    found = with_band(evaluate_method(made, all_methods().resolve("full_recompute"), job.base))
    step_s, band = found.step_s, found.error_band
    assert step_s is not None
    assert band is not None
    assert step_s == pytest.approx(23.0, rel=band.half_width)
    assert "documents of 10,240" in band.evidence
    whole = make_problem(qwen())
    assert "context" in band_of(whole, "full_recompute").outside  # 32,768 tokens


def test_a_record_keeps_the_length() -> None:
    made = make_problem(qwen(document_len=10240))
    spec = run_spec(made, all_methods().resolve("keep_all"))
    again = spec_problem(replace(spec, system="megatron-core"))
    assert again.workload == made.workload
    assert causal_pairs(32768, 0) > attention(made).pairs
