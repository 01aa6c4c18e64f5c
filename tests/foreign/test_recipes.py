"""Recipes of launch lines and of torchtitan's files, and the options that `flags` prints."""

from pathlib import Path
from typing import Any

import pytest

from baselines.megatron_core.options import recipe_words
from rematbench.workload import Work, Workload
from tests.foreign.small_jobs import SIZES, job
from tests.problems import LLAMA
from tests.tables import tables

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


@pytest.mark.parametrize(
    "facts",
    [
        {"recipe": "fp8", "fp8_params": True, "bf16_ends": 2},
        {"recipe": "fp8-delayed"},
        {"recipe": "fp8-block"},
        {"recipe": "mxfp8", "fp8_params": True},
        {"recipe": "nvfp4"},
    ],
)
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
