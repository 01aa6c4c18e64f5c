"""The table and figure of measured speed, from made-up rows of executed.csv."""

import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import write_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.paper.tables.measured_speed import build, speed_table
from tests.campaigns import ROOT

FIGURE = ROOT / "figures/measured_speed.py"
H800 = {
    "problem": "one", "settings": "{}", "status": "ok", "reason": "", "device": "NVIDIA H800",
    "model": "m", "cluster": "c", "system": "s", "record_key": "k", "timed_steps": "3",
}  # fmt: skip


def gpu_row(method: str, engine: str, step_s: float, **more: str) -> dict[str, str]:
    """A cell of a GPU."""
    numbers = {
        "step_s": f"{step_s}", "step_min_s": f"{0.9 * step_s}", "step_max_s": f"{1.2 * step_s}",
        "tokens_per_s_per_gpu": f"{100 / step_s}", "mfu_causal": f"{0.4 / step_s}",
        "mfu_dense": f"{0.5 / step_s}", "peak_device_bytes": f"{20 * 2**30}",
        "reserved_bytes": f"{24 * 2**30}", "simulated_step_s": "1.25", "step_error_percent": "-8.0",
        "simulated_peak_bytes": f"{21 * 2**30}", "peak_error_percent": "-4.762",
    }  # fmt: skip
    return H800 | numbers | {"method": method, "engine": engine} | more


ROWS = [
    gpu_row("full_recompute", "rematbench 1", 1.25, alike="yes"),
    gpu_row("keep_all", "rematbench 1", 1.0, keeps_all="yes"),
    gpu_row("megatron_core", "megatron-core 2", 0.8, keeps_all="yes"),
    gpu_row("megatron_core", "megatron-core 2", 1.0, settings='{"modules": ["mlp", "norm"]}'),
    gpu_row("deepspeed", "deepspeed 3", 2.0, settings='{"checkpointing": "plain"}'),
    gpu_row("memo", "rematbench 1", 2.0, problem="two", mfu_causal="", mfu_dense=""),
    H800 | {"method": "pp_offload", "engine": "rematbench", "status": "oom", "reason": "no room"},
    H800 | {"method": "mst", "engine": "rematbench 1", "device": "cpu (x86_64)"},
    H800 | {"method": "lynx", "engine": "rematbench", "status": "waiting", "device": ""},
]


def written(folder: Path, rows: list[dict[str, str]]) -> Path:
    """executed.csv of rows, and the table made from it."""
    write_sheet(folder / "executed.csv", rows)
    build(folder / "executed.csv").write(folder / "tables")
    return folder / "tables/measured_speed.csv"


def test_gains_are_over_what_keeps_all_in_the_same_engine_only() -> None:
    made = speed_table(ROWS)
    gains = {row["method"]: row.get("gain") for row in made.rows}
    assert gains["full_recompute"] == pytest.approx(1.0 / 1.25 - 1)
    assert gains["megatron_core (modules=mlp norm)"] == pytest.approx(0.8 / 1.0 - 1)
    alone = {"keep_all", "megatron_core", "deepspeed (checkpointing=plain)", "memo"}
    assert {name for name in alone if gains[name] is not None} == set(), "no base, no gain"
    other = [
        row | {"device": "NVIDIA H100"} if row["method"] == "keep_all" else row for row in ROWS
    ]
    assert "gain" not in speed_table(other).rows[0], "another GPU is no base"


@pytest.mark.full
def test_a_cell_that_trains_otherwise_has_no_gain_is_no_base_and_is_not_drawn(
    tmp_path: Path,
) -> None:
    wrong = {"alike": "NO", "against": "keep_all", "first_loss_error": "0.0",
             "first_norm_error": "0.25"}  # fmt: skip
    told = "not keep_all's numbers: first loss 0.0e+00 apart, norm 2.5e-01"
    rows = [row | wrong if number in (0, 2) else row for number, row in enumerate(ROWS)]
    recompute, _, package, modules, *_ = speed_table(rows).rows
    assert recompute["remark"] == package["remark"] == told
    assert "gain" not in recompute
    assert "gain" not in modules, "its base is wrong"
    table, figure = written(tmp_path, rows), tmp_path / "measured_speed.pdf"
    left = "2 omitted: their training results differ\n"
    assert drawn(table, figure) == f"measured_speed.pdf: 4 cells that were timed on a GPU; {left}"
    said = drawn(written(tmp_path, [rows[0], rows[2], rows[-1]]), figure)
    assert said.startswith("no figure: no other cell was timed on a GPU")
    assert said.endswith(left)


def test_cells_without_time_say_why(tmp_path: Path) -> None:
    rows = {row["method"]: row for row in read_sheet(written(tmp_path, ROWS))}
    remarks = {name: rows[name]["remark"] for name in ("pp_offload", "mst", "lynx", "memo")}
    assert remarks == {
        "pp_offload": "oom: no room",
        "mst": "cpu",
        "lynx": "waiting",
        "memo": "no MFU: not the GPU of the cluster file",
    }
    assert rows["keep_all"]["remark"] == ""


def test_the_markdown_has_times_errors_and_gains(tmp_path: Path) -> None:
    text = written(tmp_path, ROWS).with_suffix(".md").read_text()
    (line,) = (line for line in text.splitlines() if "| full_recompute" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "one", "rematbench 1", "full_recompute", "yes", "1.25", "3", "80.0", "32.0", "40.0",
        "-20.0", "20.00", "24.00", "1.25", "-8.0", "21.00", "-4.8", "NVIDIA H800", "-",
    ]  # fmt: skip
    assert "Engines are not ranked" in text


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ConfigError, match="the sheet lacks the columns problem, engine, method, status, record_key"
    ):
        build(tmp_path / "other.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        build(tmp_path / "none.csv")


def drawn(table: Path, figure: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(FIGURE), str(table), str(figure)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_figure_is_drawn_where_a_gpu_has_seconds_and_nowhere_else(tmp_path: Path) -> None:
    table, figure = written(tmp_path, ROWS), tmp_path / "measured_speed.pdf"
    assert drawn(table, figure) == "measured_speed.pdf: 6 cells that were timed on a GPU\n"
    assert figure.stat().st_size > 1000
    assert figure.with_suffix(".png").stat().st_size > 1000
    assert "mst" in {row["method"] for row in read_sheet(table)}
    said = drawn(written(tmp_path, ROWS[-3:]), figure)
    assert said == "no figure: no cell was timed on a GPU (a CPU's time is never performance)\n"
    assert not figure.exists(), "nor an older one"
    assert not figure.with_suffix(".png").exists()
