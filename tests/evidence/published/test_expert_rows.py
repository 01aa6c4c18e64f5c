"""moe.csv: words of rows with experts, and what they mean."""

import pytest

from rematbench.evidence.published.row_cases import PublishedCase, read_case
from rematbench.evidence.published.sheets import Cell, RowError, read_sheet
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import discover

REGISTRY = discover(())
ROWS = read_sheet(data_dir("published") / "moe.csv")
ZOO = next(row for row in ROWS if row["recompute_modules"] == "layernorm moe")
READ = {**ZOO, "system": "megatron-core-0.16"}


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
        ({"attention_kind": "mla: q_lora 1536"}, "attention_kind: mla: Object missing required"),
        ({"ep_overlap": "shared"}, "ep_overlap: 'shared' is not modelled"),
        ({"cuda_graph": "full_iteration"}, "cuda_graphs: full_iteration holds experts of known"),
        ({"cuda_graph": "moe_preprocess"}, "cuda_graph: 'moe_preprocess': CUDA graphs of this"),
        ({"router": "token drop"}, "router: 'token drop': the capacity factor of dropped"),
        ({"router": "token dropping"}, "is not modelled; did you mean 'token drop'?"),
        ({"optimizer": "muon"}, "optimizer: 'muon': is not modelled"),
        ({"recompute_modules": "gdn_norm"}, "recompute_modules: 'gdn_norm' is not modelled"),
        ({"dispatcher": "mori"}, "dispatcher: 'mori' is not modelled"),
        ({"recompute": "", "recompute_modules": ""}, "recomputation not published"),
        ({"dispatcher": "deep-ep"}, "is not modelled; did you mean 'deepep'?"),
        ({"cuda_graph": "full_iteration", "offload": "x"}, "offload: 'x': is not modelled"),
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


def test_words_without_an_effect_refuse_nothing() -> None:
    """A router's scores, a fabric, an optimizer's name, a clamp, and what stands in parentheses."""
    plain = case(router="forced balance, dropless")
    for changed in (
        {"router": "forced balance, sigmoid scores (group limited), dropless"},
        {"dispatcher": "deepep (NVSHMEM over EFA)"},
        {"optimizer": "adamw (distributed, fused)"},
        {"recompute_modules": "layernorm moe (default)"},
    ):
        assert case(**{"router": "forced balance, dropless", **changed}).key == plain.key, changed


def test_an_unknown_word_of_a_shipped_models_mlp_is_the_models() -> None:
    row = {"model": "gpt-oss-120b", "mlp": "quick geglu with a clamp", "recompute_modules": "none"}
    layers = {"layers": "36", "hidden": "2880", "heads": "64", "kv_heads": "8", "ffn": "2880"}
    found = case(**row, **layers, vocab="201088", attention_kind="gqa: sinks, windows of 128")
    assert (found.model.mlp, found.model.attention_sinks) == ("swiglu", True)
    with pytest.raises(RowError, match="column mlp: 'quick geglu with a clamp' is not modelled"):
        case(mlp="quick geglu with a clamp")


def test_stages_of_a_row_are_those_of_the_layout() -> None:
    """As text; by their ends, which the even partition makes smaller where it can; or by layers."""
    layout = {"layers": "30", "tp": "1", "sp": "no", "cp": "1", "pp": "8", "vpp": "4", "dp": "32"}
    ends = "first and last stage one layer fewer"
    assert case(**layout, pp_layout="E|(t|)*30L").layout.stages == "E|(t|)*30L"
    found = case(**layout, pp_layout=ends).layout.stages
    assert found == case(**layout, partition=f"0,{'1,' * 30}0").layout.stages == "E|(t|)*30L"
    assert case(**{**layout, "layers": "62"}, pp_layout=ends).layout.stages == ""
    with pytest.raises(RowError, match="column partition: '1,2' is not 30 layers in 32 chunks"):
        case(**layout, partition="1,2")
