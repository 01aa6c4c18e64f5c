"""Documents name files and functions that exist, are short, and begin with a command."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/engine/golden/interleaved_offload.txt"
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|txt|yaml|smk))(?::([\w.]+))?`")
FENCED = re.compile(r"```text\n(.*?)```", re.DOTALL)
PLACEHOLDERS = {
    "config/clusters/NAME.yaml",
    "methods/recompute_mlp.py",
    *("run.py", "stack.py", "requirements.txt"),
}
"""Files that a user writes: a cluster, a method, a baseline."""
PAGES = sorted((ROOT / "docs").glob("*.md"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
NO_COMMAND = {"words.md"}
MOST = {"README.md": 900, "DESIGN.md": 1800}
"""Words."""
MOST_CHANGES, MOST_LETTERS = 130, 120
"""Lines of the changelog, and letters of one of them."""


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
        if not known and path not in PLACEHOLDERS:
            wrong.append(f"{path}:{name}")
    return wrong


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *PAGES, *DECISIONS], ids=lambda path: path.stem
)
def test_a_document_names_files_that_exist(path: Path) -> None:
    text = path.read_text()
    assert not missing(text)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not [link for link in links if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_a_command(path: Path) -> None:
    _, _, rest = path.read_text().partition("\n\n")
    assert path.name in NO_COMMAND or rest.startswith("```sh\n")


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_date(path: Path) -> None:
    """Every entry, or the page for all of its entries, says when."""
    head, *entries = path.read_text().split("\n## ")
    when = re.compile(r"\b20\d\d-\d\d-\d\d\b")
    undated = [entry.partition("\n")[0] for entry in entries if not when.search(entry)]
    assert when.search(head) or not undated, undated


def test_documents_are_short() -> None:
    assert all(len((ROOT / name).read_text().split()) <= most for name, most in MOST.items())
    changes = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(changes) <= MOST_CHANGES
    assert max(map(len, changes)) <= MOST_LETTERS


def test_a_name_that_is_gone_is_found() -> None:
    text = "`plan.py:Rule` `plan.py:Ruler` `lowering/gone.py` `evaluate/proof.py:check`"
    assert missing(text) == ["plan.py:Ruler", "lowering/gone.py:"]


def test_quoted_lines_are_in_the_golden_plan_in_their_order() -> None:
    quoted = FENCED.findall((ROOT / "docs/life_of_a_tensor.md").read_text())
    assert len(quoted) == 5
    for block in quoted:
        golden = iter(GOLDEN.read_text().splitlines())
        assert not [line for line in block.splitlines() if line not in golden]


def test_decisions_are_linked_from_the_lines_that_they_explain() -> None:
    """A comment names a page and a heading, or its beginning, that are there."""
    linked = re.compile(r"# Why: docs/decisions/(\w+\.md), (.+)")
    found = [
        link
        for path in (ROOT / "src").rglob("*.py")
        for link in linked.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 30
    pages = {path.name: path.read_text(encoding="utf-8") for path in DECISIONS}
    assert not [(page, head) for page, head in found if f"\n## {head}" not in pages[page]]
