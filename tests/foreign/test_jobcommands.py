"""Shell scripts and command lines of training packages: the values that their variables give.

The forms of the scripts are those of public ones: NVIDIA/Megatron-LM (examples),
bigscience-workshop/bigscience (train/*.slurm), microsoft/Megatron-DeepSpeed (examples/MoE),
cmu-flame/FLAME-MoE, modelscope/ms-swift (examples), lm-sys/FastChat (scripts), QwenLM/Qwen
(finetune), hiyouga/LLaMA-Factory, huggingface/trl, OpenRLHF, huggingface/nanotron.
"""

import json
from pathlib import Path

import pytest

from rematbench.foreign.packages import read_files
from rematbench.inputs.configfile import ConfigError
from tests.foreign.small_jobs import facts, job
from tests.tables import tables

TABLES = tables(__file__)

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512"


@pytest.mark.parametrize("gpus", ["--gres=gpu:8", "--gres=gpu:a100:8", "--gpus-per-node=mi250:8"])
def test_a_job_of_one_task_on_a_node_has_all_its_gpus(tmp_path: Path, gpus: str) -> None:
    header = f"#SBATCH -N 3\n#SBATCH --ntasks-per-node=1\n#SBATCH {gpus}\n"
    line = f"torchrun --nnodes $SLURM_NNODES pretrain_gpt.py {SIZES} --micro-batch-size 1 --bf16\n"
    assert job(tmp_path, header + line)[0].options["gpus"] == "24"


def test_megatron_deepspeed_takes_the_configuration_that_its_script_writes(tmp_path: Path) -> None:
    text = f"""
ZERO=3
cat <<EOT > ./ds.$ID.json
{{"zero_optimization": {{"stage": $ZERO, "offload_optimizer": {{"device": "cpu"}}}}}}
EOT
deepspeed --num_gpus 4 pretrain_gpt.py {SIZES} --micro-batch-size 1 --fp16 --deepspeed \\
  --deepspeed_config ./ds.$ID.json
"""
    words = " ".join(job(tmp_path, text)[0].words)
    assert "--zero 3" in words
    assert "--optimizer host" in words
    assert "megatron-deepspeed" in words or "run-stack" in words


def test_bf16_without_zero_shards_the_states_in_deepspeed(tmp_path: Path) -> None:
    line = f"deepspeed --num_gpus 4 pretrain_gpt.py {SIZES} --deepspeed --zero-stage 0 "
    assert job(tmp_path, line + "--bf16")[0].options.get("zero_stage", "1") == "1"
    assert job(tmp_path, line + "--fp16")[0].options["zero_stage"] == "0"


def test_alibi_a_norm_of_the_embedding_and_a_padded_vocabulary_are_read(tmp_path: Path) -> None:
    sizes = SIZES.replace("--vocab-size 512", "--pad-vocab-size-to 640")
    line = f"pretrain_gpt.py {sizes} --position-embedding-type alibi --embed-layernorm"
    model = job(tmp_path, line)[1].model
    assert (model["position"], model["embedding_norm"]) == ("alibi", True)
    assert job(tmp_path, line)[1].values["vocab"] == 640


def test_a_sourced_file_and_the_names_of_2021_are_read(tmp_path: Path) -> None:
    (tmp_path / "CONFIG.sh").write_text(f'export ALL=" $MORE --global-batch-size $GBS {SIZES} "\n')
    text = 'GBS=32\nMORE="--activations-checkpoint-method uniform "\n. `pwd`/CONFIG.sh\n'
    made = job(tmp_path, text)[0]
    assert made.method == "full_recompute"
    assert made.options["global_batch"] == "32"


def test_a_script_reads_the_script_that_it_starts_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(
        f"TP=$2\nif [ $1 = 2L ]; then L='{SIZES}'; fi\nMBS=${{MBS:-1}}\n"
        "torchrun --nproc_per_node 8 x.py $L --tensor-model-parallel-size $TP "
        "--micro-batch-size $MBS --global-batch-size $3 --bf16\n"
    )
    for line in (
        "MBS=2 bash a/inner.sh 2L 4 16",
        "export MBS=2\nsrun --nodes 1 ./inner.sh 2L 4 16",
    ):
        options = job(tmp_path, line)[0].options
        names = ("gpus", "tp", "micro_batch", "global_batch")
        assert [options[name] for name in names] == ["8", "4", "2", "16"]


@pytest.mark.parametrize(("options", "vocab"), TABLES["vocabularies"])
def test_gpt_2s_vocabulary_is_the_default_of_its_files(
    tmp_path: Path, options: str, vocab: int | None
) -> None:
    sizes = SIZES.replace("--vocab-size 512", "")
    assert job(tmp_path, f"x.py {sizes} {options}")[1].values.get("vocab") == vocab


def test_comparisons_with_values_that_nothing_sets_are_named(tmp_path: Path) -> None:
    text = f"if [ $1 = a ]; then T=2; fi\nx.py {SIZES} --tensor-model-parallel-size $T"
    notes = job(tmp_path, text)[1].notes
    assert any(note.endswith("count as empty: [ $1 = a ]") for note in notes)


def test_a_loop_is_read_once_and_said_to_be(tmp_path: Path) -> None:
    text = f"for TP in 2 4; do x.py {SIZES} --bf16 --tensor-model-parallel-size $TP; done"
    made, reading = job(tmp_path, text)
    assert made.options["tp"] == "2"
    assert "loop: TP is 2, the first of 2 values" in reading.notes


def test_gpus_that_hold_no_replica_are_named(tmp_path: Path) -> None:
    line = f"torchrun --nproc_per_node 8 x.py {SIZES} --tensor-model-parallel-size 8 "
    notes = job(tmp_path, line + "--pipeline-model-parallel-size 2 --global-batch-size 8")[1].notes
    assert "8 GPUs are not a multiple of tp x cp x pp = 16" in notes


@pytest.mark.parametrize(("line", "expected"), TABLES["trainers"])
def test_a_trainers_command_gives_the_equal_command(
    tmp_path: Path, line: str, expected: str
) -> None:
    made, reading = job(tmp_path, line)
    assert " ".join(made.words) == expected
    assert not reading.refused
    assert not reading.unknown


def test_a_command_counts_before_the_files_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
    )
    line = "accelerate launch --config_file=a/zero.yaml --num_processes=2 sft.py --bf16 "
    line += "--model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1"
    options = job(tmp_path, line)[0].options
    assert (options["gpus"], options["zero_stage"]) == ("2", "3")


def test_a_command_replaces_values_of_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\ncutoff_len: 2048\n"
        "per_device_train_batch_size: 8\nbf16: true\n"
    )
    line = "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train x/full.yaml cutoff_len=512 lr=1 "
    made = job(tmp_path, line + "disable_gradient_checkpointing=true")[0]
    assert (made.method, made.options["seq_len"]) == ("keep_all", "512")
    assert made.options["global_batch"] == "16"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("megatron sft --model m --tuner_type longlora", "longlora"),
        ("megatron sft --model m --tuner_type lora --target_regex q", "target-regex"),
        ("deepspeed train.py --model_name_or_path m --vision_tower v", "vision_tower"),
        ("deepspeed -m openrlhf.cli.train_dpo --pretrain m --micro_train_batch_size 1", "stage"),
        (f"pretrain_gpt.py {SIZES} --num-experts 8 --moe-train-capacity-factor 1", "capacity"),
    ],
)
def test_a_command_that_is_not_modelled_is_named(tmp_path: Path, line: str, refusal: str) -> None:
    assert any(refusal in one for one in job(tmp_path, line)[1].refused)


def test_options_of_2020_and_their_checkpoints_on_the_host_are_read(tmp_path: Path) -> None:
    line = f"pretrain_gpt2.py --model-parallel-size 2 {SIZES} --batch-size 4 --cpu-optimizer "
    line += "--checkpoint-activations --checkpoint-in-cpu --partition-activations"
    made = job(tmp_path, line)[0]
    assert (made.method, made.settings) == ("full_recompute", ("inputs=shared_host",))
    options = made.options
    assert (options["tp"], options["micro_batch"], options["optimizer"]) == ("2", "4", "host")
    assert options["attention"] == "unfused"


@pytest.mark.parametrize(("options", "attention"), TABLES["flash"])
def test_megatron_has_flash_attention_in_16_bits(
    tmp_path: Path, options: str, attention: str | None
) -> None:
    made = job(tmp_path, f"pretrain_gpt.py {SIZES} {options}")[0]
    assert made.options.get("attention") == attention
    assert "system" in made.options


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


def test_a_command_that_names_another_file_points_to_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.toml, which was not found"):
        job(tmp_path, "torchrun train.py --job.config_file ./x/llama.toml")


def test_the_arguments_of_megatrons_own_tests_are_read(tmp_path: Path) -> None:
    text = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 128
  --micro-batch-size: 2
  --global-batch-size: 8
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: false
  --squared-relu: true
  --rotary-percent: 0.5
  --position-embedding-type: rope
  --bf16: true
  --surprise: 3
"""
    made, reading = job(tmp_path, text, "model_config.yaml")
    assert (made.options["tp"], made.options["zero_stage"]) == ("2", "0")
    assert "sp" not in made.options
    assert (reading.model["mlp"], reading.model["rotary_share"]) == ("relu2", 0.5)
    assert reading.unknown == ["--surprise"]


def test_tensor_parallelism_of_deepspeed_is_read(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}})
    options = job(tmp_path, text, "ds.json")[0].options
    assert (options["tp"], "sp" in options) == ("2", True)


def test_a_nemo_configuration_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NeMo"):
        job(tmp_path, "trainer: {devices: 8}\nexp_manager: {}\nmodel: {}\n", "gpt.yaml")


def test_a_python_configuration_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("def llama3_8b():\n    return Config(num_layers=32)\n")
    with pytest.raises(ConfigError, match="Python configuration"):
        read_files([tmp_path / "recipe.py"])


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


@pytest.mark.parametrize(("zero", "expected"), TABLES["homes"])
def test_homes_of_parameters_and_old_names_of_deepspeed(
    tmp_path: Path, zero: dict[str, object], expected: str
) -> None:
    text = json.dumps({"zero_optimization": {"stage": 3, **zero}})
    made, reading = job(tmp_path, text, "ds.json")
    assert expected in " ".join(made.words)
    assert not reading.unknown


@pytest.mark.parametrize(("text", "gpus", "refused"), TABLES["torchtitan"])
def test_torchtitan_of_each_year(
    tmp_path: Path, text: str, gpus: str | None, refused: bool
) -> None:
    degrees = "\n[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 1\n"
    degrees += "data_parallel_replicate_degree = 1\n"
    table = "" if "[training]" in text else "[training]\nseq_len = 2\n"
    made, reading = job(tmp_path, table + text + degrees, "titan.toml")
    assert (made.options.get("gpus"), bool(reading.refused)) == (gpus, refused)


@pytest.mark.parametrize(("text", "words"), TABLES["axolotl"])
def test_keys_of_axolotl_are_read_or_named(tmp_path: Path, text: str, words: str) -> None:
    base = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\n"
    reading = job(tmp_path, base + text, "axolotl.yaml")[1]
    assert not reading.unknown
    assert words in " ".join(reading.refused)


@pytest.mark.parametrize("key", TABLES["harmless"])
def test_a_key_that_can_change_the_step_is_never_called_harmless(tmp_path: Path, key: str) -> None:
    base = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\n"
    assert job(tmp_path, f"{base}{key}: 1", "axolotl.yaml")[1].unknown == [key]


def test_shards_and_replicas_of_axolotl_give_the_gpus(tmp_path: Path) -> None:
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\ndp_shard_size: 4\n"
    text += "dp_replicate_size: 2\ntensor_parallel_size: 2\nfsdp_config: {version: 2}\n"
    options = job(tmp_path, text, "axolotl.yaml")[0].options
    assert (options["gpus"], options["shard_degree"]) == ("16", "4")


def test_a_part_of_the_optimizer_on_the_host_is_a_method(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    made = job(tmp_path, json.dumps({"zero_optimization": zero}), "ds.json")[0]
    assert made.method == "optimizer_offload:share=0.3,visiting=0"
    assert "optimizer" not in made.options
    line = f"x.py {SIZES} --optimizer-cpu-offload --optimizer-offload-fraction "
    full = " --recompute-granularity full --recompute-num-layers 2"
    half = "optimizer_offload:share=0.5,visiting=0,slots="
    assert job(tmp_path, line + "0.5")[0].method == f"{half}0"
    assert job(tmp_path, line + "0.5 --overlap-cpu-optimizer-d2h-h2d")[0].method == f"{half}1"
    method = "full_recompute:num_layers=2+optimizer_offload:share=0.25,visiting=0,slots=0"
    assert job(tmp_path, line + "0.25" + full)[0].method == method
    aware = job(tmp_path, f"{line}1.0 --bf16 --use-precision-aware-optimizer")[0]
    assert not {"resident_bytes", "optimizer_bytes"} & facts(aware).keys()
    assert facts(job(tmp_path, f"{line}1.0 --bf16")[0])["resident_bytes"] == 4
    assert job(tmp_path, line + "1.0")[0].options["optimizer"] == "host"
    assert "optimizer" not in job(tmp_path, line + "0")[0].options


def test_accelerate_without_distribution_starts_one_process(tmp_path: Path) -> None:
    text = 'distributed_type: "NO"\nnum_processes: 8\nmixed_precision: bf16\n'
    assert job(tmp_path, text, "single.yaml")[0].options["gpus"] == "1"
