"""`rematbench baseline run` under a launcher: one record by rank 0, silence of the others, and a
record of every failure."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="baselines need torch")

from rematbench.host import ranks as host_ranks
from rematbench.host.ranks import RankError
from rematbench.worlds.records.record import Record, read_record
from tests.installed import needs
from tests.tables import tables

needs("megatron.core")

RUN = "from rematbench.cli.app import main; main()"
WORDS = (
    "baseline", "run", "megatron_core", "--model", "tiny-llama", "--cluster", "this-machine",
    "--gpus", "2", "--tp", "2", "--seq-len", "64", "--global-batch", "2", "--precision", "fp32",
    "--device", "cpu", "--timeout", "60",
)  # fmt: skip
ENDS = {
    "alone": "os.kill(os.getpid(), 9)",
    "with its caller": "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
    "out of memory": "raise torch.OutOfMemoryError('HBM is full')",
    "by a mistake": "raise KeyError('no such stage')",
}
BROKEN = """
import sys
if any(word.endswith("baselines/run.py") for word in sys.orig_argv):
    import os, torch, torch.distributed
    def broken(*_):
        {end}
    torch.distributed.all_gather_object = broken
"""
"""Loaded as a process starts: it ends after its steps, where ranks bring their answers together."""

LATE = """
import sys
if any(word.endswith("baselines/run.py") for word in sys.orig_argv):
    import time, torch.distributed
    from torch.distributed import distributed_c10d, init_process_group
    def late(*given, **named):
        init_process_group(*given, **named)
        time.sleep(5)
        distributed_c10d._get_default_store().add("late", 1)
    torch.distributed.init_process_group = late
"""
"""Loaded as a process starts: it needs the store of rank 0 for longer than the other ranks."""


def started(given: dict[str, str], *words: str, code: str = RUN) -> "subprocess.Popen[str]":
    """A process with these variables, and no others of a launcher."""
    alone = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not key.startswith("SLURM_")
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=alone | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def places() -> list[dict[str, str]]:
    """What a launcher gives two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def changed(folder: Path, code: str) -> dict[str, str]:
    """The variables of a process that loads this code as it starts."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def after_a_death(tmp_path: Path, dies: int, end: str) -> tuple[Record, list[str]]:
    """The record of two ranks of which one ends so, and what each said."""
    out = tmp_path / "record.json"
    path = changed(tmp_path, BROKEN.format(end=ENDS[end]))
    ranks = [
        started(place | (path if rank == dies else {}), *WORDS, "--out", str(out))
        for rank, place in enumerate(places())
    ]
    codes, said, errors = zip(*map(ended, ranks), strict=True)
    assert 0 not in codes
    return read_record(out), [*said, *errors]


@pytest.mark.full
def test_torchrun_gives_one_record_and_one_answer(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    launch = ["--standalone", "--nproc-per-node", "2", "-m", "rematbench.cli.app"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *WORDS, "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("megatron-core + CPU shim (executed") == 1
    assert done.stdout.count("rank 1: ") == 1
    launched = read_record(out).measured
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    own = tmp_path / "own.json"
    assert ended(started({}, *WORDS, "--out", str(own)))[0] == 0
    alone = read_record(own).measured
    assert launched.losses == alone.losses
    assert launched.parameter_norms == alone.parameter_norms
    assert len(launched.ranks) == 2


@pytest.mark.full
@pytest.mark.parametrize("code", ["", LATE], ids=["together", "late"])
def test_what_is_refused_is_refused_once(tmp_path: Path, code: str) -> None:
    """By all ranks alike: rank 0 says it, and ends as what did not run.  No rank ends while another
    one still joins."""
    out, modules = tmp_path / "record.json", "attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm"
    words = (*WORDS, "--out", str(out), "--set", f"offload_modules={modules}")
    first, second = places()
    ranks = [started(first, *words), started(second | changed(tmp_path, code), *words)]
    (exit_code, said, _), (other_code, silent, _) = map(ended, ranks)
    assert (exit_code, other_code, silent) == (1, 0, "")
    assert said.startswith("UNSUPPORTED: ")
    assert read_record(out).status == "unsupported"


@pytest.mark.full
def test_a_killed_rank_0_leaves_a_record_by_the_other(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("of an earlier run")
    os.utime(tmp_path / "record.json", (1, 1))
    record, (_, silent, _, error) = after_a_death(tmp_path, 0, "with its caller")
    assert record.status == "failed"
    assert record.reason.startswith("a rank process has ended: ")
    assert RankError(record.status, record.reason).is_secondhand
    assert (silent, error.strip()) == ("", f"rank 1: failed: {record.reason}")
    assert (tmp_path / "record.json.error.1").exists()


@pytest.mark.full
def test_rank_0_tells_the_other_ranks_cause_and_no_older_one(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    host_ranks.write_error(out, 3, RankError("failed", "of an earlier run"))
    os.utime(f"{out}.error.3", (1, 1))
    record, (said, _, _, error) = after_a_death(tmp_path, 1, "out of memory")
    assert record.status == "oom"
    assert record.reason.endswith("HBM is full")
    assert said.strip() == f"OOM: {record.reason}"
    assert error.strip() == f"rank 1: oom: {record.reason}"


@pytest.mark.full
def test_the_rank_that_failed_shows_where_the_others_say_a_line(tmp_path: Path) -> None:
    record, (_, _, other, error) = after_a_death(tmp_path, 1, "by a mistake")
    assert (record.status, record.reason) == ("failed", "KeyError: 'no such stage'")
    assert "Traceback" in error
    assert "sitecustomize.py" in error
    assert "Traceback" not in other


@pytest.mark.full
def test_a_process_that_the_kernel_killed_is_out_of_memory(tmp_path: Path) -> None:
    record, (said, *_) = after_a_death(tmp_path, 0, "alone")
    assert record.status == "oom"
    assert "signal 9" in record.reason
    assert said.startswith("OOM: ")


@pytest.mark.full
def test_a_single_process_of_an_allocation_starts_the_ranks_itself(tmp_path: Path) -> None:
    """As `srun -n 1` or a batch script has it; no MASTER_ADDR is asked for."""
    out = tmp_path / "record.json"
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    code, _, said = ended(started(slurm, *WORDS, "--steps", "1", "--out", str(out)))
    assert code == 0, said
    seen = read_record(out).measured
    assert len(seen.ranks) == 2


@pytest.mark.parametrize(("given", "words"), tables(__file__)["apart"])
def test_ranks_that_cannot_meet_are_one_line(given: dict[str, str], words: str) -> None:
    code, _, said = ended(started(given, *WORDS))
    assert (code, said) == (2, f"rematbench baseline: {words}\n")
