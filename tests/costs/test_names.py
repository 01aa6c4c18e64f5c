"""ACTIVATIONS has the name of every activation, and no other."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from msgspec.structs import replace

from rematbench.costs.operators.adapters import Place, trained_table
from rematbench.costs.operators.block import (
    embedding_table,
    head_table,
    layer_table,
    prediction_table,
)
from rematbench.costs.operators.ops import ACTIVATIONS
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model, load_system, names
from rematbench.inputs.system import with_facts
from rematbench.model import Memory
from rematbench.problem import Problem
from rematbench.workload import Experts, Latent, Workload
from tests.problems import BLOCKS, LLAMA, problem, remade


def test_the_names_are_those_of_all_models_and_stacks() -> None:
    """ACTIVATIONS, against the tables of every shipped model and of each other block (and one with
    norms of heads) on every stack that differs in what it keeps."""
    stacks = [load_system(name) for name in ("megatron-core", "huggingface", "rematbench")]
    stacks[1] = with_facts(stacks[1], held_logit_bytes=2)  # which jobs say, not stacks
    found: set[str] = set()
    shipped = [load_model(name) for name in names("model")]
    experts = Experts(count=8, active=2, ffn=64, shared_ffn=64, shared_gate=True)
    mixtures = [replace(LLAMA, experts=experts, mlp=mlp) for mlp in ("swiglu", "gelu")]
    chosen = Latent(
        q_rank=24, kv_rank=16, nope=8, rope=4, v=6, index_heads=2, index_dim=8, index_top=16
    )
    sparse = replace(LLAMA, **{**BLOCKS["latent"], "latent": chosen})
    blocks = (replace(LLAMA, **facts) for facts in BLOCKS.values())
    for model in (*shipped, *mixtures, sparse, *blocks):
        for system, degree in product(stacks, (1, 2)):
            shape = replace(model, qk_norm=model.qk_norm or model.name == "llama-7b")
            work = Workload(model=shape, seq_len=256)
            layout = Layout(dp=2, ulysses=degree, ep=2 if shape.experts else 1)
            for fused, dense in product((True, False), {True, shape.experts is None}):
                made = layer_table(
                    work, layout, system, fused_attention=fused, window=0, dense=dense
                )
                found |= made.activations.keys()
            found |= embedding_table(work, layout, system).activations.keys()
            found |= head_table(work, layout, system).activations.keys()
        for tp in (1, 2):
            work = Workload(model=replace(shape, mtp_layers=1), seq_len=256)
            layout = Layout(dp=2, tp=tp, ep=2 if shape.experts else 1)
            predicts = {"fused_attention": True, "dense": shape.experts is None, "copies": True}
            for system in stacks:
                found |= prediction_table(work, layout, system, **predicts).activations.keys()
                found |= head_table(work, layout, system).activations.keys()
        for facts in ({"lora_dropout": 0.1}, {"dora": True}):
            work = Workload(model=shape, seq_len=256, lora_rank=4, **facts)
            last = {"fused_attention": True, "dense": shape.experts is None}
            table = layer_table(work, layout, stacks[1], window=0, **last)
            found |= trained_table(table, work, stacks[1], Place()).activations.keys()
    for problem_of in special():
        tables = (*problem_of.layer_kinds, problem_of.embedding, problem_of.head)
        found |= {name for table in tables for name in table.activations}
    assert found == ACTIVATIONS


def special() -> Iterator[Problem]:
    """Jobs that save what no shipped model saves: with recipes, adapters over ranks, shared layers,
    tables in place of MLPs."""
    memory = Memory(layers=(1,), heads=2, keys=8, key_dim=8, top=3)
    albert = {"layer_groups": 2, "embedding_width": 16, "embedding_norm": True, "post_norm": True}
    shared = Experts(count=8, active=2, ffn=64, shared_ffn=64)
    for facts in ({"memory": memory}, albert | {"pre_norm": False}):
        for system in ("rematbench", "huggingface"):
            yield problem(model=replace(LLAMA, num_layers=4, **facts), system=system)
    after = {"post_norm": True, "pre_norm": False}
    blocks = ({}, after, BLOCKS["latent"], {"experts": shared}, {"mtp_layers": 1})
    jobs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *((block, {"recipe": "fp8"}) for block in blocks),
        ({}, {"bottleneck": 8}),
    ]
    for block, job in jobs:
        for attention in ("flash", "unfused"):
            model = replace(LLAMA, **block)
            made = problem(model=model, system="megatron-core", attention=attention)
            yield remade(made, workload=replace(made.workload, **job))
    routed = {"model": replace(LLAMA, experts=shared), "ep": 2, "etp": 1}
    for fused, kind in product((True, False), ({}, routed)):
        changes = {"fused_linears": fused}
        made = problem(system="megatron-core", tp=2, system_changes=changes, **kind)
        yield remade(made, workload=replace(made.workload, lora_rank=4))
