"""Shell scripts and command lines of training packages: the values that their variables give.

The forms of the scripts are those of public ones: NVIDIA/Megatron-LM (examples),
bigscience-workshop/bigscience (train/*.slurm), microsoft/Megatron-DeepSpeed (examples/MoE),
cmu-flame/FLAME-MoE, modelscope/ms-swift (examples), lm-sys/FastChat (scripts), QwenLM/Qwen
(finetune), hiyouga/LLaMA-Factory, huggingface/trl, OpenRLHF, huggingface/nanotron.
"""

from pathlib import Path

import pytest

from tests.foreign.small_jobs import job
from tests.tables import tables

TABLES = tables(__file__)

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512"


@pytest.mark.parametrize(("line", "expected"), TABLES["trainers"])
def test_a_trainers_command_gives_the_equal_command(
    tmp_path: Path, line: str, expected: str
) -> None:
    made, reading = job(tmp_path, line)
    assert " ".join(made.words) == expected
    assert not reading.refused
    assert not reading.unknown


@pytest.mark.parametrize(("name", "homes"), TABLES["names"])
def test_a_file_that_is_not_here_gives_the_states_of_its_name(
    tmp_path: Path, name: str, homes: list[str]
) -> None:
    text = f"base_model: Qwen/Qwen3-8B\nsequence_len: 512\ndeepspeed: x/{name}\n"
    made, reading = job(tmp_path, text, "axolotl.yaml")
    assert [home for home in ("optimizer", "parameters") if home in made.options] == homes
    assert made.options["zero_stage"] == ("3" if "zero3" in name else "2")
    assert bool(reading.refused) is ("compile" in name or "autotp" in name)
    assert f"x/{name} is not here: its states are assumed from its name" in reading.notes


@pytest.mark.parametrize("depth", [0, 1])
def test_layers_that_predict_more_tokens_are_read(tmp_path: Path, depth: int) -> None:
    made, reading = job(tmp_path, f"x.py {SIZES} --mtp-num-layers {depth}")
    assert not reading.refused
    text = made.files[made.options["model"]]
    assert ("mtp_layers: 1" in text) == bool(depth)


NANOTRON = TABLES["nanotron"]


def test_nanotron_is_read(tmp_path: Path) -> None:
    made, reading = job(tmp_path, NANOTRON, "config.yaml")
    assert " ".join(made.words) == (
        "full_recompute --model llama-3.1-8b --cluster CLUSTER --system megatron-core --gpus 16 "
        "--seq-len 4096 --global-batch 64 --tp 2 --pp 2 --micro-batch 2 --no-sp"
    )
    assert reading.unknown == ["model.model_config.surprise"]
    assert not reading.refused
    _, reading = job(tmp_path, NANOTRON.replace("pp_engine: 1f1b, ", ""), "config.yaml")
    assert reading.refused == ["parallelism.pp_engine: afab (only 1f1b is modelled)"]


@pytest.mark.parametrize(("text", "gpus", "refused"), TABLES["torchtitan"])
def test_torchtitan_of_each_year(
    tmp_path: Path, text: str, gpus: str | None, refused: bool
) -> None:
    degrees = "\n[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 1\n"
    degrees += "data_parallel_replicate_degree = 1\n"
    table = "" if "[training]" in text else "[training]\nseq_len = 2\n"
    made, reading = job(tmp_path, table + text + degrees, "titan.toml")
    assert (made.options.get("gpus"), bool(reading.refused)) == (gpus, refused)


@pytest.mark.parametrize("key", TABLES["harmless"])
def test_a_key_that_can_change_the_step_is_never_called_harmless(tmp_path: Path, key: str) -> None:
    base = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\n"
    assert job(tmp_path, f"{base}{key}: 1", "axolotl.yaml")[1].unknown == [key]
