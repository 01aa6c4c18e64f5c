"""Engines on the same weights: which runs there are, and which differ."""

from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="the executor needs torch")

from rematbench.inputs.paths import data_dir
from rematbench.worlds import agreement
from rematbench.worlds.agreement import agreement_records, disagreements
from rematbench.worlds.packages.process import BaselineError
from rematbench.worlds.records.record import read_record

COMMITTED = data_dir("config").parent / "results/measured/executed/agreement"


def test_what_differs_is_said_and_only_that() -> None:
    names = [f"executor-one-{kind}" for kind in ("fp32", "bf16")]
    names += ["megatron_core-one-fp32", "deepspeed-zero1-bf16"]
    records = {name: read_record(COMMITTED / f"{name}.json") for name in names}
    assert disagreements(records) == {}

    one = records[names[2]]
    losses = (one.measured.losses[0] * 1.0001, 0.0)
    records[names[2]] = replace(one, measured=replace(one.measured, losses=losses))
    records[names[3]] = replace(records[names[3]], measured=None, status="oom", reason="full")
    assert disagreements(records) == {
        names[2]: "loss 1.0e-04, gradient norm 5.3e-08 apart, 1e-05 allowed",
        names[3]: "oom: full",
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_that_breaks_takes_no_other_engines_records(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU engines run one after another, and the first that breaks ends it; on GPUs rows run
    side by side, each in a process of its own."""
    asked: list[str] = []

    def engine(name: str, precision: str, rows: Any, *_: object) -> dict[str, Any]:
        asked.extend(f"{name}-{row.name}" for row in rows)
        if name == "megatron_core":
            raise BaselineError("no")
        return {f"{name}-{row.name}-{precision}": None for row in rows}

    monkeypatch.setattr(agreement, "_engine", engine)
    found: list[str] = []
    with pytest.raises(BaselineError, match="no"):
        found.extend(name for name, _ in agreement_records(device, 1))
    here = [
        f"{row}-{kind}"
        for row in ("deepspeed-one-tiled", "deepspeed-zero1", "executor-one")
        for kind in ("bf16", "fp32")
    ]
    first = ["executor-dp2-zero3-fp32", "executor-one-fp32"]
    assert sorted(found) == {"cpu": first, "cuda": here}[device]
    assert len(asked) == {"cpu": 9, "cuda": 12}[device]
