"""A fact of a job is declared once: in a copy of the package with three further fields, and no
other edit, options, help, records, rows, cells and messages have them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.plugins.discover import discover
from rematbench.worlds.records.record import run_spec

PACKAGE = Path(__file__).resolve().parents[2] / "src/rematbench"
EDITS = {
    "workload.py": ("    document_len: Annotated[", 0),
    "inputs/layout.py": ("    shard_degree: NonNegativeInt", 0),
    "inputs/system.py": ("    optimizer: Annotated[Home | None", None),
}
"""For each file the field before which a further one stands, and the default of that."""
NAMES = {"workload.py": "dummy_tokens", "inputs/layout.py": "dummy_ranks"} | {
    "inputs/system.py": "dummy_kernel"
}
KINDS = {"dummy_tokens": "NonNegativeInt", "dummy_ranks": "NonNegativeInt"} | {
    "dummy_kernel": 'Literal["slow", "quick"] | None'
}
ASKED: dict[str, Any] = {"model": "llama-7b", "cluster": "a800-80gb", "gpus": 8, "tp": 2}
ASKED |= {"system": "megatron-core-0.16", "seq_len": 4096, "global_batch": 16}
GIVEN = "--dummy-tokens 3 --dummy-ranks 4 --dummy-kernel quick"
SCRIPT = """
import json, sys
from pathlib import Path
from rematbench.api import Problem, simulate
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.row_cases import read_case
from rematbench.host.declared import flat
from rematbench.plugins.discover import discover
from rematbench.worlds.records.plan_replay import spec_problem
from rematbench.worlds.records.record import read_record, run_spec
registry = discover()
job = json.loads(sys.argv[1])
given = dict(dummy_tokens=3, dummy_ranks=4, dummy_kernel="quick")
plain, other = simulate(Problem(**job), "keep_all"), simulate(Problem(**job, **given), "keep_all")
keep = registry.resolve("keep_all")
again = spec_problem(read_record(Path("record.json")).spec)
row = {name: str(value) for name, value in (job | given).items()} | {"pp": "1", "dp": "4"}
case = read_case(row | {"recompute": "", "note": ""}, registry)
try:
    Problem(**job, dummy_kernel="none")
except ValueError as error:
    wrong = str(error)
print(json.dumps({
    "ids": [run_spec(make_problem(Problem(**one)), keep).run_id for one in (job, job | given)],
    "plain": list(plain.row()),
    "row": {name: other.row()[name] for name in given},
    "command": other.command,
    "replayed": {**flat(again.layout), **flat(again.workload), **flat(again.chosen)},
    "case": flat(case),
    "wrong": wrong,
}, default=str))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in which three structs have a further field."""
    folder = tmp_path_factory.mktemp("copy")
    there = folder / "lib/rematbench"
    (there / "inputs").mkdir(parents=True)
    for path in [*PACKAGE.iterdir(), *(PACKAGE / "inputs").iterdir()]:
        name = str(path.relative_to(PACKAGE))
        if name in EDITS:
            before, default = EDITS[name]
            text, fact = path.read_text(), NAMES[name]
            assert text.count(before) == 1
            field = f"    {fact}: {KINDS[fact]} = {default}\n"
            field += f'    """The {fact} of this test changes nothing."""\n'
            (there / name).write_text(text.replace(before, field + before))
        elif name not in ("inputs", "__pycache__", "inputs/__pycache__"):
            (there / name).symlink_to(path)
    return folder


def ran(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "lib")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["simulate", "search", "read"])
def test_help_has_the_option_and_the_sentence(copy: Path, command: str) -> None:
    told = " ".join(ran(copy, "-m", "rematbench", command, "--help").split())
    for fact in NAMES.values():
        assert f"--{fact.replace('_', '-')} " in told
        assert f"The {fact} of this test changes nothing." in told


def test_records_rows_cells_and_messages_have_it(copy: Path) -> None:
    simulated = ["-m", "rematbench", "simulate", "keep_all"]
    ran(copy, *simulated, *Job(**ASKED).to_arguments(), *GIVEN.split(), "--out", "record.json")
    spec = json.loads((copy / "record.json").read_text())["spec"]
    assert spec["dummy_tokens"] == 3
    assert spec["layout"]["dummy_ranks"] == 4
    assert spec["parameters"]["base"]["dummy_kernel"] == "quick"
    found: dict[str, Any] = json.loads(ran(copy, "-c", SCRIPT, json.dumps(ASKED)))
    values = {"dummy_tokens": 3, "dummy_ranks": 4, "dummy_kernel": "quick"}
    assert found["row"] == values
    assert not values.keys() & {*found["plain"]}
    assert found["command"].endswith("--dummy-ranks 4 --dummy-kernel quick --dummy-tokens 3")
    for where in ("replayed", "case"):
        assert {name: found[where][name] for name in values} == values
    assert "dummy_kernel: 'none'" in found["wrong"]
    assert "(allowed: slow, quick)" in found["wrong"]
    same, other = found["ids"]
    here = run_spec(make_problem(Job(**ASKED)), discover().resolve("keep_all"))
    assert same == here.run_id != other
