"""`rematbench execute`, `trace`, `measure` and `worlds` as a person runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.cli.measure import measure
from rematbench.host.console import CommandError
from rematbench.worlds.records.record import Record, read_record
from rematbench.worlds.torch import rank_processes
from tests.method_files import method_file
from tests.tables import tables
from tests.typed import typed

TINY = ("--model", "tiny-llama-deep", "--cluster", "this-machine", "--system", "rematbench")
DROP_NORMS = method_file(
    "drop_norms",
    """names = ("attn_norm_out", "mlp_norm_out")
return base.with_rules(Rule(Select(parts=("layer",), activations=names), Recompute()))""",
)


def rematbench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from rematbench.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def dropped_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a method file that nothing else knows."""
    folder = tmp_path_factory.mktemp("methods")
    (folder / "drop_norms.py").write_text(DROP_NORMS)
    return folder


@pytest.fixture(scope="module")
def executed(dropped_in: Path) -> tuple[Record, str]:
    out = dropped_in / "record.json"
    words = ("--gpus", "2", "--tp", "2", "--seq-len", "32", "--precision", "fp64", "--steps", "1")
    more = ("--out", str(out), "--against", "keep_all", "--methods", str(dropped_in))
    done = rematbench("execute", "drop_norms", *TINY, *words, *more)
    assert done.returncode == 0, done.stderr
    return read_record(out), done.stdout


def test_a_method_file_dropped_in_is_executed(executed: tuple[Record, str]) -> None:
    record, text = executed
    found = record.measured
    assert (record.world, record.status, found.differing_actions) == ("executed", "ok", 0)
    assert all(rank.recompute_flop == 0 for rank in found.ranks)  # norms are no matrix products
    assert found.comparison.lossless
    assert "lossless against keep_all: yes" in text
    assert record.provenance.torch
    assert record.provenance.ranks_per_host == (2,)


@pytest.mark.full
def test_the_same_file_is_traced_to_the_same_bytes(
    executed: tuple[Record, str], dropped_in: Path
) -> None:
    out = dropped_in / "traced.json"
    words = ("--gpus", "2", "--tp", "2", "--seq-len", "32", "--global-batch", "2", "--out")
    more = (str(out), "--precision", "fp64", "--methods", str(dropped_in))
    done = rematbench("trace", "drop_norms", *TINY, *words, *more)
    assert done.returncode == 0, done.stderr
    traced, real = read_record(out).measured, executed[0].measured
    assert traced.differing_actions == 0
    assert traced.fullest.boundary_peak_bytes == real.fullest.boundary_peak_bytes
    assert traced.fullest.state_bytes == real.fullest.state_bytes


@pytest.mark.full
def test_a_model_with_experts_is_lossless(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    words = ("--model", "tiny-experts", "--cluster", "this-machine", "--system", "rematbench")
    layout = ("--gpus", "2", "--ep", "2", "--seq-len", "32", "--precision", "fp64")
    more = ("--against", "keep_all", "--set", "modules=[moe]", "--steps", "2", "--out", str(out))
    done = rematbench("execute", "selective_recompute", *words, *layout, *more)
    assert done.returncode == 0, done.stderr
    assert "lossless against keep_all: yes" in done.stdout
    assert all(rank.recompute_flop > 0 for rank in read_record(out).measured.ranks)


@pytest.mark.parametrize(("words", "said"), tables(__file__)["refused"])
def test_what_is_not_modelled_is_refused_before_any_process(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "execute_cases", None)  # what starts processes
    code, out, _ = typed("execute", "keep_all", "--cluster", "this-machine", *words)
    assert code == 1
    assert said in out


def test_a_launcher_with_another_number_of_processes_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, _, said = typed("execute", "keep_all", *TINY, "--gpus", "2")
    assert code == 2
    assert "--gpus 2: the launcher started 4 processes" in said


def test_without_torch_one_line_says_what_to_install() -> None:
    code = (
        "import importlib.util as u; u.find_spec = lambda name: None\n"
        "from rematbench.cli.app import main; main()"
    )
    words = [sys.executable, "-c", code, "execute", "keep_all", *TINY, "--gpus", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rematbench execute: torch is not installed: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_torchrun_gives_the_processes(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    code = "from rematbench.cli.app import main; main()"
    script = tmp_path / "run.py"
    script.write_text(code)
    words = ("--gpus", "2", "--pp", "2", "--seq-len", "32", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script),
         "execute", "full_recompute", *TINY, *words, "--against", "keep_all"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lossless against keep_all: yes") == 1
    assert read_record(out).provenance.ranks_per_host == (2,)


def test_a_cell_that_no_suite_has_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nosuch: no such cell in .*traced"):
        measure("traced", tmp_path / "out", only=["nosuch"])
    assert list((tmp_path / "out").iterdir()) == []
