"""Hugging Face config.json: the supported architectures, and one clear line for the others."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from rematbench.costs.flops import attention_flop_per_token, matrix_flop_per_token
from rematbench.evaluate.result import assumed
from rematbench.inputs.architectures import architectures
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.huggingface import OWN_FILE
from rematbench.inputs.load import load_model
from rematbench.workload import Model, Workload
from tests.inputs.public_configs import EXPERTS, PUBLIC
from tests.problems import problem
from tests.tables import tables

TABLES = tables(__file__)
LLAMA, GPT2, MPT, NEOX = (TABLES["bases"][name] for name in ("llama", "gpt2", "mpt", "neox"))
CONFIGS: dict[str, dict[str, Any]] = {"llama-3.1-8b": LLAMA, **TABLES["public"]}


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
    assert mpt.parameters == 6_649_286_656
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


KNOWN = [name for name in architectures() if not name.startswith(".")]
MODELLED = f"(config/architectures.yaml has the {len(KNOWN)} modelled architectures)"


@pytest.mark.parametrize(("base", "changes", "line"), TABLES["refused"])
def test_what_is_not_modelled_is_refused_by_its_key(
    tmp_path: Path, base: str, changes: dict[str, Any], line: str
) -> None:
    """A change to null takes the key away."""
    data = TABLES["bases"].get(base, {}) | changes
    path = written(tmp_path, {key: value for key, value in data.items() if value is not None})
    with pytest.raises(ConfigError) as error:
        load_model(path)
    words = line.format(MODELLED=MODELLED, OWN_FILE=OWN_FILE)
    assert str(error.value) == f"{path}: {words}"


def test_a_release_in_fp8_alone_is_read_as_fine_tuning_takes_it(tmp_path: Path) -> None:
    given = {"model_type": "minimax_m2", "num_local_experts": 8}
    fp8 = {**LLAMA, **given, "quantization_config": {"quant_method": "fp8"}}
    model, plain = load_model(written(tmp_path, fp8)), load_model(written(tmp_path, LLAMA | given))
    assert model.parameters == plain.parameters
    assert "read as the run's precision" in model.left_out


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_decoder_has_the_parameters_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    data, parameters = PUBLIC[name]
    assert load_model(written(tmp_path, data)).parameters == parameters


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_a_mixture_of_experts_has_the_parameters_of_its_class(tmp_path: Path, name: str) -> None:
    data, parameters, active = EXPERTS[name]
    model = load_model(written(tmp_path, data))
    assert (model.parameters, model.active_parameters) == (parameters, active)
    model = replace(model, mtp_layers=0)
    matrices = model.active_layer_matrices + model.hidden * model.vocab
    assert matrix_flop_per_token(model) == 6 * matrices
    assert matrices <= active + model.hidden * model.vocab * model.tied_embeddings


def test_experts_by_layer_router_and_shared_expert(tmp_path: Path) -> None:
    def read(name: str, **more: Any) -> Model:
        return load_model(written(tmp_path, {**EXPERTS[name][0], **more}))

    glm, scout, maverick = read("GLM-4.5"), read("Llama-4-Scout"), read("Llama-4-Maverick")
    assert glm.experts is not None
    assert (glm.experts.dense_layers, glm.experts.router) == ((0, 1, 2), "sigmoid")
    assert (glm.experts.shared_ffn, glm.ffn, glm.expert_layers) == (1536, 12288, 89)
    assert "more than one token" in glm.left_out
    assert maverick.experts is not None
    assert maverick.experts.dense_layers == tuple(range(0, 48, 2))
    assert (scout.attention_chunked, scout.attention_window[:4]) == (True, (8192, 8192, 8192, 0))
    assert scout.head_norm_parameters(scout.q_width) == 0
    assert scout.rotary_share == 0.75
    assert read("Qwen3-30B-A3B", num_experts=1).experts is None
    assert read("Qwen3-30B-A3B", decoder_sparse_step=2).expert_layers == 24
    assert read("Qwen3-30B-A3B", mlp_only_layers=[0, 5]).expert_layers == 46
    gpt = read("gpt-oss-20b")
    assert (gpt.attention_window[:2], gpt.attention_sinks) == ((128, 0), True)
    assert "quantised" in gpt.left_out
    assert "experts" in gpt.special_features


def test_attention_in_chunks_counts_pairs_inside_them(tmp_path: Path) -> None:
    scout = load_model(written(tmp_path, EXPERTS["Llama-4-Scout"][0]))
    length, chunk = 32768, 8192
    keys = 36 * chunk / 2 + 12 * length / 2
    found = attention_flop_per_token(Workload(model=scout, seq_len=length), causal=True)
    assert found == pytest.approx(12 * scout.q_width * keys)


@pytest.mark.parametrize(("changes", "line"), TABLES["experts"])
def test_experts_that_no_layer_can_have(
    tmp_path: Path, changes: dict[str, Any], line: str | None
) -> None:
    path = written(tmp_path, {**EXPERTS["Qwen3-30B-A3B"][0], **changes})
    if line is None:
        assert load_model(path).expert_layers == 48
        return
    with pytest.raises(ConfigError, match=f"experts: {line}"):
        load_model(path)


def test_each_block_is_said_with_its_facts(tmp_path: Path) -> None:
    def read(name: str, **more: Any) -> Model:
        return load_model(written(tmp_path, {**PUBLIC[name][0], **more}))

    assert read("gpt-neox-20b").block == "parallel"
    assert read("gpt-neox-20b", use_parallel_residual=False).block == "sequential"
    assert read("falcon-7b").block == "parallel_shared_norm"
    assert (read("falcon-40b").block, read("falcon-40b").num_kv_heads) == ("parallel", 8)
    assert read("falcon-40b", num_ln_in_parallel_attn=1).block == "parallel_shared_norm"
    assert (read("opt-6.7b").mlp, read("opt-6.7b").max_positions) == ("relu", 2050)
    assert read("bloom").embedding_norm
    assert read("Baichuan2-7B").position == "rope"
    assert read("Baichuan2-13B").position == "alibi"
    olmo = read("OLMo-2-7B")
    assert (olmo.pre_norm, olmo.post_norm, olmo.qk_norm_weights) == (False, True, "width")
    mpt = {**PUBLIC["mpt-7b"][0]["attn_config"], "qk_ln": True}
    assert read("mpt-7b", attn_config=mpt).parameters == PUBLIC["mpt-7b"][1] + 32 * 2 * 4096


def test_windows_and_rotary_positions_by_layer(tmp_path: Path) -> None:
    def read(name: str, **more: Any) -> Model:
        return load_model(written(tmp_path, {**PUBLIC[name][0], **more}))

    gemma = read("gemma-3-1b").attention_window
    assert [layer for layer, window in enumerate(gemma) if not window] == [5, 11, 17, 23]
    assert set(gemma) == {0, 512}
    assert read("gemma-3-1b", sliding_window=None).attention_window == ()
    command = read("command-r7b")
    assert command.attention_window == (4096, 4096, 4096, 0) * 8
    assert (command.rotary_share, read("SmolLM3-3B").rotary_share) == (0.75, 0.75)
    assert (read("gpt-j-6b").rotary_share, read("stablelm-3b-4e1t").rotary_share) == (0.25, 0.25)
    assert read("gpt-neo-2.7B").attention_window == (0, 256) * 16
    assert read("Phi-3-mini", sliding_window=2047).attention_window == (2047,) * 32
    pattern = {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    exaone = {**LLAMA, "model_type": "exaone4", **pattern}
    assert load_model(written(tmp_path, exaone)).attention_window == (4096, 4096, 4096, 0) * 8


def test_dropout_of_attention_alone_keeps_no_mask_of_the_outputs(tmp_path: Path) -> None:
    granite = {**LLAMA, "model_type": "granite", "attention_dropout": 0.1}
    model = load_model(written(tmp_path, granite))
    assert (model.dropout, model.attention_dropout, model.drops_attention) == (0.0, 0.1, True)
    gpt2 = load_model(written(tmp_path, GPT2))
    assert (gpt2.attention_dropout, gpt2.embedding_dropout, gpt2.drops_embedding) == (
        None,
        None,
        True,
    )


def test_the_text_part_of_a_larger_model_is_read_and_said(tmp_path: Path) -> None:
    """The class of the text part gives the widths that the file leaves out."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024,
    }  # fmt: skip
    data = {"model_type": "gemma3", "text_config": text, "vision_config": {"image_size": 896}}
    model = load_model(written(tmp_path, data))
    assert model.parameters == 27_009_346_304  # 27,432,406,640 less the encoder and its projection
    assert model.left_out == "only the text part of the model: the image encoder is left out"
    assert model.left_out in assumed(problem(model=model))
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert load_model(written(tmp_path, llava)).parameters == 6_738_415_616 + 2 * 64 * 4096


def test_a_byte_order_mark_is_read_and_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert load_model(path).parameters == 8_030_261_248
    path.write_text(json.dumps(LLAMA)[:-1] + ', "num_hidden_layers": 16}', encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_model(path)
    assert str(error.value) == f"{path}: key 'num_hidden_layers' is given twice"
