"""What the torch runtime saw -> the numbers of a record, beside the ledgers."""

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rematbench.choose.outcome import Status
from rematbench.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.program.ledger import live_bytes
from rematbench.program.program import Program
from rematbench.runs.cell import Cell
from rematbench.runs.measured import (
    BOUNDS,
    Comparison,
    Measured,
    RankMeasured,
    largest,
    relative,
    whole_norms,
)
from rematbench.runs.record import Record, World, plan_hash, provenance, run_spec
from rematbench.simulate.evaluate import RankBytes, program_bytes
from rematbench.spec.load import load_system
from rematbench.workload import Model

if TYPE_CHECKING:
    from rematbench.torch.case import RankResult, Result


RUNTIME = "rematbench"
"""The torch runtime's own stack, in config/systems."""
OWN = (
    *("param_bytes", "grad_bytes", "optimizer_bytes", "step_scratch_bytes"),
    *("fused_loss", "loss_in_place", "loss_keeps_logits"),
)
"""Facts of a stack that the torch runtime does not take from it: the widths of its states, and what
lives inside its loss and its optimizer step.  What is saved for the backward it takes."""


def as_run(problem: Problem) -> Problem:
    """The problem whose simulated totals a run of the torch runtime is held to: saved tensors of
    the problem's stack, states and kernels of the runtime's."""
    own = load_system(RUNTIME)
    system = replace(problem.system, **{name: getattr(own, name) for name in OWN})
    if system == problem.system:
        return problem
    return Problem(
        workload=problem.workload,
        cluster=problem.cluster,
        system=system,
        layout=problem.layout,
        calibration=problem.calibration,
        attention=problem.attention,
        backend=problem.backend,
    )


def activation_bytes(problem: Problem, plan: Plan) -> int:
    """Activations, on the device or on the host, at the ledger's peak of the pipeline rank that
    holds most, in all its processes: they are alike and reach it together."""
    stages = program_bytes(problem, plan, lower(plan, problem))
    peak = max(max(stage.activation_peak, stage.host_activation_peak) for stage in stages)
    return peak * (problem.layout.gpus // len(stages))


def measured_rank(
    rank: int, result: "RankResult", program: Program, simulated: tuple[RankBytes, ...], steps: int
) -> RankMeasured:
    """One process's bytes beside its stage's ledger."""
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
    """Processes in rank order, from the rank `first` on."""
    program = lower(plan, problem)
    run = as_run(problem)
    simulated = program_bytes(run, plan, program if run is problem else lower(plan, run))
    return tuple(
        measured_rank(rank, result, program, simulated, steps)
        for rank, result in enumerate(results, first)
    )


def measured(problem: Problem, plan: Plan, result: "Result") -> Measured:
    """An executed run's numbers."""
    return Measured(
        losses=tuple(result.losses),
        gradient_norms=whole_norms(result.gradient_norms),
        ranks=measured_ranks(problem, plan, result.ranks, len(result.losses)),
    )


def compared(problem: Problem, result: "Result", other: "Result", against: str) -> Comparison:
    """Losses and gradients of two runs on the same batches."""
    pairs = list(zip(result.gradients, other.gradients, strict=True))
    zero = without_gradient(problem.workload.model)
    errors = [norm_error(got, want, zero) for got, want in pairs]
    losses = list(zip(result.losses, other.losses, strict=True))
    return Comparison(
        against=against,
        bitwise=result.losses == other.losses and largest(errors) == 0.0,
        gradient_error=largest(errors),
        loss_error=largest([relative(abs(a - b), abs(b)) for a, b in losses]),
        bound=BOUNDS[problem.workload.precision],
        first_gradient_error=errors[0],
        first_only=problem.workload.precision == "bf16",
    )


def without_gradient(model: Model) -> frozenset[str]:
    """Parameters whose gradient is zero in exact arithmetic, so that what is computed is rounding:
    a bias of keys that are not rotated moves all scores of a query alike."""
    if not model.qkv_bias or model.position == "rope":
        return frozenset()
    return frozenset(f"layers.{layer}.k.bias" for layer in range(model.num_layers))


def norm_error(
    got: dict[str, Any], want: dict[str, Any], zero: frozenset[str] = frozenset()
) -> float:
    """Largest norm-wise error of a parameter's gradient, but for those that are `zero`; one far
    below the others counts as rounding of zero too."""
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
    where: dict[str, str | tuple[int, ...]],
) -> Record:
    """A record of the traced or executed world; `where` completes the provenance."""
    spec = run_spec(cell.problem, cell.method, world, cell.base)
    status, reason, found = outcome
    plan = cell.plan if isinstance(cell.plan, Plan) else None
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status=status,
        reason=reason,
        plan_hash=plan_hash(cell.problem, plan) if plan else "",
        plan=plan,
        measured=found,
        provenance=replace(provenance(cell.problem.calibration), **where),
    )
