"""config/kernels is what the rows say, and every row off its curve has a reason."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import yaml

from rematbench.costs.kernel_seconds import attention_share
from rematbench.costs.operators.kernels import Attention
from rematbench.evidence.kernels.kernel_curves import solve
from rematbench.evidence.kernels.kernel_fit import as_text, fit_share, refit
from rematbench.evidence.kernels.kernel_rows import (
    TOLERANCE,
    Array,
    KernelError,
    KernelRow,
    Match,
    ShareRows,
    attention_flop,
    load_sources,
    measured,
    outliers,
    parse_shape,
    read_kernel_rows,
    unclaimed,
)
from rematbench.inputs.kernel_rates import OPERATORS, SOURCES, fitted_parameters, load_kernel_rates
from rematbench.inputs.load import calibration, load_cluster
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables.scores import how_to_read
from tests.problems import problem
from tests.tables import tables

TABLES = tables(__file__)

FOLDER = data_dir("config") / "kernels"
PUBLISHED = data_dir("published") / "kernels.csv"
ROWS = read_kernel_rows(PUBLISHED)
DECLARED = load_sources(FOLDER / f"{SOURCES}.yaml")
USED = DECLARED.used(ROWS)
RATES = load_kernel_rates(FOLDER)
FILES = (*RATES.generations, OPERATORS)


@pytest.fixture(scope="module")
def again() -> dict[str, msgspec.Struct]:
    return refit(FOLDER, PUBLISHED)


def alike(ours: Any, theirs: Any) -> bool:
    """Equal but for a last digit, which another build of a solver may round otherwise."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(v, theirs[k]) for k, v in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(ours, float):
        return bool(ours == pytest.approx(theirs, rel=2e-3, abs=2e-8))
    return bool(ours == theirs)


def test_committed_files_are_the_refit(again: dict[str, msgspec.Struct]) -> None:
    by_hand = {"cpu", SOURCES}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*again, *by_hand}
    for name, rates in again.items():
        committed = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert alike(yaml.safe_load(as_text(rates)), yaml.safe_load(committed)), name


def outlier_lines(part: Any) -> list[int]:
    if isinstance(part, dict):
        own = [line for found in part.get("outliers", ()) for line in found["lines"]]
        return own + [line for value in part.values() for line in outlier_lines(value)]
    return []


def test_outliers_are_named_and_few() -> None:
    named = [
        line
        for name in FILES
        for line in outlier_lines(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    ]
    assert 0 < len(set(named)) < 0.25 * len(USED)
    fused = [r for r in USED if r.what.startswith("attention")]
    hopper = {r.line for r in fused if DECLARED.of_generation("hopper", r)}
    assert len(hopper & set(named)) < 0.2 * len(hopper)


def test_every_reason_has_its_row() -> None:
    files = [yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in FILES]
    given = {reason for part in files for reason in reasons(part)}
    assert {r.reason for r in DECLARED.reasons} == given


def reasons(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [found["reason"] for found in part.get("outliers", ())]
        return own + [reason for value in part.values() for reason in reasons(value)]
    return []


def test_a_row_off_its_curve_without_a_reason_fails() -> None:
    hopper = [r for r in USED if DECLARED.of_generation("hopper", r) and r.shape.get("d") == "128"]
    row = next(r for r in hopper if r.implementation == "fa2")
    assert outliers(DECLARED, [row], {row.line: TOLERANCE}) == ()
    with pytest.raises(KernelError, match=f"without a reason: {row.line} "):
        outliers(DECLARED, [row], {row.line: -1.01 * TOLERANCE})


@pytest.mark.parametrize(("generation", "backend", "s", "forward", "backward"), TABLES["curves"])
def test_curves_lie_where_documents_do(
    generation: str,
    backend: str,
    s: int,
    forward: tuple[float, float],
    backward: tuple[float, float],
) -> None:
    rates = RATES.attention(generation, backend)
    sms = RATES.generation(generation).sm_count
    for one, (low, high) in ((rates.forward, forward), (rates.backward, backward)):
        share = attention_share(one, float(s), 64.0, sms)
        assert low <= share <= high


def test_a_share_needs_rows_or_a_sourced_value() -> None:
    with pytest.raises(KernelError, match="neither rows nor value"):
        fit_share(DECLARED, "hopper", ShareRows(value=0.5), USED)
    nothing = ShareRows(match=Match(what=("memcpy_h2d",), gpu=("no such GPU",)))
    with pytest.raises(KernelError, match="no row matches"):
        fit_share(DECLARED, "hopper", nothing, USED)


def test_parameters_fitted_to_kernel_rows_are_counted() -> None:
    counts = fitted_parameters(RATES)
    assert counts.keys() == {*RATES.generations, OPERATORS}
    files = [yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in FILES]

    def listed(part: Any) -> int:
        if isinstance(part, dict):
            return len(part.get("fitted", ())) + sum(map(listed, part.values()))
        return 0

    assert sum(counts.values()) == sum(map(listed, files)) > 100
    told = how_to_read(calibration())
    count = len(calibration().fitted)
    assert f"{count} constants are fitted to published steps; {sum(counts.values())} " in told
    assert "A step uses the kernel parameters of fused attention" in told


def test_gemms_of_blackwell_are_those_of_its_kernel_rows() -> None:
    """No step is fitted: the constants are the kernel rates, with weight gradients a third."""
    rates, constants = RATES.generation("blackwell").gemm, calibration().gpu("blackwell")
    both = rates.efficiency * 3 / (2 + 1 / rates.accumulate)
    assert constants.gemm_efficiency == round(both, 4)
    assert (constants.gemm_half_k, constants.gemm_tail_waves) == (rates.half_k, rates.tail)
    assert (constants.tile_rows, constants.tile_columns) == (rates.tile_rows, rates.tile_columns)
    assert constants.sm_count == RATES.generation("blackwell").sm_count


def test_refit_refuses_a_row_of_a_new_kind(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    new = "a document,attention_forward,fa9,H100,bf16,b=1;h=8;s=512;d=128;causal=1,9,TFLOP/s,,\n"
    path.write_text(PUBLISHED.read_text(encoding="utf-8") + new, encoding="utf-8")
    with pytest.raises(KernelError, match="lines 2006 are neither used nor excluded"):
        refit(FOLDER, path)


def attention_seconds(system: str, cluster: str, kernel: Attention) -> float:
    given = problem(system=system, attention="unfused")
    cost = replace(given, cluster=load_cluster(cluster)).cost
    ways: tuple[Literal["forward", "backward_input"], ...] = ("forward", "backward_input")
    return sum(cost.kernel_s(kernel, way) for way in ways)


@pytest.mark.parametrize(
    ("gpu", "cluster"), [("H100-SXM", "h100-80gb"), ("A100-80GB-SXM", "a100-80gb-selene")]
)
def test_eager_attention_takes_its_published_seconds(gpu: str, cluster: str) -> None:
    """Of a stack of torch operators, on the causal rows, as a model's attention is.  One softmax
    kernel takes less."""
    found = []
    for row in (row for row in ROWS if row.implementation == "torch-eager" and row.gpu == gpu):
        if row.what == "attention_fwd_bwd" and row.causal:
            batch, heads, s, width = (row.size(key) for key in "bhsd")
            kernel = Attention(batch, heads, heads, width, s, s, s * s, fused=False)
            seconds = attention_seconds("huggingface", cluster, kernel)
            assert attention_seconds("rematbench", cluster, kernel) < seconds
            found.append(attention_flop(row) / seconds / measured(row).value)
    assert found == pytest.approx([1.0] * 6, rel=0.08)


@pytest.mark.parametrize(("wanted", "found"), [(-1.0, 0.0), (0.3, 0.3), (7.0, 1.0)])
def test_a_minimum_beyond_a_bound_is_the_bound(wanted: float, found: float) -> None:
    def misses(x: Array) -> Array:
        return np.array([x[0] - wanted, x[0] - wanted + 1e-3])

    (best,) = solve(misses, [0.5], ([0.0], [1.0]), near=0.03)
    assert best == pytest.approx(found, abs=0 if found in (0.0, 1.0) else 1e-3)


# -- every row of kernels.csv is typed, in base units, and used or left out by name ----------------


HEAD = "source,what,implementation,gpu,dtype,shape,value,unit,convention,note\n"


def row(**fields: object) -> KernelRow:
    plain = {
        "line": 2,
        "source": "a document",
        "what": "attention_forward",
        "implementation": "fa2",
        "gpu": "H100",
        "dtype": "bf16",
        "shape": parse_shape("b=2;h=8;kv=8;s=4096;d=128;causal=1"),
        "value": 300.0,
        "unit": "TFLOP/s",
        "convention": "causal counted half",
        "note": "",
    }
    return KernelRow(**{**plain, **fields})  # type: ignore[arg-type]


def test_every_row_is_read() -> None:
    assert len(ROWS) == 2004
    assert len({r.source for r in ROWS}) == 78
    assert all(measured(r).value > 0 for r in ROWS)


# An RTX 4090 runs above its sheet's clock: xytpai/nvbench measures 85.70 TFLOP/s in fp32 of 82.58.
HELD_CLOCK = {"RTX-4090": 85.70 / 82.58}


def test_no_share_of_a_peak_is_above_one() -> None:
    rates = [r for r in ROWS if measured(r).quantity == "flop_per_s" and r.dtype != "fp8"]
    over = [
        r.line
        for r in rates
        if (gpu := DECLARED.gpus.get(r.gpu))
        and measured(r).value > gpu.peak_flop_per_s * HELD_CLOCK.get(r.gpu, 1.0)
    ]
    assert len(rates) > 800
    assert over == []


def test_units_and_conventions() -> None:
    flop = 4 * 128 * 8 * 2 * 4096**2 / 2
    assert measured(row()).value == 300e12
    assert measured(row(value=1.0, unit="ms")).value == flop / 1e-3
    every_pair = row(convention="causal kernel, all pairs counted")
    assert measured(every_pair).value == 150e12
    exact = row(convention="causal counted s(s+1)/2")
    assert measured(exact).value == pytest.approx(300e12 * 4096 / 4097)
    both = row(what="attention_fwd_bwd", value=1.0, unit="ms")
    assert measured(both).value == pytest.approx(3.5 * flop / 1e-3)
    unmasked = row(shape=parse_shape("b=2;h=8;s=4096;d=128;causal=0"), value=1.0, unit="ms")
    assert measured(unmasked).value == 2 * flop / 1e-3
    gemm = row(what="gemm", shape=parse_shape("m=3;n=5;k=7"), value=1.0, unit="ms")
    assert measured(gemm).value == pytest.approx(2 * 3 * 5 * 7 / 1e-3)
    copy = row(what="memcpy_h2d", shape={}, value=55.0, unit="GB/s")
    assert (measured(copy).quantity, measured(copy).value) == ("bytes_per_s", 55e9)


def test_notes_confirm_times_turned_into_speeds() -> None:
    """Where a document prints milliseconds, the note has TFLOP/s worked out by hand."""
    told = [
        (measured(r).value / 1e12, float(found[1]))
        for r in ROWS
        if r.unit == "ms" and (found := re.search(r"(\d+) TFLOP/s", r.note))
    ]
    assert len(told) > 150
    assert all(ours == pytest.approx(theirs, abs=1.0, rel=0.005) for ours, theirs in told)


@pytest.mark.parametrize(("line", "message"), TABLES["bad"])
def test_a_bad_row_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(HEAD + line + "\n")
    with pytest.raises(KernelError, match=re.escape(message)) as error:
        read_kernel_rows(path)
    assert "\n" not in str(error.value)


def test_a_missing_size_names_its_line() -> None:
    with pytest.raises(KernelError, match="line 2: 'n' in shape is missing or not a whole number"):
        measured(row(what="gemm", shape=parse_shape("m=3;k=7"), unit="ms"))


def test_match_joins_its_fields() -> None:
    match = Match(what=("gemm",), implementation=("cublas",), shape={"layout": ("", "TN")})
    gemm = row(what="gemm", implementation="te (cublas)", shape=parse_shape("m=8;n=8;k=8"))
    assert match.holds(gemm)
    assert not match.holds(row())
    assert Match(below={"m": 9}).holds(gemm)
    assert not Match(at_least={"m": 9}).holds(gemm)
    assert not Match(below={"hidden": 9}).holds(gemm)  # it has no hidden


def test_every_row_is_used_or_excluded_by_name() -> None:
    left = Counter(found.name for r in ROWS if (found := DECLARED.exclusion(r)))
    assert unclaimed(DECLARED, ROWS) == []
    assert set(left) == {e.name for e in DECLARED.exclusions}  # none is idle
    assert len(DECLARED.used(ROWS)) == len(ROWS) - left.total() > 900


def test_a_row_of_a_new_kind_is_noticed() -> None:
    new = row(implementation="fa9", gpu="H100")
    assert unclaimed(DECLARED, [new]) == [new]
