"""The part `rates` of `measure-gpu`: rates of kernels, copies and the host on one device."""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rematbench.inputs.load import load_cluster
from rematbench.measure.machine import Machine
from rematbench.measure.records import Rate, append_line
from rematbench.workload import PositiveInt
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.measured import has_peak_of
from rematbench.worlds.records.suite import NamedProblem, Suite, read_suite

if TYPE_CHECKING:
    from rematbench.measure.torch.probe_calls import Probe
    from rematbench.measure.torch.probe_rates import Timed

SEED = 7


class RateSuite(Suite, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems whose kernels are timed.  `clusters`: the first cluster with the device gives the
    predictions (none: no predictions).  Attention runs at each of `attention_lengths`.  Copies have
    `copy_bytes`, and the square products during copies have the width `copy_gemm`.  `compiled`:
    also time kernels by torch.compile.  `sustained_s`: seconds for which the first problem's
    products and its attention also run without a pause (0: they do not).
    """

    clusters: tuple[str, ...] = ()
    attention_lengths: tuple[PositiveInt, ...]
    copy_bytes: tuple[PositiveInt, ...]
    copy_gemm: PositiveInt
    compiled: bool = True
    sustained_s: float = 0.0


def load_rates(path: Path) -> RateSuite:
    """The suite of a file; ConfigError of one line for a wrong entry."""
    return read_suite(path, RateSuite)


def measure_rates(path: Path, out: Path, device: Device, limit_s: float) -> None:
    """Time every probe of the suite `path` within `limit_s` seconds, with a line of `out` for
    each."""
    from rematbench.measure.torch.probe_rates import Rates  # noqa: PLC0415
    from rematbench.worlds.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional

    until = time.monotonic() + limit_s
    suite, place = load_rates(path), prepared_device(device, 0)
    machine = Machine(device)
    cluster = device_cluster(suite, machine.name)
    known = bool(cluster) or device == "cpu"
    specs = [replace(spec, cluster=cluster) if cluster else spec for spec in suite.problems]
    first = specs[0].problem()
    found = []
    for timed in Rates(place, until).run(list(_probes(suite, specs, place)), SEED):
        line = _line(timed, known, machine.about(first.calibration))
        found.append(line)
        append_line(out, line)
    between = gap(found, first.cost.stack.gap_s if known else None)
    if between is not None:
        append_line(out, between)


ALIKE = ("what", "implementation", "dtype", "shape", "work", "unit", "clock", "predicted_s")
"""Fields that a line takes from its probe."""


def _line(timed: "Timed", same_device: bool, about: dict[str, Any]) -> Rate:
    """The line of a timed probe; `same_device`: the prediction is of this device."""
    from rematbench.measure.torch.repeats import spread_of  # noqa: PLC0415  # torch is optional

    fields: dict[str, Any] = {name: getattr(timed.probe, name) for name in ALIKE} | about
    fields |= {"status": timed.status, "reason": timed.reason}
    fields |= {} if same_device else {"predicted_s": None}
    if timed.seconds:
        seconds = timed.seconds
        fields |= {"n": len(seconds), "median_s": statistics.median(seconds)}
        fields |= {"min_s": min(seconds), "max_s": max(seconds)}
        fields |= {"spread": spread_of(seconds) if len(seconds) > 1 else None}
    return Rate(**fields)


def gap(rates: Sequence[Rate], predicted_s: float | None) -> Rate | None:
    """Compute the device's gap between kernels: twice the seconds of a memory-bound kernel, minus
    the seconds of a kernel with twice the bytes.  None if either was not measured."""
    pair = [rate for rate in rates if rate.what == "elementwise" and rate.median_s is not None]
    if len(pair) != 2:
        return None
    one, two = sorted(pair, key=lambda rate: rate.work)
    assert one.median_s is not None
    assert two.median_s is not None
    return Rate(
        what="gap",
        implementation="torch",
        dtype="",
        shape={"of": "two add_"},
        status="ok",
        n=min(one.n, two.n),
        median_s=2 * one.median_s - two.median_s,
        predicted_s=predicted_s,
        gpu=two.gpu,
        provenance=two.provenance,
    )


def device_cluster(suite: RateSuite, device: str) -> str:
    """The suite's first cluster with this device, as torch names it; empty if there is none."""
    return next((name for name in suite.clusters if has_peak_of(load_cluster(name), device)), "")


def _probes(suite: RateSuite, specs: list[NamedProblem], device: Any) -> "Iterator[Probe]":
    from rematbench.measure.torch.probe_calls import (  # noqa: PLC0415
        Place,
        attention_probes,
        layer_probes,
        sustained,
    )
    from rematbench.measure.torch.probe_rates import copy_probes, launch_probes  # noqa: PLC0415

    for spec in specs:
        yield from layer_probes(Place(spec.name, spec.problem(), device), compiled=suite.compiled)
        for length in suite.attention_lengths:
            longer = spec.changed(seq_len=length)
            yield from attention_probes(Place(spec.name, longer.problem(), device))
    first = Place(specs[0].name, specs[0].problem(), device)
    if suite.sustained_s:
        yield from sustained(layer_probes(first, compiled=False), suite.sustained_s)
        own = (probe for probe in attention_probes(first) if probe.implementation == "flash")
        yield from sustained(own, suite.sustained_s)
    for nbytes in suite.copy_bytes:
        yield from copy_probes(first, nbytes, suite.copy_gemm)
    yield from launch_probes(first, suite.copy_bytes[0])
