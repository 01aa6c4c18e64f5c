"""A file is answered as the job that it is, or refused by name: kinds of other jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rematbench.foreign.keys import dialect
from rematbench.foreign.packages import read_files
from rematbench.inputs.configfile import ConfigError
from tests.foreign.small_jobs import AXOLOTL, FACTORY, SIZES, SWIFT, TITAN, TRL, facts, job, small
from tests.tables import tables

TABLES = tables(__file__)


@pytest.mark.parametrize(("base", "more", "word"), TABLES["files"])
def test_a_file_of_another_job_is_refused(tmp_path: Path, base: str, more: Any, word: str) -> None:
    text = small(base, more)
    assert any(word in line for line in job(tmp_path, text, "job.yaml")[1].refused)


@pytest.mark.parametrize("line", TABLES["commands"])
def test_a_command_of_another_job_is_refused(tmp_path: Path, line: str) -> None:
    assert job(tmp_path, line)[1].refused


@pytest.mark.parametrize(("more", "zero"), TABLES["switches"])
def test_a_switch_of_deepspeed_takes_its_file(tmp_path: Path, more: str, zero: str | None) -> None:
    (tmp_path / "ds_z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    line = f"deepspeed --num_gpus 8 train.py --deepspeed --model_name_or_path m --bf16 {more}"
    made, reading = job(tmp_path, line)
    assert (made.options.get("zero_stage"), bool(reading.refused)) == (zero, zero is None)


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


def test_a_value_of_a_command_can_turn_its_yamls_off(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(FACTORY + "bf16: true\ndeepspeed: ds_z3.json\n")
    made, reading = job(tmp_path, "llamafactory-cli train full.yaml deepspeed=null")
    assert (made.options["zero_stage"], reading.files) == ("0", [])


@pytest.mark.parametrize(("text", "package"), TABLES["packages"])
def test_a_file_of_a_package_that_is_not_read_is_named(
    tmp_path: Path, text: str, package: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"a {package} configuration, which is not read|an {package}"
    ):
        job(tmp_path, text, "job.yaml")


@pytest.mark.parametrize(("processes", "fits"), [("", False), ("NPROC_PER_NODE=2 ", True)])
def test_layers_on_several_devices_of_a_process_are_refused(
    tmp_path: Path, processes: str, fits: bool
) -> None:
    line = f"CUDA_VISIBLE_DEVICES=0,1 {processes}swift sft --model m --max_length 512"
    refused = job(tmp_path, line)[1].refused
    assert (not refused, "device_map" in " ".join(refused)) == (fits, not fits)


def test_accelerates_checkpointing_wraps_whatever_the_trainer_says(tmp_path: Path) -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True}}
    (tmp_path / "fsdp.json").write_text(json.dumps(config))
    line = "accelerate launch --config_file fsdp.json swift/cli/sft.py --model Qwen/Qwen3-8B "
    line += "--per_device_train_batch_size 1 --gradient_checkpointing false --tuner_type full"
    made, reading = job(tmp_path, line)
    assert (made.method, reading.package) == ("full_recompute", "ms-swift")


@pytest.mark.parametrize("out", ["runs/dpo", "grpo.out", "reward"])
def test_a_name_of_a_file_chooses_no_task(tmp_path: Path, out: str) -> None:
    line = f"torchrun train.py --model_name_or_path m --bf16 --output_dir {out}"
    assert not job(tmp_path, line)[1].refused


@pytest.mark.parametrize("option", TABLES["megatron"])
def test_an_option_of_megatron_that_changes_the_job_is_refused(tmp_path: Path, option: str) -> None:
    reading = job(tmp_path, f"x.py {SIZES} --bf16 {option}")[1]
    assert any(option.split()[-2 if " " in option else 0] in line for line in reading.refused)


def test_a_layer_that_predicts_one_more_token_is_read(tmp_path: Path) -> None:
    reading = job(tmp_path, f"x.py {SIZES} --bf16 --mtp-num-layers 1")[1]
    assert not [line for line in reading.refused if "mtp" in line]


OPTIMIZERS = ["galore_adamw", "apollo_adamw", "grokadamw", "adamw_torch_16bit", "lion_4bit"]


@pytest.mark.parametrize("word", [*OPTIMIZERS, "adamw_torch_npu_fused"])
def test_an_optimizer_is_known_by_its_whole_name(tmp_path: Path, word: str) -> None:
    reading = job(tmp_path, f"{TRL}optim: {word}", "job.yaml")[1]
    assert [line for line in reading.refused if line.startswith(f"optim: {word}")]
    assert not job(tmp_path, f"{TRL}optim: adamw_torch_fused", "job.yaml")[1].refused


def test_a_model_type_makes_no_file_a_model(tmp_path: Path) -> None:
    plain = job(tmp_path, AXOLOTL, "job.yaml", gpus=8)[0]
    assert job(tmp_path, AXOLOTL + "model_type: LlamaForCausalLM", "job.yaml", gpus=8)[0] == plain


def test_another_engine_in_a_known_file_is_read(tmp_path: Path) -> None:
    text = FACTORY + "gradient_accumulation_steps: 8\nbf16: true\ntensor_model_parallel_size: 4\n"
    text += "pipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    text += "use_distributed_optimizer: true\nrecompute_granularity: full\n"
    made, reading = job(tmp_path, text, "job.yaml", gpus=8)
    names = ("tp", "pp", "global_batch")
    assert [made.options[name] for name in names] == ["4", "2", "8"]
    assert (made.method, reading.package) == ("full_recompute", "Megatron")
    assert "zero_stage" not in made.options
    assert not reading.unknown
    lora = job(tmp_path, text.replace("full\n", "lora\n", 1), "job.yaml", gpus=8)[0]
    assert (lora.options["tp"], lora.options["lora_rank"]) == ("4", "8")


def test_a_command_can_choose_the_engine_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(FACTORY + "bf16: true\n")
    for line in (
        "USE_MCA=1 llamafactory-cli train full.yaml",
        "llamafactory-cli train full.yaml tensor_model_parallel_size=2",
    ):
        made, reading = job(tmp_path, "NPROC_PER_NODE=8 " + line)
        assert reading.package == "Megatron"
        assert (made.options["gpus"], "tp" in made.options) == ("8", "=2" in line)
    assert job(tmp_path, "llamafactory-cli train full.yaml")[1].package == "LLaMA-Factory"


def test_a_model_type_alone_makes_no_config_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the kind of this file is unknown"):
        job(tmp_path, '{"model_type": "qwen3", "output_dir": "x"}', "args.json")


def test_accelerates_options_about_fsdp_are_read(tmp_path: Path) -> None:
    line = "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 "
    line += "--fsdp_reshard_after_forward {} trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-8B "
    line += "--per_device_train_batch_size 2 --bf16 --max_length 512 --loss_type nll"
    for reshard, stage in (("true", "3"), ("false", "2")):
        made = job(tmp_path, line.format(reshard))[0]
        assert (made.options["zero_stage"], made.options["system"]) == (stage, "huggingface-fsdp2")
    refused = job(tmp_path, line.format("true") + " --fsdp_offload_params true")[1].refused
    assert any("offload_params" in text for text in refused)


@pytest.mark.parametrize(("text", "stage", "refused"), TABLES["fsdp"])
def test_words_and_section_of_fsdp_are_one_strategy(
    tmp_path: Path, text: str, stage: str, refused: str
) -> None:
    (tmp_path / "here.json").write_text(json.dumps({"activation_checkpointing": True}))
    made, reading = job(tmp_path, TRL.replace("ing: true", "ing: false") + text, "job.yaml")
    assert made.options["zero_stage"] == stage
    assert any(refused in line for line in reading.refused) == bool(refused)
    assert made.method == ("full_recompute" if "here" in text else "keep_all")


def test_options_of_experts_hold_for_a_named_model(tmp_path: Path) -> None:
    line = SWIFT + "--expert_model_parallel_size 8 --tensor_model_parallel_size 2 "
    line += "--moe_expert_capacity_factor 2 --moe_pad_expert_input_to_capacity true "
    line += "--moe_token_dispatcher_type flex --moe_enable_deepep true"
    made = job(tmp_path, line)[0]
    expected = {"capacity_factor": "2.0", "expert_padding": "capacity", "ep": "8", "etp": "1"}
    assert {key: made.options.get(key) for key in expected} == expected
    assert facts(made)["dispatcher"] == "deepep"


def test_a_shared_expert_is_refused_where_there_is_one(tmp_path: Path) -> None:
    line = SWIFT + "--moe_shared_expert_overlap true"
    assert not job(tmp_path, line)[1].refused
    line = f"x.py {SIZES} --num-experts 4 --moe-shared-expert-overlap"
    assert not job(tmp_path, line)[1].refused
    line += " --moe-shared-expert-intermediate-size 64"
    assert any("shared" in text for text in job(tmp_path, line)[1].refused)


def test_experts_that_do_not_fit_the_gpus_are_named(tmp_path: Path) -> None:
    line = f"torchrun --nproc_per_node 8 x.py {SIZES} --num-experts 8 --bf16 "
    line += "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8"
    assert any("multiple of 32" in note for note in job(tmp_path, line)[1].notes)


def test_slime_is_read_with_its_defaults(tmp_path: Path) -> None:
    line = "ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
    line += SIZES.replace("--seq-length 128", "--max-tokens-per-gpu 256")
    made, reading = job(tmp_path, line + " --use-dynamic-batch-size --global-batch-size 32")
    assert (made.options["gpus"], made.options["seq_len"]) == ("16", "256")
    assert "precision" not in made.options
    assert not reading.unknown


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


def test_a_torchtitan_command_reads_its_toml(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text(TITAN)
    for line in (
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file llama.toml {}",
        'NGPU=8 CONFIG_FILE="./llama.toml" ./run_train.sh {}',
    ):
        options = "--training.local_batch_size 2 --training.compile --bogus.key 1"
        made, reading = job(tmp_path, line.format(options))
        assert (made.options["global_batch"], made.options["micro_batch"]) == ("16", "2")
        assert made.options["system"] == "torchtitan-compiled"
        assert reading.unknown == ["bogus"]


@pytest.mark.parametrize(("line", "word"), TABLES["recipes"])
def test_a_recipe_in_a_package_is_named(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"{word}.*not read"):
        job(tmp_path, line)


def test_slimes_supervised_training_has_no_engine(tmp_path: Path) -> None:
    line = f"x.py {SIZES} --max-tokens-per-gpu 64 --rollout-batch-size 8 --ref-load m "
    line += "--loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns"
    made, reading = job(tmp_path, line)
    assert (reading.refused, reading.unknown, made.options["seq_len"]) == ([], [], "64")


@pytest.mark.parametrize(
    ("text", "word"), [("step_scheduler: {}\nmodel: {}", "Automodel"), ("a: 1", "not a job")]
)
def test_a_file_that_a_command_names_is_not_called_absent(
    tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "am.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"names am.yaml, .*{word}"):
        job(tmp_path, "torchrun recipes/llm/finetune.py --config am.yaml")


def test_openrlhf_has_dots_in_its_options(tmp_path: Path) -> None:
    text = "read -r -d '' cmd <<EOF\nopenrlhf.cli.train_sft --data.max_len 2048 "
    text += "--train.batch_size 256 --train.micro_batch_size 2 --ds.zero_stage 3 --ds.adam_offload "
    text += "--model.model_name_or_path Qwen/Qwen3-8B --model.gradient_checkpointing_enable\nEOF\n"
    made, reading = job(tmp_path, text + "deepspeed --num_gpus 8 --module $cmd")
    expected = {"global_batch": "256", "micro_batch": "2", "zero_stage": "3", "optimizer": "host"}
    assert {key: made.options.get(key) for key in expected} == expected
    assert made.method == "full_recompute"
    assert not reading.unknown


def test_a_micro_batch_of_verl_can_be_that_of_all_ranks_or_of_tokens(tmp_path: Path) -> None:
    line = "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.{} data.train_batch_size=64 "
    line += "model.{}=Qwen/Qwen3-8B data.max_length=2048 "
    old = job(tmp_path, line.format("fsdp_sft_trainer", "partial_pretrain"))[0]
    assert old.options["micro_batch"] == "4"
    rank = line.format("fsdp_sft_trainer", "partial_pretrain") + "data.micro_batch_size=16"
    assert job(tmp_path, rank)[0].options["micro_batch"] == "2"
    new = line.format("sft_trainer", "path") + "data.max_token_len_per_gpu=16384"
    assert job(tmp_path, new)[0].options["micro_batch"] == "8"


def test_a_number_without_a_value_stops_the_run(tmp_path: Path) -> None:
    line = f"x.py {SIZES} --bf16 --tensor-model-parallel-size $("
    assert job(tmp_path, f"{line}nproc)")[1].unknown == ["--tensor-model-parallel-size"]
    assert job(tmp_path, f"N=8; {line}expr 16 / $N)")[0].options["tp"] == "2"


def test_a_key_of_verl_is_named_whatever_its_letters(tmp_path: Path) -> None:
    line = "torchrun --bogus 1 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m "
    reading = job(tmp_path, line + "data.Odd2=1 +model.extra=3")[1]
    assert reading.unknown == ["bogus", "data.Odd2", "model.extra"]


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


def test_a_sourced_script_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources /models/m\.sh, which was not found"):
        job(tmp_path, 'source "${D}/models/m.sh"\ntorchrun train.py ${MODEL_ARGS[@]}')
    assert "models/m.sh" in "".join(job(tmp_path, f"source models/m.sh\nrun {SIZES}")[1].notes)


MODEL = [*sorted(dialect("megatron")[""].shapes.keys() - {"num_layers"}), "num_experts"]


@pytest.mark.parametrize("option", [*MODEL, "mtp_num_layers"])
def test_an_option_of_a_named_model_is_never_dropped(tmp_path: Path, option: str) -> None:
    _, reading = job(tmp_path, f"{SWIFT} --{option} 2")
    assert any(option.replace("_", "-") in line for line in reading.refused), option


@pytest.mark.parametrize("program", ["-m openrlhf.cli.train_sft", "../train_sft.py"])
def test_openrlhf_is_known_by_its_module_and_by_its_options(tmp_path: Path, program: str) -> None:
    line = f"deepspeed {program} --pretrain Qwen/Qwen3-8B --micro_train_batch_size 2 --max_len 512"
    made, reading = job(tmp_path, f"{line} --train_batch_size 16 --ds_tensor_parallel_size 2")
    expected = {"model": "qwen3-8b", "micro_batch": "2", "seq_len": "512", "tp": "2"}
    assert {key: made.options.get(key) for key in expected} == expected
    assert not reading.unknown + reading.refused
    assert job(tmp_path, f"{line} --backend fsdp2")[1].refused


def test_groups_of_a_configuration_of_verl_are_no_values(tmp_path: Path) -> None:
    line = "torchrun -m verl.trainer.sft_trainer model=hf_model model.path=Qwen/Qwen3-8B "
    made, reading = job(tmp_path, f"{line} engine=fsdp optim=fsdp engine.fsdp_size=-1")
    assert made.options["model"] == "qwen3-8b"
    assert not reading.unknown + reading.refused
    assert len(job(tmp_path, f"{line} engine=automodel optim=automodel")[1].refused) == 2


@pytest.mark.parametrize("key", ["processor_type", "vision_model", "vit_gradient_checkpointing"])
def test_a_job_with_images_is_refused(tmp_path: Path, key: str) -> None:
    assert job(tmp_path, f"{AXOLOTL}{key}: AutoProcessor\n", "a.yaml")[1].refused


@pytest.mark.parametrize(("plugin", "known"), [("swanlab.SwanLabPlugin", True), ("a.B", False)])
def test_a_plugin_of_axolotl_is_known_by_its_class(
    tmp_path: Path, plugin: str, known: bool
) -> None:
    text = f"{AXOLOTL}plugins: [axolotl.integrations.{plugin}]\n"
    assert bool(job(tmp_path, text, "a.yaml")[1].refused) is not known
