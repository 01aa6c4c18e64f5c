"""The part `rates` of `measure-gpu`: rates of kernels, copies and the host on one device."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rematbench.packages.process import Device
from rematbench.runs.gpu_lines import append_line
from rematbench.runs.suite import NamedProblem, Suite, read_suite
from rematbench.spec.load import load_cluster
from rematbench.workload import PositiveInt
from rematbench.worlds.machine import Machine
from rematbench.worlds.speed import has_peak_of

if TYPE_CHECKING:
    from rematbench.torch.probes import Probe

SEED = 7


class RateSuite(Suite, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems whose kernels are timed.  `clusters`: of these, the one that has the device predicts
    (none: nothing is predicted).  Attention runs at each of `attention_lengths`; copies have
    `copy_bytes`; the square products beside them, `copy_gemm`; `compiled`: also by torch.compile.
    """

    clusters: tuple[str, ...] = ()
    attention_lengths: tuple[PositiveInt, ...]
    copy_bytes: tuple[PositiveInt, ...]
    copy_gemm: PositiveInt
    compiled: bool = True


def load_rates(path: Path) -> RateSuite:
    """The suite of a file; ConfigError in one line for what it does not allow."""
    return read_suite(path, RateSuite)


def measure_rates(path: Path, out: Path, device: Device, limit_s: float) -> None:
    """Time every probe of the suite `path` within `limit_s` seconds; a line of `out` for each."""
    from rematbench.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional
    from rematbench.torch.rates import Rates, gap  # noqa: PLC0415

    until = time.monotonic() + limit_s
    suite, place = load_rates(path), prepared_device(device, 0)
    machine = Machine(device)
    cluster = device_cluster(suite, machine.name)
    known = bool(cluster) or device == "cpu"
    specs = [replace(spec, cluster=cluster) if cluster else spec for spec in suite.problems]
    first = specs[0].problem()
    rates = Rates(place, until, lambda: machine.about(first.calibration))
    found = []
    for rate in rates.run(list(_probes(suite, specs, place)), SEED):
        found.append(rate if known else replace(rate, predicted_s=None))
        append_line(out, found[-1])
    between = gap(found, first.cost.stack.gap_s if known else None)
    if between is not None:
        append_line(out, between)


def device_cluster(suite: RateSuite, device: str) -> str:
    """The suite's first cluster that has this device, as torch names it; empty if none has."""
    return next((name for name in suite.clusters if has_peak_of(load_cluster(name), device)), "")


def _probes(suite: RateSuite, specs: list[NamedProblem], device: Any) -> "Iterator[Probe]":
    from rematbench.torch.probes import Place, attention_probes, layer_probes  # noqa: PLC0415
    from rematbench.torch.rates import copy_probes, launch_probes  # noqa: PLC0415

    for spec in specs:
        yield from layer_probes(Place(spec.name, spec.problem(), device), compiled=suite.compiled)
        for length in suite.attention_lengths:
            longer = replace(spec, seq_len=length)
            yield from attention_probes(Place(spec.name, longer.problem(), device))
    first = Place(specs[0].name, specs[0].problem(), device)
    for nbytes in suite.copy_bytes:
        yield from copy_probes(first, nbytes, suite.copy_gemm)
    yield from launch_probes(first, suite.copy_bytes[0])
