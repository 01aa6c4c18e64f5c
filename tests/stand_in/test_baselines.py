"""Megatron-core and DeepSpeed on torch's CUDA build: the way they go on GPUs, with no shim."""

import importlib.util
from pathlib import Path

import pytest

from rematbench.worlds.records.record import read_record
from tests.stand_in.conftest import Run

pytestmark = pytest.mark.soak


def test_every_row_of_the_agreement_runs(run: Run, tmp_path: Path) -> None:
    if not all(map(importlib.util.find_spec, ("megatron", "deepspeed"))):
        pytest.skip("needs megatron-core and deepspeed")
    run("-m", "rematbench", "measure", "agreement", "--device", "cuda", "-o", str(tmp_path))
    records = {path.stem: read_record(path) for path in sorted(tmp_path.glob("*.json"))}
    assert len(records) > 20
    for name, record in records.items():
        assert record.status == "ok", f"{name}: {record.reason}"
        if name.startswith("executor"):
            continue
        seen, engine = record.measured, record.engine
        assert seen is not None, name
        assert engine is not None, name
        assert "CPU" not in engine.label, name
        assert engine.backend == "nccl", name
        ranks = record.spec.layout.gpus
        assert len(seen.ranks) == ranks, name
        assert all(0 < rank.allocated_bytes <= rank.reserved_bytes for rank in seen.ranks)
