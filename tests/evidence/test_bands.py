"""Bands: quantiles over sources of the same weight, kinds of evidence, and whether they hold."""

import math
from collections import Counter
from statistics import median
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from rematbench.engine.program.allocator import MIB
from rematbench.evaluate.problems import make_problem
from rematbench.evidence import peaks
from rematbench.evidence.bands import (
    FEWEST_SOURCES,
    bands_of,
    coverage,
    inside_shares,
    kind_coverage,
    pooled,
    ratio_band,
    ratio_errors,
    shipped,
    speed_errors,
    with_outside,
)
from rematbench.evidence.calibrate import left_out_bytes
from rematbench.evidence.job_evidence import (
    BYTES,
    OPTIONS,
    PEAK,
    JobProperties,
    LeftOutCell,
    covered,
    left_out_cells,
    log_error,
)
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
from rematbench.evidence.quantiles import LEVEL, quantile
from rematbench.inputs.job import Job
from rematbench.inputs.load import names
from rematbench.inputs.paths import data_dir
from rematbench.problem import Problem


def job(**changes: Any) -> JobProperties:
    given = {"stack": "s", "generation": "hopper", "gpus": 8, "seq_len": 4096, "methods": ()}
    made = {**given, **changes}
    return JobProperties(**{**made, "methods": frozenset(made["methods"])})


def known(
    source: str, error: float, at: JobProperties | None = None, layout: str = "a"
) -> LeftOutCell:
    return LeftOutCell(
        source=source, job=at or job(), log_error=error, layout=(source, layout), sweep=(source,)
    )


# -- widths -------------------------------------------------------------------------------------


def test_a_quantile_lies_between_the_middles_of_weights() -> None:
    assert quantile({"a": [0.0, 1.0]}, 0.5) == pytest.approx(0.5)
    assert quantile({"a": [3.0]}) == 3.0
    assert quantile({"a": [1.0], "b": [2.0]}, 0.0) == 1.0
    assert quantile({"a": [1.0], "b": [2.0]}, 1.0) == 2.0


@pytest.mark.parametrize(("level", "rank"), [(0.8, 8.6), (0.5, 5.5), (0.2, 2.4)])
def test_a_quantile_is_the_value_of_a_median_unbiased_rank(level: float, rank: float) -> None:
    """Rank level (n + 1/3) + 1/3 of n values (Hyndman and Fan 1996, type 8), rows or sources."""
    ten = {str(value): [float(value)] for value in range(1, 11)}
    assert quantile(ten, level) == pytest.approx(rank)


def test_rows_of_one_source_are_as_many_values() -> None:
    """A source's own errors are ranked by its rows, not as one value of many parts."""
    ten = [known("a", float(i)) for i in range(1, 11)]
    found = coverage([*ten, known("b", 1.0), known("c", 1.0)])
    assert found[0].error == pytest.approx(8.6)


def test_every_source_weighs_the_same() -> None:
    few = {"a": [0.1], "b": [0.2], "c": [0.3]}
    many = {"a": [0.1] * 500, "b": [0.2], "c": [0.3]}
    assert quantile(many) == pytest.approx(quantile(few))


def test_more_outside_is_never_narrower_and_few_sources_are_pooled() -> None:
    """Five sources alike and five whose jobs are strange to all others; wider, then narrower."""
    near = [known(f"n{i}", 0.01 * i) for i in range(FEWEST_SOURCES + 1)]
    strange = [job(stack=f"x{i}", seq_len=2**i) for i in range(1, FEWEST_SOURCES + 2)]
    far = [known(f"f{i}", 0.5, at) for i, at in enumerate(strange)]
    widths = [pool.half_width for pool in bands_of(near + far).pools]
    assert len(widths) > 1
    assert widths == sorted(widths)
    assert widths[0] < 0.1
    exact = [known(f"f{i}", 0.0, at) for i, at in enumerate(strange)]
    assert len(bands_of(near + exact).pools) == 1
    assert len(bands_of(near + far[:2]).pools) == 1


def test_what_nobody_published_is_named() -> None:
    seen = covered([job(methods=("memo",)), job(seq_len=8192, gpus=64)])
    assert seen.outside(job(seq_len=6000, methods=("memo",))) == {}
    strange = {"stack": "", "generation": "ampere", "cluster": "cluster of mine"}
    found = seen.outside(job(**strange, gpus=128, seq_len=1, methods=("mst", "memo")))
    assert list(found) == ["stack", "generation", "cluster", "scale", "context", "mechanism"]
    assert found["cluster"] == "cluster of mine"
    assert found["context"] == "1 tokens (published: 4,096 to 8,192)"
    assert found["mechanism"] == "mechanism mst"
    long = seen.outside(job(seq_len=16384))
    assert long == {"context": "16,384 tokens (published on s: 4,096 to 8,192)"}


def test_a_generation_to_whose_steps_nothing_is_fitted_is_outside() -> None:
    """Blackwell has published steps, and its constants come from kernels alone."""
    at = job(generation="blackwell")
    seen = covered([at])
    (words,) = seen.outside(at).values()
    assert words == "generation blackwell (published, but no constant is fitted to its steps)"
    errors = [
        abs(cell.log_error) for cell in left_out_cells() if cell.job.generation == "blackwell"
    ]
    width = shipped().band(at).half_width
    assert len([error for error in errors if error <= width]) > len(errors) / 2


def test_ratios_are_of_one_source_and_layout() -> None:
    cells = [known("a", 0.5), known("a", 0.4), known("b", -0.5), known("a", 0.0, layout="b")]
    assert ratio_errors(cells, one_layout=True) == {"a": [pytest.approx(0.1)]}
    between = ratio_errors(cells, one_layout=False)
    assert between == {"a": [pytest.approx(error) for error in (0.1, 0.5, 0.4)]}


def test_rows_with_other_options_of_a_stack_are_no_pair() -> None:
    """torchtitan published its jobs in pairs: with and without the compiler or async TP."""
    rows = [cell for cell in left_out_cells() if cell.source == "torchtitan benchmarks"]
    jobs = Counter((cell.job, cell.layout[-6:]) for cell in rows)
    assert set(jobs.values()) == {2}
    assert not ratio_errors(rows, one_layout=False)
    plain = [  # as if they had the same options: then every job is a pair
        replace(cell, sweep=cell.sweep[: -len(OPTIONS)], layout=(cell.source, *cell.layout[-6:]))
        for cell in rows
    ]
    assert len(ratio_errors(plain, one_layout=False)["torchtitan benchmarks"]) >= len(jobs) > 0


def test_the_coverage_of_ratios_leaves_the_source_out() -> None:
    """Source a errs by 0.1 and 0.3 and is judged by the others' 0.2."""
    pair = [known(source, error) for source in "bc" for error in (0.0, 0.2)]
    own = [known("a", error, layout=layout) for layout, error in (("a", 0.1), ("b", 0.3))]
    cells = [*pair, *own, known("a", 0.0, layout="a"), known("a", 0.0, layout="b")]
    found = {one.source: one for one in kind_coverage(ratio_errors(cells, one_layout=True))}
    assert found["a"].half_width == pytest.approx(0.2)
    assert (found["a"].rows, found["a"].inside) == (2, 0.5)
    assert found["b"].half_width > 0.2
    assert found["b"].inside == 1.0


# -- whether they hold: the bars of the issue, each source left out in turn ------------------------


def test_bands_hold_for_sources_that_they_were_not_learnt_from() -> None:
    cells = left_out_cells()
    found = coverage(cells)
    assert {one.source for one in found} == {cell.source for cell in cells}
    every = pooled(found, speed_errors(cells))
    assert every.rows == len(cells)
    assert 0.7 <= every.inside <= 0.9
    assert every.half_width <= 1.3 * every.error


@pytest.mark.parametrize("one_layout", [True, False])
def test_bands_of_ratios_hold_for_sources_that_they_were_not_learnt_from(one_layout: bool) -> None:
    cells = left_out_cells()
    errors = ratio_errors(cells, one_layout=one_layout)
    found = kind_coverage(errors)
    every = pooled(found, errors)
    assert len(found) >= FEWEST_SOURCES
    assert 0.7 <= every.inside <= 0.9
    assert every.half_width <= 1.3 * every.error


def test_ratios_at_one_layout_have_a_narrower_band_than_speeds() -> None:
    """Narrower than every band of a speed, and than that of the speeds of the same sources."""
    cells = left_out_cells()
    paired = ratio_errors(cells, one_layout=True)
    speeds = {source: some for source, some in speed_errors(cells).items() if source in paired}
    assert ratio_band() < min(quantile(speeds), *(pool.half_width for pool in shipped().pools))
    assert ratio_band() < ratio_band(one_layout=False)
    assert LEVEL == 0.8


def test_a_job_outside_in_a_property_has_the_errors_of_rows_outside_in_it() -> None:
    """Twelve sources on 8 GPUs, and two on fewer or more, whose rows are ten times as far off."""
    near = [known(f"n{i}", 0.01) for i in range(12)]
    far = [known(f"f{gpus}", 0.1, job(gpus=gpus)) for gpus in (4, 64)]
    bands = bands_of(near + far)
    larger, other = bands.band(job(gpus=4096)), bands.band(job(stack="x", gpus=8))
    assert list(larger.outside) == ["scale"]
    assert larger.half_width == pytest.approx(0.1)
    assert larger.sources == 2
    assert list(other.outside) == ["stack"]
    assert other.half_width < larger.half_width


def test_shipped_bands_are_as_wide_as_errors_outside_in_the_same_property() -> None:
    errors: dict[str, Any] = {}
    for cell, outside in with_outside(left_out_cells()):
        for name in outside:
            of_source = errors.setdefault(name, {}).setdefault(cell.source, [])
            of_source.append(abs(cell.log_error))
    assert "scale" in errors
    covers = shipped().covered.methods
    strange = {"gpus": 1 << 20, "stack": "torchtitan", "seq_len": 8192, "methods": covers}
    band = shipped().band(job(**strange))
    assert list(band.outside) == ["scale"]
    assert band.half_width >= quantile(errors["scale"])


def test_both_shares_inside_are_told_and_differ() -> None:
    cells = left_out_cells()
    found, errors = coverage(cells), speed_errors(cells)
    by_source, by_row = inside_shares()
    assert by_source == pytest.approx(sum(one.inside for one in found) / len(found))
    inside = sum(one.inside * one.rows for one in found)
    assert by_row == pytest.approx(inside / len(cells)) == pooled(found, errors, by_row=True).inside
    assert by_source > by_row


# -- margins of device bytes -----------------------------------------------------------------------


CHECKED, SHARDED = "huggingface-flash-4.4x", "huggingface-fsdp-4.46"


def problem_of(stack: str = CHECKED, cluster: str = "a100-80gb-single") -> Problem:
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
    words = "weights, device, a: 2 rows, 75.0 % off in the median, 100 % inside the margin of the"
    assert said == f"{words} other sources, +200.0 %"


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
    given = problem_of()
    withheld = given.cluster.hbm_bytes - given.room_bytes
    assert withheld == int(given.calibration.gpus["ampere"].withheld_bytes)
    context = given.room_bytes - given.usable_bytes
    assert context == pytest.approx(given.calibration.gpus["ampere"].context_bytes, abs=1)


def test_a_measured_number_never_makes_room_beyond_the_device() -> None:
    assert (
        problem_of(cluster="this-machine").room_bytes
        == problem_of(cluster="this-machine").usable_bytes
    )


@pytest.mark.parametrize("stack", names("system"))
def test_device_totals_are_shown_where_rows_of_the_stack_are_near(stack: str) -> None:
    miss = total_miss(stack)
    assert (miss is not None and miss <= MOST_MISS) == (stack in (CHECKED, SHARDED))


def test_the_sentence_says_what_the_verdict_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = about(problem_of())
    assert "about the device total" in line
    other = problem_of("huggingface-deepspeed")
    assert not total_is_checked(other)
    (line,) = about(other)
    assert line.startswith("allocated only: no device total of stack huggingface-deepspeed")
    assert not about(problem_of(cluster="this-machine"))
    monkeypatch.setattr(peaks, "total_miss", lambda _: 0.33)
    (line,) = about(problem_of())
    assert line.startswith(f"allocated only: published device totals of stack {CHECKED} lie up to")
    assert "33 % above ours" in line


def test_tight_is_what_the_reserve_would_not_leave() -> None:
    room = 79 << 30
    reserve = reserve_bytes(room)
    assert 0 < reserve < 0.2 * room
    words = [fits_word(left, room) for left in (-1, 0, reserve - 2, reserve + 1)]
    assert words == ["no", "tight", "tight", "yes"]
