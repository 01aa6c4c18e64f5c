"""moe.csv: words of rows with experts, and what they mean."""

from functools import cache
from math import fsum
from operator import attrgetter
from statistics import median, quantiles
from typing import Any, NamedTuple

import pytest
from msgspec import json
from msgspec.structs import replace

from rematbench.evaluate.evaluation import evaluate, speed
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.row_cases import PublishedCase, read_case, stack_of
from rematbench.evidence.published.sheets import (
    SPEED,
    Cell,
    RowError,
    given_facts,
    read_peak_kind,
    read_peak_rank,
    read_sheet,
)
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import calibration, load_model, load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import Dispatcher, StackChoice, with_facts
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.workload import Experts
from tests.predicted import read_of
from tests.tables import tables

REGISTRY = discover(())
TABLES = tables(__file__)
ROWS = read_sheet(data_dir("published") / "moe.csv")
ZOO = next(row for row in ROWS if row["recompute_modules"] == "layernorm moe")
READ = {**ZOO, "system": "megatron-core-0.16"}


def case(**changed: str) -> PublishedCase:
    return read_case({**READ, **changed}, REGISTRY)


def test_flags_in_a_note_are_facts_of_the_model_and_the_stack() -> None:
    row = next(row for row in ROWS if row["table"].startswith("moe/gpt3_mcore_cp2_pp2_ep2"))
    read = read_case(row, REGISTRY)
    assert (read.model.vocab, read.model.dropout, read.model.drops_attention) == (50257, 0.0, False)
    assert (read.system.kernels.workspaces, read.system.experts.expert_workspaces) == (1, 0)
    assert read_case({**row, "note": ""}, REGISTRY).model.dropout == 0.1
    grouped = {**row, "note": "flags {--moe-grouped-gemm:true}"}
    assert read_case(grouped, REGISTRY).system.experts.expert_workspaces == 4
    sharded = {**row, "note": "flags {--num-distributed-optimizer-instances:2}"}
    with pytest.raises(RowError, match="spread in a replica"):
        read_case(sharded, REGISTRY).problem()


@pytest.mark.parametrize("row", TABLES["facts"])
def test_a_row_says_its_facts(row: dict[str, Any]) -> None:
    """Its cells give facts by path, and words of what is assumed, or leave them out."""
    found = case(**row["cells"])
    facts = {path: attrgetter(path)(found) for path in row.get("facts", {})}
    assert json.decode(json.encode(facts)) == row.get("facts", {})
    assert all(word in found.assumed for word in row.get("assumed", []))
    assert not [word for word in row.get("not_assumed", []) if word in found.assumed]


def test_a_capacity_factor_pads_the_experts_of_every_rank() -> None:
    router, alltoall = "natural, capacity factor 1.25, padded to capacity", "alltoall"
    with pytest.raises(RowError, match="deepep backend does not support"):
        case(router=router).problem()
    padded = case(router=router, dispatcher=alltoall).problem()
    dropless = case(dispatcher=alltoall).problem()
    rows = [one.layer(0).activations["expert_fc2_in"].rows for one in (padded, dropless)]
    assert rows[0] == 1.25 * rows[1]


@pytest.mark.parametrize(("changed", "words"), TABLES["refused"])
def test_what_is_not_modelled_is_refused_by_its_column(changed: Cell, words: str) -> None:
    with pytest.raises(RowError) as refused:
        case(**changed).problem()
    assert words in str(refused.value)


def test_a_column_of_a_choice_in_words_is_read() -> None:
    """`cuda_graphs`, as a sheet of a person's own rows has it."""
    assert given_facts({"cuda_graphs": "attn, mlp"}, StackChoice) == {"cuda_graphs": "attn,mlp"}
    with pytest.raises(RowError, match="cuda_graphs 'atn' is not modelled"):
        given_facts({"cuda_graphs": "atn"}, StackChoice)


SPELLINGS: dict[str, dict[str, list[str]]] = TABLES["spellings"]
"""Words of a column, and other spellings of each."""


@pytest.mark.parametrize("column", SPELLINGS)
def test_spellings_of_a_word_mean_the_same(column: str) -> None:
    base = {"layers": "62", "tp": "1", "cp": "1", "pp": "8", "vpp": "4", "dp": "32"}
    for word, spellings in SPELLINGS[column].items():
        wanted = case(**{**base, column: word})
        for spelling in spellings:
            assert case(**{**base, column: spelling}).key == wanted.key, spelling


def test_a_sheet_may_lack_what_it_does_not_need() -> None:
    """Without recomputation everything is kept, as where its cell is empty."""
    lacks = ("note", "recompute", "recompute_modules", "offload_fraction", "vpp", "sp")
    row = {name: cell for name, cell in READ.items() if name not in lacks}
    assert (read_case(row, REGISTRY).method, stack_of(row)) == ("keep_all", "megatron-core-0.16")


def test_windows_are_those_of_the_words() -> None:
    found = case(attention_kind="gqa: head_dim 128, every second layer sliding window 128")
    assert found.model.attention_window == (128, 0) * (found.model.num_layers // 2)


# -- peaks of models with experts in Megatron-LM's functional tests --------------------------------


@cache
def errors() -> dict[str, float]:
    """Predicted over published peak, less 1, of each row whose peak is compared, by its table."""
    return {
        row["table"]: float(row["pred_peak_device_bytes"]) / float(row["peak_device_bytes"]) - 1.0
        for row in read_of("moe.csv")
        if row["peak_device_bytes"]
    }


def test_peaks_are_predicted_within_the_bars() -> None:
    found = [abs(error) for error in errors().values()]
    assert len(found) >= 36
    assert median(found) <= 0.04
    assert max(found) <= 0.10


def test_peaks_of_latent_attention_are_predicted_within_the_bars() -> None:
    """Of tests, of four layers on B200, and of a proxy with a prediction layer and stated stages;
    its overlap with full recomputation is refused, as Megatron-core 0.16.1 refuses it."""
    rows = [row for name in ("moe.csv", "mla.csv", "fp8.csv") for row in read_of(name)]
    found = [
        abs(float(row["pred_peak_device_bytes"]) / float(row["peak_device_bytes"]) - 1.0)
        for row in rows
        if "mla" in row["attention_kind"] and row["peak_device_bytes"]
    ]
    assert len(found) >= 13
    assert median(found) <= 0.04
    assert max(found) <= 0.10


def test_rows_of_one_job_differ_as_published() -> None:
    """Unfused attention, two experts a token, unsharded states: the larger job is the larger."""
    rows = {row["table"]: row for row in read_sheet(data_dir("published") / "moe.csv")}
    stem = "moe/gpt3_mcore_te_tp2_pp1_{}te_8experts2parallel_{} a100"
    resumed = "resume_torch_dist_"
    pairs = [
        (stem.format(resumed, "dist_optimizer"), stem.format("", "dist_optimizer")),
        (stem.format(resumed, "groupedGEMM"), stem.format(resumed, "top2router")),
        (stem.format(resumed, "dist_optimizer"), stem.format(resumed, "groupedGEMM")),
        (stem.format(resumed, "top2router"), stem.format("", "top2router")),
    ]
    for small, large in pairs:
        published = [float(rows[name]["peak_device_bytes"]) for name in (small, large)]
        predicted = [
            here * (1 + errors()[name])
            for here, name in zip(published, (small, large), strict=True)
        ]
        apart = [(pair[1] - pair[0]) / pair[0] for pair in (published, predicted)]
        assert apart[0] > 0.05
        assert abs(apart[1] - apart[0]) < 0.10


def test_words_of_sources_for_a_peak() -> None:
    def read(words: str) -> tuple[str, str]:
        row: Cell = {"peak_kind": words}
        return read_peak_kind(row), read_peak_rank(row)

    assert read("") == ("allocated", "fullest")
    assert read("reserved") == ("reserved", "fullest")
    assert read("allocated_bytes.all.peak of the last rank (last stage)") == ("allocated", "last")
    assert read("rank 0 peak allocated 62.166 GiB") == ("allocated", "first")
    assert read("max over all ranks of max_memory_allocated") == ("allocated", "fullest")
    assert read("allocated at OOM") == ("unstated", "fullest")


# -- steps of models with experts on Megatron's stacks ---------------------------------------------


def timed_rows() -> list[dict[str, Any]]:
    """The rows with a published speed and dispatcher."""
    return [row for row in read_of("moe.csv") if row[SPEED] and row["dispatcher"]]


def error(row: dict[str, Any]) -> float:
    """The signed error of a row's predicted speed."""
    return float(row[f"pred_{SPEED}"]) / float(row[SPEED]) - 1.0


def test_steps_are_predicted_within_the_bars() -> None:
    errors = [abs(error(row)) for row in timed_rows()]
    assert len(errors) >= 18
    assert median(errors) <= 0.12
    assert quantiles(errors, n=4)[2] <= 0.20


def test_a_router_that_is_forced_to_balance_is_predicted_best() -> None:
    """Long contexts, where the router and nothing else differs: balance is what is simulated, and
    a natural router is slower by the tokens of its worst rank."""
    rows = [row for row in timed_rows() if row["table"].startswith("long context")]
    forced = [error(row) for row in rows if "forced" in row["router"]]
    natural = [error(row) for row in rows if "natural" in row["router"]]
    assert len(forced) == len(natural) == 4
    assert max(map(abs, forced)) <= 0.05
    assert min(natural) > max(forced)


def test_a_constant_utilisation_predicts_them_worse() -> None:
    """The same rows at the median model FLOPs utilisation of all of them."""
    used = []
    for row in timed_rows():
        problem = read_case(row, REGISTRY).problem()
        tokens = problem.layout.global_batch * problem.workload.seq_len
        step_s = tokens / (float(row[SPEED]) * problem.layout.gpus)
        used.append(speed(problem, step_s).mfu_causal)
    constant = [abs(median(used) / share - 1.0) for share in used]
    assert median(abs(error(row)) for row in timed_rows()) < median(constant)


def test_what_ran_fits() -> None:
    """No row that is read ran out of memory: the one that did prints no layout."""
    verdicts = [(row["status"], row["pred_status"]) for row in read_of("moe.csv")]
    assert set(verdicts) == {("ok", "ok")}
    assert len(verdicts) >= 54


def test_none_of_them_is_fitted() -> None:
    sources = {row["source"] for row in timed_rows()}
    assert len(sources) >= 2
    assert not [rule for rule in calibration().fit if any(rule.source in one for one in sources)]


# -- layers with experts that Megatron-LM measures alone on eight H100 (kernels_moe.csv) -----------


SHAPE = "tokens=4096;h=7168;ffn=2048;experts=32;topk=8;shared=2048;ep=8"
EXPERTS = Experts(count=32, active=8, ffn=2048, shared_ffn=2048)
WORDS: dict[Dispatcher, str] = {"alltoall": "a2a", "deepep": "deepep"}


class Layer(NamedTuple):
    """Seconds of a pass and bytes of a layer's experts."""

    forward_s: float
    backward_s: float
    peak_bytes: float


def published(dispatcher: Dispatcher) -> Layer:
    rows = [
        row
        for row in read_sheet(data_dir("published") / "kernels_moe.csv")
        if row["shape"] == SHAPE and row["dtype"] == "bf16"
        if row["implementation"].endswith(f"dispatcher {WORDS[dispatcher]}")
    ]
    values = {row["what"]: float(row["value"]) for row in rows}
    return Layer(
        values["moe_layer_forward"] / 1e3,
        values["moe_layer_backward"] / 1e3,
        values["moe_layer_peak_allocated"],
    )


def given(dispatcher: Dispatcher) -> Problem:
    narrow = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "vocab": 1024}
    model = replace(
        load_model("llama-7b"), name="layer", num_layers=1, hidden=7168, experts=EXPERTS, **narrow
    )
    return make_problem(
        Job.at(
            Layout(dp=8, ep=8, zero_stage=1, global_batch=8),
            model=model,
            cluster="h100-80gb",
            system=with_facts(load_system("megatron-core-2026"), dispatcher=dispatcher),
            seq_len=4096,
        )
    )


def predicted(dispatcher: Dispatcher) -> Layer:
    found = given(dispatcher)
    ops, cost = found.layer(0).ops, found.cost
    ours = ops[[op.name for op in ops].index("router") :]
    forward = [cost.op_s(op, "forward", 1.0) for op in ours]
    forward += [cost.comm_s(op.reduce, 0) for op in ours if op.reduce]
    backward = [cost.op_s(op, "backward_input", 1.0) for op in ours]
    backward += [cost.op_s(op, "backward_weight", 1.0) for op in ours]
    backward += [cost.comm_s(op.grad_gather, 0) for op in ours if op.grad_gather]
    peak = evaluate(found, found.base_plan).ranks[0].activation_peak
    return Layer(fsum(forward), fsum(backward), peak)


def test_one_copy_of_a_token_saves_seconds_and_bytes() -> None:
    apart = [
        Layer(*(a - b for a, b in zip(of("alltoall"), of("deepep"), strict=True)))
        for of in (published, predicted)
    ]
    assert min(apart[0]) > 0
    assert apart[1].forward_s == pytest.approx(apart[0].forward_s, rel=0.25)
    assert apart[1].backward_s == pytest.approx(apart[0].backward_s, rel=0.25)
    assert apart[1].peak_bytes == pytest.approx(apart[0].peak_bytes, rel=0.25)
