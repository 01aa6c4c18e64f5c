"""A method file dropped into methods/ is executed, traced and tested; nothing else is touched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.torch.test_execute_cli import DROP_NORMS

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("config", "methods", "src", "tests", "pyproject.toml", "results/published")
TESTS = (
    "tests/worlds/torch/test_one.py",
    "tests/worlds/torch/test_traced.py",
    "tests/plugins/test_plugin_contract.py",
)


@pytest.mark.full  # that a file is executed and traced: test_execute_cli.py
def test_the_tests_take_up_a_new_file_by_themselves(tmp_path: Path) -> None:
    for part in PARTS:
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
    for path in (tmp_path / "methods").glob("*.py"):
        if path.stem != "keep_all":  # the others cost time and show nothing
            path.unlink()
    (tmp_path / "methods" / "drop_norms.py").write_text(DROP_NORMS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rA", "-k", "drop_norms", *TESTS],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for test in (
        "test_one.py::test_live_bytes_equal_the_ledger_after_every_action[one drop_norms]",
        "test_one.py::test_gradients_equal_the_autograd_model[one drop_norms]",
        "test_traced.py::test_fake_bytes_of_methods_equal_real_ones[one drop_norms]",
        "test_plugin_contract.py::test_the_file_keeps_the_contract[drop_norms]",
    ):
        assert test in done.stdout
