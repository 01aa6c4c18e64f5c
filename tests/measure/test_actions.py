"""The table of seconds by kind of action, from the committed records of a GPU."""

from msgspec.structs import replace

from rematbench.inputs.paths import data_dir
from rematbench.measure.records import ActionSeconds, read_lines
from rematbench.paper.tables.gpu_checks import actions_table

RUN = data_dir("config").parent / "results" / "measured" / "gpu-searched"


def test_the_largest_differences_come_first_and_what_did_not_run_is_named() -> None:
    lines = read_lines(RUN / "actions.jsonl", ActionSeconds)
    lost = replace(lines[0], cell="h200-32k.memo.0", status="oom", reason="full")
    table = actions_table([*lines, lost])
    for cell in {line.cell for line in lines}:
        sizes = [abs(row["difference_s"]) for row in table.rows if row["cell"] == cell]
        assert len(sizes) == sum(line.cell == cell for line in lines)
        assert sizes == sorted(sizes, reverse=True)
    assert f"without waits: {lines[0].cell} " in table.full_note
    assert "Did not run: h200-32k.memo.0 oom: full." in table.full_note
    assert "times mean nothing" not in table.full_note
