"""The verdict on memory: whether a plan fits a device and a node's host memory."""

from msgspec import Struct
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import PlanEvaluation, RankBytes, fullest_rank
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, replayed
from rematbench.plan import Plan
from rematbench.problem import Problem


class Verdict(Struct, frozen=True, kw_only=True):
    """Whether a plan fits.  `headroom_bytes`: usable minus needed device bytes on the fullest rank
    (negative: out of memory).  `binds` names the memory that is short, otherwise "nothing".
    `expandable`: the plan does not fit with the segments of its stack, but would fit with
    expandable segments (False: it would not, or this was not examined)."""

    fits: bool
    headroom_bytes: int
    host_headroom_bytes: int
    binds: str
    expandable: bool = False

    @property
    def short_bytes(self) -> dict[str, int]:
        """Missing bytes by place (device, host); empty if the plan fits."""
        rest = {"device": self.headroom_bytes, "host": self.host_headroom_bytes}
        return {place: -nbytes for place, nbytes in rest.items() if nbytes < 0}


class Retries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often cudaMalloc is retried in a training step.  `fails`: whether the last retry failed
    too."""

    per_step: int = 0
    fails: bool = False


def retries(problem: Problem, plan: Plan, evaluation: PlanEvaluation) -> Retries | None:
    """Return the allocator retries of the fullest rank in the second of two whole training steps,
    because the first step begins with an empty cache.  None if no allocator was modelled.  The
    seconds of a retry are not modelled."""
    if evaluation.pressed is None:
        return None
    if not evaluation.pressed and not only_fragmented(problem, plan, evaluation):
        return Retries()
    rank, program = fullest_rank(evaluation.ranks), lower(plan, problem)
    held = evaluation.ranks[rank]
    found = replayed(program, rank, held, problem.usable_bytes, whole=True)
    return Retries(per_step=found.retries, fails=found.oom_at is not None)


def only_fragmented(problem: Problem, plan: Plan, evaluation: PlanEvaluation) -> bool:
    """Return whether a plan exceeds the device only by its allocator's fragmentation: the fullest
    rank's allocated bytes fit, and so do the bytes that expandable segments reserve."""
    usable, rank = problem.usable_bytes, fullest_rank(evaluation.ranks)
    held = evaluation.ranks[rank]
    if evaluation.pressed is None or not evaluation.reserved_bytes > usable >= held.device_peak:
        return False
    lowered = SINGLE_EVALUATOR.lowered(problem, plan)
    if lowered.program.expandable or lowered.placed_bytes or lowered.ranks[rank] != held:
        return False
    expandable = replace(lowered.program, expandable=True)
    return replayed(expandable, rank, held, usable).oom_at is None


def judge(problem: Problem, evaluation: PlanEvaluation) -> Verdict:
    """Return the verdict on device and host memory for a plan's evaluation."""
    held, pinned = evaluation.reserved_bytes, evaluation.host_node_bytes
    return judged(problem, evaluation.ranks, held, pinned)


def judged(
    problem: Problem, ranks: tuple[RankBytes, ...], reserved_bytes: int, host_node_bytes: int
) -> Verdict:
    """Return the verdict on device and host memory: whether the bytes that the fullest rank
    reserves fit the usable bytes of a device, and whether a node's pinned bytes fit the host memory
    that is free for them."""
    rank = fullest_rank(ranks)
    device = problem.usable_bytes - reserved_bytes
    host = problem.cost.host_room_bytes - host_node_bytes
    short = []
    if device < 0:
        short.append(f"device memory of pipeline rank {rank}: {_gib(-device)} GiB short")
    if host < 0:
        short.append(f"host memory of a node: {_gib(-host)} GiB short")
    return Verdict(
        fits=not short,
        headroom_bytes=device,
        host_headroom_bytes=host,
        binds="; ".join(short) or "nothing",
    )


GRAPH_BYTES = {False: 4 * 10**9, True: 10**10}
"""Bytes that the CUDA graph of an iteration takes without (False) and with a pipeline: "a few GB"
and "over 10 GB" (Megatron-Bridge, docs/training/cuda-graphs.md).  Nobody has published the bytes of
a job, so no total counts them, and whether a plan with less headroom fits is unknown."""


def unknown_bytes(problem: Problem) -> int:
    """The device bytes that a job may need and that no prediction includes."""
    graph = problem.system.kernels.captures_iteration
    return GRAPH_BYTES[problem.layout.pp > 1] if graph else 0


def graphs(problem: Problem) -> str:
    """What CUDA graphs capture, and the bytes that no total counts; empty without graphs."""
    if not problem.system.kernels.captures:
        return ""
    gb = unknown_bytes(problem) / 1e9
    held = f" ({gb:g} GB or more, which no total counts)" if gb else ""
    return f"{problem.system.kernels.cuda_graphs}{held}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
