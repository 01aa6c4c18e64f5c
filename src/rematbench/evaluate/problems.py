"""Makes problems from plain inputs: loads names and files, binds the evaluator, and says which
options of a stack would be faster."""

from typing import Literal

from msgspec.structs import replace

from rematbench.costs.states import fsdp_shards
from rematbench.evaluate.evaluator import evaluate, weigh
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.constants import Calibration
from rematbench.inputs.facts import CPU
from rematbench.inputs.job import Job
from rematbench.inputs.load import calibration, load_cluster, load_model, load_system
from rematbench.inputs.precision import in_precision, of_trained, with_optimizer
from rematbench.inputs.recipes import with_recipe
from rematbench.inputs.system import EpOverlap, EpOverlapChoice, System, with_facts
from rematbench.plan import Unsupported
from rematbench.problem import Problem
from rematbench.workload import Model

Variant = Literal["compile", "async_tp"]


def make_problem(spec: Job, constants: Calibration | None = None) -> Problem:
    """Load names and files, and return a problem with the chunk-level evaluator.  `attention` is
    flash (the stack's kernel), unfused, or a kernel by name.  Raise, each with a clear message of
    one line: ConfigError for names, LayoutError for layouts, RateError for a kernel that the GPUs
    cannot run, or that does not exist in the precision."""
    layout = spec.layout
    model = spec.model if isinstance(spec.model, Model) else load_model(spec.model)
    cluster = spec.cluster if isinstance(spec.cluster, Cluster) else load_cluster(spec.cluster)
    chosen = spec.stack
    if chosen.hbm_bytes is not None:
        cluster = replace(cluster, hbm_bytes=chosen.hbm_bytes)
    if chosen.dispatcher and model.experts is None:
        raise ConfigError("", "dispatcher", f"{chosen.dispatcher!r}: {model.name} has no experts")
    system = stack_of(spec)
    if cluster.generation != CPU:  # CPU problems of the executor keep the bytes of bf16.
        system = in_precision(system, spec.work.precision, layout.zero_stage)
    system = of_trained(system, spec.work, layout.zero_stage)
    system = with_recipe(with_optimizer(system, chosen.optimizer_kind), spec.work)
    work = spec.workload(trained_model(model, system))
    if work.fp32_norms and fsdp_shards(layout, system):  # FSDP gathers norms in 16 bits.
        work = replace(work, fp32_norms=False)
    return Problem(
        workload=work,
        cluster=cluster,
        system=system,
        layout=layout,
        calibration=constants or calibration(),
        stack_choice=chosen,
        attention="unfused" if chosen.attention == "unfused" else "flash",
        backend="" if chosen.attention == "flash" else chosen.attention,
        evaluator=evaluate,
        weigher=weigh,
    )


def trained_model(model: Model, system: System) -> Model:
    """The model as a stack trains it; `left_out` says what the stack's classes lack."""
    if system.loss.prediction_layers or not model.mtp_layers:
        return model
    lacking = f"layers that predict more tokens are left out ({system.name} does not train them)"
    left_out = "; ".join(filter(None, (model.left_out, lacking)))
    return replace(model, mtp_layers=0, left_out=left_out)


def stack_of(spec: Job) -> System:
    """The stack with the job's choices: homes of states, dispatcher, CUDA graphs and overlap of
    experts' exchanges."""
    chosen = spec.stack
    system = spec.system if isinstance(spec.system, System) else load_system(spec.system)
    if chosen.optimizer:
        system = with_facts(system, optimizer_on_host=chosen.optimizer == "host")
    if chosen.parameters:
        system = with_facts(system, parameters_on_host=chosen.parameters == "host")
    if chosen.dispatcher:
        system = with_facts(system, dispatcher=chosen.dispatcher)
    if (scope := chosen.cuda_graphs) is not None:
        if scope != "none" and "cuda_graphs" not in system.accepts.features:
            raise ConfigError(
                "", "cuda_graphs", f"{scope!r}: {system.name} captures no CUDA graphs"
            )
        system = with_facts(system, cuda_graphs=scope)
    return overlapping(system, chosen.ep_overlap)


def overlapping(system: System, choice: EpOverlapChoice | None) -> System:
    """Return the stack with or without experts' exchanges that overlap another micro-batch, as
    `choice` says (None: as in the stack's file)."""
    if choice is None:
        return system
    kind: EpOverlap = "none" if choice == "off" else "interleaved"
    if system.experts.ep_overlap != "none" and choice != "off":
        kind = system.experts.ep_overlap
    return with_facts(system, ep_overlap=kind, delayed_wgrad=choice == "delayed_wgrad")


def system_variant(system: System, variants: tuple[Variant, ...]) -> System | Unsupported:
    """Return a stack with some of its options switched on, or Unsupported for an option that the
    stack lacks.  compile: torch.compile fuses SiLU with the product.  async_tp: sequence-parallel
    collectives overlap the GEMMs that read their results."""
    for variant in variants:
        if variant not in system.accepts.features:
            return Unsupported(f"system {system.name} does not support {variant}")
    if "compile" in variants:
        system = with_facts(system, compiled=True, fused_swiglu=True)
    if "async_tp" in variants:
        system = with_facts(system, tp_overlap="gemm")
    return system


def leaner_exchanges(problem: Problem) -> str:
    """Return how experts could exchange fewer bytes, or hide exchanges behind compute, in one line;
    empty if they do so already or exchange nothing."""
    exchange, others = problem.system.experts, []
    if problem.layout.ep == 1:
        return ""
    if exchange.dispatcher in ("alltoall", "allgather"):
        others.append("deepep and hybridep send a token once to a node (--dispatcher)")
    if not problem.ep_overlaps and "ep_overlap" in problem.system.accepts.features:
        others.append("exchanges may overlap another micro-batch (--ep-overlap on)")
    return f"experts exchange by {exchange.dispatcher}: {'; '.join(others)}" if others else ""


def faster_attention(problem: Problem) -> str:
    """Return the attention kernels of the GPU generation whose published rates are higher than
    those of the kernel in use, in one line; empty if there are none."""
    if problem.kernel == "unfused" or problem.untimed:
        return ""
    rates = problem.calibration.kernels.generation(problem.cluster.generation).attention
    used = rates[problem.kernel]
    faster = [
        name
        for name, one in rates.items()
        if one.forward.efficiency > used.forward.efficiency
        and one.backward.efficiency > used.backward.efficiency
    ]
    if not faster:
        return ""
    slow = f"{problem.kernel} on {problem.cluster.generation}"
    return f"attention kernels that are faster than {slow}: {', '.join(sorted(faster))}"
