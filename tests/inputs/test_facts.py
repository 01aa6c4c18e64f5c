"""Facts of a stack or a cluster that cannot be, or of which only one can hold, get one line."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rematbench.host.declared import flat, made
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import load_cluster, load_system, names
from rematbench.inputs.system import FACTS, System, with_facts
from rematbench.worlds.records.record import content_hash
from tests.tables import tables

TABLES = tables(__file__)

COMPILED = "norm_keeps_steps: true with compiled: true: only an eager norm keeps its steps"


def written(folder: Path, base: str, text: str) -> Path:
    path = folder / "mine.yaml"
    head = f"name: mine\nbase: {base}\nsource: a test\n"
    path.write_text(head + text + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("load", "base", "text", "said"),
    [
        *((load_system, "megatron-core", text, said) for text, said in TABLES["stacks"].items()),
        *((load_cluster, "h100-80gb", text, said) for text, said in TABLES["clusters"].items()),
        (load_system, "huggingface", "compiled: true\nnorm_keeps_steps: true", COMPILED),
    ],
)
def test_a_file_that_cannot_be_is_one_line(
    tmp_path: Path, load: Callable[[Path], object], base: str, text: str, said: str
) -> None:
    path = written(tmp_path, base, text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: {said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", TABLES["allowed"])
def test_what_may_be_is_not_refused(tmp_path: Path, text: str) -> None:
    assert load_system(written(tmp_path, "megatron-core", text)).name == "mine"


def test_what_follows_from_a_fact_need_not_be_said(tmp_path: Path) -> None:
    """A person knows that norms or attention are eager; what eager operators save is ours."""
    eager = "norm: eager\nattention: eager"
    norms = load_system(written(tmp_path, "megatron-core", eager)).kernels
    assert (norms.norm_keeps_steps, norms.attention, norms.eager_operators) == (
        True, "unfused", True,
    )  # fmt: skip
    said = load_system(written(tmp_path, "megatron-core", "norm: eager\nnorm_keeps_steps: false"))
    assert not said.kernels.norm_keeps_steps
    compiled = load_system(written(tmp_path, "huggingface", "compiled: true"))
    assert not compiled.kernels.norm_keeps_steps


@pytest.mark.parametrize("gpu", ["H20-SXM5-96GB", "RTX-4090", "A10"])
def test_a_gpu_of_no_certain_generation_is_not_refused(tmp_path: Path, gpu: str) -> None:
    base = "a100-80gb-selene" if gpu == "A10" else "h100-80gb"
    assert load_cluster(written(tmp_path, base, f"gpu: {gpu}")).gpu == gpu


# -- a fact of a stack is a field with its sentence; everything else follows from the field --------


PACKAGE = Path(__file__).resolve().parents[2] / "src/rematbench"
SOURCE = PACKAGE / "inputs/system.py"
MOST_FIELDS = 16
BEFORE = "    bucket_bytes: Bytes = 0\n"
DUMMY = '    dummy_bytes: Bytes = 0\n    """A bucket of this test has so many bytes."""\n'
STACK = "name: mine\nbase: deepspeed\ndummy_bytes: {value: 5, source: mine}\n"
SCRIPT = """
import runpy, sys
from rematbench.host.declared import flat, made
from rematbench.inputs.load import load_system
from rematbench.inputs.stackfacts import differences
from rematbench.inputs.system import with_facts
from rematbench.worlds.records.record import content_hash
shipped, mine = load_system("deepspeed"), load_system("mine.yaml")
assert (shipped.zero.dummy_bytes, mine.zero.dummy_bytes) == (0, 5)
assert list(differences("mine.yaml")) == ["dummy_bytes"]
print(content_hash(shipped), content_hash(with_facts(shipped, dummy_bytes=5)))
sys.argv = ["rematbench", "systems", "mine.yaml"]
runpy.run_module("rematbench", run_name="__main__")
"""


def test_a_fact_is_one_edit(tmp_path: Path) -> None:
    """In a copy of the package, a further field is found in a file, in what `systems` prints and in
    the hash, which stays where the field has its default."""
    inputs = tmp_path / "rematbench/inputs"
    inputs.mkdir(parents=True)
    for path in [*PACKAGE.iterdir(), *SOURCE.parent.iterdir()]:
        if path not in (SOURCE.parent, SOURCE) and path.name != "__pycache__":
            (tmp_path / "rematbench" / path.relative_to(PACKAGE)).symlink_to(path)
    text = SOURCE.read_text()
    assert text.count(BEFORE) == 1
    (inputs / "system.py").write_text(text.replace(BEFORE, DUMMY + BEFORE))
    (tmp_path / "mine.yaml").write_text(STACK)
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hashes, _, printed = done.stdout.partition("\n")
    same, other = hashes.split()
    assert same == content_hash(load_system("deepspeed")) != other
    assert "dummy_bytes" in printed


def test_every_field_has_a_sentence_and_no_group_has_many() -> None:
    for kind in ast.parse(SOURCE.read_text()).body:
        if isinstance(kind, ast.ClassDef):
            body = kind.body
            places = [n for n, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
            assert len(places) <= MOST_FIELDS, kind.name
            for place in places:
                said = body[place + 1] if place + 1 < len(body) else None
                assert isinstance(said, ast.Expr), ast.unparse(body[place])
                assert isinstance(said.value, ast.Constant), ast.unparse(body[place])


@pytest.mark.parametrize("name", names("system"))
def test_groups_hold_the_facts_of_a_file(name: str) -> None:
    system = load_system(name)
    assert tuple(flat(system)) == FACTS
    assert made(System, flat(system)) == system
    changed = with_facts(system, name="mine", reduce_bytes=1)
    assert (changed.name, changed.states.reduce_bytes) == ("mine", 1)
    assert flat(changed) == {**flat(system), "name": "mine", "reduce_bytes": 1}


def test_a_key_that_no_stack_has_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown facts of a stack: reduce_byte"):
        with_facts(load_system("deepspeed"), reduce_byte=1)
