"""Hugging Face config.json: the supported architectures, and one clear line for the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from rematbench.spec.configfile import ConfigError
from rematbench.spec.load import load_model

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA,
    "mistral-7b": {
        **LLAMA, "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
        "vocab_size": 152064, "max_position_embeddings": 131072, "sliding_window": 131072,
        "use_sliding_window": False, "max_window_layers": 28,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 42,
        "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "internlm-7b": {
        "model_type": "internlm", "bias": True, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 103168, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "resid_pdrop": 0.1,
}  # fmt: skip
MPT = {
    "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
    "max_seq_len": 2048, "vocab_size": 50432, "no_bias": True,
    "attn_config": {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False},
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50304,
    "max_position_embeddings": 2048, "use_parallel_residual": False,
}  # fmt: skip


def written(folder: Path, data: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_public_config_equals_our_yaml(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, CONFIGS[name])
    theirs, ours = asdict(load_model(path)), asdict(load_model(name))
    assert theirs.pop("source") == f"Hugging Face config {path}"
    assert ours.pop("source")
    assert theirs == ours


def test_the_folder_of_a_config_is_enough(tmp_path: Path) -> None:
    path = written(tmp_path / "my-llama", LLAMA)
    assert load_model(tmp_path / "my-llama").name == "my-llama"
    assert load_model(str(path)).parameters == 8_030_261_248


def test_gpt2_has_124_million_parameters(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, GPT2))
    assert model.parameters == 124_439_808
    assert (model.position, model.dropout, model.tied_embeddings) == ("learned", 0.1, True)


def test_mpt_and_gpt_neox_load(tmp_path: Path) -> None:
    mpt = load_model(written(tmp_path / "mpt", MPT))
    assert (mpt.position, mpt.qkv_bias, mpt.ffn) == ("alibi", False, 16384)
    # The checkpoint has 6,649,286,656: its 65 norms lack the bias that a LayerNorm counts here.
    assert mpt.parameters == 6_649_286_656 + 65 * 4096
    assert load_model(written(tmp_path / "neox", NEOX)).position == "rope"


def test_windows_of_qwen2_and_of_layer_types(tmp_path: Path) -> None:
    qwen = {**CONFIGS["qwen2-7b"], "use_sliding_window": True, "max_window_layers": 20}
    model = load_model(written(tmp_path / "qwen", qwen))
    assert model.attention_window == (0,) * 20 + (131072,) * 8
    kinds = ["full_attention", "sliding_attention"] * 21
    gemma = {**CONFIGS["gemma-2-9b"], "layer_types": kinds}
    assert load_model(written(tmp_path / "gemma", gemma)).attention_window == (0, 4096) * 21


def test_qwen3_norms_the_heads_of_queries_and_keys(tmp_path: Path) -> None:
    made = load_model(written(tmp_path, {**LLAMA, "model_type": "qwen3", "head_dim": 128}))
    plain = load_model(written(tmp_path, {**LLAMA, "head_dim": 128}))
    assert (made.qk_norm, made.qkv_bias, plain.qk_norm) == (True, False, False)
    assert made.parameters - plain.parameters == made.num_layers * 2 * 128


KNOWN = "gemma2, gpt2, gpt_neox, internlm, llama, mistral, mpt, qwen2, qwen3"
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {**LLAMA, "model_type": "qwen4"},
        f"model_type: 'qwen4': is not modelled (modelled: {KNOWN})",
    ),
    (
        {"architectures": ["T5"], "d_model": 8},
        f"model_type: 'None': is not modelled (modelled: {KNOWN})",
    ),
    (
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 8},
        "num_local_experts: mixture of experts (8 experts) is not modelled",
    ),
    (
        {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
        "quantization_config: fp8 weights are not modelled",
    ),
    (
        {**LLAMA, "hidden_act": "relu"},
        "hidden_act: activation 'relu' in a gated MLP, which is not modelled",
    ),
    (
        {**NEOX, "use_parallel_residual": True},
        "use_parallel_residual: attention and MLP side by side, which is not modelled",
    ),
    (
        {**MPT, "attn_config": {"qk_ln": True}},
        "attn_config.qk_ln: a norm on queries and keys, which is not modelled",
    ),
    (
        {k: v for k, v in LLAMA.items() if k != "hidden_size"},
        "hidden_size: required key is missing",
    ),
    ({**LLAMA, "vocab_size": "many"}, "vocab_size: expected int, got str"),
    (
        {"model_type": "qwen2_moe", "num_experts": 60},
        "num_experts: mixture of experts (60 experts) is not modelled",
    ),
    (
        {"model_type": "qwen2_vl", "vision_config": {"depth": 32}},
        "model_type: 'qwen2_vl': it has an image encoder, which is not modelled "
        f"(modelled: {KNOWN})",
    ),
    (
        {"model_type": "minicpm3", "kv_lora_rank": 256},
        "model_type: 'minicpm3': it has latent attention (keys and values of low rank), which is "
        f"not modelled (modelled: {KNOWN})",
    ),
]


@pytest.mark.parametrize(("data", "line"), REFUSED, ids=[line[:30] for _, line in REFUSED])
def test_what_is_not_modelled_is_refused_by_its_key(
    tmp_path: Path, data: dict[str, Any], line: str
) -> None:
    path = written(tmp_path, data)
    with pytest.raises(ConfigError) as error:
        load_model(path)
    assert str(error.value) == f"{path}: {line}"
