"""`flags --baseline torchtitan`: what is printed is read back."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.cli.options import RunOptions, request
from rematbench.cli.titan import titan_answer
from rematbench.worlds.packages.flags import FlagsAnswer
from tests.foreign.small_jobs import job
from tests.tables import tables

USUAL = {"model": "llama-3.1-8b", "cluster": "h100-80gb", "system": "torchtitan-compiled"}
USUAL |= {"gpus": 8, "seq_len": 4096, "global_batch": 16, "micro_batch": 2, "zero_stage": 3}
READ = ("seq_len", "global_batch", "recipe", "fp8_params", "tp", "pp", "vpp", "precision")


def answer(method: str, settings: list[str] | None = None, **facts: Any) -> FlagsAnswer:
    problem = {"recipe": "none", **USUAL, **facts}
    return titan_answer(request(RunOptions(problem=problem, method=method, settings=settings)))


@pytest.mark.parametrize(("method", "settings", "facts"), tables(__file__)["printed"])
def test_printed_files_are_read_back(
    tmp_path: Path, method: str, settings: list[str] | None, facts: dict[str, Any]
) -> None:
    made = answer(method, settings, **facts)
    assert made.missing == ()
    _, reading = job(tmp_path, made.flags, "titan.toml")
    assert (reading.refused, reading.unknown) == ([], [])
    told = {**USUAL, "tp": 1, "pp": 1, "precision": "bf16", "recipe": "none", **facts}
    assert {k: reading.get(k, told.get(k)) for k in READ} == {k: told.get(k) for k in READ}
    assert reading.system == USUAL["system"]
    assert reading.method == (method, {"every": 2} if settings else {})


def test_what_no_key_says_is_missing() -> None:
    facts = {"system": "megatron-core", "zero_stage": 1, "recipe": "fp8-block", "tp": 2}
    words = " ".join(answer("memo", **facts).missing)
    for part in ("stack megatron-core", "zero_stage 1", "recipe fp8-block", "this plan"):
        assert part in words
