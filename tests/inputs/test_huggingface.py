"""Hugging Face config.json: the supported architectures, and one clear line for the others."""

import json
from operator import attrgetter
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
from rematbench.workload import Workload
from tests.inputs.public_configs import EXPERTS, PUBLIC
from tests.problems import problem
from tests.tables import tables

TABLES = tables(__file__)
LLAMA = TABLES["bases"]["llama"]
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


def public(name: str) -> dict[str, Any]:
    if name in TABLES["bases"]:
        return dict(TABLES["bases"][name])
    return CONFIGS[name] if name in CONFIGS else (PUBLIC | EXPERTS)[name][0]


@pytest.mark.parametrize("row", TABLES["facts"], ids=lambda row: row["config"])
def test_a_config_gives_the_facts_of_its_class(tmp_path: Path, row: dict[str, Any]) -> None:
    """Of a public config with changes; `windows` are patterns of layers, each with its repeats."""
    model = load_model(written(tmp_path, public(row["config"]) | row.get("with", {})))
    facts = row.get("facts", {})
    assert {name: attrgetter(name)(model) for name in facts} == facts
    assert all(word in model.left_out for word in row.get("left_out", []))
    if "windows" in row:
        layers = [layer for pattern, times in row["windows"] for layer in pattern * times]
        assert [*model.attention_window] == layers


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


def test_dense_layers_and_norms_of_heads_are_those_of_the_class(tmp_path: Path) -> None:
    dense = {"GLM-4.5": (0, 1, 2), "Llama-4-Maverick": tuple(range(0, 48, 2))}
    for name, layers in dense.items():
        experts = load_model(written(tmp_path, public(name))).experts
        assert experts is not None
        assert experts.dense_layers == layers
    scout = load_model(written(tmp_path, public("Llama-4-Scout")))
    assert scout.head_norm_parameters(scout.q_width) == 0
    assert "experts" in load_model(written(tmp_path, public("gpt-oss-20b"))).special_features
    mpt = public("mpt-7b")
    normed = mpt | {"attn_config": {**mpt["attn_config"], "qk_ln": True}}
    added = load_model(written(tmp_path, normed)).parameters - PUBLIC["mpt-7b"][1]
    assert added == 32 * 2 * 4096


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
