"""Bytes, stacks and lengths are those of the job that a file says."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from rematbench.foreign.job import FileJob
from rematbench.inputs.load import load_model, load_system
from tests.foreign.small_jobs import SIZES, TRL, facts, job, small
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


@pytest.mark.parametrize(("base", "more", "pieces"), TABLES["losses"])
def test_a_loss_without_logits_divides_the_head(
    tmp_path: Path, base: str, more: Any, pieces: bool
) -> None:
    method = job(tmp_path, small(base, more), "job.yaml")[0].method
    assert method == ("full_recompute+mst:mlp_chunks=1" if pieces else "full_recompute")


@pytest.mark.parametrize("pair", [*combinations(TABLES["switches"], 2)])
def test_a_written_stack_of_a_trainer_loads(tmp_path: Path, pair: tuple[str, str]) -> None:
    text = TRL.replace("bf16: true\n", "" if "fp16: true" in pair else "bf16: true\n")
    loads(tmp_path, job(tmp_path, text + "\n".join(pair), "job.yaml")[0])


def loads(folder: Path, made: FileJob) -> None:
    for name, text in made.files.items():
        (folder / name).write_text(text)
        (load_system if "stack" in name else load_model)(folder / name)


@pytest.mark.parametrize("options", TABLES["options"])
def test_a_written_stack_of_megatron_loads(tmp_path: Path, options: str) -> None:
    loads(tmp_path, job(tmp_path, f"x.py {SIZES} {options}", cluster="h100-80gb")[0])


@pytest.mark.parametrize(("optim", "scratch"), [("adamw_torch", 4), ("adamw_torch_fused", None)])
def test_torch_updates_all_tensors_at_once_unless_one_kernel_does(
    tmp_path: Path, optim: str, scratch: int | None
) -> None:
    """The roots of second moments are as wide as the weights, which TRL holds in fp32."""
    text = f"{TRL}optim: {optim}\n"
    assert facts(job(tmp_path, text, "job.yaml")[0]).get("step_scratch_bytes") == scratch
    moved = f"{text}deepspeed: {{zero_optimization: {{stage: 2}}}}\n"
    assert "step_scratch_bytes" not in facts(job(tmp_path, moved, "job.yaml")[0])


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
