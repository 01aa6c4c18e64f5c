"""Adapters, quantised weights and narrow optimizers in the files of trainers."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.foreign.job import file_job
from rematbench.foreign.packages import read_files
from tests.tables import tables

AXOLOTL = "base_model: m\nsequence_len: 512\nmicro_batch_size: 1\nbf16: true\n"
TRL = "model_name_or_path: m\nmax_length: 512\nbf16: true\n"
FACTORY = "model_name_or_path: m\ncutoff_len: 512\nstage: sft\nbf16: true\n"
TABLES = tables(__file__)
TUNE = TABLES["tune"]
BASES = {"AXOLOTL": AXOLOTL, "TRL": TRL, "FACTORY": FACTORY, "TUNE": TUNE}


def read(tmp_path: Path, text: str, name: str = "job.yaml") -> tuple[dict[str, Any], list[str]]:
    file = tmp_path / name
    file.write_text(text)
    reading = read_files([file])
    assert not reading.unknown
    made = file_job(reading, {"cluster": "h100-80gb", "gpus": 1}, "", "job")
    own = {key: value for key, value in made.options.items() if key in NAMES}
    return own, reading.refused


NAMES = ("lora_rank", "lora_targets", "lora_dropout", "dora", "trained_parts", "trained_dtype")
NAMES = (*NAMES, "base_dtype", "optimizer_kind")


@pytest.mark.parametrize(("base", "more", "found"), TABLES["options"])
def test_adapters_of_a_file_are_options(
    tmp_path: Path, base: str, more: str, found: dict[str, str]
) -> None:
    want = {"trained_dtype": "autocast"} | found
    given = {name: word for name, word in want.items() if word is not None}
    assert read(tmp_path, BASES[base] + more) == (given, [])


def test_a_configuration_of_torchtune_is_read(tmp_path: Path) -> None:
    found = {"lora_rank": "64", "lora_targets": "q,v,k,o,gate,up,down"}
    packed = found | {"base_dtype": "nf4_double", "optimizer_kind": "adam8bit"}
    assert read(tmp_path, TUNE) == (packed, [])
    reading = read_files([tmp_path / "job.yaml"])
    made = file_job(reading, {"cluster": "h100-80gb", "gpus": 1}, "", "job")
    assert (made.options["model"], made.options["micro_batch"]) == ("llama-3.1-8b", "2")
    assert made.method == "full_recompute+mst:mlp_chunks=1"
    whole = TUNE.replace("qlora_", "")
    assert read(tmp_path, whole)[0] == {"optimizer_kind": "adam8bit"}
    (tmp_path / "job.yaml").write_text(whole + "data_parallel_shard_dim: -1\n")
    line = "tune run --nproc_per_node 4 x --config job.yaml batch_size=4 optimizer.lr=1e-5"
    read(tmp_path, line, "run.sh")
    reading = read_files([tmp_path / "run.sh"])
    made = file_job(reading, {"cluster": "h100-80gb"}, "", "job")
    expected = {"gpus": "4", "micro_batch": "4", "global_batch": "16", "zero_stage": "3"}
    assert {key: made.options.get(key) for key in expected} == expected
    assert not reading.unknown
    (tmp_path / "job.yaml").write_text(TUNE + "custom_sharded_layers: [output]\n")
    read(tmp_path, "tune run lora_finetune_single_device --config job.yaml", "run.sh")
    reading = read_files([tmp_path / "run.sh"])
    assert (reading.get("gpus"), len(reading.notes)) == (1, 2)
    (refused,) = read(tmp_path, TUNE + "optimizer_in_bwd: true\n")[1]
    assert "update in the backward" in refused


def test_pefts_file_stands_beside_a_trainers(tmp_path: Path) -> None:
    """Its rank is `r`; beside DeepSpeed adapters are narrow."""
    peft = tmp_path / "adapter_config.json"
    peft.write_text(
        '{"peft_type": "LORA", "r": 32, "target_modules": ["q_proj", "up_proj"], "bias": "none"}'
    )
    for more, dtype in (("", "autocast"), ("deepspeed: zero2.json\n", None)):
        (tmp_path / "job.yaml").write_text(TRL + more)
        values = read_files([tmp_path / "job.yaml", peft]).values
        assert (values["lora_rank"], values["lora_targets"]) == (32, "q,up")
        assert values.get("trained_dtype") == dtype
    peft.write_text('{"peft_type": "IA3", "bias": "all"}')
    assert [line.split(":")[0] for line in read_files([peft]).refused] == ["bias", "peft_type"]


FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n"


@pytest.mark.parametrize("text", ["key", "1", "2"])
def test_frozen_weights_are_narrow_wherever_fsdp_comes_from(tmp_path: Path, text: str) -> None:
    """accelerate 1.15 widens only what trains (utils/fsdp_utils.py, fsdp2_prepare_model)."""
    own = tmp_path / "job.yaml"
    more = "fsdp: full_shard\n" * (text == "key")
    own.write_text(TRL + "use_peft: true\ndtype: bfloat16\n" + more)
    files = [own]
    if text != "key":
        files.append(tmp_path / "fsdp.yaml")
        files[1].write_text(f"{FSDP}  fsdp_version: {text}\n")
    assert read_files(files).values["base_dtype"] == "bf16"
