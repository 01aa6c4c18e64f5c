"""Worker processes with a limit of CPU seconds per task.

Workers are forked from a server process that has imported their modules: a new worker imports
nothing, and no thread or lock of the calling process is copied.  The limit counts CPU seconds, so
that a busy machine does not change which tasks finish.  A solver may ignore signals, so the kernel
ends its process (RLIMIT_CPU), and a new process takes over.
"""

import gc
import math
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Start = Callable[..., Callable[[Any], Any]]
NoAnswer = Literal["late", "died"]


_CONTEXT = multiprocessing.get_context("forkserver")


def start_server(module: str) -> None:
    """Start the fork server, which imports `module` (where the workers' `start` is defined), unless
    a server runs already.  Call it early so that the import overlaps with the caller's work."""
    with _no_main():
        _CONTEXT.set_forkserver_preload([module])
        ensure_running()


class _Worker(Generic[T]):
    """One worker process, the connection to it, and its current task."""

    def __init__(self, start: Start, args: tuple[Any, ...], limit_s: int) -> None:
        start_server(start.__module__)
        self.connection, other = _CONTEXT.Pipe()
        self.process: ForkServerProcess = _CONTEXT.Process(
            target=_serve, args=(other, start, args, limit_s), daemon=True
        )
        with _no_main():
            self.process.start()
        other.close()
        self.task: T | None = None

    def give(self, task: T) -> None:
        self.task = task
        self.connection.send(task)

    def end(self) -> NoAnswer:
        """End the process if it still runs.  Return `late` if the kernel ended it at its CPU limit,
        otherwise `died`."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        return "late" if self.process.exitcode == -signal.SIGXCPU else "died"


@contextmanager
def _no_main() -> Iterator[None]:
    """Hide the main module, because a new process would import it and so run the user's script or
    the command line a second time."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(connection: Connection, start: Start, args: tuple[Any, ...], limit_s: int) -> None:
    """The main loop of a worker process: answer tasks until the parent closes the connection."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would leave a core file
    try:
        work = start(*args)
        while True:
            task = connection.recv()
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            soft = math.ceil(time.process_time() + limit_s)
            if hard != resource.RLIM_INFINITY:
                soft = min(soft, hard)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            connection.send(work(task))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


# Why: docs/decisions/host.md, How do worker processes start?
class Pool(Generic[T, R]):
    """Up to `processes` workers.  In each worker, `start(*args)` runs once and returns the function
    that answers tasks."""

    def __init__(self, processes: int, start: Start, args: tuple[Any, ...], limit_s: int) -> None:
        self.processes = processes
        self._start, self._args, self._limit_s = start, args, limit_s
        self.waiting: list[T] = []
        self._workers: list[_Worker[T]] = []

    def add(self, tasks: Iterable[T]) -> None:
        """Append tasks to the queue; allowed while `run` yields."""
        self.waiting.extend(tasks)

    def begin(self) -> None:
        """Hand out tasks without waiting for answers, so that several pools work at once."""
        self._hand_out()

    def run(self) -> Iterator[tuple[T, R | NoAnswer]]:
        """Yield (task, answer) in order of completion; the answer of a task whose process ended is
        `late` or `died`.  Processes stay ready for further tasks until `close`."""
        try:
            while self.waiting or self._busy():
                self._hand_out()
                for connection in wait([w.connection for w in self._busy()]):
                    yield self._answer(next(w for w in self._workers if w.connection is connection))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _busy(self) -> list[_Worker[T]]:
        return [worker for worker in self._workers if worker.task is not None]

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while self.waiting:
            if not idle:
                if len(self._workers) >= self.processes:
                    return
                self._workers.append(_Worker(self._start, self._args, self._limit_s))
                idle.append(self._workers[-1])
            idle.pop().give(self.waiting.pop(0))

    def _answer(self, worker: _Worker[T]) -> tuple[T, R | NoAnswer]:
        task = worker.task
        assert task is not None
        worker.task = None
        try:
            answer: R = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.process.join()
            return task, worker.end()
        return task, answer


def collect_rarely() -> None:
    """Make garbage collections rare.  Lowered programs are large and have no reference cycles, so a
    scan frees nothing, and scans would take a quarter to a half of a command's time."""
    gc.set_threshold(10_000_000, 50, 50)


def lost_reason(why: NoAnswer, limit_s: int) -> str:
    """Why a worker returned no plan within `limit_s` CPU seconds, for a table."""
    if why == "died":
        return "the worker process died"
    return f"planning took more than {limit_s} CPU seconds (raise --limit)"
