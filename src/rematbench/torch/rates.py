"""Rates of one device: the probes of the operator tables, copies, and the host's issue times."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from rematbench.cost.copies import Crowd
from rematbench.cost.kernels import Elementwise, Gemm
from rematbench.host.memory import free_bytes
from rematbench.torch.devices import empty_pinned, pin_exactly
from rematbench.torch.failures import failure
from rematbench.torch.memory import host_bytes
from rematbench.torch.probes import Place, Probe
from rematbench.torch.repeats import Call, Repeats
from rematbench.torch.streams import make_streams

PROBE_S = 2.5
"""Seconds of repeats of one probe, at most (a repeat that has begun ends)."""
NODES = 256
HOST_CALLS = 300
"""Calls of a host's sample: fewer than the launches that wait in a GPU's queue."""
LACKING = ("No available kernel", "No viable backend")
"""Texts of torch's errors where an attention backend is not for this device or shape."""
BOTH = Crowd(1.0, 0.0, 0.0, 0.0)


def copy_probes(place: Place, nbytes: int, width: int) -> Iterator[Probe]:
    """Pinned copies each way, both ways, and both beside square products of `width`; and making
    pinned memory."""
    cost, device = place.problem.cost, place.device
    streams = make_streams(device)
    shape = {"nbytes": str(nbytes), "pinned": str(int(device.type == "cuda"))}

    def make(*names: str, products: int = 0) -> Call:
        here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        there = [host_bytes(nbytes, pinned=device.type == "cuda") for _ in range(2)]
        a = place.random(width, width) if products else torch.empty(0)
        work: dict[str, Call] = {
            "d2h": partial(there[0].copy_, here[0], non_blocking=True),
            "h2d": partial(here[1].copy_, there[1], non_blocking=True),
            "compute": lambda: [a @ a for _ in range(products)],
        }

        def run() -> None:
            streams.begin()
            for name in names:
                with streams.on(name):
                    work[name]()
            streams.flush()

        return run

    alone = {"d2h": cost.copy_s(nbytes, "d2h"), "h2d": cost.copy_s(nbytes, "h2d")}
    both = max(cost.copy_s(nbytes, "d2h", BOTH), cost.copy_s(nbytes, "h2d", BOTH))
    one = cost.kernel_s(Gemm(width, width, width), "forward")
    many = max(1, round(both / one))
    common: dict[str, Any] = {"dtype": "", "implementation": "torch"}
    for name, seconds in alone.items():
        yield Probe(
            what=f"memcpy_{name}", shape=shape, make=partial(make, name), work=float(nbytes),
            unit="bytes", predicted_s=seconds, **common,
        )  # fmt: skip
    yield Probe(
        what="memcpy_bidirectional", shape=shape, make=partial(make, "d2h", "h2d"),
        work=2.0 * nbytes, unit="bytes", predicted_s=both, **common,
    )  # fmt: skip
    beside = shape | {"gemms": str(many), "m": str(width), "n": str(width), "k": str(width)}
    for names in (("compute",), ("d2h", "h2d", "compute")):
        yield Probe(
            what="overlap", shape=beside | {"streams": "+".join(names)},
            make=partial(make, *names, products=many),
            predicted_s=max(many * one, both if len(names) > 1 else 0.0), **common,
        )  # fmt: skip

    def pin() -> Call:
        pin_exactly()

        def run() -> None:
            host_bytes(nbytes, pinned=device.type == "cuda")
            if device.type == "cuda":
                empty_pinned()

        return run

    yield Probe(
        what="pinned_allocation", shape=shape, make=pin, work=float(nbytes), unit="bytes",
        clock="host", **common,
    )  # fmt: skip


def launch_probes(place: Place, nbytes: int) -> Iterator[Probe]:
    """Two memory-bound kernels, one of twice the bytes; the host's time to issue an operator, a
    node of the backward, and a copy."""
    cost, device = place.problem.cost, place.device
    launch_s = cost.host_launch_s
    tiny = partial(torch.ones, 16, device=device)

    def adding(size: int) -> Call:
        x = torch.zeros(size // 4, device=device)
        return lambda: x.add_(1.0)

    def operator() -> Call:
        x = tiny()
        return lambda: x + x

    def nodes() -> Call:
        x = tiny(requires_grad=True)
        y = x
        for _ in range(NODES):
            y = y * 1.0
        grad = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)

    def copy() -> Call:
        x, y = tiny(), host_bytes(64, pinned=device.type == "cuda").view(torch.float32)
        return lambda: y.copy_(x, non_blocking=True)

    for size in (nbytes, 2 * nbytes):
        yield Probe(
            what="elementwise", implementation="torch", dtype="fp32",
            shape={"op": "add_", "nbytes": str(size)}, make=partial(adding, size),
            work=2.0 * size, unit="bytes",
            predicted_s=cost.kernel_s(Elementwise(2 * size), "forward"),
        )  # fmt: skip
    hosts: tuple[tuple[str, Callable[[], Call], int], ...] = (
        ("operator", operator, 1), ("autograd_node", nodes, NODES), ("copy", copy, 1),
    )  # fmt: skip
    for word, make, per in hosts:
        yield Probe(
            what="host_issue", implementation="torch", dtype="fp32", shape={"of": word},
            make=make, per=per, clock="host", predicted_s=launch_s,
        )  # fmt: skip


class Timed(NamedTuple):
    """How a probe ended, and the seconds of each repeat; `reason` says why there are none."""

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
        """Every probe with its seconds; what waits for torch's compiler comes last."""
        order = list(probes)
        random.Random(seed).shuffle(order)
        for probe in sorted(order, key=lambda probe: probe.compiled):
            yield self.rate(probe)

    def rate(self, probe: Probe) -> Timed:
        """One probe.  What does not run here is `skipped` or `failed`."""
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
        until = min(self.until, time.monotonic() + PROBE_S)
        if probe.clock == "host":
            calls = 1 if probe.per > 1 or probe.unit else HOST_CALLS
            return self.repeats.of_host(call, calls, until)
        return self.repeats.of_device(call, until)
