"""Marked texts of documents are those of the committed tables, and are written in their place."""

from pathlib import Path

import pytest

from rematbench.inputs.configfile import ConfigError
from rematbench.paper.builders.documents import MARKED, PLACES, TEXTS, with_numbers, write_documents
from rematbench.paper.catalog import table_files
from tests.workflow.checkout import ROOT

EXPECTED = ROOT / "results" / "expected"
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_has_the_texts_of_the_committed_tables(path: Path) -> None:
    """`rematbench make results/paper/documents.txt` writes them."""
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- from: ") == text.count("<!-- end -->") == len(MARKED.findall(text))
    assert with_numbers(text, EXPECTED, path.name) == text


def test_every_text_has_its_place() -> None:
    marked = [name for path in DOCUMENTS for name, _ in MARKED.findall(path.read_text())]
    assert len(marked) == len(set(marked))
    assert TEXTS.keys() <= set(marked)


def test_a_table_is_written_between_its_markers(tmp_path: Path) -> None:
    page = "# Page\n\n<!-- from: systems -->\n\n{}\n\n<!-- end -->\n\nRest.\n"
    (tmp_path / "page.md").write_text(page.format("old"))
    assert "systems" in table_files()
    assert write_documents(tmp_path, tmp_path) == []  # no such table there
    (tmp_path / "systems.md").write_text("### Title\n\n| a |\n| - |\n\nNote.\n")
    assert write_documents(tmp_path, tmp_path) == ["page.md"]
    assert (tmp_path / "page.md").read_text() == page.format("| a |\n| - |\n\nNote.")
    assert write_documents(tmp_path, tmp_path) == []
    (tmp_path / "page.md").write_text(page.replace("systems", "no_such"))
    with pytest.raises(ConfigError, match=r"page.md: from: no_such: no such table or text"):
        write_documents(tmp_path, tmp_path)
