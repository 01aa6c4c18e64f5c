"""Every architecture of config/architectures.yaml against its class in Transformers: parameters of
meta tensors for the class's defaults and for each switch in its other position, and the tensors
that a layer keeps."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from rematbench.costs.operators.block import layer_table
from rematbench.inputs.architectures import Architecture, architectures
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model, load_system
from rematbench.workload import Model, Workload

pytest.importorskip("transformers")

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.problems import once

KNOWN = {
    name: known
    for name, known in architectures().items()
    if name in CONFIG_MAPPING and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
HEADS = {"head_dim": 128, "num_key_value_heads": 8}
NEEDS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": HEADS,
    "ministral": HEADS,
    "nemotron": HEADS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 64, "moe_topk": 8, "intermediate_size": 3072},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
"""Keys of classes that cannot be made from their own defaults."""
REMOTE = {
    "RefinedWeb", "RefinedWebModel", "Yi", "aquila", "baichuan", "chatglm", "deepseek", "exaone",
    "grok-1", "hf_olmo", "internlm", "internlm2", "jais", "kimi_k2", "mimo", "minicpm", "orion",
    "qwen", "skywork", "stablelm_epoch", "xverse",
}  # fmt: skip
"""Architectures whose code is in their models' repositories."""
ENCODERS = {"albert"}
"""Architectures with a class for masked tokens, not for the next one."""
TEXT_PARTS = {
    "glm4v_moe_text",
    "glm4v_text",
    "qwen3_vl_moe_text",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_vl_text",
}
"""Text parts without a class of their own for language models."""


def config_of(name: str, **keys: Any) -> Any:
    return CONFIG_MAPPING[name](**NEEDS.get(name, {}) | keys)


def shallow(name: str, short: bool) -> dict[str, int]:
    """In a short run six layers, not the class's 24 to 61: dense, windowed and sparse are among
    them.  GPT-Neo names the kind of each of its layers."""
    return {"num_hidden_layers": 6} if short and name != "gpt_neo" else {}


def read(folder: Path, config: Any, **changes: Any) -> Model:
    data = json.loads(config.to_json_string(use_diff=False)) | changes
    path = folder / "config.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return load_model(path)


def meta_parameters(config: Any) -> int:
    with torch.device("meta"):
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = kind._from_config(config)
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(parameter.numel() for parameter in trained)


def _is_one(keys: str | tuple[str, ...]) -> TypeGuard[str]:
    return isinstance(keys, str)


def switches(known: Architecture) -> Iterator[dict[str, Any]]:
    """The keys that change a fact, each with another value than its default."""
    for key in (*filter(_is_one, known.keys.values()), "tie_word_embeddings"):
        yield {key: not known.defaults.get(key, False)}
    for rule in known.when:
        yield rule.condition
        yield {key: not value for key, value in rule.condition.items() if isinstance(value, bool)}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_parameters_are_those_of_the_class(tmp_path: Path, name: str, short: bool) -> None:
    config = config_of(name, **shallow(name, short))
    assert read(tmp_path, config).parameters == meta_parameters(config)


def facts(name: str, keys: object = ()) -> object:
    """What decides the operators and parameters of an architecture, and the switches."""
    return sorted(KNOWN[name].facts.items()), KNOWN[name].when, keys


def all_facts(name: str) -> object:
    """The same and the keys that are switched."""
    return facts(name, [*switches(KNOWN[name])])


@pytest.mark.parametrize("name", once(((name,) for name in KNOWN if name != "mpt"), all_facts))
def test_each_switch_changes_the_parameters_as_in_the_class(
    tmp_path: Path, name: str, short: bool
) -> None:
    """But of MPT, whose class has no biases at all."""
    usual = config_of(name)
    for keys in switches(KNOWN[name]):
        known = all(isinstance(getattr(usual, key, None), bool) for key in keys)
        apart = "tie_word_embeddings" in keys and KNOWN[name].facts.get("head_bias")
        if keys and known and not apart:
            config = config_of(name, **shallow(name, short), **keys)
            assert read(tmp_path, config).parameters == meta_parameters(config), keys


def test_the_others_have_no_class_here() -> None:
    named = {name for name in architectures() if not name.startswith(".")}
    assert named - KNOWN.keys() == REMOTE | TEXT_PARTS | ENCODERS


@pytest.mark.parametrize("name", sorted({*KNOWN, *TEXT_PARTS, *ENCODERS}))
def test_the_defaults_are_those_of_the_class(name: str) -> None:
    """Of the keys that the class has under the same name; it may set None where a key has no
    effect."""
    data = config_of(name).to_dict()
    defaults = architectures()[name].defaults
    given = NEEDS.get(name, {}).keys()
    both = {key for key in defaults.keys() & data.keys() - given if data[key] is not None}
    assert {key: defaults[key] for key in both} == {key: data[key] for key in both}


TINY = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KEYS = {
    "gpt2": dict(
        zip(tuple(TINY)[:4], ("n_embd", "n_inner", "n_layer", "n_head"), strict=True)
    ),
    "opt": {"intermediate_size": "ffn_dim"},
}  # fmt: skip
KEYS["gpt_bigcode"] = KEYS["gpt2"]
PLAIN = (
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "dropout", "residual_dropout",
)  # fmt: skip
TRACED = sorted(
    {name for name, known in KNOWN.items() if "experts.count" not in known.keys}
    - {"bloom", "codegen", "gemma2", "gptj", "gpt_neo", "mpt", "vaultgemma", "xglm"}  # no SDPA
    - {"granite_swa"}  # no SDPA beside its sinks
    - {"biogpt", "falcon", "gpt_neox"}  # masks of seq_len x seq_len beside SDPA
    - {"persimmon", "phi3"}  # one projection, whose output their values keep whole
)
STEPS = 4e-3
"""Statistics of LayerNorm, scalars, and weights in fp32."""


@pytest.mark.parametrize("name", once(((name,) for name in TRACED), facts))
def test_a_layer_keeps_what_the_class_keeps(tmp_path: Path, name: str) -> None:
    """On the stack `huggingface-flash`, in bf16, by a trace of the class on fake tensors."""
    keys = {KEYS.get(name, {}).get(key, key): value for key, value in TINY.items()}
    config = CONFIG_MAPPING[name](**keys, **({"head_dim": 64} if name not in KEYS else {}))
    config.num_key_value_heads = 4 if hasattr(config, "num_key_value_heads") else None
    for key in PLAIN:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    if name == "opt":
        config.word_embed_proj_dim = 256
    from baselines.transformers.traced_step import Setup, run  # noqa: PLC0415 - slow to collect

    seen = run(config, Setup(seq_len=272, attention="sdpa"))
    inside = [
        kept
        for kept in seen.saved
        if re.search(r"\.(layers|h)\b", kept.module) and "apply_rotary_pos_emb" not in kept.function
    ]
    model = read(tmp_path, config, sliding_window=None, layer_types=None)
    work = Workload(model=model, seq_len=272)
    stack = load_system("huggingface-flash")
    table = layer_table(work, Layout(), stack, fused_attention=True, window=0)
    traced = sum(kept.nbytes * kept.layers for kept in inside) / model.num_layers
    assert table.saved_bytes == pytest.approx(traced, rel=STEPS)
