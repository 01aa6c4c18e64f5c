"""Megatron-core and DeepSpeed on torch's CUDA build: the way they go on GPUs, with no shim."""

import importlib.util
from pathlib import Path

import pytest

from rematbench.runs.record import read_record
from tests.stand_in.conftest import Run

pytestmark = pytest.mark.soak


def test_every_row_of_the_agreement_runs(run: Run, tmp_path: Path) -> None:
    if not all(map(importlib.util.find_spec, ("megatron", "deepspeed"))):
        pytest.skip("needs megatron-core and deepspeed")
    run("-m", "rematbench", "baseline", "agree", "--device", "cuda", "-o", str(tmp_path))
    records = {path.stem: read_record(path) for path in sorted(tmp_path.glob("*.json"))}
    assert len(records) > 20
    for name, record in records.items():
        assert record.status == "ok", f"{name}: {record.reason}"
        if name.startswith("executor"):
            continue
        seen = record.observed
        assert seen is not None, name
        assert "CPU" not in seen.label, name
        assert seen.backend == "nccl", name
        ranks = record.spec.layout.gpus
        assert len(seen.allocated_bytes) == ranks, name
        assert all(
            0 < a <= r for a, r in zip(seen.allocated_bytes, seen.reserved_bytes, strict=True)
        )
