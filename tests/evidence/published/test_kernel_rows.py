"""Every row of kernels.csv is typed, in base units, and used or left out by name."""

import re
from collections import Counter
from pathlib import Path

import pytest

from rematbench.evidence.kernels.kernel_rows import (
    KernelRow,
    KernelRowError,
    Match,
    load_sources,
    measured,
    parse_shape,
    read_kernel_rows,
    unclaimed,
)
from rematbench.inputs.kernel_rates import SOURCES
from rematbench.inputs.paths import data_dir

ROWS = read_kernel_rows(data_dir("published") / "kernels.csv")
DECLARED = load_sources(data_dir("config") / "kernels" / f"{SOURCES}.yaml")
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
    assert len(ROWS) == 1967
    assert len({r.source for r in ROWS}) == 71
    assert all(measured(r).value > 0 for r in ROWS)


def test_no_share_of_a_peak_is_above_one() -> None:
    rates = [r for r in ROWS if measured(r).quantity == "flop_per_s" and r.dtype != "fp8"]
    over = [
        r.line
        for r in rates
        if (gpu := DECLARED.gpus.get(r.gpu)) and measured(r).value > gpu.peak_flop_per_s
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("d,gem,i,H100,bf16,m=1,1,ms,,", "line 2: what 'gem' (known: gemm,"),
        ("d,gemm,i,H100,bf16,m=1,1,s,,", "line 2: unit 's' (known: TFLOP/s,"),
        ("d,gemm,i,H100,bf16,m=1;m=2,1,ms,,", "line 2: shape 'm=1;m=2' is not key=value"),
        ("d,gemm,i,H100,bf16,m,1,ms,,", "line 2: shape 'm' is not key=value"),
        ("d,gemm,i,H100,bf16,m=1,fast,ms,,", "line 2: could not convert"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(HEAD + line + "\n")
    with pytest.raises(KernelRowError, match=re.escape(message)) as error:
        read_kernel_rows(path)
    assert "\n" not in str(error.value)


def test_a_missing_size_names_its_line() -> None:
    with pytest.raises(KernelRowError, match="line 2: shape has no whole number 'n'"):
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
