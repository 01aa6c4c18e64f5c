"""What each rule of the search saves: CPU seconds of six searches with the rule and without it.

Run it on a quiet machine: `./bench run python benchmarks/search_rules.py`.  `--small` runs one
small job and two rules, as a check.  `--jobs` and `--rules` take words of their names.

A rule is taken away by putting in its place what decides nothing: a bound of zero, a plan that may
fit, no traffic.  Rules that only correctness needs are not taken away.  Every search runs in a
process of its own until it proves GAP, or ends without a proof after MOST times the seconds that it
takes with all rules.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import inf
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from rematbench.advise.search import best_first, shard_bounds
from rematbench.advise.search.memory_rules import MemoryRules
from rematbench.advise.search.search_job import SearchJob, SearchRequest
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard
from rematbench.costs.copies import NO_TRAFFIC
from rematbench.inputs.job import Job
from rematbench.inputs.paths import data_dir

GAP, MOST, SHORT_S = 0.02, 4.0, 5.0
"""The gap to prove.  A search without a rule may take MOST times the seconds with all rules, and
SHORT_S in any case."""


def job(cluster: str, gpus: int, seq_len: int, global_batch: int, **others: Any) -> SearchRequest:
    """A search of a Llama 3 8B or of the `model` in `others`."""
    words = {"model": "llama3-8b", "system": "megatron-core", **others}
    request = {name: words.pop(name) for name in ("only", "folders") if name in words}
    spec = Job(cluster=cluster, gpus=gpus, seq_len=seq_len, global_batch=global_batch, **words)
    return SearchRequest(spec=spec, within=GAP, **request)


def jobs() -> dict[str, SearchRequest]:
    """The six searches by name."""
    own = {"folders": (data_dir("config") / "examples",), "only": ("recompute_mlp", "pp_offload")}
    return {
        "deep pipeline": job(
            "h800-80gb", 256, 8192, 256, model="llama-175b", system="megatron-kwai"
        ),
        "one node": job("h100-80gb", 8, 8192, 64),
        "long context": job("h100-80gb", 8, 262_144, 8),
        "tight memory": job("a800-80gb", 32, 8192, 64, model="llama-65b"),
        "a method of one's own": job("a800-80gb", 64, 16_384, 64, model="llama-65b", **own),
        "nothing fits": job("a100-40gb-pcie", 32, 8192, 64, model="llama-65b"),
    }


def no_bytes(self: ShardBounds, candidate: Any, *pieces: int) -> Any:
    """No bytes of a candidate in more pieces."""
    return np.zeros((self.shard.steps(candidate), len(self.shard.choices)))


RULES: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "bytes stored, before a probe": [(MemoryRules, "lacks_bytes", lambda *_: False)],
    "smallest plan of a layout": [(MemoryRules, "may_fit", lambda *_: True)],
    "bound by the schedule": [(ShardBounds, "tight_s", lambda *_: 0.0)],
    "kernels of a shard": [
        (Shard, "kernels_s", property(lambda self: np.zeros(len(self.choices))))
    ],
    "pieces that free nothing": [(MemoryRules, "_is_flat", lambda *_: False)],
    "chord of the bytes in pieces": [(ShardBounds, "in_more_pieces", no_bytes)],
    "traffic beside copies": [(shard_bounds, "lowest_traffic", lambda *_: NO_TRAFFIC)],
    "a simulation early": [(best_first, "AHEAD", 1 << 60)],
}
"""What takes the place of a rule: objects, attributes and substitutes."""


class Cost(NamedTuple):
    """CPU seconds of a search, its gap, its best step in seconds and its simulations."""

    cpu_s: float
    gap: float
    best_s: float
    simulations: int

    def __str__(self) -> str:
        return f"{self.cpu_s:.1f}" if self.gap <= GAP else f"> {self.cpu_s:.1f}"


def searched(name: str, rule: str, most_s: float) -> Cost:
    """The cost of a job without a rule (empty: with all), for at most `most_s` CPU seconds."""
    begun = time.process_time()
    with ExitStack() as stack:
        for thing, attribute, substitute in RULES.get(rule, ()):
            stack.enter_context(patch.object(thing, attribute, substitute))
        search, count = SearchJob(SMALL[name] if name in SMALL else jobs()[name]).search(), 0
        for trial in search.run():
            count += trial is not None
            if search.gap <= GAP or time.process_time() - begun > most_s:
                break
    return Cost(time.process_time() - begun, search.gap, search.best_s, count)


SMALL = {"small": job("a800-80gb", 4, 2048, 8, model="gpt-1.3b", only=("pp_offload",))}


def lines(names: Sequence[str], rules: Sequence[str]) -> Iterator[str]:
    """The table: a line with the seconds of all rules, and one for each rule without it."""
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:

        def costs(rule: str, most: Sequence[float]) -> list[Cost]:
            tasks = [(name, rule, most_s) for name, most_s in zip(names, most, strict=True)]
            return pool.starmap(searched, tasks, chunksize=1)

        yield f"{'without':32}" + "".join(f"{name:>24}" for name in names)
        every = costs("", [inf] * len(names))
        yield f"{'(all rules)':32}" + "".join(f"{one!s:>18} {one.simulations:5}" for one in every)
        most = [max(SHORT_S, MOST * one.cpu_s) for one in every]
        for rule in rules:
            found = costs(rule, most)
            text = "".join(f"{one!s:>18} {one.simulations:5}" for one in found)
            saves = max(1.0 - a.cpu_s / b.cpu_s for a, b in zip(every, found, strict=True))
            slower = max(
                b.best_s / a.best_s for a, b in zip(every, found, strict=True) if a.best_s < inf
            )
            yield f"{rule:32}{text}  saves at most {100 * saves:.0f} %, best step {slower:.4f}"


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jobs", default="")
    parser.add_argument("--rules", default="")
    chosen = parser.parse_args(arguments)
    names = list(SMALL) if chosen.small else [name for name in jobs() if chosen.jobs in name]
    rules = [rule for rule in RULES if chosen.rules in rule][: 2 if chosen.small else None]
    for line in lines(names, rules):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
