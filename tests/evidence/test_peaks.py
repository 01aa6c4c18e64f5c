"""Margins of device bytes: each from rows that print the quantity, and what a verdict is about."""

import math
from statistics import median
from typing import get_args

import pytest

from rematbench.engine.program.allocator import MIB
from rematbench.evaluate.problems import make_problem
from rematbench.evidence import peaks
from rematbench.evidence.calibrate import left_out_bytes
from rematbench.evidence.job_evidence import BYTES, PEAK, log_error
from rematbench.evidence.peaks import (
    MOST_MISS,
    about,
    errors_of,
    fits_word,
    lines_of_bytes,
    margin,
    of_sources,
    reserve_bytes,
    total_is_checked,
    total_miss,
    widest,
)
from rematbench.evidence.published.sheets import PeakKind, Quantity, printed_bytes, read_sheet
from rematbench.evidence.published.words import committed
from rematbench.inputs.job import Job
from rematbench.inputs.load import names
from rematbench.inputs.paths import data_dir
from rematbench.problem import Problem

CHECKED = "huggingface-flash-4.4x"


def job(stack: str = CHECKED, cluster: str = "a100-80gb-single") -> Problem:
    return make_problem(
        Job(model="mistral-7b", cluster=cluster, system=stack, gpus=1, seq_len=4096, global_batch=1)
    )


def line(source: str, quantity: str, published: float, predicted: float) -> dict[str, str]:
    sizes = {"bytes": str(published), "pred_bytes": str(predicted)}
    return {"source": source, "quantity": quantity, "trains": "weights", **sizes}


def test_every_published_peak_says_which_quantity_it_is() -> None:
    for name in ("runs.csv", "runs_more.csv"):
        for line in read_sheet(data_dir("published") / name):
            kinds = get_args(PeakKind) if line[PEAK] else ("",)
            assert line["peak_kind"] in kinds


def test_rows_print_bytes_in_columns_and_in_notes() -> None:
    """A peak, reserved bytes in a column, and what a note says of the card."""
    (first, *_), smi = committed("pipeline_vocabulary.csv"), committed("adapters.csv")[0]
    beside = next(row for row in committed("mla.csv") if "device 68973" in row["note"])
    assert list(printed_bytes(first)) == ["allocated", "reserved"]
    assert printed_bytes(first)["reserved"] == float(first["peak_reserved_bytes"])
    assert printed_bytes(smi)["device"] == 77256 * MIB
    assert printed_bytes(beside)["reserved"] == 62570 * MIB
    assert printed_bytes(beside)["device"] == 68973 * MIB
    assert not printed_bytes({PEAK: "1", "peak_kind": "computed"})


def test_a_margin_has_sources_of_equal_weight_and_counts_no_overestimate() -> None:
    lines = [line("a", "device", 100, 50), line("a", "device", 100, 200)]
    assert errors_of(lines, "device") == {"a": [pytest.approx(math.log(2)), -math.log(2)]}
    assert widest([line("a", "device", 100, 200)]) == (0.0, {"a": [pytest.approx(-math.log(2))]})
    parts = [*lines, line("b", "reserved", 300, 100)]
    assert widest(parts) == (pytest.approx(math.log(3)), {"b": [pytest.approx(math.log(3))]})
    assert not widest([])[1]
    (_, said) = of_sources(parts)
    assert said.startswith("weights, device, a: 2 rows, 75.0 % off; 100 % inside +200.0 %")


def test_totals_of_jobs_without_adapters_are_near() -> None:
    """The bars: 5 % in the median, and 80 % of rows inside the margin of the other sources."""
    lines = [one for one in lines_of_bytes() if one["quantity"] == "device"]
    errors = [abs(math.expm1(log_error(one, "bytes") or 0.0)) for one in lines]
    assert len(errors) >= 10
    assert median(errors) < 0.05
    for source in {one["source"] for one in lines}:
        width, _ = widest([one for one in lines_of_bytes() if one["source"] != source])
        own = [-(log_error(one, "bytes") or 0.0) for one in lines if one["source"] == source]
        assert sum(error <= width for error in own) >= 0.8 * len(own)


@pytest.mark.full
def test_the_committed_lines_are_those_of_today() -> None:
    committed_lines = read_sheet(data_dir("config") / BYTES)
    assert [dict(one) for one in committed_lines] == left_out_bytes()


def test_a_total_is_never_better_known_than_its_parts() -> None:
    widths = [margin(quantity) for quantity in get_args(Quantity)]
    assert widths == sorted(widths)
    assert 0.0 < widths[0] < widths[-1]


def test_three_quantities_and_what_processes_may_take() -> None:
    """nvidia-smi counts no byte that the driver withholds as used."""
    given = job()
    withheld = given.cluster.hbm_bytes - given.room_bytes
    assert withheld == int(given.calibration.gpus["ampere"].withheld_bytes)
    context = given.room_bytes - given.usable_bytes
    assert context == pytest.approx(given.calibration.gpus["ampere"].context_bytes, abs=1)


def test_a_measured_number_never_makes_room_beyond_the_device() -> None:
    assert job(cluster="this-machine").room_bytes == job(cluster="this-machine").usable_bytes


@pytest.mark.parametrize("stack", names("system"))
def test_device_totals_are_shown_where_rows_of_the_stack_are_near(stack: str) -> None:
    miss = total_miss(stack)
    assert (miss is not None and miss <= MOST_MISS) == (stack == CHECKED)


def test_the_sentence_says_what_the_verdict_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = about(job())
    assert "about the device total" in line
    other = job("huggingface-deepspeed")
    assert not total_is_checked(other)
    (line,) = about(other)
    assert line.startswith("allocated only: no device total of stack huggingface-deepspeed")
    assert not about(job(cluster="this-machine"))
    monkeypatch.setattr(peaks, "total_miss", lambda _: 0.33)
    (line,) = about(job())
    assert line.startswith(f"allocated only: published device totals of stack {CHECKED} lie up to")
    assert "33 % above ours" in line


def test_tight_is_what_the_reserve_would_not_leave() -> None:
    room = 79 << 30
    reserve = reserve_bytes(room)
    assert 0 < reserve < 0.2 * room
    words = [fits_word(left, room) for left in (-1, 0, reserve - 2, reserve + 1)]
    assert words == ["no", "tight", "tight", "yes"]
