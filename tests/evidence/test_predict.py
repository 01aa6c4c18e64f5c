"""Rows of a sheet: every published kind is understood, and no bad row brings the sheet down."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rematbench.cli.sheet import predict as predict_sheet
from rematbench.evidence.predict import COLUMNS, layer_bytes_in_flight, predict_case, predict_rows
from rematbench.evidence.published.row_cases import PublishedCase, read_case, recompute_method
from rematbench.evidence.published.sheets import (
    PeakKind,
    RowError,
    read_cells,
    read_number,
    read_sheet,
)
from rematbench.host.errors import UserError
from rematbench.host.table import write_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from tests.problems import all_methods
from tests.tables import tables
from tests.wrong_inputs import ROW

TABLES = tables(__file__)

REGISTRY = all_methods()


def row(**changes: Any) -> dict[str, str]:
    """A row of the sheet with changes; None takes a column away."""
    made = {key: str(value) for key, value in {**ROW, **changes}.items() if value is not None}
    if "gpus" not in changes:
        degrees = [made.get(key, "") for key in ("tp", "cp", "pp", "dp")]
        if all(degree.isdigit() for degree in degrees):
            made["gpus"] = str(eval("*".join(degrees)))
    return made


def without(*columns: str) -> dict[str, str]:
    return {key: value for key, value in ROW.items() if key not in columns}


def predict(cells: dict[str, str]) -> dict[str, Any]:
    return predict_rows([cells], processes=1)[0]


def case(**changes: Any) -> PublishedCase:
    return read_case(row(**changes), REGISTRY)


def test_a_good_row_gets_every_column() -> None:
    out = predict(row())
    assert {**out, **ROW} == out
    assert out["pred_status"] == "ok"
    assert out["pred_reason"] == ""
    assert [column for column in out if column.startswith("pred_")] == list(COLUMNS)
    batch_tokens = 16 * 4096
    assert out["pred_tokens_per_s_per_gpu"] == pytest.approx(batch_tokens / out["pred_step_s"] / 8)
    assert 0 < out["pred_mfu_causal"] < 1
    assert out["pred_peak_device_bytes"] > 7e9 * 18 / 8
    assert (out["pred_peak_host_bytes"], out["pred_offload_fraction"]) == (0, 0.0)


def test_a_row_says_where_the_states_live() -> None:
    here, there = predict(row()), predict(row(optimizer="host"))
    assert there["pred_peak_host_bytes"] > here["pred_peak_host_bytes"] == 0
    assert there["pred_peak_device_bytes"] < here["pred_peak_device_bytes"]
    assert case(parameters="host").stack.parameters == "host"
    assert (case().stack.optimizer, case(optimizer="").stack.parameters) == (None, None)


def test_a_peak_is_the_quantity_that_the_row_prints() -> None:
    found = {kind: predict(row(peak_kind=kind)) for kind in get_args(PeakKind)}
    peaks = {kind: one["pred_peak_device_bytes"] for kind, one in found.items()}
    whole = found["device"]
    assert peaks["allocated"] <= peaks["reserved"] == whole["pred_reserved_bytes"]
    assert peaks["reserved"] < peaks["device"] == whole["pred_device_total_bytes"]
    assert peaks["unstated"] == ""
    assert len(set(peaks.values())) == len(peaks)
    assert whole["pred_headroom_bytes"] == whole["pred_usable_bytes"] - whole["pred_reserved_bytes"]
    assert predict(row())["pred_peak_device_bytes"] == peaks["allocated"]


BAD: list[tuple[dict[str, str], str, str]] = [
    ({}, "failed", "column system is missing"),
    ({"system": ""}, "failed", "column system is missing"),
    *((row(**changes), status, words) for changes, status, words in TABLES["bad"]),
]


@pytest.mark.parametrize(("cells", "status", "words"), BAD, ids=[words for *_, words in BAD])
def test_a_bad_row_gets_a_status_and_a_reason(
    cells: dict[str, str], status: str, words: str
) -> None:
    out = predict(cells)
    assert out["pred_status"] == status
    assert words in out["pred_reason"]
    assert "\n" not in out["pred_reason"]
    assert out["pred_step_s"] == ""


def test_bad_rows_do_not_touch_their_neighbours() -> None:
    rows = [row(), *(cells for cells, *_ in BAD), row(recompute="full")]
    out = predict_rows(rows, processes=2)
    assert len(out) == len(rows)
    assert [out[0]["pred_status"], out[-1]["pred_status"]] == ["ok", "ok"]
    assert out[0] == predict(row())


def test_a_crash_inside_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr("rematbench.evidence.predict.evaluate_method", crash)
    out = predict_case(case(), REGISTRY)
    assert (out["pred_status"], out["pred_reason"]) == ("failed", "RuntimeError: no luck")


def test_cells_none_and_extra_columns_are_harmless() -> None:
    cells: dict[Any, Any] = {**ROW, "compile": None, None: ["stray"], "mine": "kept"}
    out = predict_rows([cells], processes=1)[0]
    assert (out["pred_status"], out["mine"]) == ("ok", "kept")


# -- models ----------------------------------------------------------------------------------


def test_the_rows_shape_counts() -> None:
    assert case(layers="16").model.num_layers == 16
    wide = case(hidden="5120", heads="40", kv_heads="40", ffn="13824").model
    assert (wide.hidden, wide.num_heads, wide.head_dim) == (5120, 40, 128)


def test_a_known_model_needs_no_shape() -> None:
    shape = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "mlp")
    assert read_case(without(*shape), REGISTRY) == case()


@pytest.mark.parametrize(("name", "mlp", "position", "biased"), TABLES["columns"])
def test_an_unknown_model_is_built_from_its_columns(
    name: str, mlp: str, position: str, biased: bool
) -> None:
    model = case(model=name, mlp=mlp, layers="8").model
    assert (model.num_layers, model.mlp, model.position) == (8, mlp, position)
    assert model.mlp_bias is biased
    assert predict(row(model=name, mlp=mlp, layers="8"))["pred_status"] == "ok"


# -- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "method", "settings"), TABLES["policies"])
def test_policies(words: str, method: str, settings: dict[str, Any]) -> None:
    assert recompute_method(words, REGISTRY) == (method, settings)


@pytest.mark.parametrize("words", ["selective(SAC)", "selective(per-op SAC)"])
def test_torchtitans_per_operator_checkpointing(words: str) -> None:
    method, settings = recompute_method(words, REGISTRY)
    assert method == "selective_recompute"
    assert settings["scope"] == "layer"


def test_unknown_policies_are_row_errors() -> None:
    with pytest.raises(RowError, match="not a known policy"):
        recompute_method("balanced_checkpoint", REGISTRY)


# -- offloading ------------------------------------------------------------------------------


def test_a_given_fraction_is_used() -> None:
    out = predict(row(offload_fraction="1.0", vpp="2"))
    assert out["pred_offload_fraction"] == 1.0
    assert out["pred_peak_host_bytes"] > 0


def test_an_empty_fraction_is_the_smallest_that_fits() -> None:
    """By the paper's estimate for the paper's stack, by our ledger for others; 0 where the stack
    or the layout cannot offload."""
    tight: dict[str, Any] = {
        "model": "llama-65b",
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 64,
        "ffn": 22016,
        "seq_len": 4096,
        "global_batch": 256,
        "tp": 2,
        "pp": 8,
        "vpp": 5,
        "dp": 16,
        "offload_fraction": "",
    }
    assert predict(row(**tight))["pred_offload_fraction"] == 0.355  # Figure 9, 256 GPUs
    ours = predict(row(**tight, system="megatron-core"))
    assert ours["pred_status"] == "ok"
    none = predict(row(**tight, system="megatron-lm"))
    assert (none["pred_status"], none["pred_offload_fraction"]) == ("oom", 0.0)
    assert "device memory of pipeline rank 0" in none["pred_reason"]


# -- variants of the published rows ----------------------------------------------------------


def test_every_published_row_is_read_or_refused_by_name() -> None:
    rows = read_sheet(data_dir("published") / "runs.csv")
    refused = []
    for cells in rows:
        try:
            read_case(cells, REGISTRY).problem()
        except RowError as error:
            refused.append(f"{error.status}: {error}")
    assert len(rows) == 455
    assert set(refused) == {
        "unsupported: layout not published: no value for global_batch, tp, pp, dp"
    }
    assert len(refused) == 2


def test_korthikanti_peaks_count_layers_alone() -> None:
    """Figure 1: 18 bytes x 12 L h^2 / (t p) of states, and sbh (10 + 24/t + 5 a s / (h t)) L of
    activations, here for the 22B model; ours adds biases and norms, 0.03 %."""
    made = case(
        system="megatron-lm", model="gpt-22b", layers=48, hidden=6144, heads=64, kv_heads=64,
        ffn=24576, vocab=51200, mlp="gelu", seq_len=2048, global_batch=4, micro_batch=4, tp=8,
        pp=1, sp="no", attention="unfused", precision="fp16", zero_stage=0,
    )  # fmt: skip
    p = made.problem()
    exact = 2048 * 4 * 6144 * (10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)) * 48
    assert layer_bytes_in_flight(p, p.base_plan) == pytest.approx(exact, rel=1e-9)


def test_what_an_unknown_model_takes_from_another_is_said() -> None:
    """Norms, biases, positions and dropout of the family, or of the plainest such model."""
    taken = "unknown model: norms, biases and positions taken from"
    assert predict(row(model="llama-new"))["pred_reason"].startswith(f"{taken} llama-")
    plain = "(rmsnorm, no biases, rope positions, no dropout)"
    rest = f" {plain}; head_dim 128, ends not tied, no windows"
    assert predict(row(model="new"))["pred_reason"] == f"{taken} llama-7b{rest}"
    gelu = predict(row(model="new", mlp="gelu"))["pred_reason"]
    like = "(layernorm, biases of qkv and proj and mlp, learned positions, dropout 0.1)"
    assert gelu == f"{taken} gpt-22b {like}; head_dim 128, tied ends, no windows"
    capped = predict(row(model="gemma-new", head_dim="256", mlp="geglu"))["pred_reason"]
    assert "norms behind attention and MLP" in capped
    short = predict(row(model="new", global_batch="256", micro_batch="32"))
    assert short["pred_status"] == "oom"
    assert re.search(
        rf"device memory of .*; {taken} llama-7b{re.escape(rest)}$", short["pred_reason"]
    )


WIDE = {"hidden": "5120", "heads": "64", "kv_heads": "8", "ffn": "25600", "vocab": "151936"}


def test_heads_of_a_model_without_a_file_are_of_its_family_or_asked_for() -> None:
    """Qwen3's heads have 128 columns where hidden / heads = 80; a model of an unknown family must
    say its head_dim, or have the usual one."""
    qwen = case(model="qwen3-32b", layers="64", **WIDE).model
    assert (qwen.head_dim, qwen.qk_norm, qwen.qkv_bias) == (128, True, False)
    failed = predict(row(model="new", **WIDE))
    assert failed["pred_status"] == "failed"
    assert "head_dim" in failed["pred_reason"]
    assert case(model="new", head_dim="128", **WIDE).model.head_dim == 128
    assert case(model="new", head_dim="128", tied="yes", **WIDE).model.tied_embeddings
    assert predict(row(model="gemma-3-4b", hidden="2048"))["pred_status"] == "failed"


def test_a_sheet_takes_the_file_of_a_model(tmp_path: Path) -> None:
    """Its shape columns are empty or the file's; other shapes are an error."""
    file = tmp_path / "mine.yaml"
    text = Path("config/models/llama-7b.yaml").read_text().replace("llama-7b", "mine")
    file.write_text(text.replace("head_dim: 128", "head_dim: 64"))
    empty = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "mlp"), "")
    assert case(**{**empty, "model": str(file)}).model.head_dim == 64
    wrong = predict(row(**{**empty, "model": str(file), "layers": "31"}))
    assert "column layers: 31, but" in wrong["pred_reason"]


@pytest.mark.parametrize(("cell", "number"), TABLES["thousands"])
def test_thousands_are_read_one_way(cell: str, number: float) -> None:
    assert read_number(cell) == number


@pytest.mark.parametrize("cell", ["0,1", "8,19", "81,92", "1,8121", "nan", "inf", "-", "1 000"])
def test_other_commas_are_refused(cell: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        read_number(cell)


@pytest.mark.parametrize(("column", "cell", "problem"), TABLES["numbers"])
def test_numbers_of_another_form_are_named(
    tmp_path: Path, column: str, cell: str, problem: str
) -> None:
    values = {"source": "mine", "status": "ok", **row(), column: f'"{cell}"'}
    path = tmp_path / "mine.csv"
    path.write_text(",".join(values) + "\n" + ",".join(values.values()) + "\n")
    with pytest.raises(UserError, match=re.escape(problem)):
        read_cells(path, "--rows", checked=True)


def test_a_step_time_counts_as_a_speed(tmp_path: Path) -> None:
    values = {**row(), "step_s": "4", "gpus": ""}
    values.pop("tokens_per_s_per_gpu", None)
    path = tmp_path / "mine.csv"
    path.write_text(",".join(values) + "\n" + ",".join(values.values()) + "\n")
    cell = read_cells(path, "--rows", checked=True)[0]
    ranks = int(cell["tp"]) * int(cell["pp"]) * int(cell["dp"])
    tokens = int(cell["seq_len"]) * int(cell["global_batch"])
    assert float(cell["tokens_per_s_per_gpu"]) == tokens / 4 / ranks


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (";".join(without()), "separated by ';'"),
        ("\t".join(without()), r"separated by '\\t'"),
        (",".join(["Model", *without("model")]), "'Model' must be written 'model'"),
        (",".join([" tp ", *without("tp")]), "' tp ' must be written 'tp'"),
    ],
)
def test_another_form_of_the_first_line_is_named(tmp_path: Path, head: str, problem: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(head + "\n")
    with pytest.raises(UserError, match=problem):
        read_cells(path, "--rows")


NEEDED = "model, cluster, system, seq_len, global_batch, tp, pp"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", f"the sheet lacks the columns {NEEDED}"),
        ("a,b\n1,2\n", f"the sheet lacks the columns {NEEDED}"),
        ("{\n  'not': 'a sheet'\n}\n", f"the sheet lacks the columns {NEEDED}"),
        (",".join(without("tp", "dp")) + "\n", "the sheet lacks the columns tp"),
        (",".join([*ROW, "model"]) + "\n", "columns: name 'model' appears twice"),
        (",".join(ROW) + "\n" + ",".join([*ROW.values(), "more"]) + "\n", "line 2: "),
    ],
)
def test_a_file_that_is_no_sheet_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError, match=f"rows.csv: .*{re.escape(problem)}"):
        read_cells(tmp_path / "rows.csv", "ROWS.csv")


def test_a_stack_that_is_not_there_is_one_line_and_no_sheet(tmp_path: Path) -> None:
    """What is typed for every row is wrong once and not in every row."""
    rows, out = tmp_path / "rows.csv", tmp_path / "pred.csv"
    write_sheet(rows, [ROW])
    with pytest.raises(ConfigError, match=r"mine\.yaml: no such system file"):
        predict_sheet(rows, out, system=str(tmp_path / "mine.yaml"))
    assert not out.exists()


def test_a_sheet_without_rows_stays_a_sheet(tmp_path: Path) -> None:
    empty, out = tmp_path / "rows.csv", tmp_path / "pred.csv"
    empty.write_text("\ufeff" + ",".join(ROW) + "\n", encoding="utf-8")  # as Excel saves it
    predict_sheet(empty, out)
    assert out.read_text() == ",".join([*ROW, *COLUMNS]) + "\n"


@pytest.mark.parametrize("cell", ["fast", "nan", "inf", "-3", "0"])
def test_a_published_number_that_is_none_is_one_line(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "rows.csv"
    columns = {**ROW, "source": "mine", "status": "ok", "tokens_per_s_per_gpu": cell}
    path.write_text(",".join(columns) + "\n" + ",".join(columns.values()) + "\n")
    with pytest.raises(UserError, match=f"row 1, tokens_per_s_per_gpu: '{cell}' is not a number"):
        read_cells(path, "--rows", "source")
    assert len(read_cells(path, "ROWS.csv")) == 1
