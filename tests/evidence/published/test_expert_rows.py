"""moe.csv: every row with experts is read, or refused by the name of what is not modelled."""

import re
from collections import Counter

import pytest

from rematbench.evidence.published.row_cases import PublishedCase, read_case
from rematbench.evidence.published.sheets import Cell, RowError, read_sheet
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import discover

REGISTRY = discover(())
ROWS = read_sheet(data_dir("published") / "moe.csv")
ZOO = next(row for row in ROWS if row["recompute_modules"] == "layernorm moe")
READ = {**ZOO, "system": "megatron-core-0.16"}


def outcome(row: Cell) -> str:
    """`read`, or the column of the reason why the row is refused."""
    try:
        read_case(row, REGISTRY)
    except RowError as error:
        text = re.sub(r"^column ", "", str(error))
        return re.split(r"[ :]", text)[0] if "not published" not in text else "not published"
    return "read"


def test_columns_of_runs_come_first() -> None:
    columns = list(ROWS[0])
    sheet = read_sheet(data_dir("published") / "runs.csv")
    runs = [column for column in sheet[0] if column != "peak_kind"]  # stands at the end there
    assert len(ROWS) == 217
    assert columns[: len(runs)] == runs
    assert "peak_kind" in columns
    assert {row["licence"] for row in ROWS} == {
        "Apache-2.0",
        "MIT",
        "BSD-3-Clause and Apache-2.0 (NVIDIA)",
    }


def test_every_row_is_read_or_refused_by_name() -> None:
    found = Counter(outcome(row) for row in ROWS)
    assert found == {
        "precision": 124,
        "attention_kind": 16,
        "read": 60,
        "offload": 6,
        "not published": 5,
        "cuda_graph": 6,
    }


def case(**changed: str) -> PublishedCase:
    return read_case({**READ, **changed}, REGISTRY)


def test_a_row_says_experts_layout_dispatcher_and_modules() -> None:
    found = case()
    experts = found.model.experts
    assert experts is not None
    assert (experts.count, experts.active, experts.ffn) == (128, 8, 1536)
    assert (found.layout.ep, found.layout.etp) == (8, 1)
    assert found.model.qk_norm
    assert found.model.head_dim == 128
    assert found.system.experts.dispatcher == "deepep"
    assert found.settings == {"modules": ("layernorm", "moe")}


def test_shared_experts_dense_layers_and_optimizers_are_read() -> None:
    found = case(shared_experts_ffn="512", dense_layers="3")
    assert found.model.experts is not None
    assert found.model.experts.shared_ffn == 512
    assert found.model.experts.dense_layers == (0, 1, 2)
    assert case(optimizer="adam, precision-aware (bf16 moments)").system.states.optimizer_bytes == 8
    assert case(etp="").layout.expert_tp == found.layout.tp


def test_flags_in_a_note_are_facts_of_the_model_and_the_stack() -> None:
    row = next(row for row in ROWS if row["table"].startswith("moe/gpt3_mcore_cp2_pp2_ep2"))
    read = read_case(row, REGISTRY)
    assert (read.model.vocab, read.model.dropout, read.model.drops_attention) == (50257, 0.0, False)
    assert (read.system.kernels.workspaces, read.system.experts.expert_workspaces) == (1, 0)
    assert read_case({**row, "note": ""}, REGISTRY).model.dropout == 0.1
    grouped = {**row, "note": "flags {--moe-grouped-gemm:true}"}
    assert read_case(grouped, REGISTRY).system.experts.expert_workspaces == 4
    sharded = {**row, "note": "flags {--num-distributed-optimizer-instances:2}"}
    with pytest.raises(RowError, match="experts are spread inside a replica"):
        read_case(sharded, REGISTRY).problem()


def test_a_capacity_factor_pads_the_experts_of_every_rank() -> None:
    router, alltoall = "natural, capacity factor 1.25, padded to capacity", "alltoall"
    with pytest.raises(RowError, match="deepep backend does not support"):
        case(router=router).problem()
    padded = case(router=router, dispatcher=alltoall).problem()
    dropless = case(dispatcher=alltoall).problem()
    rows = [one.layer(0).activations["expert_fc2_in"].rows for one in (padded, dropless)]
    assert rows[0] == 1.25 * rows[1]


def test_balance_is_an_assumption_unless_it_was_forced() -> None:
    assert "experts balanced" not in case(router="forced balance, dropless").assumed
    assert case(router="natural, dropless").assumed.endswith("experts balanced")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not modelled (known: bf16, fp16, fp32, fp64)"),
        ({"attention_kind": "mla: q_lora 1536"}, "attention_kind: 'mla: q_lora 1536': is not"),
        ({"mtp_layers": "1"}, "mtp_layers: '1': multi-token prediction is not modelled"),
        ({"ep_overlap": "shared"}, "ep_overlap: 'shared': is not modelled (known: no, none, yes)"),
        ({"cuda_graph": "full_iteration"}, "cuda_graph: 'full_iteration': CUDA graphs"),
        ({"offload": "paged stash"}, "offload: 'paged stash': is not modelled"),
        ({"pp_layout": "Et|(tt|)*30L"}, "pp_layout: 'Et|(tt|)*30L': stages of a layout string"),
        ({"router": "token drop"}, "router: 'token drop': is not modelled (dropless, or"),
        ({"router": "capacity factor 0.5"}, "is not modelled (dropless, or capacity factor F"),
        ({"optimizer": "muon"}, "optimizer: 'muon': is not modelled"),
        ({"recompute_modules": "gdn_norm"}, "recompute_modules: 'gdn_norm' is not modelled"),
        ({"dispatcher": "mori"}, "dispatcher 'mori' is not modelled (known: alltoall, allgather"),
        ({"recompute": "", "recompute_modules": ""}, "recomputation not published"),
        ({"ep": "7"}, "layout: "),
    ],
)
def test_what_is_not_modelled_is_refused_by_its_column(changed: Cell, words: str) -> None:
    with pytest.raises(RowError) as refused:
        case(**changed).problem()
    assert words in str(refused.value)


def test_a_dense_model_of_a_family_with_experts_has_none() -> None:
    """The shipped model that lends it norms and positions is the dense one."""
    named = {"model": "qwen3-14b", "layers": "40", "heads": "40", "kv_heads": "8", "hidden": "5120"}
    experts = dict.fromkeys(("experts", "topk", "moe_ffn", "ep", "etp", "recompute_modules"), "")
    layout = {"tp": "1", "sp": "no", "cp": "1", "pp": "1", "vpp": "1", "dp": "256"}
    found = case(**named, **experts, **layout, recompute="none")
    assert found.model.experts is None
    assert "qwen3-8b" in found.assumed


def test_an_overlap_is_a_fact_of_the_stack_and_delays_weights_only_where_a_row_says_so() -> None:
    found = case(ep_overlap="yes", recompute_modules="layernorm")
    assert (found.system.experts.ep_overlap, found.system.experts.delayed_wgrad) == (
        "interleaved",
        False,
    )
    delayed = case(ep_overlap="yes", recompute_modules="layernorm", note="wgrad delayed")
    assert delayed.system.experts.delayed_wgrad
    assert not case(note="wgrad delayed").system.experts.delayed_wgrad
