"""Output of a run on a terminal: the verdict, then speed, bytes per rank, freed bytes."""

from rich.console import Console, RenderableType
from rich.table import Table

from rematbench import __version__
from rematbench.cli.options import Request
from rematbench.cli.result import ShownRun, fits, retries_of, shown_band
from rematbench.costs.flops import model_flop_per_token
from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.band import Band
from rematbench.evaluate.breakdown import host_wait_s
from rematbench.evaluate.evaluation import PlanEvaluation, RankBytes, fullest_rank
from rematbench.evaluate.job import assumed, faster_attention
from rematbench.evaluate.proof import Proof
from rematbench.evaluate.verdict import Retries
from rematbench.evidence.bands import peak_band
from rematbench.host.console import gib, grid, percent, plain, rounded, seconds, show_whole
from rematbench.problem import Problem
from rematbench.solve.memory_plan import FEW_TENSORS, placed

HOST_SHARE = 0.01
"""The least share of a step spent waiting for the host that is printed."""
UNTIMED = "their time is not modelled"
FRAGMENTS = (
    "fragments of a whole step may not fit (the verdict knows them only as far as two passes after "
    "twice the way to the peak)"
)
BANNERS = {
    "ok": "FITS",
    "oom": "OUT OF MEMORY",
    "unsupported": "UNSUPPORTED",
    "failed": "FAILED",
}


def show(out: Console, shown: ShownRun) -> None:
    """Print a run and its outcome."""
    for line in heading(shown.request):
        out.print(plain(line))
    out.print()
    out.print(plain(banner(shown)), style="bold")
    evaluation = shown.outcome.evaluation
    if shown.outcome.proof is not None:
        out.print(plain(proved(shown.outcome.proof)))
    if evaluation is None:
        return
    if not evaluation.not_timed:
        out.print()
        if shown.outcome.status == "oom":
            out.print(plain("with enough memory it would take:"))
        out.print(speeds(shown, evaluation))
    out.print()
    show_whole(out, stages(shown, evaluation))
    out.print()
    for line in footer(shown, evaluation):
        out.print(plain(line))


def proved(proof: Proof) -> str:
    """The facts that `--check` has proved, in one sentence."""
    return (
        f"proved safe: {proof.actions:,} actions of {proof.ranks} pipeline "
        f"rank{'s' * (proof.ranks != 1)}; each of "
        f"{proof.allocations:,} storages is freed once, after its last reader, and none is left; "
        f"{proof.reads:,} reads come after what they read is made, whatever streams take "
        f"({proof.waits:,} waits); no gradient after its reduction, no weight after its update; no "
        "deadlock"
    )


def heading(request: Request) -> list[str]:
    """Lines with model and devices, layout, assumed kernels and constants, and last the method."""
    problem = request.problem
    lay, work, cluster = problem.layout, problem.workload, problem.cluster
    sp = " (sp)" if lay.sequence_parallel else ""
    ulysses = f" (of it ulysses {lay.ulysses})" if lay.ulysses > 1 else ""
    faster = faster_attention(problem)
    return [
        f"{work.model.name}, {work.seq_len:,} tokens, {work.precision}, on {lay.gpus} x "
        f"{cluster.gpu} ({cluster.name}), stack {problem.system.name}",
        f"tp {lay.tp}{sp}  cp {lay.cp}  pp {lay.pp}  vpp {lay.vpp}  dp {lay.dp}{ulysses}  zero "
        f"{lay.zero_stage} | micro-batch {lay.micro_batch}, global batch {lay.global_batch}, "
        f"{lay.num_micro_batches} micro-batches | attention {problem.attention}",
        f"assumes: {assumed(problem)}",
        *([f"{faster} (--attention, if the stack has it)"] if faster else []),
        f"method {request.method.name}{_typed(request)}",
    ]


def _typed(request: Request) -> str:
    named = [
        f"{key}={value}"
        for method in request.method.parameters.values()
        for key, value in method.items()
        if value is not None
    ]
    return f" ({', '.join(named)})" if named else ""


def banner(shown: ShownRun) -> str:
    """The run's verdict in one line."""
    outcome = shown.outcome
    word = BANNERS[outcome.status]
    if outcome.status != "ok" or outcome.verdict is None or outcome.evaluation is None:
        return f"{word}: {outcome.reason}"
    peaks = outcome.evaluation.peak_device_bytes
    rank = peaks.index(max(peaks))
    spare = gib(outcome.verdict.headroom_bytes)
    tight = "FITS, TIGHT" if fits(shown) == "tight" else word
    return f"{tight}: {spare} GiB of headroom on the fullest rank ({rank})"


def speeds(shown: ShownRun, evaluation: PlanEvaluation) -> RenderableType:
    """A table of step time, tokens/s/GPU, both MFUs, HFU, and the costs of the method."""
    problem = shown.request.problem
    tokens = problem.layout.global_batch * problem.workload.seq_len
    flop = tokens * model_flop_per_token(problem.workload.model, problem.workload.seq_len)
    again = evaluation.recompute_flop
    table = Table.grid(padding=(0, 2))
    speed, band = evaluation.tokens_per_s_per_gpu, shown_band(shown)
    between = f" ({rounded(band.low(speed))} to {rounded(band.high(speed))})"
    rows = [
        ("step", seconds(evaluation.step_s)),
        ("tokens/s/GPU", rounded(speed) + between * (not nominal(problem))),
        ("MFU, causal attention", percent(evaluation.mfu_causal)),
        ("MFU, dense attention", percent(evaluation.mfu_dense)),
        ("HFU (recompute counted)", percent(evaluation.hfu)),
        ("recomputed", f"{percent(again / flop)} of the model's FLOP"),
        ("offloaded", f"{evaluation.offload_bytes / 2**40:.3f} TiB per step, all ranks"),
    ]
    plan = shown.outcome.plan
    rows += [("waits for the host", percent(share)) for share in _host_shares(problem, shown)]
    rows += [("plan", f"{key}: {value}") for key, value in (plan.fit if plan else {}).items()]
    for name, value in rows:
        table.add_row(name, plain(value))
    return table


def _host_shares(problem: Problem, shown: ShownRun) -> list[float]:
    """Share of the step that devices wait for hosts; empty below HOST_SHARE or without a plan."""
    plan, evaluation = shown.outcome.plan, shown.outcome.evaluation
    if plan is None or evaluation is None:
        return []
    step_s = evaluation.step_s
    program = lower(plan, problem)
    share = host_wait_s(action_seconds(problem, program), program, step_s) / step_s
    return [share] if share > HOST_SHARE else []


def stages(shown: ShownRun, evaluation: PlanEvaluation) -> Table:
    """A table of the peak bytes of every pipeline rank, and the bytes left of the device."""
    usable = shown.request.problem.usable_bytes
    table = grid(
        "rank (GiB)",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "staging",
        "peak",
        "unallocated",
        "freed",
        "pinned host",
    )
    for first, last in runs(evaluation, shown.keep_all):
        rank = evaluation.ranks[first]
        freed = freed_bytes(shown, first)
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            *(gib(value) for value in _parts(rank)),
            gib(rank.device_peak),
            gib(usable - rank.device_peak),
            "-" if freed is None else gib(freed),
            gib(rank.host_peak),
        )
    return table


def runs(evaluation: PlanEvaluation, other: PlanEvaluation | None) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbouring ranks with equal cells in the table."""

    def look(rank: int) -> tuple[object, ...]:
        beside = other.ranks[rank].device_peak if other else 0
        here = evaluation.ranks[rank]
        return (*_parts(here), here.host_peak, beside)

    found: list[tuple[int, int]] = []
    for rank in range(len(evaluation.ranks)):
        if found and look(found[-1][1]) == look(rank):
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def _parts(rank: RankBytes) -> tuple[int, ...]:
    return (rank.parameter, rank.gradient, rank.optimizer, rank.activation_peak, rank.pools)


def freed_bytes(shown: ShownRun, rank: int) -> int | None:
    """Device bytes of a rank that keep_all needs and this plan does not; None if unknown."""
    if shown.keep_all is None or shown.outcome.evaluation is None:
        return None
    before = shown.keep_all.ranks[rank].device_peak
    return before - shown.outcome.evaluation.ranks[rank].device_peak


def nominal(problem: Problem) -> list[str]:
    """A warning on CPU clusters, where seconds mean nothing."""
    if problem.cluster.generation != "cpu":
        return []
    return ["times are nominal: a CPU cluster is for tests, never for performance"]


def footer(shown: ShownRun, evaluation: PlanEvaluation) -> list[str]:
    """Lines on the allocator, host bytes per node, freed bytes, and the source of the numbers."""
    problem = shown.request.problem
    host, room = evaluation.host_node_bytes, problem.cost.host_room_bytes
    reserved, peak = evaluation.reserved_bytes, max(evaluation.peak_device_bytes)
    usable = problem.usable_bytes
    return [
        f"allocator, fullest rank: {gib(reserved)} GiB reserved of {gib(usable)} usable, "
        f"{gib(peak)} allocated (fragmentation {gib(reserved - peak)}; {_segments(shown)})",
        *retried(retries_of(shown)),
        f"host memory per node: {gib(host)} GiB pinned at the peak, in torch's blocks, of "
        f"{gib(room)} that the system leaves of {gib(problem.cluster.host_bytes)}",
        _freed_line(shown, evaluation),
        *([] if evaluation.not_timed else nominal(problem) or _trust(shown)),
        f"world: simulated (rematbench {__version__}, constants of "
        f"{problem.calibration.date}); stage bytes are allocated bytes in issue order",
    ]


def retried(found: Retries | None) -> list[str]:
    """A line on the allocator's retries in a step, and whether they fail; empty without retries."""
    if found is None or not found.per_step:
        return []
    count = f"{found.per_step:,} allocator retr{'y' if found.per_step == 1 else 'ies'}"
    if found.fails:
        return [f"{count} in a step, the last of which fails too: {FRAGMENTS}"]
    return [f"{count} a step ({UNTIMED})"]


def _segments(shown: ShownRun) -> str:
    """Whose bytes the reserved ones are: of planned addresses, or of the framework's allocator."""
    plan, problem = shown.outcome.plan, shown.request.problem
    segments = "expandable" if problem.system.expandable_segments else "default"
    if plan is None or plan.addresses != "planned":
        return f"{segments} segments"
    evaluation = shown.outcome.evaluation
    rank = fullest_rank(evaluation.ranks) if evaluation else 0
    if placed(lower(plan, problem).ranks[rank]):
        return "planned addresses"
    more = f"more than {FEW_TENSORS:,} tensors, which are not placed here"
    return f"{segments} segments, not the plan's addresses: {more}"


def _trust(shown: ShownRun) -> list[str]:
    lines = trust(shown_band(shown))
    if shown.outcome.status == "ok" and fits(shown) == "tight":
        lines.append(
            f"tight: published peaks lie up to {percent(peak_band())} above predicted ones (80 %)"
        )
    return lines


def trust(band: Band) -> list[str]:
    """Lines on the uncertainty of a speed."""
    learnt = f"{band.sources} sources whose rows no constant had seen"
    if not band.sources:
        learnt = "its own calibrating rows, or published stacks calibrated on as few (the wider)"
    return [
        f"80 % band of the speed: +-{percent(band.half_width)}, from errors of {learnt}",
        f"evidence: {band.evidence}",
    ]


def _freed_line(shown: ShownRun, evaluation: PlanEvaluation) -> str:
    if shown.keep_all is None:
        return "freed against keep_all: not compared"
    before, after = max(shown.keep_all.peak_device_bytes), max(evaluation.peak_device_bytes)
    freed = [freed_bytes(shown, rank) for rank in range(len(evaluation.ranks))]
    slower = f", step {100 * (evaluation.step_s / shown.keep_all.step_s - 1):+.1f} %"
    slower = "" if evaluation.not_timed or shown.keep_all.not_timed else slower
    if not any(freed):
        return "freed against keep_all: nothing; this policy is a no-op here"
    return (
        f"freed against keep_all: {gib(before - after)} GiB of the largest peak "
        f"({gib(before)} -> {gib(after)}){slower}"
    )
