"""AdamW on states in host memory, on a thread of its own beside the thread that issues actions."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from rematbench.engine.program.action import HOST_UPDATE
from rematbench.worlds.torch.parameters import HostShard, Parameter
from rematbench.worlds.torch.storages import ExecutionError
from rematbench.worlds.torch.streams import Mark, Streams


class Underway(NamedTuple):
    """An update under way, for readers of the weights to wait on."""

    future: Future[None]

    def wait(self) -> None:
        """Hold the calling thread until the update is done; raise the update's error."""
        self.future.result()


class HostUpdates:
    """Runs updates one by one on one thread, each once the events before it are complete."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pool: ThreadPoolExecutor | None = None
        self.latest: Underway | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start an update once everything issued so far on its stream is done."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix=HOST_UPDATE)
        before = self.streams.mark(HOST_UPDATE)

        def run() -> None:
            self.streams.reach(before)
            work()

        self.latest = Underway(self.pool.submit(run))

    def attach(self, mark: Mark) -> None:
        """Make an event complete only when the latest update is done."""
        if self.latest is not None:
            mark.works.append(self.latest)


def gradients_down(parameters: Iterable[Parameter], streams: Streams, stream: str) -> None:
    """Copy this rank's shards of the gradients to the host memory that the update reads."""
    for parameter in parameters:
        here, there = parameter.grad_flat[parameter.start : parameter.stop], _host(parameter).grad
        streams.run(stream, _copy(there, here))


def weights_up(parameters: Iterable[Parameter], streams: Streams, stream: str) -> None:
    """Copy the updated shards of the weights to the device."""
    for parameter in parameters:
        here, there = parameter.flat[parameter.start : parameter.stop], _host(parameter).value
        streams.run(stream, _copy(here, there))


def _copy(to: Tensor, given: Tensor) -> Callable[[], Tensor]:
    return lambda: to.copy_(given, non_blocking=True)


def _host(parameter: Parameter) -> HostShard:
    if parameter.host is None:
        raise ExecutionError(f"{parameter.spec.name} has no states in host memory")
    return parameter.host
