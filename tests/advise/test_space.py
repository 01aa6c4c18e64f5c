"""The space of a search: what it has, and that its output says what it leaves out."""

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.candidates.layouts import MOST_MICRO_BATCH, Fixed
from rematbench.advise.search.limits import not_searched
from rematbench.advise.search.questions import reached
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.system import with_facts
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import method_text
from tests.everything import ALONE

LONG = Job(
    model="llama-3.1-8b", cluster="h100-80gb", system="megatron-core", gpus=8,
    seq_len=1_556_480, global_batch=1,
)  # fmt: skip


def job(fixed: Fixed = Fixed(), only: tuple[str, ...] = (), **others: Any) -> SearchJob:  # noqa: B008
    """One of gpt-1.3b, or of another model, on a node."""
    given: dict[str, Any] = {
        "model": "gpt-1.3b",
        "system": "megatron-core",
        "seq_len": 2048,
        "global_batch": 8,
        **others,
    }
    spec = Job(**{"cluster": "a800-80gb", "gpus": 8, **given})
    return SearchJob(SearchRequest(spec=spec, fixed=fixed, only=only))


def test_tensor_parallelism_runs_with_and_without_sequence_parallelism() -> None:
    """Each layout of several tensor-parallel ranks exists twice; a fixed choice holds."""
    layouts = [choice.layout for choice in job().space.choices]
    off = [lay for lay in layouts if lay.tp > 1 and not lay.sp]
    assert off
    assert {replace(lay, sp=True) for lay in off} == {lay for lay in layouts if lay.sp}
    for sp in (True, False):
        held = [c.layout for c in job(Fixed(tp=2, sp=sp)).space.choices]
        assert {lay.sp for lay in held} == {sp}


def test_a_length_that_rows_do_not_divide_has_tensor_parallelism_without_rows() -> None:
    layouts = [c.layout for c in job(Fixed(tp=8), seq_len=1028).space.choices]
    assert layouts
    assert not any(lay.sp for lay in layouts)


def test_chunks_may_leave_a_layer_to_each_end() -> None:
    """Of 22 layers on four ranks there are two and three chunks a rank, as if both ends were two,
    and of 23 too, as if one end were; of 21 there are two, with three missing; of 19 there
    are none, because five are missing."""
    for layers, counts in ((22, {1, 2, 3}), (23, {1, 2, 3}), (21, {1, 2}), (19, {1})):
        model = replace(load_model("gpt-1.3b"), num_layers=layers)
        made = job(Fixed(pp=4, tp=1, micro_batch=1), model=model)
        assert {choice.layout.vpp for choice in made.space.choices} == counts


@pytest.mark.parametrize("system", ["megatron-core", "torchtitan"])
def test_experts_share_states_as_the_stack_can_on_every_layout(system: str) -> None:
    """Of all degrees of 8 GPUs: no rank shares states in a stage that the stack lacks, also where
    experts alone have peers, and the space has every other layout (one stage where no rank has a
    peer)."""
    made = job(Fixed(cp=1, vpp=1), model="mixtral-8x7b", system=system)
    work, kept = made.request.spec.workload(made.model), set[Layout]()
    degrees = (1, 2, 4, 8)
    for tp, pp, ep, micro_batch, stage in product(*(degrees,) * 4, (0, 1, 2, 3)):
        for etp in {1, tp} if tp * pp <= 8 else ():
            layout = Layout(
                tp=tp, pp=pp, dp=8 // tp // pp, sp=tp > 1, ep=ep, etp=etp, zero_stage=stage,
                micro_batch=micro_batch, global_batch=8,
            )  # fmt: skip
            try:
                check_layout(layout, work, made.system)
            except LayoutError:
                continue
            shares = layout.dp > 1 or layout.expert_dp > 1
            assert stage in made.system.accepts.zero_stages or not shares
            again = system == "torchtitan" and pp > 1 and stage == 2  # it is stage 3 there
            if (shares and not again) or stage == 1:
                kept.add(layout)
    assert kept == {c.layout for c in made.space.choices if c.even}


def test_the_output_names_every_limit_that_applies() -> None:
    """Of a pipeline its schedules; of a batch its micro-batches; of methods their grids."""
    whole = not_searched(job(global_batch=8 * MOST_MICRO_BATCH, system="rematbench"))
    single = not_searched(job(Fixed(pp=1, micro_batch=1), ("keep_all",)))
    for words in ("micro-batches of more than 64", "schedules other than 1F1B"):
        assert any(one.startswith(words) for one in whole), whole
        assert not any(one.startswith(words) for one in single), single
    held = "ZeRO 2 and 3 with more than 3 chunks of a rank"
    assert held in not_searched(job(system="torchtitan"))
    assert held not in whole
    pieces = "optimizer states on the host in pieces (name optimizer_offload with --method)"
    assert pieces in whole
    experts = not_searched(job(model="mixtral-8x7b"))
    assert pieces not in experts  # it would be refused
    assert "dispatchers other than alltoall (--dispatcher)" in experts
    assert "exchanges during another micro-batch (the stack has none)" in experts
    hopper = {"cluster": "h100-80gb", "system": "megatron-core-0.16", "model": "mixtral-8x7b"}
    assert "dispatchers other than alltoall and deepep (--dispatcher)" in not_searched(
        job(**hopper)
    )
    assert not any("exchanges beside" in words for words in not_searched(job(**hopper)))
    last = discover().methods["mst"].grid[-1]
    assert f"more pieces than {method_text(discover().methods['mst'], last)}" in whole


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("qwen3-30b-a3b", {}),
        ("deepseek-v3", {}),  # with a layer that predicts one more token
        ("qwen3-30b-a3b", {"cuda_graphs": "attn,moe_router"}),
        ("mixtral-8x7b", {"capacity_factor": 1.0, "expert_padding": "capacity"}),
    ],
)
def test_exchanges_of_a_layout_are_those_that_all_rules_allow(
    model: str, more: dict[str, Any]
) -> None:
    """The space asks only the rules that an exchange decides, once for each layout."""
    spec = Job(
        model=model, cluster="h100-80gb", system="megatron-core-0.16", gpus=16, seq_len=2048,
        global_batch=32, **more,
    )  # fmt: skip
    made = SearchJob(SearchRequest(spec=spec, fixed=Fixed(micro_batch=1, cp=1)))
    work, stack = spec.workload(made.model), made.system
    found = {(item.layout, item.dispatcher, item.overlaps) for item in made.space.choices}
    for layout in {item.layout for item in made.space.choices}:
        for dispatcher, overlaps in product((None, "deepep"), (False, True)):
            facts: dict[str, Any] = {"dispatcher": dispatcher} if dispatcher else {}
            facts |= {"ep_overlap": "interleaved"} if overlaps else {}
            own = layout.ep > 1 and not (overlaps and layout.num_micro_batches == 1)
            try:
                check_layout(layout, work, with_facts(stack, **facts))
            except LayoutError:
                own = False
            assert ((layout, dispatcher, overlaps) in found) is (own or not facts)


@pytest.mark.full
def test_the_longest_context_is_not_that_of_a_short_grid() -> None:
    """At this length a plan by hand fits tightly, with many pieces and no layer exempt from
    swapping; with the margin of published peaks the next shorter length does."""
    plain = with_facts(load_system(str(LONG.system)), dummy_gradients=False)
    long = LONG.changed(system=plain)
    request = SearchRequest(spec=long, fixed=Fixed(cp=8), reserve_gib=0.0)
    shorter = replace(request, spec=long.changed(seq_len=1_507_328), reserve_gib=None)
    for one in (request, shorter):
        found = reached(one, float("inf"), ALONE)
        assert found is not None
        assert found.fits
        assert "exempt_layers=0" in found.method
