"""A file is answered as the job that it is, or refused by name: kinds of other jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rematbench.foreign.keys import dialect
from rematbench.foreign.packages import read_files
from tests.foreign.small_jobs import AXOLOTL, SIZES, SWIFT, TRL, job, small
from tests.tables import tables

TABLES = tables(__file__)


@pytest.mark.parametrize(("base", "more", "word"), TABLES["files"])
def test_a_file_of_another_job_is_refused(tmp_path: Path, base: str, more: Any, word: str) -> None:
    text = small(base, more)
    assert any(word in line for line in job(tmp_path, text, "job.yaml")[1].refused)


def test_a_file_is_read_at_its_path_before_its_name(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    for stage, folder in ((2, tmp_path), (3, tmp_path / "ds")):
        (folder / "c.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    line = "deepspeed --num_gpus 8 train.py --model_name_or_path m --bf16 --deepspeed {}/c.json"
    stages = [job(tmp_path, line.format(at))[0].options["zero_stage"] for at in ("ds", "elsewhere")]
    assert stages == ["3", "2"]


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, False)])
def test_a_degree_of_one_is_none(tmp_path: Path, ranks: int, fits: bool) -> None:
    lines = [f"x.py {SIZES} --bf16 --num-distributed-optimizer-instances {ranks}"]
    lines += [f"torchrun openrlhf.cli.train_sft --pretrain m --ring_attn_size {ranks}"]
    assert [not job(tmp_path, line)[1].refused for line in lines] == [fits, fits]


def test_a_model_type_makes_no_file_a_model(tmp_path: Path) -> None:
    plain = job(tmp_path, AXOLOTL, "job.yaml", gpus=8)[0]
    assert job(tmp_path, AXOLOTL + "model_type: LlamaForCausalLM", "job.yaml", gpus=8)[0] == plain


def test_variables_of_a_model_zoo_file_are_named_or_given(tmp_path: Path) -> None:
    text = "MODEL_ARGS:\n  --num-layers: 32\n  --hidden-size: 4096\n  --num-attention-heads: 32\n"
    text += "  --tensor-model-parallel-size: ${TP}\n  --ffn-hidden-size: 14336\n  --swiglu: true\n"
    text += "  --num-query-groups: 8\n  --group-query-attention: true\n  --bf16: true\n"
    made, reading = job(tmp_path, text, "model.yaml")
    assert reading.unknown == ["--tensor-model-parallel-size"]
    assert any("--set TP=VALUE" in note for note in reading.notes)
    assert yaml.safe_load(made.files["run-model.yaml"])["vocab"] == 128256
    reading = read_files([tmp_path / "model.yaml"], {"TP": "2"})
    assert (reading.values["tp"], reading.unknown) == (2, [])


PLACES = {
    "its folder": "part/models/m.sh",
    "a variable that nothing sets": "$HERE/part/models/m.sh",
    "another checkout": "/root/repo/part/models/m.sh",
    "the folder above": "../scripts/part/models/m.sh",
    "the checkout": "scripts/part/models/m.sh",
}


@pytest.mark.parametrize("kind", ["sourced", "deepspeed", "trainer", "fsdp", "model"])
@pytest.mark.parametrize("place", PLACES)
def test_files_that_a_file_names_are_found_by_one_rule(
    tmp_path: Path, place: str, kind: str
) -> None:
    models = tmp_path / "scripts/part/models"
    models.mkdir(parents=True)
    ends = {"sourced": "m.sh", "deepspeed": "m.json", "trainer": "m.yaml", "fsdp": "m.json"}
    name = PLACES[place].replace("m.sh", ends.get(kind, "m"))
    texts = {"sourced": "X=4096\n", "deepspeed": '{"zero_optimization": {"stage": 1}}'}
    texts |= {"trainer": TRL, "fsdp": '{"reshard_after_forward": false}'}
    if kind == "model":
        (models / "m").mkdir()
        (models / "m/config.json").write_text("{}")
    else:
        (models / ends[kind]).write_text(texts[kind])
    hugging = f"torchrun sft.py --model_name_or_path {name if kind == 'model' else 'q'}"
    hugging += " --per_device_train_batch_size 1"
    lines = {"sourced": f"source {name}\ntorchrun p.py {SIZES} --hidden-size $X"}
    lines |= {"deepspeed": f"{hugging} --deepspeed {name}", "trainer": f"trl sft --config {name}"}
    lines |= {"fsdp": f"{hugging} --fsdp full_shard --fsdp_config {name}", "model": hugging}
    made, reading = job(tmp_path / "scripts", lines[kind])
    assert {
        "sourced": reading.model.get("hidden") == 4096,
        "deepspeed": reading.get("zero_stage") == 1,
        "trainer": reading.get("model") == "Qwen/Qwen3-8B",
        "fsdp": reading.get("zero_stage") == 2,
        "model": Path(made.options.get("model", "")).resolve() == models / "m",
    }[kind], reading


MODEL = [*sorted(dialect("megatron")[""].shapes.keys() - {"num_layers"}), "num_experts"]


@pytest.mark.parametrize("option", [*MODEL, "mtp_num_layers"])
def test_an_option_of_a_named_model_is_never_dropped(tmp_path: Path, option: str) -> None:
    _, reading = job(tmp_path, f"{SWIFT} --{option} 2")
    assert any(option.replace("_", "-") in line for line in reading.refused), option
