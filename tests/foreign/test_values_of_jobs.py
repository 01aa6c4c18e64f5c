"""Bytes, stacks and lengths are those of the job that a file says."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from rematbench.foreign.job import FileJob
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import load_model, load_system
from tests.foreign.small_jobs import AXOLOTL, SIZES, SWIFT, TITAN, TRL, facts, job, small
from tests.tables import tables

TABLES = tables(__file__)


@pytest.mark.parametrize(("text", "method", "refused"), TABLES["offloaded_inputs"])
def test_offloaded_inputs_have_a_home(tmp_path: Path, text: str, method: str, refused: str) -> None:
    trl = TRL.replace("gradient_checkpointing: true\n", "") if "ing: false" in text else TRL
    made, reading = job(tmp_path, trl + text, "job.yaml")
    assert made.method == method
    assert (made.settings == ("inputs=host",)) == ("offload" in text and method == "full_recompute")
    assert any(refused in line for line in reading.refused) == bool(refused)
    if made.settings:
        assert "activation_offload" in facts(made)["features"]  # type: ignore[operator]


@pytest.mark.parametrize(("options", "settings", "base", "refused"), TABLES["recomputed"])
def test_full_recomputation_of_megatron_is_read(
    tmp_path: Path, options: str, settings: list[str], base: str, refused: str
) -> None:
    made, reading = job(tmp_path, f"x.py {SIZES} --bf16 {options}")
    assert [*made.settings] == settings
    stack = yaml.safe_load(made.files.get("run-stack.yaml", "{}"))
    assert stack.get("base", made.options["system"]) == base
    assert [refused in line for line in reading.refused] == [True] * bool(refused)


@pytest.mark.parametrize(("base", "more", "wide"), TABLES["weights"])
def test_weights_have_the_type_that_the_job_gives(
    tmp_path: Path, base: str, more: Any, wide: Any
) -> None:
    stack = facts(job(tmp_path, small(base, more), "job.yaml")[0])
    bytes_of = [stack.get(name) for name in ("param_bytes", "grad_bytes", "optimizer_bytes")]
    assert bytes_of == {True: [4, 4, 8], False: [None] * 3, "narrow": [2, 2, 4]}[wide]


@pytest.mark.parametrize("optimizer", ["paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_8bit"])
def test_paged_states_of_a_whole_model_are_refused(tmp_path: Path, optimizer: str) -> None:
    for more in ("", "lora_rank: 8\nuse_peft: true\n"):
        refused = job(tmp_path, TRL + f"{more}optim: {optimizer}\n", "job.yaml")[1].refused
        assert [optimizer in line for line in refused] == ([] if more else [True])


@pytest.mark.parametrize(("optim", "scratch"), [("adamw_torch", 4), ("adamw_torch_fused", None)])
def test_torch_updates_all_tensors_at_once_unless_one_kernel_does(
    tmp_path: Path, optim: str, scratch: int | None
) -> None:
    """The roots of second moments are as wide as the weights, which TRL holds in fp32."""
    text = f"{TRL}optim: {optim}\n"
    assert facts(job(tmp_path, text, "job.yaml")[0]).get("step_scratch_bytes") == scratch
    moved = f"{text}deepspeed: {{zero_optimization: {{stage: 2}}}}\n"
    assert "step_scratch_bytes" not in facts(job(tmp_path, moved, "job.yaml")[0])


def test_gradients_of_fp16_are_fp16_unless_a_switch_widens_them(tmp_path: Path) -> None:
    for switch, grad_bytes in (("", 2), ("--accumulate-allreduce-grads-in-fp32", None)):
        stack = facts(job(tmp_path, f"x.py {SIZES} --fp16 {switch}")[0])
        assert stack.get("grad_bytes") == grad_bytes


@pytest.mark.parametrize(("options", "expected"), TABLES["state_types"])
def test_states_of_megatron_have_the_types_of_the_line(
    tmp_path: Path, options: str, expected: list[int | None]
) -> None:
    stack = facts(job(tmp_path, f"x.py {SIZES} --bf16 --use-distributed-optimizer {options}")[0])
    assert [stack.get("grad_bytes"), stack.get("optimizer_bytes")] == expected


@pytest.mark.parametrize(("text", "expected"), TABLES["torchtitan"])
def test_states_of_torchtitan_have_the_types_of_the_file(
    tmp_path: Path, text: str, expected: dict[str, int]
) -> None:
    stack = facts(job(tmp_path, TITAN + text, "titan.toml")[0])
    assert {key: stack.get(key) for key in expected} == expected


@pytest.mark.parametrize(("more", "modelled"), TABLES["logits"])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_tensor_parallel_ranks_are_divided(
    tmp_path: Path, tp: int, more: str, modelled: bool
) -> None:
    text = f"{TITAN}[parallelism]\ntensor_parallel_degree = {tp}\n{more}"
    assert (not job(tmp_path, text, "t.toml")[1].refused) == (modelled or tp == 1)


@pytest.mark.parametrize(("more", "named"), TABLES["masks"])
def test_a_large_mask_of_megatrons_loader_is_named(tmp_path: Path, more: str, named: int) -> None:
    notes = job(tmp_path, f"torchrun pretrain_gpt.py {SIZES} --bf16 --seq-length {more}")[1].notes
    assert sum("GiB" in note for note in notes) == named


@pytest.mark.parametrize(("base", "default"), [("AXOLOTL", True), ("FACTORY", True), ("TRL", None)])
@pytest.mark.parametrize(("word", "given"), [("true", True), ("false", None), ("", "default")])
@pytest.mark.parametrize("version", [1, 2])
def test_a_recomputed_layer_under_fsdp_is_a_graph_of_its_own(
    tmp_path: Path, base: str, default: bool | None, word: str, given: object, version: int
) -> None:
    text = f"fsdp: full_shard\nfsdp_config: {{fsdp_version: {version}}}\n"
    text += f"gradient_checkpointing_kwargs: {{use_reentrant: {word}}}\n" if word else ""
    expected = default if given == "default" else given
    stack = facts(job(tmp_path, small(base, text), "job.yaml")[0])
    assert stack.get("reentrant") == (expected if version == 1 else None)
    assert stack.get("waiting_frees") == (2 if version == 1 else None)


@pytest.mark.parametrize(("line", "expected", "said"), TABLES["lines"])
def test_a_line_gives_its_values_and_says_what_it_leaves_open(
    tmp_path: Path, line: str, expected: dict[str, object], said: str
) -> None:
    """Transformers 5.23, training_args.py, takes FSDP2 and loads the checkpoint's type; 4.x took
    FSDP1 and fp32."""
    made, reading = job(tmp_path, line)
    stated = facts(made) | made.options
    assert {key: stated.get(key) for key in expected} == expected
    left = " ".join([*reading.assumed, *reading.refused, *made.missing])
    assert said in left
    assert said or not reading.assumed


@pytest.mark.parametrize(("word", "width"), [("fp32", 4), ("bf16", None), ("none", None)])
def test_gradients_of_deepspeed_have_the_type_of_the_line(
    tmp_path: Path, word: str, width: int | None
) -> None:
    line = f"torchrun openrlhf.cli.train_sft --pretrain m --ds.grad_accum_dtype {word}"
    assert facts(job(tmp_path, line)[0]).get("grad_bytes") == width


def test_a_pipeline_that_gathers_again_is_refused(tmp_path: Path) -> None:
    text = TITAN + '[parallelism]\nfsdp_reshard_after_forward = "always"\n'
    assert not job(tmp_path, text, "titan.toml")[1].refused
    text += "pipeline_parallel_degree = 2\n"
    assert any("always" in line for line in job(tmp_path, text, "titan.toml")[1].refused)


def test_stages_of_a_named_model_are_those_of_its_layers(tmp_path: Path) -> None:
    line = SWIFT + "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 25"
    assert job(tmp_path, line)[0].options["partition"] == "25,23"
    line = SWIFT.replace("Qwen/Qwen3-30B-A3B-Base", "other/model")
    line += "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 25"
    made, reading = job(tmp_path, line)
    assert "partition" not in made.options
    assert any("not known" in text for text in reading.refused)


@pytest.mark.parametrize(("options", "partition"), TABLES["stages"])
def test_stages_at_the_ends_differ(tmp_path: Path, options: str, partition: str) -> None:
    sizes = SIZES.replace("-layers 4", "-layers 7")
    line = f"x.py {sizes} --bf16 --pipeline-model-parallel-size 4 {options}"
    assert job(tmp_path, line)[0].options["partition"] == partition
    with pytest.raises(ConfigError, match="do not divide"):
        job(tmp_path, line.replace("-layers 7", "-layers 6", 1))


@pytest.mark.parametrize(("options", "partition"), TABLES["chunks"])
def test_interleaved_chunks_differ(tmp_path: Path, options: str, partition: str) -> None:
    layers = 2 if "E" in partition else 6
    sizes = SIZES.replace("-layers 4", f"-layers {layers}")
    line = f"x.py {sizes} --bf16 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline"
    assert partition in job(tmp_path, f"{line}-rank 2 {options}")[0].options.values()
    with pytest.raises(ConfigError, match="do not divide over 2 stages of 2 chunks"):
        job(tmp_path, f"{line}-rank 2 --decoder-first-pipeline-num-layers 3")


HUB = {"deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite", "Qwen/Qwen3-8B-FP8": None}
HUB |= {"deepseek-ai/DeepSeek-V3-0324": "deepseek-v3", "deepseek-ai/DeepSeek-V3.1": None}
HUB |= {"mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b"}
HUB |= {"Qwen/Qwen3-235B-A22B-Thinking-2507": "qwen3-235b"}
HUB |= {"meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b"}


def test_a_name_of_the_hub_is_a_shipped_model(tmp_path: Path) -> None:
    texts = {name: TRL.replace("Qwen/Qwen3-8B", name) for name in HUB}
    found = {
        k: job(tmp_path, text, "job.yaml")[0].options.get("model") for k, text in texts.items()
    }
    assert found == HUB


def test_a_layout_of_stages_is_read(tmp_path: Path) -> None:
    text = "Et|(tt|)*2,L"
    line = f"x.py {SIZES.replace('-layers 4', '-layers 5')} --bf16 --pipeline-model-parallel-size 2"
    made = job(tmp_path, f"{line} --pipeline-model-parallel-layout '{text}'")[0]
    assert made.options["stages"] == text
    assert made.options["vpp"] == "2"
    assert made.words[made.words.index("--layout") + 1] == text
    made = job(tmp_path, f"{line} --pipeline-model-parallel-layout 'Et*2|t*3L'")[0]
    assert made.words[made.words.index("--partition") + 1] == "2,3"
    assert "--layout" not in made.words


def test_a_key_of_an_early_trl_has_its_defaults(tmp_path: Path) -> None:
    text = TRL.replace("loss_type: nll\n", "").replace("gradient_checkpointing: true\n", "")
    assert job(tmp_path, text, "job.yaml")[0].method == "full_recompute+mst:mlp_chunks=1"
    early = text.replace("max_length", "max_seq_length")
    assert job(tmp_path, early, "job.yaml")[0].method == "keep_all"


def test_blocks_of_transformers_own_example_are_full(tmp_path: Path) -> None:
    values = {"model_name_or_path": "Qwen/Qwen3-8B", "block_size": 4096, "bf16": True}
    (tmp_path / "args.json").write_text(json.dumps(values))
    made, reading = job(tmp_path, "torchrun --nproc_per_node 8 x/run_clm.py args.json")
    assert (made.method, reading.package) == ("keep_all", "Transformers")
    assert not [line for line in reading.notes if "upper bound" in line]


@pytest.mark.parametrize(("base", "more", "capped"), TABLES["caps"])
def test_a_cap_is_named_where_nothing_packs(
    tmp_path: Path, base: str, more: Any, capped: bool
) -> None:
    name = "run.sh" if base == "SWIFT" else "job.yaml"
    notes = job(tmp_path, small(base, more), name)[1].notes
    assert any("is an upper bound" in note for note in notes) == capped


@pytest.mark.parametrize(("base", "more", "name", "system"), TABLES["context_parallel"])
def test_context_parallelism_takes_a_stack_that_has_it(
    tmp_path: Path, base: str, more: Any, name: str, system: str
) -> None:
    made = job(tmp_path, small(base, more), name)[0]
    assert (made.options["cp"], made.options["system"]) == ("2", system)
    if "compile" in more:
        assert yaml.safe_load(made.files["run-stack.yaml"])["base"] == "torchtitan-2026"


@pytest.mark.parametrize(("backend", "cluster", "kernel"), TABLES["transformer_engine"])
def test_transformer_engine_prefers_cudnn_from_hopper_on(
    tmp_path: Path, backend: str, cluster: str | None, kernel: str | None
) -> None:
    before, after = ("", backend) if backend.startswith("--") else (f"export {backend}\n", "")
    line = f"{before if backend else ''}x.py {SIZES} --bf16 {after}"
    made = job(tmp_path, line, cluster=cluster)[0]
    assert facts(made).get("attention") == kernel
    assert yaml.safe_load(made.files["run-stack.yaml"])["base"] == "megatron-core-0.16"


@pytest.mark.parametrize(("base", "more", "pieces"), TABLES["losses"])
def test_a_loss_without_logits_divides_the_head(
    tmp_path: Path, base: str, more: Any, pieces: bool
) -> None:
    method = job(tmp_path, small(base, more), "job.yaml")[0].method
    assert method == ("full_recompute+mst:mlp_chunks=1" if pieces else "full_recompute")


@pytest.mark.parametrize(("text", "method"), TABLES["tiles"])
def test_tiles_of_an_mlp_are_computed_again(tmp_path: Path, text: str, method: str) -> None:
    made = job(tmp_path, AXOLOTL + text, "job.yaml")[0]
    assert made.method == f"full_recompute{'+' if method else ''}{method}"
    assert facts(made).get("tiles_again", False) is bool(method)


def test_compiled_norms_keep_no_steps(tmp_path: Path) -> None:
    stack = facts(job(tmp_path, TRL + "torch_compile: true", "job.yaml")[0])
    assert (stack["compiled"], stack["norm_keeps_steps"]) == (True, False)


ALLOC, GROWS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


@pytest.mark.parametrize(("before", "states"), TABLES["environment"])
def test_variables_of_the_environment_state_facts(
    tmp_path: Path, before: str, states: bool
) -> None:
    made = facts(job(tmp_path, f"{before}x.py {SIZES} --bf16")[0])
    assert made.get("expandable_segments", False) is states


def test_only_megatrons_own_optimizer_on_the_host_leaves_a_copy_on_the_device(
    tmp_path: Path,
) -> None:
    line = f"x.py {SIZES} --bf16 "
    more = "--optimizer-cpu-offload --swiglu --use-tp-pp-dp-mapping --no-bias-swiglu-fusion"
    stack = facts(job(tmp_path, line + more)[0])
    assert (stack["rank_order"], stack["fused_swiglu"]) == (["tp", "cp", "pp", "dp"], False)
    assert stack["resident_bytes"] == 4
    made = job(tmp_path, f"{line}--deepspeed --zero-stage 1 --cpu-optimizer")[0]
    assert (made.options["optimizer"], "resident_bytes" in facts(made)) == ("host", False)


@pytest.mark.parametrize("pair", [*combinations(TABLES["switches"], 2)])
def test_a_written_stack_of_a_trainer_loads(tmp_path: Path, pair: tuple[str, str]) -> None:
    text = TRL.replace("bf16: true\n", "" if "fp16: true" in pair else "bf16: true\n")
    loads(tmp_path, job(tmp_path, text + "\n".join(pair), "job.yaml")[0])


def loads(folder: Path, made: FileJob) -> None:
    for name, text in made.files.items():
        (folder / name).write_text(text)
        (load_system if "stack" in name else load_model)(folder / name)


@pytest.mark.parametrize(("options", "scope", "refused"), TABLES["graphs"])
def test_graphs_of_a_line_are_a_choice_of_the_run(
    tmp_path: Path, options: str, scope: str | None, refused: str
) -> None:
    _, reading = job(tmp_path, f"torchrun pretrain_gpt.py {SIZES} --bf16 {options}\n")
    assert reading.get("cuda_graphs") == scope
    assert [line.startswith(refused) for line in reading.refused] == [True] * bool(refused)
    assert not reading.unknown


@pytest.mark.parametrize("options", TABLES["options"])
def test_a_written_stack_of_megatron_loads(tmp_path: Path, options: str) -> None:
    loads(tmp_path, job(tmp_path, f"x.py {SIZES} {options}", cluster="h100-80gb")[0])


def test_modules_on_the_host_are_those_of_the_package(tmp_path: Path) -> None:
    line = f"x.py {SIZES} --fine-grained-activation-offloading --offload-modules "
    more = " --recompute-granularity selective --recompute-modules mlp"
    made, reading = job(tmp_path, f"{line}core_attn attn_proj{more}")
    moved = "bias_activation_fusion=true offload_modules=[core_attn,attn_proj]"
    expected = f"{moved} recompute=selective modules=[mlp]".split()
    assert (made.method, [*made.settings], reading.refused) == ("megatron_core", expected, [])
    assert "moe_act" in job(tmp_path, f"{line}moe_act{more}")[1].refused[0]
    assert job(tmp_path, f"{line}core_attn --recompute-granularity full")[1].refused


def test_weights_in_fp32_are_those_of_the_stack_that_runs(tmp_path: Path) -> None:
    line = "accelerate launch --use_deepspeed --zero_stage 2 --num_processes 8 trl/scripts/sft.py "
    line += "--model_name_or_path Qwen/Qwen3-8B --max_length 512 --bf16 --loss_type nll "
    made = job(tmp_path, line + "--per_device_train_batch_size 1")[0]
    assert (made.options["system"], made.files) == ("huggingface-deepspeed", {})
