"""Under torchrun the same entry point is one rank: the same records, and none is lost."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from rematbench.spec.paths import data_dir
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import Record, read_record
from tests.baselines.cases import Asked, Ran, asked_job, assert_equal
from tests.installed import needs

PACKAGES = {"megatron_core": "megatron.core", "deepspeed": "deepspeed"}
LAYOUTS = {"megatron_core": "tp2", "deepspeed": "dp2"}


def launched(baseline: str, jobs: list[PackageJob], folder: Path) -> list[Record]:
    """Two processes with the variables that torchrun sets; records in the jobs' order."""
    (folder / "jobs.json").write_bytes(msgspec.json.encode(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, str(data_dir("baselines") / "run.py"), baseline,
        str(folder / "jobs.json"), str(folder),
    ]  # fmt: skip
    given = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = [
        subprocess.Popen(command, env={**os.environ, **given, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    for process in processes:
        process.wait(timeout=120)
    return [read_record(folder / f"{number}.json") for number in range(len(jobs))]


@pytest.mark.full
@pytest.mark.parametrize("baseline", PACKAGES)
def test_the_record_is_that_of_a_run_of_its_own(baseline: str, tmp_path: Path) -> None:
    needs(PACKAGES[baseline])
    asked = Asked(LAYOUTS[baseline])
    wide = asked_job(baseline, Asked("one"))
    good, refused = asked_job(baseline, asked), wide
    first, second = launched(baseline, [good, refused], tmp_path)
    gradients = torch.load(tmp_path / f"{good.run.run_id}.gradients.pt")
    assert_equal(asked, Ran(first, gradients), 1e-5)
    assert first.engine.backend == "gloo"
    assert second.status == "unsupported"
    assert "started 2 processes for 1 GPUs" in second.reason
