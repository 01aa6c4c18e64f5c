"""What each replay of a package's memory is worth: the peak with all, and with one left out.

    ./bench run python benchmarks/replays.py [--small]

A replay is a rule of when Megatron-core or DeepSpeed holds bytes that a plan does not say
(docs/baselines.md).  A hundred jobs of each package are drawn by a seed over what it supports:
models of config/, degrees, lengths, recomputation, offloading, one stage of the pipeline; none
needs more than twice the device.  In percent of the peak, states and all: the job that leaving a
replay out moves most, and the median over the package's jobs.  A replay stays where the worst is
more than 2 % or the median more than 0.5 %.  `lines`: of the functions, classes and files that are
there for it alone (- : some lines of others).  `--small`: two jobs of each, to see that it runs.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

from baselines.deepspeed import reducing, stack, whole, zero_peaks
from baselines.megatron_core import offloads
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import RankProgram
from rematbench.evaluate.evaluation import RankBytes, program_bytes
from rematbench.evaluate.outcome import make_problem
from rematbench.plan import Unsupported
from rematbench.plugins.registry import Method
from rematbench.spec.configfile import ConfigError
from rematbench.spec.layout import Layout, LayoutError
from rematbench.spec.load import load_model
from rematbench.spec.paths import data_dir
from rematbench.spec.problemspec import ProblemSpec
from rematbench.worlds.packages.process import policy
from rematbench.worlds.packages.stack import StackProblem, activation_peak, packaged

JOBS, SEED = 100, 21
WORST, MEDIAN = 2.0, 0.5
SMALLEST = 500_000_000
"""Fewest parameters of a drawn model: smaller models of config/ are for tests."""
MODELS = [
    model
    for path in sorted((data_dir("config") / "models").glob("*.yaml"))
    if (model := load_model(path.stem)).parameters >= SMALLEST
]
SUBSETS = {
    "modules": ("core_attn", "layernorm", "mlp"),
    "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
}


class Drawn(NamedTuple):
    """One rank of a drawn job, lowered with the tensors of its package."""

    name: str
    policy: Method
    problem: StackProblem
    rank: RankProgram
    planned: RankBytes

    def peak(self) -> int:
        """Peak device bytes of the rank, states included, by the replays as they are now."""
        live = activation_peak(self.policy, self.problem, self.rank, self.planned)
        return self.planned.device_peak - self.planned.activation_peak + live


def megatron(random: Random) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A random Megatron-core job: (fields of its problem, its layout, settings of its policy)."""
    tp, pp = random.choice([1, 2, 4, 8]), random.choice([1, 1, 2, 4, 8])
    vpp = random.choice([1, 1, 2, 4]) if pp > 1 else 1
    micro_batch, dp = random.choice([1, 1, 2, 4]), random.choice([1, 2, 8])
    count = pp * random.choice([1, 2, 4]) if vpp > 1 else random.choice([1, 2, pp, 2 * pp])
    layout = {
        "tp": tp, "sp": tp > 1 and random.random() < 0.8, "pp": pp, "vpp": vpp,
        "cp": random.choice([1, 1, 1, 2, 4]), "dp": dp, "zero_stage": random.choice([0, 1]),
        "micro_batch": micro_batch, "global_batch": micro_batch * count * dp,
    }  # fmt: skip
    problem = {
        "cluster": "h800-80gb", "system": "megatron-core",
        "attention": random.choice(["flash", "flash", "flash", "unfused"]),
        "precision": random.choice(["bf16", "bf16", "bf16", "fp32"]),
        "seq_len": random.choice([1024, 2048, 4096, 8192, 32768]),
    }  # fmt: skip
    kind = random.choice(["none", "full", "block", "modules", "modules", "offload_modules"])
    settings: dict[str, Any] = {"bias_activation_fusion": random.random() < 0.5}
    if kind in {"full", "block"}:
        settings |= {"recompute": "full", "num_layers": random.choice([1, 1, 2, 4])}
        settings["method"] = "block" if kind == "block" else "uniform"
    elif kind in SUBSETS:
        names = SUBSETS[kind]
        settings[kind] = tuple(random.sample(names, random.randint(1, len(names))))
        settings |= {"recompute": "selective"} if kind == "modules" else {}
    return problem, layout, settings


def deepspeed(random: Random) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A random DeepSpeed job: (fields of its problem, its layout, settings of its policy)."""
    dp, stage = random.choice([1, 2, 8, 8, 16]), random.choice([0, 1, 2, 2, 3, 3, 3])
    ulysses = random.choice([n for n in (1, 1, 2, 8) if n <= dp])
    micro_batch = random.choice([1, 1, 2, 4])
    count = random.choice([1, 1, 2, 3])
    layout = {
        "dp": dp, "ulysses": ulysses, "zero_stage": stage, "micro_batch": micro_batch,
        "global_batch": micro_batch * count * (dp // ulysses),
    }  # fmt: skip
    problem = {
        "cluster": "a800-80gb", "system": "deepspeed", "attention": "flash",
        "precision": random.choice(["bf16", "bf16", "bf16", "fp32"]),
        "seq_len": random.choice([1024, 2048, 4096, 16384, 65536]),
    }  # fmt: skip
    kinds = ["none", "none", "plain", "plain", "partitioned", "cpu", "partitioned_cpu"]
    settings: dict[str, Any] = {"checkpointing": random.choice(kinds)}
    settings["offload_optimizer"] = stage > 0 and random.random() < 0.4
    settings["offload_param"] = stage == 3 and random.random() < 0.3
    settings["overlap_comm"] = stage > 0 and random.random() < 0.3
    for name in ("mlp_tiles", "loss_tiles"):
        settings[name] = random.choice([1, 1, 1, 2, 4])
    return problem, layout, settings


DRAWS = {"megatron_core": megatron, "deepspeed": deepspeed}


def drawn(baseline: str, count: int) -> list[Drawn]:
    """The first `count` jobs of the seed that the package supports."""
    random = Random(SEED)
    found: list[Drawn] = []
    while len(found) < count:
        model = random.choice(MODELS)
        problem, layout, settings = DRAWS[baseline](random)
        place = random.random()
        method = policy(baseline, settings)
        try:
            asked = make_problem(ProblemSpec.at(Layout(**layout), model=model, **problem))
        except (LayoutError, ConfigError):
            continue
        here = packaged(method, asked)
        plan = method.plan(here)
        if isinstance(plan, Unsupported) or not isinstance(here, StackProblem):
            continue
        program = lower(plan, here)
        stage = min(int(place * (asked.layout.pp + 2)), asked.layout.pp - 1)
        planned = program_bytes(here, plan, program)[stage]
        one = Drawn(model.name, method.methods[0], here, program.ranks[stage], planned)
        if one.peak() <= 2 * asked.usable_bytes:
            found.append(one)
    return found


class Replay(NamedTuple):
    """A replay of a package.  `instead`: the patches (object, attribute, value) that switch it off;
    `sources`: functions, classes and modules that only this replay needs."""

    baseline: str
    name: str
    instead: tuple[tuple[Any, str, Any], ...]
    sources: tuple[Any, ...] = ()

    def moves(self, jobs: Sequence[Drawn], whole: Sequence[int]) -> list[float]:
        """Percent of its peak by which each job's peak changes without the replay."""
        with ExitStack() as stack:
            for owner, name, value in self.instead:
                stack.enter_context(mock.patch.object(owner, name, value))
            return [100 * (job.peak() / peak - 1) for job, peak in zip(jobs, whole, strict=True)]

    def row(self, jobs: Sequence[Drawn], whole: Sequence[int]) -> str:
        """The replay's line of the table."""
        found = self.moves(jobs, whole)
        worst, middle = max(found, key=abs), median(map(abs, found))
        lines = sum(len(inspect.getsourcelines(source)[0]) for source in self.sources)
        keeps = "keep" if abs(worst) > WORST or middle > MEDIAN else "delete"
        moved = sum(move != 0 for move in found)
        words = f"{self.baseline:<14}{self.name:<42}{moved:>5}{worst:>+9.2f}{middle:>10.2f}"
        return f"{words}{lines or '-':>7}  {keeps}"


def megatron_replays() -> tuple[Replay, ...]:
    """The replays of baselines/megatron_core/offloads.py."""
    groups = offloads.Groups
    still = offloads, "Groups", lambda _, rank: groups({}, rank)
    found = (
        ("groups of offloaded tensors", (still,), (groups,)),
        ("offloading: what views hold leaves", ((offloads, "VIEWED", ("no",)),), ()),
        ("loss made in the logits' storage", ((offloads, "MADE_IN", {}),), ()),
    )
    return tuple(Replay("megatron_core", *one) for one in found)


def _nothing(*_: Any, **__: Any) -> None:
    """A stand-in for a replay's function: it does nothing."""


def deepspeed_replays() -> tuple[Replay, ...]:
    """The replays of baselines/deepspeed/zero_peaks.py: activations, whole weights, gradients."""
    sizes = stack._sizes
    once = stack, "_sizes", lambda *known: sizes(*known)._replace(remade=False)

    def release(self: Any, weight: Any) -> None:
        if weight.offset in self._groups and self._last[weight.offset] < self._at:
            del self._groups[weight.offset]
            self._there -= weight.elements
            self.elements -= weight.elements

    class Planned(whole.Whole):
        module = release = _nothing

    every = (whole, "Whole", Planned), (zero_peaks, "OWN", (".gradients",))
    kind = whole.Whole
    found = (
        ("tiles are made again, one at a time", (once,), ()),
        ("whole weights, not the plan's", every, (whole,)),
        ("whole weights: fetched ahead", ((kind, "_ahead", _nothing),), (kind._ahead,)),
        ("whole weights: copied out of a buffer", ((kind, "_wait", _nothing),), (kind._wait,)),
        ("whole weights: kept for their next use", ((kind, "release", release),), ()),
    )
    return (*(Replay("deepspeed", *one) for one in found), *gradient_replays())


class Unseen:
    """A stand-in for a replay of gradients: it holds no gradient."""

    held, last = 0, True
    gradient = end = _nothing

    def __init__(self, *_: Any) -> None:
        """Take the arguments of any job and ignore them."""


def gradient_replays() -> tuple[Replay, ...]:
    """The replays of baselines/deepspeed/reducing.py."""
    red = reducing

    def summed(self: Any) -> list[int]:
        return [self._copied(sum(weight.elements for weight in self.filled), 2)]

    def ended(self: Any) -> None:
        if self.last:
            self.held, self._kept = 0, {}

    def untied(self: Any, weight: Any, *, more: bool = False) -> None:
        self.see(self._size(weight))
        self.made(weight, more=more)

    def scattered(self: Any, beside: int) -> None:
        self.see(beside)
        for weight in self.filled:
            self.let(weight)
        self.filled = []

    planned = (
        (red, "reducer", Unseen),
        (zero_peaks, "OWN", (".parameters",)),
        (stack, "made_on_the_way", lambda *_: 0),
    )
    first, parted, third = red.Zero0, red.Zero2, red.Zero3
    leaving = third, "_leaving", lambda *_: 0
    found = (
        ("gradients, not the plan's", planned, (red,)),
        ("ZeRO 0: summed in copies", ((first, "end", ended),), (first.end,)),
        ("ZeRO 0 to 2: the copy", ((first, "_copied", lambda *_: 0),), (first._copied,)),
        ("tied: waits for the embedding's", ((first, "gradient", untied),), ()),
        ("ZeRO 1: not as ZeRO 2", ((red, "Zero1", parted),), (red.Zero1,)),
        ("ZeRO 1, 2: buckets", ((parted, "buckets", _nothing),), (parted.buckets,)),
        ("ZeRO 1, 2: slices by rank", ((parted, "_summed", summed),), (parted._summed,)),
        ("ZeRO 3: copies", ((third, "reduce", scattered),), (third.reduce,)),
        ("ZeRO 3: a part leaves for the host", (leaving,), (third._leaving,)),
        ("norm in fp64 of what leaves", ((red, "NORM", 0),), ()),
    )
    return tuple(Replay("deepspeed", *one) for one in found)


def main() -> None:
    """Print a line for each replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="two jobs of each package")
    count = 2 if parser.parse_args().small else JOBS
    names = f"{'package':<14}{'replay':<42}{'moved':>5}{'worst %':>9}{'median %':>10}{'lines':>7}\n"
    sys.stdout.write(names)
    for replays in (megatron_replays(), deepspeed_replays()):
        jobs = drawn(replays[0].baseline, count)
        whole = [job.peak() for job in jobs]
        for replay in replays:
            sys.stdout.write(f"{replay.row(jobs, whole)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
