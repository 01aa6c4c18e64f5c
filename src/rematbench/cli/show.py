"""Output of a run: on a terminal the verdict, speed, bytes per rank, freed bytes; and as JSON."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict
from rich.console import Console, RenderableType
from rich.table import Table

from rematbench import __version__
from rematbench.cli.options import Request
from rematbench.cli.rank_table import freed_bytes, stages
from rematbench.costs.flops import megatron_flop_per_token, model_flop_per_token, over_peak
from rematbench.costs.operators.memory import table_traffic
from rematbench.costs.tiles import untiled
from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.breakdown import host_wait_s
from rematbench.evaluate.evaluation import PlanEvaluation, fullest_rank, has_exact_pins
from rematbench.evaluate.problems import faster_attention, leaner_exchanges
from rematbench.evaluate.proof import Proof
from rematbench.evaluate.result import SPEEDS, Band, Result, assumed
from rematbench.evaluate.verdict import Retries
from rematbench.evidence.bands import inside_shares
from rematbench.evidence.peaks import ABOUT, about, in_words, left_free, total_is_checked, trains_in
from rematbench.host.console import gib, percent, plain, print_uncut, rounded, seconds, worded
from rematbench.inputs.stackfacts import other_versions
from rematbench.problem import Problem
from rematbench.solve.memory_plan import BEST_FIT_TENSORS, is_placeable

HOST_SHARE = 0.01
"""Waits for the host are printed if they take at least this share of the step."""
MOST_NOTES = 3
"""The number of notes that are printed without --notes."""
UNTIMED = "their time is not modelled, and may be several times the step"
FRAGMENTS = (
    "fragmentation may exhaust memory late in the step (the verdict replays only the start of a "
    "step: twice the passes before the peak, and two more)"
)
BANNERS = {
    "ok": "FITS",
    "fragmented": "FITS, FRAGMENTED",
    "dropping": "FITS IF TOKENS ARE DROPPED",
    "oom": "OUT OF MEMORY",
    "unsupported": "UNSUPPORTED",
    "failed": "FAILED",
}


def show(
    out: Console,
    request: Request,
    result: Result,
    keep_all: PlanEvaluation | None = None,
    *,
    every: bool = False,
) -> None:
    """Print a run: verdict, speed with its band, bytes with their margin, bytes by rank, and notes
    (`every`: all of them).  `keep_all`: the evaluation of that method on the same problem (None:
    not compared)."""
    for line in (*heading(request.problem), method_line(request)):
        out.print(plain(line))
    out.print()
    out.print(plain(banner(result)), style="bold")
    evaluation = result.evaluation
    if result.proof is not None:
        out.print(plain(proved(result.proof)))
    if evaluation is None:
        return
    for line in answer(result, evaluation, keep_all):
        out.print(plain(line))
    out.print()
    print_uncut(out, stages(result, evaluation, keep_all))
    out.print()
    if every and not evaluation.not_timed:
        out.print(speeds(result, evaluation))
        out.print()
    say_notes(out, run_notes(request, result, evaluation), every=every)


def say_notes(out: Console, lines: Sequence[str], *, every: bool) -> None:
    """Print notes, the most important of which come first: all, or three and the number of the
    others."""
    shown = lines if every else lines[:MOST_NOTES]
    for text in shown:
        out.print(plain(text))
    if more := len(lines) - len(shown):
        out.print(plain(f"{more} more note{'s' * (more > 1)}: --notes"))


def as_json(request: Request, result: Result) -> dict[str, Any]:
    """The JSON of a run: a result with its band and retries.  Values are null where there is no
    plan to evaluate."""
    evaluation, verdict = result.evaluation, result.verdict
    values: dict[str, Any] = {key: getattr(result.timed, key, None) for key in SPEEDS}
    peaks = evaluation.peak_device_bytes if evaluation else None
    values["peak_device_bytes"] = peaks and {"per_rank": list(peaks), "max": max(peaks)}
    values["peak_host_bytes"] = max(evaluation.peak_host_bytes) if evaluation else None
    values["recompute_flop"] = evaluation.recompute_flop if evaluation else None
    values["offload_bytes"] = evaluation.offload_bytes if evaluation else None
    values["parameters"] = {**request.method.parameters, **(result.plan.fit if result.plan else {})}
    values["reserved_bytes"] = result.reserved_bytes
    values["device_total_bytes"] = result.device_total_bytes
    values["device_total_checked"] = total_is_checked(request.problem)
    values["headroom_bytes"] = verdict.headroom_bytes if verdict else None
    values["fits"] = result.fit if verdict else None
    values["band"] = _band_values(result)
    values["binds"] = verdict.binds if verdict else None
    values["allocator_retries"] = asdict(result.retries) if result.retries else None
    values["job"] = {"method": request.method.name, **result.job.facts()}
    values["run_with"] = request.run_with
    if lines := untiled_of(request.problem):
        values["does_not_tile"] = list(lines)
    if result.not_timed:
        values["not_timed"] = result.not_timed
    if result.proof is not None:
        values["proof"] = asdict(result.proof)
    return {**values, "status": result.status, "reason": result.reason}


def _band_values(result: Result) -> dict[str, Any] | None:
    """The ends of a band in tokens/s/GPU, and the job's properties outside of published rows."""
    if result.band is None or result.error_band is None:
        return None
    low, high = result.band
    return {"low": low, "high": high, "outside": list(result.error_band.outside)}


def proved(proof: Proof) -> str:
    """The facts that `--check` has proved, in one sentence."""
    return (
        f"proved safe: {proof.actions:,} actions of {proof.ranks} pipeline "
        f"rank{'s' * (proof.ranks != 1)}; each of {proof.allocations:,} storages is freed "
        f"exactly once, after its last read; {proof.reads:,} reads come after their write, for "
        f"any duration of actions ({proof.waits:,} waits); no gradient is used after its "
        "reduction, no weight after its update; no deadlock"
    )


def heading(problem: Problem) -> list[str]:
    """Lines with model and devices, with the layout, and with the assumed kernels and constants."""
    lay, work, cluster = problem.layout, problem.workload, problem.cluster
    sp = " (sp)" if lay.sequence_parallel else ""
    both = f" x {lay.tp_columns}" if lay.tp_columns > 1 else ""
    ulysses = f" (of which ulysses {lay.ulysses})" if lay.ulysses > 1 else ""
    shards = f" over {lay.shard_degree} ranks" if lay.shard_degree else ""
    experts = f"  ep {lay.ep}  etp {lay.expert_tp}" if work.model.experts else ""
    layers, chunks = work.model.num_layers, lay.num_chunks
    uneven = f" | {layers} layers are no multiple of pp x vpp = {chunks}" if layers % chunks else ""
    stages = f" | stages {lay.stages}" if lay.stages else uneven
    batches = lay.num_micro_batches
    return [
        f"{work.model.name}, {work.seq_len:,} tokens{_packed(problem)}, {work.numbers}, on "
        f"{lay.gpus} x {cluster.gpu} ({cluster.name}), stack {problem.system.name}; simulated",
        f"tp {lay.tp}{both}{sp}  cp {lay.cp}  pp {lay.pp}  vpp {lay.vpp}  dp {lay.dp}{ulysses}"
        f"{experts}  zero {lay.zero_stage}{shards} | micro-batch {lay.micro_batch}, global batch "
        f"{lay.global_batch}, {batches} micro-batch{'es' if batches > 1 else ''} | attention "
        f"{problem.attention}{stages}",
        f"assumes: {assumed(problem)}",
    ]


def job_notes(problem: Problem) -> list[str]:
    """Notes on a job: sizes that kernels round up, faster kernels, the stack's version and other
    versions."""
    faster, leaner = faster_attention(problem), leaner_exchanges(problem)
    others = ", ".join(other_versions(problem.system.name))
    more = f"; other versions: {others} (`rematbench systems NAME`)" if others else ""
    notes = (
        *(f"does not tile: {line}" for line in untiled_of(problem)),
        _table_note(problem),
        f"{faster} (--attention, if the stack has it)" if faster else "",
        leaner,
        f"stack {problem.system.name}: {problem.system.version}{more}",
    )
    return [note for note in notes if note]


def _table_note(problem: Problem) -> str:
    """A note on memory layers: the bytes that a dense update moves for rows that no token reads."""
    given = problem.workload.model.memory
    if given is None:
        return ""
    every, idle = table_traffic(problem.workload, problem.layout, problem.system.states)
    return (
        f"memory layers: a token reads {given.picked} of {given.rows:,} rows in each; a step's "
        f"dense update of the table moves {gib(every)} GiB, at most {gib(every - idle)} GiB of it "
        "for rows that some token reads; its time is not published"
    )


def untiled_of(problem: Problem) -> tuple[str, ...]:
    """What the problem's kernels round up, a sentence each; none for a CPU."""
    if nominal(problem) or problem.untimed:
        return ()
    fused = problem.attention == "flash"
    return untiled(problem.workload, problem.layout, problem.system, fused_attention=fused)


def _packed(problem: Problem) -> str:
    """Words on the documents of a sequence, or on samples of differing lengths; else empty."""
    if mean := problem.workload.sample_len:
        return f" at most ({mean:,} on average over all samples)"
    whole = "" if problem.attention == "flash" else " (the kernel computes the whole square)"
    packing = problem.workload.packing
    return f"{packing}, attention inside each{whole}" if packing else ""


def method_line(request: Request) -> str:
    """The method with the parameters that were typed."""
    typed = [word for word in request.settings if word != "--set"]
    return f"method {request.method.name}" + (f" ({', '.join(typed)})" if typed else "")


def settings_line(request: Request) -> str:
    """All parameters of the method; empty if it has none."""
    named = [
        f"{key}={worded(value)}"
        for method in request.method.parameters.values()
        for key, value in method.items()
        if value is not None
    ]
    return f"parameters: {', '.join(named)}" if named else ""


def banner(result: Result) -> str:
    """The run's verdict in one line, with the reason if its time is not modelled."""
    word, why = BANNERS[result.status], f" ({result.not_timed})" if result.not_timed else ""
    if not result.fits or result.verdict is None or result.evaluation is None:
        return f"{word}: {result.reason}{why}"
    peaks = result.evaluation.peak_device_bytes
    rank = peaks.index(max(peaks))
    spare = gib(result.verdict.headroom_bytes)
    retried = result.retries and result.retries.per_step
    word = "FITS, TIGHT" if result.fit == "tight" else word
    word = f"{word}, THE ALLOCATOR RETRIES" if retried else word
    return f"{word}: {spare} GiB of headroom on the fullest rank ({rank}){why}"


def speeds(result: Result, evaluation: PlanEvaluation) -> RenderableType:
    """A table of further ratios to the peak FLOP/s (MFU, HFU), and of the costs of the method."""
    problem = result.problem
    work = problem.workload
    tokens = problem.layout.global_batch * work.seq_len
    flop = tokens * model_flop_per_token(work)
    again = evaluation.recompute_flop
    inside = " (inside documents)" if work.packed else ""
    table = Table.grid(padding=(0, 2))
    rows = [
        ("MFU, dense attention", f"{percent(evaluation.mfu_dense)}{inside}"),
        ("HFU (recompute counted)", percent(evaluation.hfu)),
        ("recomputed", f"{percent(again / flop)} of the model's FLOP"),
        ("offloaded", f"{evaluation.offload_bytes / 2**40:.3f} TiB per step, all ranks"),
    ]
    notes = result.plan.fit if result.plan else {}
    rows += [("waits for the host", percent(share)) for share in _host_shares(result)]
    rows += [("plan", f"{key}: {worded(value)}") for key, value in notes.items()]
    for name, value in rows:
        table.add_row(name, plain(value))
    return table


def _megatron_tflop(problem: Problem, rate: float) -> str:
    """TFLOP/s per GPU in Megatron's formula, with half and with all of the attention matrix."""
    work = problem.workload
    vocab = problem.system.padded_vocab(work.model.vocab, problem.layout.tp)
    half, whole = (
        rate * megatron_flop_per_token(work.model, work.seq_len, vocab, causal=causal) / 1e12
        for causal in (True, False)
    )
    return f"{half:.1f} (older versions, which count all of attention: {whole:.1f})"


def _host_shares(result: Result) -> list[float]:
    """Share of the step that devices wait for hosts; empty below HOST_SHARE or without a plan."""
    plan, problem, step_s = result.plan, result.problem, result.step_s
    if plan is None or step_s is None:
        return []
    program = lower(plan, problem)
    share = host_wait_s(action_seconds(problem, program), program, step_s) / step_s
    return [share] if share > HOST_SHARE else []


def nominal(problem: Problem) -> list[str]:
    """A warning on CPU clusters, where seconds mean nothing."""
    if problem.cluster.generation != "cpu":
        return []
    return ["the times mean nothing: a CPU cluster is only for tests"]


def answer(
    result: Result, evaluation: PlanEvaluation, keep_all: PlanEvaluation | None
) -> list[str]:
    """Lines with the speed and its band, device and host bytes, and what the plan frees."""
    problem, reserved = result.problem, evaluation.reserved_bytes
    peak, total = max(evaluation.peak_device_bytes), result.device_total_bytes or 0
    host, room = evaluation.host_node_bytes, problem.cost.host_room_bytes
    margin = "" if nominal(problem) else f"; margin {in_words(ABOUT, trains_in(problem))}"
    memory = (
        f"device memory, fullest rank: {gib(peak)} GiB allocated, {gib(reserved)} reserved, "
        f"{gib(total)} in all of {gib(problem.room_bytes)}{margin}"
    )
    pinned = f"host memory: {gib(host)} of {gib(room)} GiB a node" if host else ""
    lines = (*speed_lines(result), memory, pinned, _freed_line(evaluation, keep_all))
    return [line for line in lines if line]


def speed_lines(result: Result) -> list[str]:
    """A line for each of the step, the speed with its 80 % band, and the MFU; none if the time is
    not modelled."""
    evaluation, (low, high) = result.timed, result.band or (0.0, 0.0)
    if evaluation is None:
        return []
    band = f" ({rounded(low)} to {rounded(high)}, 80 % band)" if low else ""
    band = "" if nominal(result.problem) else band
    rate = evaluation.tokens_per_s_per_gpu
    rows = (
        ("step", seconds(evaluation.step_s)),
        ("tokens/s/GPU", f"{rounded(rate)}{band}"),
        ("MFU, causal attention", percent(evaluation.mfu_causal)),
        ("TFLOP/s/GPU, Megatron's", _megatron_tflop(result.problem, rate)),
    )
    above = [] if result.fits else ["with enough memory:"]
    return [*above, *(f"{name:<23}  {value}" for name, value in rows)]


def run_notes(request: Request, result: Result, evaluation: PlanEvaluation) -> list[str]:
    problem, band = result.problem, result.error_band
    why = over_peak(evaluation.mfu_causal, evaluation.mfu_dense)
    timed = not evaluation.not_timed and not nominal(problem)
    exact = result.plan is not None and has_exact_pins(problem.system, result.plan)
    pins = "in buffers of exact size" if exact else "in blocks of powers of two"
    notes = (
        *nominal(problem),
        *retried(result.retries),
        *([tight_line()] if result.fit == "tight" else ()),
        *(trust(band)[::-1] if band and timed else ()),
        *about(problem),
        f"MFU {why}" if why else "",
        *job_notes(problem),
        settings_line(request),
        f"device memory: the CUDA context and communicators are added to the reserved bytes, of "
        f"which {gib(evaluation.reserved_bytes - max(evaluation.peak_device_bytes))} GiB are "
        f"fragmentation ({_segments(result)}); bytes of ranks are allocated bytes in issue order",
        f"host memory: activations are pinned {pins}; {gib(problem.cluster.host_bytes)} GiB are "
        "installed",
        world_line(problem),
    )
    return [note for note in notes if note]


def world_line(problem: Problem) -> str:
    """The world of the numbers, and the versions of rematbench and of its constants."""
    constants = f"constants of {problem.calibration.date}"
    return f"world: simulated (rematbench {__version__}, {constants})"


def retried(retries: Retries | None) -> list[str]:
    """A line on the allocator's retries in a step, and whether they fail; empty without retries."""
    if retries is None or not retries.per_step:
        return []
    count = f"{retries.per_step:,} allocator retr{'y' if retries.per_step == 1 else 'ies'}"
    if retries.fails:
        return [f"{count} in a step, and the last retry fails: {FRAGMENTS}"]
    return [f"{count} a step ({UNTIMED})"]


def _segments(result: Result) -> str:
    """What the reserved bytes follow from: planned addresses, or the segments of torch's
    allocator."""
    plan, problem, evaluation = result.plan, result.problem, result.evaluation
    segments = "expandable" if problem.system.states.expandable_segments else "default"
    if plan is None or plan.addresses != "planned":
        return f"{segments} segments"
    rank = fullest_rank(evaluation.ranks) if evaluation else 0
    if is_placeable(lower(plan, problem).ranks[rank]):
        return "planned addresses"
    more = f"addresses not planned: more than {BEST_FIT_TENSORS:,} tensors"
    return f"{segments} segments, not the plan's addresses: {more}"


def tight_line() -> str:
    """A note that explains the verdict `tight`."""
    free = f"what tuned plans leave free ({left_free()} of the device total)"
    return f"tight: fits, but the headroom is below {free} or below the bytes that no total counts"


def covers() -> str:
    """The shares of published rows inside the bands learnt from the other sources, in words."""
    sources, rows = (f"{100 * share:.0f} %" for share in inside_shares())
    return f"inside: {sources} of rows if each source weighs 1, {rows} if each row does"


def trust(band: Band) -> list[str]:
    """Lines on the uncertainty of a speed."""
    learnt = (
        f"{band.sources} sources of equal weight, each predicted with constants fitted without it "
        f"({covers()})"
    )
    if band.other_generation:
        learnt = f"{band.sources} sources predicted with the kernels of another GPU generation"
        learnt = learnt if band.sources else "no row (our choice for a GPU without published rates)"
    if band.open_cause:
        learnt = "published steps of such jobs, whose cause is not known"
    if not band.sources and not band.other_generation:
        learnt = (
            "the stack's calibration rows, or of published stacks calibrated on as many rows if "
            "that band is wider"
        )
    return [
        f"80 % band of the speed: +-{percent(band.half_width)}, from errors of {learnt}",
        f"evidence: {band.evidence}",
    ]


def _freed_line(evaluation: PlanEvaluation, keep_all: PlanEvaluation | None) -> str:
    if keep_all is None:
        return "freed against keep_all: not compared"
    before, after = max(keep_all.peak_device_bytes), max(evaluation.peak_device_bytes)
    slower = f", step {100 * (evaluation.step_s / keep_all.step_s - 1):+.1f} %"
    slower = "" if evaluation.not_timed or keep_all.not_timed else slower
    if not any(freed_bytes(evaluation, keep_all)):
        return "freed against keep_all: nothing; this policy has no effect on this problem"
    return (
        f"freed against keep_all: {gib(before - after)} GiB of the largest peak "
        f"({gib(before)} -> {gib(after)}){slower}"
    )
