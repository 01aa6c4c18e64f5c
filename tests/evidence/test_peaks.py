"""Margins of device bytes: each from rows that print the quantity, and what a verdict is about."""

import math
from typing import get_args

import pytest

from rematbench.evaluate.problems import make_problem
from rematbench.evidence import peaks
from rematbench.evidence.job_evidence import PEAK, log_error, out_of_source
from rematbench.evidence.peaks import (
    MOST_MISS,
    about,
    fits_word,
    margin,
    reserve_bytes,
    total_is_checked,
    total_miss,
    underestimates,
)
from rematbench.evidence.published.sheets import PeakKind, Quantity, read_sheet
from rematbench.inputs.job import Job
from rematbench.inputs.load import names
from rematbench.inputs.paths import data_dir
from rematbench.problem import Problem

CHECKED = "huggingface-flash-4.4x"


def job(stack: str = CHECKED, cluster: str = "a100-80gb-single") -> Problem:
    return make_problem(
        Job(model="mistral-7b", cluster=cluster, system=stack, gpus=1, seq_len=4096, global_batch=1)
    )


def row(kind: str, published: int, predicted: int) -> dict[str, str]:
    numbers = {PEAK: str(published), f"pred_{PEAK}": str(predicted)}
    return {"source": "a", "peak_kind": kind, **numbers}


def test_every_published_peak_says_which_quantity_it_is() -> None:
    for name in ("runs.csv", "runs_more.csv"):
        for line in read_sheet(data_dir("published") / name):
            kinds = get_args(PeakKind) if line[PEAK] else ("",)
            assert line["peak_kind"] in kinds


def test_only_rows_of_the_quantity_count_and_only_underestimates() -> None:
    rows = [row("allocated", 100, 50), row("allocated", 100, 200), row("device", 100, 90)]
    assert underestimates(rows, "allocated") == {"a": [pytest.approx(math.log(2)), 0.0]}
    assert not underestimates(rows, "reserved")


def test_computed_and_unstated_peaks_are_in_no_margin() -> None:
    counted = sum(
        len(errors)
        for quantity in get_args(Quantity)
        for errors in underestimates(out_of_source(), quantity).values()
    )
    scored = [line for line in out_of_source() if log_error(line, PEAK) is not None]
    computed = [line for line in scored if line["peak_kind"] == "computed"]
    assert computed
    assert {line["source"][:10] for line in computed} == {"Korthikant"}
    assert counted == len(scored) - len(computed)


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
