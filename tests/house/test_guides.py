"""The life of a tensor, CONTRIBUTING and DESIGN.md name files and functions that are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/engine/golden/interleaved_offload.txt"
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|txt|yaml|smk))(?::([\w.]+))?`")
FENCED = re.compile(r"```text\n(.*?)```", re.DOTALL)
PLACEHOLDER = "config/clusters/NAME.yaml"


def guide(name: str) -> str:
    if name == "life_of_a_tensor":
        return (ROOT / "docs" / f"{name}.md").read_text()
    if name == "design":
        return (ROOT / "DESIGN.md").read_text()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition("## Adding a mechanism\n")[2].partition("\n## ")[0]


def located(path: str) -> Path | None:
    """A file of the checkout, or of the package."""
    places = (ROOT / path, ROOT / "src/rematbench" / path)
    return next((place for place in places if place.is_file()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """What a module defines at its top, and what its classes do: `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        found |= bound(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner}" for part in node.body for inner in bound(part)}
    return frozenset(found)


def bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def missing(text: str) -> list[str]:
    """References that lead nowhere."""
    wrong = []
    for path, name in FILE.findall(text):
        found = located(path)
        known = found is not None and (not name or name in names(found))
        if not known and path != PLACEHOLDER:
            wrong.append(f"{path}:{name}")
    return wrong


@pytest.mark.parametrize("name", ["life_of_a_tensor", "mechanism", "design"])
def test_a_guide_names_files_and_functions_that_exist(name: str) -> None:
    assert len(FILE.findall(guide(name))) > 10
    assert not missing(guide(name))


def test_a_name_that_is_gone_is_found() -> None:
    text = "`plan.py:Rule` `plan.py:Ruler` `lowering/gone.py` `evaluate/proof.py:check`"
    assert missing(text) == ["plan.py:Ruler", "lowering/gone.py:"]


def test_quoted_lines_are_in_the_golden_plan_in_their_order() -> None:
    quoted = FENCED.findall(guide("life_of_a_tensor"))
    assert len(quoted) == 5
    for block in quoted:
        golden = iter(GOLDEN.read_text().splitlines())
        assert not [line for line in block.splitlines() if line not in golden]
