"""Rates of one device: the probes of the operator tables, copies, and the host's issue times."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from rematbench.costs.bind import CopyDirection
from rematbench.costs.copies import CopyTraffic
from rematbench.costs.operators.kernels import Elementwise, Gemm
from rematbench.host.memory import free_bytes
from rematbench.measure.torch.probe_calls import Place, Probe
from rematbench.measure.torch.repeats import Call, Repeats
from rematbench.worlds.torch.case import failure
from rematbench.worlds.torch.devices import pin_requested_size, release_pinned
from rematbench.worlds.torch.storages import host_bytes
from rematbench.worlds.torch.streams import Streams, make_streams

PROBE_S = 2.5
"""Seconds of repeats of one probe, at most (a repeat that has begun ends)."""
LONG_FLOP = 5e13
"""FLOP of a call, from which on it is long: a tenth of a second on a GPU of 2022."""
NODES = 256
HOST_CALLS = 300
"""Calls of a host's sample: fewer than the launches that wait in a GPU's queue."""
LACKING = ("No available kernel", "No viable backend")
"""Texts of torch's errors where an attention backend is not for this device or shape."""
COPIES: tuple[CopyDirection, CopyDirection] = ("d2h", "h2d")
BOTH = CopyTraffic(1.0, 0.0, 0.0, 0.0)


def copy_probes(place: Place, nbytes: int, width: int) -> Iterator[Probe]:
    """Yield the probes of pinned copies (each way, both ways, and both during square products of
    `width`), and of the allocation of pinned memory."""
    cost, pinned = place.problem.cost, int(place.device.type == "cuda")
    alone = {name: cost.copy_s(nbytes, name) for name in COPIES}
    both = max(cost.copy_s(nbytes, name, BOTH) for name in COPIES)
    one = cost.kernel_s(Gemm(width, width, width), "forward")
    many = max(1, round(both / one))
    shape = {"nbytes": str(nbytes), "pinned": str(pinned)}
    gemms = {"gemms": str(many), "m": str(width), "n": str(width), "k": str(width)}
    asked: list[tuple[str, tuple[str, ...], float]] = [
        ("memcpy_d2h", ("d2h",), alone["d2h"]),
        ("memcpy_h2d", ("h2d",), alone["h2d"]),
        ("memcpy_bidirectional", COPIES, both),
        ("overlap", ("compute",), many * one),
        ("overlap", (*COPIES, "compute"), max(many * one, both)),
    ]
    for what, streams, predicted_s in asked:
        products_shape = gemms | {"streams": "+".join(streams)} if "compute" in streams else {}
        moved = 0.0 if products_shape else float(nbytes * len(streams))
        yield Probe(
            what=what,
            implementation="torch",
            dtype="",
            shape=shape | products_shape,
            make=partial(_copying, place, nbytes, width, many, streams),
            work=moved,
            unit="bytes" if moved else "",
            predicted_s=predicted_s,
        )
    yield Probe(
        what="pinned_allocation",
        implementation="torch",
        dtype="",
        shape=shape,
        make=partial(_pinning, place, nbytes),
        work=float(nbytes),
        unit="bytes",
        clock="host",
    )


def _copying(place: Place, nbytes: int, width: int, products: int, names: tuple[str, ...]) -> Call:
    """The named kinds of work at once, one stream per kind."""
    device, streams = place.device, make_streams(place.device)
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in COPIES]
    there = [host_bytes(nbytes, pinned=device.type == "cuda") for _ in COPIES]
    a = place.random(width, width)
    work: dict[str, Call] = {
        "d2h": partial(there[0].copy_, here[0], non_blocking=True),
        "h2d": partial(here[1].copy_, there[1], non_blocking=True),
        "compute": lambda: a @ a,
    }
    times = {name: products if name == "compute" else 1 for name in names}
    return partial(at_once, streams, work, times)


def at_once(streams: Streams, work: Mapping[str, Call], times: Mapping[str, int]) -> None:
    """Issue pieces of work, one stream per kind; `times` is the number of calls of each kind."""
    streams.begin()
    for name, count in times.items():
        with streams.on(name):
            for _ in range(count):
                work[name]()
    streams.flush()


def _pinning(place: Place, nbytes: int) -> Call:
    """Allocate pinned memory and release it."""
    cuda = place.device.type == "cuda"
    if cuda:
        pin_requested_size()

    def run() -> None:
        host_bytes(nbytes, pinned=cuda)
        if cuda:
            release_pinned()

    return run


def launch_probes(place: Place, nbytes: int) -> Iterator[Probe]:
    """Yield the probes of two memory-bound kernels, one with twice the bytes of the other, and of
    the host's time to issue an operator, a node of the backward, and a copy."""
    cost = place.problem.cost
    common: dict[str, Any] = {"implementation": "torch", "dtype": "fp32"}
    for size in (nbytes, 2 * nbytes):
        yield Probe(
            what="elementwise",
            shape={"op": "add_", "nbytes": str(size)},
            make=partial(_adding, place, size),
            work=2.0 * size,
            unit="bytes",
            predicted_s=cost.kernel_s(Elementwise(2 * size), "forward"),
            **common,
        )
    for word, per in (("operator", 1), ("autograd_node", NODES), ("copy", 1)):
        yield Probe(
            what="host_issue",
            shape={"of": word},
            make=partial(_issuing, place, word),
            per=per,
            clock="host",
            predicted_s=cost.host_launch_s,
            **common,
        )


def _adding(place: Place, nbytes: int) -> Call:
    x = torch.zeros(nbytes // 4, device=place.device)
    return lambda: x.add_(1.0)


def _issuing(place: Place, word: str) -> Call:
    x = torch.ones(16, device=place.device, requires_grad=word == "autograd_node")
    if word == "operator":
        return lambda: x + x
    if word == "copy":
        there = host_bytes(64, pinned=place.device.type == "cuda").view(torch.float32)
        return lambda: there.copy_(x, non_blocking=True)
    y = x
    for _ in range(NODES):
        y = y * 1.0
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


def _late(probe: Probe) -> tuple[bool, ...]:
    """The order of probes."""
    return (probe.unit == "flop" and probe.work > LONG_FLOP, probe.for_s > 0.0, probe.compiled)


class Timed(NamedTuple):
    """How a probe ended, and the seconds of each repeat; `reason` explains missing seconds."""

    probe: Probe
    status: Literal["ok", "skipped", "failed"]
    reason: str = ""
    seconds: tuple[float, ...] = ()


class Rates:
    """Times probes one after another, in a random order."""

    def __init__(self, device: torch.device, until: float) -> None:
        """`until`: the monotonic time at which the last probe begins."""
        self.device, self.until = device, until
        self.repeats = Repeats(device)

    def run(self, probes: Sequence[Probe], seed: int) -> Iterator[Timed]:
        """Yield every probe with its seconds.  Short calls come first, then compiled calls, calls
        repeated without a pause (they heat the device), and long calls, so that few are missing
        when the time ends."""
        order = list(probes)
        random.Random(seed).shuffle(order)
        for probe in sorted(order, key=_late):
            yield self.rate(probe)

    def rate(self, probe: Probe) -> Timed:
        """One probe.  A probe that does not run on this device is `skipped` or `failed`."""
        missing = self._missing(probe)
        if missing:
            return Timed(probe, "skipped", missing)
        try:
            found = self._times(probe)
        except Exception as error:
            status, reason = failure(error)
            lacking = status == "oom" or any(words in reason for words in LACKING)
            short = " ".join(reason.split()).split(". ")[0][:200]
            return Timed(probe, "skipped" if lacking else "failed", short)
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return Timed(probe, "ok", "", tuple(seconds / probe.per for seconds in found))

    def _missing(self, probe: Probe) -> str:
        if time.monotonic() >= self.until:
            return "no time was left"
        cuda = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if cuda else free_bytes()
        if probe.room_bytes > free >= 0:
            return f"needs {probe.room_bytes / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        return ""

    def _times(self, probe: Probe) -> list[float]:
        call = probe.make()
        call()  # compiles, and fills caches, outside of the time for repeats
        self.repeats.wait()
        until = min(self.until, time.monotonic() + PROBE_S)
        if probe.for_s and self.device.type == "cuda":
            return self.repeats.of_busy_device(call, probe.for_s)
        if probe.clock == "host":
            calls = 1 if probe.per > 1 or probe.unit else HOST_CALLS
            return self.repeats.of_host(call, calls, until)
        return self.repeats.of_device(call, until)
