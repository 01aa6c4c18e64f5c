"""Recipes of launch lines and of torchtitan's files, and the options that `flags` prints."""

from pathlib import Path
from typing import Any

import pytest

from baselines.megatron_core.options import recipe_words
from rematbench.workload import Work, Workload
from tests.foreign.small_jobs import SIZES, job
from tests.problems import LLAMA
from tests.tables import tables

TABLES = tables(__file__)

FACTS = ("recipe", "fp8_params", "bf16_ends")


def stated(reading: Any) -> dict[str, Any]:
    """What a reading says of the recipe."""
    return {name: reading.get(name) for name in FACTS if reading.get(name) is not None}


@pytest.mark.parametrize(("words", "facts"), tables(__file__)["options"])
def test_megatrons_options_state_a_recipe(
    tmp_path: Path, words: str, facts: dict[str, Any]
) -> None:
    _, reading = job(tmp_path, f"x.py {SIZES} --bf16 {words}")
    assert (stated(reading), reading.refused) == (facts, [])


@pytest.mark.parametrize("facts", TABLES["printed"])
def test_printed_options_are_read_back(tmp_path: Path, facts: dict[str, Any]) -> None:
    words = recipe_words(Workload(model=LLAMA, seq_len=64, **facts))
    _, reading = job(tmp_path, f"x.py {SIZES} --bf16 {' '.join(words)}")
    assert (stated(reading), reading.refused, reading.unknown) == (facts, [], [])
    assert recipe_words(Workload(model=LLAMA, **{"seq_len": 64})) == []
    assert Work(seq_len=64).numbers == "bf16"


def test_torchtitans_converters_state_a_recipe(tmp_path: Path) -> None:
    text = '[model]\nconverters = ["float8"]\n[training]\nseq_len = 64\n[parallelism]\n'
    text += "tensor_parallel_degree = 1\n[float8]\n"
    text += 'enable_fsdp_float8_all_gather = true\nfilter_fqns = ["output"]\n'
    _, reading = job(tmp_path, text, "titan.toml")
    assert (stated(reading), reading.refused) == ({"recipe": "fp8", "fp8_params": True}, [])
    _, reading = job(tmp_path, text.replace("float8", "mx"), "titan.toml")
    assert stated(reading)["recipe"] == "mxfp8"


@pytest.mark.parametrize(("section", "facts", "words"), TABLES["torchao"])
def test_recipes_of_torchao_are_read_or_refused(
    tmp_path: Path, section: str, facts: dict[str, Any], words: str
) -> None:
    output = "" if "filter_fqns" in section else 'filter_fqns = ["output"]\n'
    text = '[model]\nconverters = ["float8"]\n[training]\nseq_len = 64\n'
    text += f"[float8]\n{output}{section}\n[parallelism]\ntensor_parallel_degree = 1\n"
    _, reading = job(tmp_path, text, "titan.toml")
    assert stated(reading) == facts
    assert words in " ".join(reading.refused)
    assert bool(reading.refused) == bool(words)


ACCELERATE = "distributed_type: FSDP\nmixed_precision: fp8\nnum_processes: 8\nfsdp_config: {{}}\n"
ACCELERATE += "fp8_config: {{backend: {backend}, fp8_format: HYBRID, {more}}}\n"


@pytest.mark.parametrize(("backend", "more", "facts", "words"), TABLES["accelerate"])
def test_fp8_of_accelerate_is_read_or_refused(
    tmp_path: Path, backend: str, more: str, facts: dict[str, Any], words: str
) -> None:
    text = ACCELERATE.format(backend=backend, more=more)
    _, reading = job(tmp_path, text, "accelerate.yaml")
    assert stated(reading) == facts
    assert words in " ".join(reading.refused)
    assert (bool(reading.refused), reading.unknown) == (bool(words), [])


@pytest.mark.parametrize(("text", "name", "recipe"), TABLES["trainers"])
def test_trainers_state_fp8_of_accelerate(
    tmp_path: Path, text: str, name: str, recipe: str
) -> None:
    """axolotl's is torchao's default, LLaMA-Factory's has scales of rows."""
    _, reading = job(tmp_path, text, name)
    assert stated(reading) == {"recipe": recipe or "fp8-rows"}
    assert not [line for line in (*reading.refused, *reading.unknown) if "fp8" in line]
