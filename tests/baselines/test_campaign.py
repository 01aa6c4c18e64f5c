"""A measurement with baselines among its cells, executed here by torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="cells are executed with torch")

from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.paths import data_dir
from rematbench.worlds import agreement
from rematbench.worlds.agreement import agreement_records, disagreements
from rematbench.worlds.packages.process import BaselineError
from rematbench.worlds.records.record import read_record
from tests.campaigns import campaign
from tests.installed import needs

needs("megatron.core")

TIMELESS = (
    "timed_steps", "step_s", "step_min_s", "step_max_s", "tokens_per_s_per_gpu", "mfu_causal",
    "mfu_dense", "simulated_step_s", "step_error_percent", "allocated_bytes", "reserved_bytes",
)  # fmt: skip


def rematbench(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rematbench.cli.app", *words],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
def test_a_packages_cells_stand_beside_ours_with_the_same_loss(tmp_path: Path) -> None:
    """Same weights, same batches; what it refuses is a row too, and it starts no cell again."""
    refused = {"offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]}
    variants = [{"method": "megatron_core", "settings": refused}]
    methods = ["keep_all", "megatron_core"]
    bundles = campaign(tmp_path, methods=methods, variants=variants, steps=2).bundles
    suite, store = str(tmp_path / "measure.yaml"), str(tmp_path / "cells")
    for name in bundles:
        done = str(tmp_path / f"{name}.json")
        said = rematbench("run-cells", suite, "--store", store, "--bundle", name, "-o", done)
    assert said.splitlines()[-1] == "megatron_core.1x2.0: 1 ok, 1 unsupported"
    table = tmp_path / "executed.csv"
    rematbench("cells", suite, "--store", store, "-o", str(table))
    ours, theirs, other = read_sheet(table)
    assert [row["status"] for row in (ours, theirs, other)] == ["ok", "ok", "unsupported"]
    assert "offload_modules" in other["reason"]
    assert theirs["engine"].startswith("megatron-core 0.")
    assert theirs["engine"].endswith(" + CPU shim")
    assert "core_attention: torch" in theirs["kernels"]
    assert ours["engine"].startswith("rematbench ")
    for key in ("losses", "gradient_norms"):
        (first, *_), (same, *rest) = (json.loads(row[key]) for row in (ours, theirs))
        assert same == pytest.approx(first, rel=1e-5), "later ones: baselines decay no weights"
        assert len(rest) == 1
    for row in (ours, theirs):
        assert not any(row[key] for key in TIMELESS), "a CPU's time is no performance"
        assert int(row["peak_device_bytes"]) > 0
        assert int(row["simulated_peak_bytes"]) > 0
    assert ours["device"].startswith("cpu")
    assert theirs["device"] == "cpu"
    again = rematbench("run-cells", suite, "--store", store, "--bundle", name, "-o", done)
    assert again.splitlines() == [said.splitlines()[-1]], "nothing is left to run"


# -- engines on the same weights: which runs there are, and which differ ---------------------------


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
        names[
            2
        ]: "differs from the executor: loss by 1.0e-04, gradient norm by 5.3e-08 (bound 1e-05)",
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
