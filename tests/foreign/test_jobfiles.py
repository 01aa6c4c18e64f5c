"""Files of training packages, and the equal command of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.foreign.job import FileJob, file_job
from rematbench.foreign.packages import read_files
from rematbench.foreign.reading import Reading
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.foreign import package_of, signs
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.solve.recompute_modules import MODULES
from rematbench.workload import Experts
from tests.tables import tables

TABLES = tables(__file__)

JOBS = Path(__file__).parent / "jobs"


def job(*files: str, **given: object) -> tuple[FileJob, Reading]:
    reading = read_files([JOBS / file for file in files])
    return file_job(reading, dict(given), "", Path(files[0]).stem), reading


@pytest.mark.parametrize(("files", "expected"), tables(__file__)["expected"])
def test_a_file_gives_the_equal_command(files: list[str], expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="but"):
            job(*files)
    else:
        assert " ".join(job(*files)[0].words) == expected


def test_an_accelerate_file_adds_gpus_and_states_to_a_trainer(tmp_path: Path) -> None:
    text = (JOBS / "trl_sft.yaml").read_text().replace("steps: 8", "steps: 2")
    (tmp_path / "sft.yaml").write_text(text)
    reading = read_files([tmp_path / "sft.yaml", JOBS / "accelerate_zero3.yaml"])
    words = file_job(reading, {}, "", "sft").words
    assert words[words.index("--global-batch") + 1] == str(16 * 2)
    assert words[words.index("--zero") + 1] == "3"


def test_a_value_that_a_launch_line_replaces_is_named(tmp_path: Path) -> None:
    line = "torchrun pretrain_gpt.py --num-layers 4 --seq-length 64 --global-batch-size 64"
    (tmp_path / "run.sh").write_text(line)
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 32, "bf16": {}, "zero_optimization": {}}'
    )
    notes = " ".join(read_files([tmp_path / "ds.json", tmp_path / "run.sh"]).notes)
    assert "train_batch_size: 32, but" in notes
    assert "--global-batch-size: 64, which is used" in notes


@pytest.mark.parametrize(("text", "note"), TABLES["packings"])
def test_packed_documents_have_a_length_that_no_file_gives(
    tmp_path: Path, text: str, note: str
) -> None:
    trl = (JOBS / "trl_sft.yaml").read_text().replace("packing: true", text)
    (tmp_path / "sft.yaml").write_text(trl)
    reading = read_files([tmp_path / "sft.yaml"])
    assert any(line.startswith(note) for line in reading.notes)
    assert "--document-len" not in file_job(reading, {}, "", "sft").words
    words = file_job(reading, {"document_len": 600}, "", "sft").words
    assert words[words.index("--document-len") + 1] == "600"


@pytest.mark.parametrize(("file", "unknown"), TABLES["unknown"])
def test_an_unknown_key_is_named(file: str, unknown: str) -> None:
    reading = job(file)[1]
    assert reading.unknown == [unknown]
    assert unknown not in reading.ignored


@pytest.mark.parametrize(("file", "refusal"), TABLES["requests"])
def test_a_request_that_is_not_modelled_is_named(file: str, refusal: str) -> None:
    assert any(refusal in line for line in job(file)[1].refused)


def test_the_modules_that_are_read_are_those_that_a_plan_recomputes(tmp_path: Path) -> None:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    file = tmp_path / "job.sh"
    modules = " ".join((*MODULES, "gdn_norm"))
    words = f"--recompute-granularity selective --recompute-modules {modules}"
    file.write_text(f"pretrain_gpt.py {shape} {words}", encoding="utf-8")
    refused = [line for line in read_files([file]).refused if "recompute" in line]
    assert refused == [f"--recompute-modules: gdn_norm (allowed: {', '.join(MODULES)})"]


def test_experts_are_read_from_a_launch_line(tmp_path: Path) -> None:
    made, _ = job("megatron_experts.sh")
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    experts = load_model(tmp_path / "megatron_experts-model.yaml").experts
    assert experts == Experts(
        count=8, active=2, ffn=14336, shared_ffn=2048, dense_layers=(0,), aux_loss=0.01
    )
    stack = load_system(tmp_path / "megatron_experts-stack.yaml")
    assert stack.experts.dispatcher == "deepep"
    assert "ep_overlap" in stack.accepts.features


@pytest.mark.parametrize(("frequency", "dense"), TABLES["frequencies"])
def test_layers_with_experts_are_a_number_or_a_list(
    tmp_path: Path, frequency: str, dense: list[int]
) -> None:
    file = tmp_path / "run.sh"
    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    file.write_text(f"pretrain_gpt.py {shape} --num-experts 4 --moe-layer-freq {frequency}")
    experts = read_files([file]).model["experts"]
    assert [*experts.get("dense_layers", ())] == dense


def test_a_file_that_another_file_names_is_read_from_its_folder() -> None:
    made, reading = job("factory_lora.yaml")
    assert made.options["zero_stage"] == "3"
    assert made.options["optimizer"] == "host"
    assert "mystery" in reading.unknown


def test_files_for_model_and_stack_load(tmp_path: Path) -> None:
    made, _ = job("megatron_gpt.sh")
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    model = load_model(tmp_path / "megatron_gpt-model.yaml")
    assert (model.ffn, model.qkv_bias, model.position) == (8192, True, "learned")
    stack = load_system(tmp_path / "megatron_gpt-stack.yaml")
    assert (stack.zero.reduce_overlap, stack.zero.gather_overlap) == (False, False)


@pytest.mark.parametrize("file", sorted(JOBS.iterdir()), ids=lambda path: path.name)
def test_every_other_door_points_to_read(file: Path) -> None:
    for load in (load_model, load_cluster, load_system):
        with pytest.raises(ConfigError, match=r"rematbench read|unknown"):
            load(file)


def test_every_sign_identifies_its_package() -> None:
    for package, every in signs().items():
        for sign in every:
            assert package_of(dict.fromkeys(sign)) == package


def test_the_command_runs_what_it_prints(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rematbench", "read", str(JOBS / "megatron_llama.sh")]
    words += ["--cluster", "h100-80gb", "-o", str(tmp_path), "--run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "keys are unknown: --surprising-option (--anyway" in done.stderr
    words.append("--anyway")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    command = "rematbench simulate selective_recompute --model llama-3.1-8b"
    for start in (command, "FITS"):
        assert any(line.startswith(start) for line in done.stdout.splitlines())


def test_variables_are_given_by_name_and_value(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 9"
    file.write_text(f"x.py {shape} --bf16 --tensor-model-parallel-size ${{TP:-1}}\n")
    words = [sys.executable, "-m", "rematbench", "read", str(file), "-o", str(tmp_path), "--set"]
    done = subprocess.run([*words, "TP=2"], capture_output=True, text=True, check=True)
    assert " --tp 2" in done.stdout
    done = subprocess.run([*words, "TP"], capture_output=True, text=True, check=False)
    assert (done.returncode, "expected NAME=VALUE" in done.stderr) == (2, True)


def test_each_note_has_a_line(tmp_path: Path) -> None:
    """Lines with one reason are one line; lines without a key stay apart."""
    file = tmp_path / "run.sh"
    shape = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 64"
    file.write_text(f"x.py {shape} --bf16 --beta 1 --colocate --tensor-model-parallel-size 2\n")
    words = [sys.executable, "-m", "rematbench", "read", str(file), "-o", str(tmp_path)]
    done = subprocess.run([*words, "--gpus", "7"], capture_output=True, text=True, check=True)
    starts = ("not modelled: --beta, --colocate: ", "note: 7 GPUs are not", "note: the vocabulary ")
    lines = done.stdout.splitlines()
    assert all(sum(line.startswith(start) for line in lines) == 1 for start in starts), lines


def test_what_is_refused_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    )
    words = [sys.executable, "-m", "rematbench", "read", str(file), "--run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rematbench read: not run: zero_optimization.offload_param")


@pytest.mark.parametrize(("zero", "facts"), TABLES["limits"])
def test_limits_of_zero_3_are_facts_of_the_stack(
    tmp_path: Path, zero: dict[str, object], facts: dict[str, object]
) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    reading = read_files([path])
    base = load_system(reading.system)
    assert {k: v for k, v in reading.facts.items() if flat(base)[k] != v} == facts
