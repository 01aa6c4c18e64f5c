"""Output of `search --find`: each value tried, and the answer."""

from collections.abc import Iterator
from typing import get_args

from msgspec import Struct
from rich.console import Console
from typer import Exit

from rematbench.advise.search.limits import not_searched
from rematbench.advise.search.questions import (
    Answer,
    Question,
    fewest_gpus,
    largest_batch,
    largest_rank,
    longest_context,
    min_memory,
    widest_base,
)
from rematbench.advise.search.request import Rounds, SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.cli.search_output import where
from rematbench.evaluate.result import Result
from rematbench.host.console import CommandError, plain
from rematbench.host.table import GIB
from rematbench.inputs.configfile import require_among
from rematbench.workload import Work

UNITS = {"gpus": "GPUs", "context": "tokens", "batch": "sequences a step", "memory": "GiB"}
UNITS |= {"rank": "columns per adapter", "base": "bits per frozen weight"}
ANY_FIT = ("context", "rank", "base")
"""Questions for which a plan only has to fit, however long its step is."""


class Inverse(Struct, frozen=True, kw_only=True):
    """An inverse question: the quantity to find, and its target, which is the tokens per second of
    all GPUs, the seconds of a step, or the share of the best speed that may be lost."""

    find: str
    speed: float
    step: float
    lose: float

    def check(self, work: Work) -> None:
        """CommandError for an unknown quantity, or a target that is missing."""
        require_among([self.find], get_args(Question), ("", "--find", "quantity"))
        if self.find in ("rank", "base") and not work.partly:
            raise CommandError(f"--find {self.find}: every weight trains, so give --lora-rank")
        if self.find == "gpus" and self.speed <= 0:
            raise CommandError("--find gpus: give the tokens/s of all GPUs with --speed")
        if self.find == "batch" and self.step <= 0:
            raise CommandError("--find batch: give the seconds of a step with --step")


def ask(out: Console, job: SearchJob, inverse: Inverse, run: Rounds) -> None:
    """Print each value as soon as it is tried, then what was left out and the answer; after Ctrl-C,
    the best so far and exit code 130."""
    request = job.request
    best: Answer | None = None
    ended = False
    try:
        for answer in _answers(request, inverse, run):
            out.print(plain(_line(inverse.find, answer)), soft_wrap=True)
            best = answer if answer[1] else best
        ended = True
    except KeyboardInterrupt:
        out.print(plain("stopped: the answer is not proved"))
    out.print(plain(f"not tried: {'; '.join(not_searched(job))}"), soft_wrap=True)
    if best is not None:
        word = "ANSWER" if ended else "best so far"
        out.print(plain(f"{word}: {_line(inverse.find, best)}"), style="bold", soft_wrap=True)
    elif ended:
        ends = {"context": "length of --seq-len", "rank": "smallest rank", "base": "fewest bits"}
        end = ends.get(inverse.find)
        none = f"NOTHING FITS, even at the {end}" if end else "NO PLAN reaches the target"
        out.print(plain(none), style="bold")
    if not ended:
        raise Exit(130)


def _answers(request: SearchRequest, inverse: Inverse, run: Rounds) -> Iterator[Answer]:
    match inverse.find:
        case "gpus":
            return fewest_gpus(request, inverse.speed, run)
        case "batch":
            return largest_batch(request, inverse.step, run)
        case "context":
            return longest_context(request, run)
        case "rank":
            return largest_rank(request, run)
        case "base":
            return widest_base(request, run)
    return min_memory(request, inverse.lose, run)


def _line(find: str, answer: Answer) -> str:
    number, result = answer
    value = f"{number / GIB:.1f}" if find == "memory" else f"{number:,}"
    unit = "GPU" if value == "1" and find == "gpus" else UNITS[find]
    none = "no plan fits" if find in ANY_FIT else "no plan reaches the target"
    return f"{value} {unit}: {in_words(result) if result else none}"


def in_words(result: Result) -> str:
    """A plan, its layout and its step time in one line."""
    return f"{result.method} at {where(result)}, step {result.fitting_s:.4g} s"
