"""One table, four texts; sheets split by bundle; suites that read strictly."""

from pathlib import Path

import msgspec
import pytest

from rematbench.evidence.published.derived import all_cells, bundles, layouts
from rematbench.evidence.published.row_cases import bundle_of
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.console import rich_table
from rematbench.host.table import TableText, write_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from rematbench.paper.sheet.table import Column, Table, gib, signed_percent
from rematbench.worlds.records.suite import bundles as suite_bundles
from rematbench.worlds.records.suite import load_suite
from tests.problems import all_methods

TABLE = Table(
    name="t",
    title="Title",
    columns=(Column("a", "a_b"), Column("x", "x %", signed_percent), Column("m", "GiB", gib)),
    rows=({"a": "p|q", "x": 0.05, "m": 2**30}, {"a": "r", "x": None, "m": 3 * 2**29}),
    note="Note.",
    shown=1,
)


def test_csv_is_raw_and_complete() -> None:
    assert TABLE.csv() == "a,x,m\np|q,0.05,1073741824\nr,,1610612736\n"


def test_markdown_is_rounded_escaped_and_says_what_it_leaves_out() -> None:
    text = TABLE.markdown()
    assert text.split("\n")[4].split() == ["|", "p\\|q", "|", "+5.0", "|", "1.00", "|"]
    assert "Note. 1 more rows in t.csv." in text
    assert "| r" not in text


def test_columns_without_a_heading_are_for_figures() -> None:
    table = Table(
        name="t", title="T", columns=(Column("a", "A"), Column("b", "")), rows=({"a": 1, "b": 2},)
    )
    assert table.csv() == "a,b\n1,2\n"
    assert "2" not in table.markdown() + table.latex()


def test_latex_is_booktabs_with_escapes() -> None:
    text = TABLE.latex()
    assert r"a\_b & x \% & GiB \\" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")


def test_tables_are_written_whole(tmp_path: Path) -> None:
    TABLE.write(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["t.csv", "t.json", "t.md", "t.tex"]
    read = msgspec.json.decode((tmp_path / "t.json").read_bytes(), type=TableText)
    assert (read.title, read.heads) == ("Title", ("a_b", "x %", "GiB"))
    assert read.rows == (("p|q", "+5.0", "1.00"),)
    assert read.note == TABLE.full_note == "Note. 1 more rows in t.csv."


def test_a_sheet_reads_back(tmp_path: Path) -> None:
    write_sheet(tmp_path / "s.csv", [{"a": "1,2"}, {"b": "x"}])
    assert read_sheet(tmp_path / "s.csv") == [{"a": "1,2", "b": ""}, {"a": "", "b": "x"}]


def test_every_published_row_is_in_one_bundle_and_ours_have_no_results() -> None:
    rows = read_sheet(data_dir("published") / "runs.csv")
    registry = all_methods()
    split = bundles(all_cells(rows), registry)
    cells = [cell for sheet in split.values() for cell in sheet]
    assert sum(cell["cell"] == "published" for cell in cells) == len(rows) == 455
    assert all(not c["status"] and not c["tokens_per_s_per_gpu"] for c in cells
               if c["cell"] != "published")  # fmt: skip
    for name in split:
        assert all(part in registry.methods for part in name.split("+"))


def test_bundle_names_the_methods_that_plan_a_row() -> None:
    registry = all_methods()
    row = {"recompute": "balanced", "offload_fraction": "0.1"}
    assert bundle_of(row, registry) == "balanced_checkpointing+pp_offload"
    assert bundle_of(row | {"offload_fraction": "0"}, registry) == "balanced_checkpointing"
    assert bundle_of({"recompute": "none", "offload_fraction": ""}, registry) == (
        "keep_all+pp_offload"
    )


def test_layouts_obey_the_schedule() -> None:
    found = layouts(256, 96, 256)
    assert found
    for each in found:
        assert each["tp"] * each["cp"] * each["pp"] * each["dp"] == 256
        assert 256 // each["dp"] % each["pp"] == 0
        assert 96 % (each["pp"] * each["vpp"]) == 0


SUITE = """
problems:
  - {name: a, why: test, model: llama-7b, cluster: a800-80gb, system: megatron-core, gpus: 4,
     seq_len: 4096, global_batch: 8}
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SUITE + "metods: [keep_all]\n", "metods: unknown key"),
        (SUITE.replace("gpus: 4", "gpus: four"), "problems[0].gpus"),
        (SUITE.replace("seq_len", "seqlen"), "problems[0]"),
        (SUITE + "variants: [{method: keep_all, problems: [b]}]\n", "no problem 'b'"),
        (SUITE + SUITE.replace("problems:\n", ""), "appears twice"),
    ],
)
def test_a_wrong_suite_is_one_line_with_its_path(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_suite(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_every_method_of_activations_and_every_variant_has_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE + "variants: [{method: full_recompute+pp_offload}]\n")
    registry = all_methods()
    found = suite_bundles(load_suite(path), registry)
    plain = [name for name, entry in registry.methods.items() if not entry.waits]
    assert list(found) == [*plain, "full_recompute+pp_offload"]


@pytest.mark.parametrize("name", ["smoke", "paper"])
def test_the_committed_suites_are_legal(name: str) -> None:
    suite = load_suite(data_dir("config") / f"{name}.yaml")
    for problem in suite.problems:
        assert problem.problem().layout.gpus == problem.gpus


def test_prose_of_a_terminal_is_said_once() -> None:
    """A long source stands in the first of its rows; a short word and a new source stay."""
    sources = [
        "a source with a name of more than forty letters",
        "another source of at least so many letters",
    ]
    rows = tuple({"source": s, "model": "m"} for s in (sources[0], *sources))
    made = Table(
        name="t",
        title="T",
        columns=(Column("source", "source"), Column("model", "model")),
        rows=rows,
    )
    shown = [str(cell) for cell in rich_table(made.printed()).columns[0].cells]
    assert shown == [sources[0], '"', sources[1]]
    assert [str(cell) for cell in rich_table(made.printed()).columns[1].cells] == ["m"] * 3
