"""`rematbench baseline run` under a launcher: one record by rank 0, silence of the others, and a
record of every failure."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="baselines need torch")
pytest.importorskip("megatron.core", reason="the real package is what is launched")

from rematbench import rank_error
from rematbench.paths import data_dir
from rematbench.rank_error import RankError
from rematbench.record import Record, read_record

RUN = "from rematbench.cli import main; main()"
WORDS = (
    "baseline", "run", "megatron_core", "--model", "tiny-llama", "--cluster", "this-machine",
    "--gpus", "2", "--tp", "2", "--seq-len", "64", "--global-batch", "2", "--precision", "fp32",
    "--device", "cpu", "--timeout", "60",
)  # fmt: skip
MEETS_AND_DIES = """
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
os._exit(9)
"""


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


def after_a_death(out: Path, dies: int, code: str = MEETS_AND_DIES) -> tuple[Record, str]:
    """The record of two ranks of which one goes once they have met, and what the other said."""
    ranks = [
        started(place, code=code) if rank == dies else started(place, *WORDS, "--out", str(out))
        for rank, place in enumerate(places())
    ]
    codes, _, errors = zip(*map(ended, ranks), strict=True)
    assert codes[1 - dies] == 1, errors
    return read_record(out), errors[1 - dies]


def test_torchrun_gives_one_record_and_one_answer(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    launch = ["--standalone", "--nproc-per-node", "2", "-m", "rematbench.cli"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *WORDS, "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("megatron-core + CPU shim (executed") == 1
    assert done.stdout.count("rank 1: ") == 1
    launched = read_record(out).observed
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    own = tmp_path / "own.json"
    assert ended(started({}, *WORDS, "--out", str(own)))[0] == 0
    alone = read_record(own).observed
    assert launched is not None
    assert alone is not None
    assert launched.losses == alone.losses
    assert launched.gradient_norms == alone.gradient_norms
    assert len(launched.state_bytes) == 2


def test_what_is_refused_is_refused_once(tmp_path: Path) -> None:
    """By all ranks alike: rank 0 says it, and none fails."""
    out, modules = tmp_path / "record.json", "attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm"
    words = (*WORDS, "--out", str(out), "--set", f"offload_modules={modules}")
    ranks = [started(place, *words) for place in places()]
    (code, said, _), (other_code, silent, _) = map(ended, ranks)
    assert (code, other_code, silent) == (0, 0, "")
    assert said.startswith("UNSUPPORTED: ")
    assert read_record(out).status == "unsupported"


def test_a_killed_rank_0_leaves_a_record_by_the_other(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    out.write_text("of an earlier run")
    os.utime(out, (1, 1))
    record, said = after_a_death(out, dies=0)
    assert record.status == "failed"
    assert RankError(record.status, record.reason).is_secondhand
    assert said.startswith("rank 1: failed: ")
    assert Path(f"{out}.error.1").exists()


def test_rank_0_tells_the_other_ranks_cause_and_no_older_one(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    rank_error.note(out, 3, RankError("oom", "of an earlier run"))
    os.utime(f"{out}.error.3", (1, 1))
    dying = MEETS_AND_DIES.replace(
        "os._exit",
        "from pathlib import Path\n"
        "from rematbench import rank_error\n"
        f"rank_error.note(Path({str(out)!r}), 1, rank_error.RankError('oom', 'HBM is full'))\n"
        "os._exit",
    )
    record, _ = after_a_death(out, dies=1, code=dying)
    assert (record.status, record.reason) == ("oom", "HBM is full")


def test_a_single_process_of_an_allocation_starts_the_ranks_itself(tmp_path: Path) -> None:
    """As `srun -n 1` or a batch script has it; no MASTER_ADDR is asked for."""
    out = tmp_path / "record.json"
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    code, _, said = ended(started(slurm, *WORDS, "--steps", "1", "--out", str(out)))
    assert code == 0, said
    seen = read_record(out).observed
    assert seen is not None
    assert len(seen.state_bytes) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            "set MASTER_ADDR and MASTER_PORT (torchrun does; srun does not)",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "--gpus 2: the launcher started 4 processes",
        ),
    ],
)
def test_ranks_that_cannot_meet_are_one_line(given: dict[str, str], words: str) -> None:
    code, _, said = ended(started(given, *WORDS))
    assert (code, said) == (2, f"rematbench baseline: {words}\n")


def test_the_bare_process_under_srun_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text("[]")
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    words = (str(data_dir("baselines") / "run.py"), "megatron_core", str(tmp_path / "jobs.json"))
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    result, _, said = ended(started(slurm, *words, str(tmp_path), code=code))
    assert result == 1
    assert said == "set MASTER_ADDR and MASTER_PORT (torchrun does; srun does not)\n"
