"""The operator table of a `huggingface` stack against committed traces of Transformers 5.23.0."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec.structs import replace

from rematbench.costs.operators.block import head_table, layer_table
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import program_bytes
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import System, with_facts
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import load_module
from rematbench.problem import Problem
from rematbench.workload import Model, Workload
from tests.problems import problem

TRACED = Path(__file__).resolve().parents[2] / "results/measured/transformers"
RECORDS = sorted(TRACED.glob("*.jsonl"))
FAMILIES = {"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"}
ROPE = "apply_rotary_pos_emb"
SAVED = 5e-4
PEAK = 1e-3
LAYER = 5e-3
full_recompute = load_module(data_dir("methods") / "full_recompute.py").FullRecompute
mst = load_module(data_dir("methods") / "mst.py").Mst


def read(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def huggingface(attention: str = "sdpa") -> System:
    """The shipped stack whose attention a record has."""
    return load_system("huggingface" if attention == "eager" else "huggingface-flash")


def model_of(config: dict[str, Any]) -> Model:
    kind, heads = config["model_type"], config["num_attention_heads"]
    gemma = kind.startswith("gemma")
    return Model(
        name=kind,
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        mlp="geglu" if gemma else "swiglu",
        norm="rmsnorm",
        position="rope",
        tied_embeddings=config["tie_word_embeddings"],
        qkv_bias=kind == "qwen2",
        post_norm=kind == "gemma2",
        qk_norm=kind == "qwen3",
        norm_offset=gemma,
        attention_soft_cap=config.get("attn_logit_softcapping") or 0.0,
        logit_soft_cap=config.get("final_logit_softcapping") or 0.0,
    )


def test_the_families_are_there_at_both_lengths() -> None:
    """Each with eager attention and with a flash kernel."""
    seen = {
        (r["config"]["model_type"], r["setup"]["seq_len"], r["setup"]["attention"] == "eager")
        for r in map(read, RECORDS)
        if not r["setup"]["checkpointing"]
    }
    assert seen == {(f, n, eager) for f in FAMILIES for n in (4096, 32768) for eager in (0, 1)}
    for record in map(read, RECORDS):
        assert record["stack"] == {"transformers": "5.23.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_table_keeps_what_the_trace_keeps(path: Path) -> None:
    """A layer's internals, and everything: rotary tables, labels and Gemma's 1 + weight are what is
    left."""
    record = read(path)
    setup, seen, model = record["setup"], record["seen"], model_of(record["config"])
    if setup["checkpointing"]:
        (kept,) = (k for k in seen["saved"] if k["operator"] == "checkpoint")
        assert kept["nbytes"] == setup["seq_len"] * model.hidden * 2
        assert kept["layers"] == model.num_layers
        return
    work = Workload(model=model, seq_len=setup["seq_len"])
    fused = setup["attention"] != "eager"
    stack = huggingface(setup["attention"])
    layer = layer_table(work, Layout(), stack, fused_attention=fused, window=0)
    head = head_table(work, Layout(), stack)
    inside = [k for k in seen["saved"] if ".layers" in k["module"] and k["function"] != ROPE]
    whole = sum(k["nbytes"] * k["layers"] for k in seen["saved"])
    traced = sum(k["nbytes"] * k["layers"] for k in inside) / model.num_layers
    assert layer.saved_bytes == pytest.approx(traced, rel=SAVED)
    table = layer.saved_bytes * model.num_layers + head.saved_bytes
    assert table == pytest.approx(whole, rel=SAVED)


def problem_of(record: dict[str, Any]) -> Problem:
    setup, base = record["setup"], problem()
    return Problem(
        workload=Workload(model=model_of(record["config"]), seq_len=setup["seq_len"]),
        cluster=base.cluster,
        system=huggingface(setup["attention"]),
        layout=Layout(),
        calibration=base.calibration,
    )


def peak(p: Problem, plan: Plan | Unsupported) -> int:
    assert isinstance(plan, Plan)
    return program_bytes(p, plan, lower(plan, p))[0].activation_peak


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_ledger_peaks_where_the_trace_does(path: Path) -> None:
    """With nothing done, and with every layer rebuilt from its input: a checkpoint also holds the
    mask of eager attention, which the table does not have."""
    record = read(path)
    p = problem_of(record)
    plan = (
        full_recompute().plan(p, p.base_plan) if record["setup"]["checkpointing"] else p.base_plan
    )
    traced = max(peak["activation_bytes"] for peak in record["seen"]["peaks"])
    assert peak(p, plan) + mask_bytes(record) == pytest.approx(traced, rel=PEAK)


def mask_bytes(record: dict[str, Any]) -> int:
    setup = record["setup"]
    held = setup["checkpointing"] and setup["attention"] == "eager"
    return 2 * setup["seq_len"] ** 2 if held else 0


@pytest.mark.parametrize(
    "path", [r for r in RECORDS if r.stem.endswith("32768.checkpointing")], ids=lambda p: p.stem
)
def test_one_rebuilt_layer_peaks_where_the_trace_does(path: Path) -> None:
    """The logits out of the way (by pieces, here): the largest sum of one layer and all inputs.  Of
    a projection that is the embedding too the gradient waits for the embedding's."""
    record = read(path)
    p = problem_of(record)
    plan = full_recompute().plan(p, p.base_plan)
    plan = mst(head_chunks=256, mlp_chunks=1).plan(p, plan)
    traced = {peak["phase"]: peak["activation_bytes"] for peak in record["seen"]["peaks"]}
    model = p.workload.model
    waiting = model.vocab * model.hidden * 2 if model.tied_embeddings else 0
    held = waiting + mask_bytes(record)
    assert peak(p, plan) + held == pytest.approx(traced["layers_backward"], rel=LAYER)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_eager_attention_makes_its_scores_more_than_once(
    precision: Literal["bf16", "fp32"],
) -> None:
    """At the softmax: the masked scores and their fp32 copy forward, both gradients backward,
    beside what is saved, with neither the values nor gradients of q and k.  One softmax kernel
    needs none of it."""
    model = model_of(read(TRACED / "llama-3-8b.eager.4096.jsonl")["config"])
    work = Workload(model=model, seq_len=4096, precision=precision)
    layer = layer_table(work, Layout(), huggingface("eager"), fused_attention=False, window=0)
    op, scores = layer.op("attention"), model.num_heads * 4096**2
    saved = sum(
        a.nbytes for n, a in layer.activations.items() if n.startswith(("attn_p", "attn_s"))
    )
    alive = {"bf16": (2 + 4 + 4, 3 * 4), "fp32": (4 + 4, 3 * 4)}[precision]
    assert saved + op.scratch_forward_bytes == scores * alive[0]
    absent = 2 * (model.q_width + model.kv_width) * 4096 * work.element_bytes
    assert saved + absent + op.scratch_backward_bytes == scores * alive[1]
    fused = layer_table(work, Layout(), load_system("rematbench"), fused_attention=False, window=0)
    inside = fused.op("attention")
    assert (inside.scratch_forward_bytes, inside.scratch_backward_bytes) == (0, 0)


def test_repeated_keys_and_held_logits_are_named() -> None:
    """Facts of older versions: SDPA of repeated keys and values, fp32 logits that are held."""
    model = model_of(read(TRACED / "llama-3-8b.sdpa.4096.jsonl")["config"])
    work, plain = Workload(model=model, seq_len=4096), huggingface()
    older = with_facts(plain, repeats_kv=True, held_logit_bytes=4)
    tables = [
        layer_table(work, Layout(), system, fused_attention=True, window=0)
        for system in (plain, older)
    ]
    more = 2 * (model.q_width - model.kv_width) * 2
    assert tables[1].saved_bytes - tables[0].saved_bytes == 4096 * more
    heads = [head_table(work, Layout(), system) for system in (plain, older)]
    assert heads[1].saved_bytes - heads[0].saved_bytes == 4096 * model.vocab * 4


def test_a_fused_norm_over_heads_keeps_its_input() -> None:
    model = model_of(read(TRACED / "qwen3-8b.sdpa.4096.jsonl")["config"])
    work = Workload(model=model, seq_len=4096)
    plain = with_facts(load_system("huggingface"), norm_keeps_steps=False)
    with_norms, without = (
        layer_table(
            replace(work, model=replace(model, qk_norm=there)),
            Layout(),
            plain,
            fused_attention=True,
            window=0,
        )
        for there in (True, False)
    )
    more = with_norms.saved_bytes - without.saved_bytes
    assert more == 4096 * (model.q_width + model.kv_width) * 2
    assert with_norms.parameters - without.parameters == 2 * model.head_dim
