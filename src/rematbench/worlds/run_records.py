"""Records of runs: measured numbers of the torch runtime beside the ledger's numbers, and records
of ranks that torchrun or srun started, with the error of the rank that failed first."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.engine.program.program import Program
from rematbench.evaluate.evaluation import RankBytes, program_bytes
from rematbench.evaluate.result import Status
from rematbench.host.declared import flat
from rematbench.host.ranks import (
    RankError,
    error_of_record,
    first_cause,
    read_errors,
    record_status,
    write_error,
)
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.workload import Model
from rematbench.worlds.records.measured import (
    BOUNDS,
    Comparison,
    Measured,
    RankMeasured,
    largest,
    relative,
    whole_norms,
)
from rematbench.worlds.records.record import (
    Record,
    World,
    plan_hash,
    provenance,
    run_spec,
    write_record,
)
from rematbench.worlds.records.suite_cells import Cell

if TYPE_CHECKING:
    from rematbench.worlds.torch.case import RankResult, Result


RUNTIME = "rematbench"
"""The torch runtime's own stack, by its name in config/systems."""
RUNTIME_FIELDS = (
    *("param_bytes", "grad_bytes", "optimizer_bytes", "step_scratch_bytes"),
    *("fused_loss", "loss_in_place", "loss_keeps_logits"),
    *("dummy_gradients", "fresh_gradients"),
)
"""Fields of a problem's stack that the torch runtime replaces by those of its own stack: bytes of
an element of each state, tensors inside the loss and the optimizer step, and buffers in place of
gradients. The activations stay those of the problem's stack."""


def as_executed(problem: Problem) -> Problem:
    """The problem for comparing simulated totals with a run of the torch runtime: activations of
    the problem's stack, states and kernels of the torch runtime."""
    own = flat(load_system(RUNTIME))
    system = with_facts(problem.system, **{name: own[name] for name in RUNTIME_FIELDS})
    if system == problem.system:
        return problem
    return problem.remade(system=system)


def activation_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of activations of all processes of the pipeline rank whose ledger peak is largest (on
    the device or the host). These processes reach their peak at the same time."""
    stages = program_bytes(problem, plan, lower(plan, problem))
    peak = max(max(stage.activation_peak, stage.host_activation_peak) for stage in stages)
    return peak * (problem.layout.gpus // len(stages))


def measured_rank(
    rank: int, result: "RankResult", program: Program, simulated: tuple[RankBytes, ...], steps: int
) -> RankMeasured:
    """The measured bytes of one process, with the ledger bytes of its pipeline rank.
    `offload_bytes` and `recompute_flop` of the result are divided by `steps`."""
    stage = result.place.pp
    expected = list(live_bytes(program.ranks[stage].actions()))
    bytes_of = simulated[stage]
    states = bytes_of.parameter + bytes_of.gradient + bytes_of.optimizer + bytes_of.pools
    return RankMeasured(
        rank=rank,
        pp=stage,
        activation_peak_bytes=result.peak_bytes,
        actions=len(expected),
        differing_actions=sum(
            want != got for want, got in zip(expected, result.bytes_after, strict=True)
        ),
        boundary_peak_bytes=result.device_peak_bytes,
        ledger_boundary_peak_bytes=max(device for device, _ in expected),
        simulated_peak_bytes=bytes_of.device_peak,
        state_bytes=result.state_bytes,
        simulated_state_bytes=states,
        host_peak_bytes=result.host_peak_bytes,
        ledger_host_peak_bytes=max(host for _, host in expected),
        offload_bytes=result.offload_bytes // steps,
        recompute_flop=result.recompute_flop / steps,
        allocated_bytes=result.allocated_bytes,
        reserved_bytes=result.reserved_bytes,
        pinned_bytes=result.pinned_bytes,
        step_s=tuple(result.step_s),
    )


def measured_ranks(
    problem: Problem, plan: Plan, results: list["RankResult"], steps: int, first: int = 0
) -> tuple[RankMeasured, ...]:
    """The measured numbers of processes in rank order, starting with rank `first`."""
    program = lower(plan, problem)
    run = as_executed(problem)
    simulated = program_bytes(run, plan, program if run is problem else lower(plan, run))
    return tuple(
        measured_rank(rank, result, program, simulated, steps)
        for rank, result in enumerate(results, first)
    )


def measured(problem: Problem, plan: Plan, result: "Result") -> Measured:
    return Measured(
        losses=tuple(result.losses),
        gradient_norms=whole_norms(result.gradient_norms),
        ranks=measured_ranks(problem, plan, result.ranks, len(result.losses)),
    )


def compared(problem: Problem, result: "Result", reference: "Result", against: str) -> Comparison:
    """The errors of a run's losses and gradients relative to `reference`, a run of the method named
    `against` on the same batches."""
    pairs = list(zip(result.gradients, reference.gradients, strict=True))
    zero = without_gradient(problem.workload.model)
    errors = [norm_error(got, want, zero) for got, want in pairs]
    losses = list(zip(result.losses, reference.losses, strict=True))
    return Comparison(
        against=against,
        bitwise=result.losses == reference.losses and largest(errors) == 0.0,
        gradient_error=largest(errors),
        loss_error=largest([relative(abs(a - b), abs(b)) for a, b in losses]),
        bound=BOUNDS[problem.workload.precision],
        first_gradient_error=errors[0],
        first_only=problem.workload.precision != "fp64",
    )


def without_gradient(model: Model) -> frozenset[str]:
    """Names of parameters whose exact gradient is zero, so that a computed gradient is only
    rounding. Without RoPE, the bias of the keys adds the same number to all scores of a query, and
    softmax cancels this number."""
    if not model.qkv_bias or model.position == "rope":
        return frozenset()
    return frozenset(f"layers.{layer}.k.bias" for layer in range(model.num_layers))


def norm_error(
    got: dict[str, Any], want: dict[str, Any], zero: frozenset[str] = frozenset()
) -> float:
    """The largest norm-wise relative error of any parameter's gradient, except those in `zero`. The
    denominator is at least 1e-6 of the largest gradient norm, because smaller ones are mostly
    rounding."""
    norms = {name: float(gradient.norm()) for name, gradient in want.items() if name not in zero}
    floor = 1e-6 * max(norms.values())
    return largest(
        [
            relative(float((got[name] - want[name]).norm()), max(norm, floor))
            for name, norm in norms.items()
        ]
    )


def measured_record(
    world: World,
    cell: Cell,
    outcome: tuple[Status, str, Measured | None],
    origin: dict[str, str | tuple[int, ...]],
) -> Record:
    """The record of a traced or executed cell; `origin`: more fields of its provenance."""
    spec = run_spec(cell.problem, cell.method, world, cell.base)
    status, reason, measured = outcome
    plan = cell.plan if isinstance(cell.plan, Plan) else None
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status=status,
        reason=reason,
        plan_hash=plan_hash(cell.problem, plan) if plan else "",
        plan=plan,
        measured=measured,
        provenance=replace(provenance(cell.problem.calibration), **origin),
    )


PATIENCE_S = 2.0
"""Seconds that rank 0, which saw only a broken connection, waits for the failed rank's error."""


def write_rank_record(record: Record, out: Path, rank: int, started: float) -> Record:
    """Write a rank's record to `out` and return it.  A record that is not a failure is written
    unchanged (only rank 0 has such a record).  A failed rank writes its error next to `out`; its
    record gets the error of the rank that failed first, among the errors written since `started`
    (seconds of the epoch).

    Three kinds of failed ranks write the record: rank 0; the rank that failed first, because rank 0
    may see only a broken connection; and any rank if `out` is missing or older than `started`,
    because rank 0 may have been killed.  Other ranks only return their record.
    """
    if record.status not in ("failed", "oom"):
        write_record(record, out)
        return record
    error = error_of_record(record.status, record.reason)
    write_error(out, rank, error)
    cause = _cause(error, out, started, PATIENCE_S if rank == 0 else 0.0)
    status, reason = record_status(cause.status, cause.reason)
    if cause.is_secondhand:
        reason = f"a rank process has ended: {reason}"
    written = replace(record, status=status, reason=reason)
    silent = not out.exists() or out.stat().st_mtime < started
    if rank == 0 or silent or cause == error:
        write_record(written, out)
    return written


def _cause(error: RankError, out: Path, started: float, patience_s: float) -> RankError:
    """The first cause among the errors of the ranks.  Wait up to `patience_s` while all known
    errors only report the end of a peer."""
    until = time.monotonic() + patience_s
    while True:
        cause = first_cause([error, *read_errors(out, started)]) or error
        if not cause.is_secondhand or time.monotonic() >= until:
            return cause
        time.sleep(0.05)
