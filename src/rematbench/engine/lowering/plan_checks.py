"""Checks that a plan can be lowered.  Each check raises PlanError with a message of one line."""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import asdict

from rematbench.costs.operators.memory import table_on_host
from rematbench.costs.operators.ops import ACTIVATIONS
from rematbench.engine.lowering.states.state_shards import rank_sharded
from rematbench.host.console import gib
from rematbench.inputs.configfile import closest
from rematbench.inputs.layout import Layout
from rematbench.inputs.stages import stages_of
from rematbench.plan import (
    Fate,
    Group,
    Pass,
    Pieces,
    Plan,
    PlanError,
    Recompute,
    Select,
    Share,
    Split,
    gathers_by_layer,
    leaves,
    passes_refusal,
    refusal,
    slices_refusal,
    vocabulary_refusal,
)
from rematbench.problem import Problem, completed_after_backward, head_parameters


def check_plan(plan: Plan, problem: Problem) -> None:
    """Raise PlanError if a plan contradicts itself, the layout or the stack."""
    _check_partition(plan, problem)
    lay = problem.layout
    parameter = plan.state("parameter")
    if gathers_by_layer(parameter, lay) and parameter.release == "never":
        raise PlanError(
            "parameters gathered per layer must be released in the forward or the backward"
        )
    _check_cuts(plan, problem)
    _check_table(problem)
    _check_host_states(plan)
    _check_pieces(plan, problem)
    early = plan.state("optimizer").update == "backward"
    refusals = (
        passes_refusal(plan, lay, problem.system, problem.workload.model),
        slices_refusal(plan, problem.system, lay, problem.workload, problem.attention),
        vocabulary_refusal(plan, lay, problem.workload),
        graph_conflict(plan, problem),
        completed_after_backward(problem) if early else "",
        shares_refusal(plan, lay),
    )
    for refused in filter(None, refusals):
        raise PlanError(refused)
    transfers = plan.transfers
    if transfers.granularity == "chunk" and transfers.reload_slots == 1:
        raise PlanError(
            "reload_slots 1: a chunk is reloaded while the backward of the previous chunk uses the "
            "slot; use 0 (new memory) or at least 2 slots"
        )
    operators = {op.name for table in (*problem.layer_kinds, problem.head) for op in table.ops}
    for sequence in plan.mini_sequences:
        if operators.isdisjoint(sequence.ops):
            raise PlanError(f"mini-sequence of {sequence.ops} matches no operator of this model")


def shares_refusal(plan: Plan, layout: Layout) -> str:
    """Why a plan cannot share tensors out over tensor-parallel ranks; empty if it can.  The rules
    are megatron-core's (0.16.1, training/arguments.py and transformer/transformer_config.py)."""
    shared = [rule for rule in plan.rules if isinstance(rule.fate, Share)]
    ranks = {rule.fate.ranks for rule in shared if isinstance(rule.fate, Share)}
    others = any(rule.select.activations != ("layer_input",) for rule in shared)
    reasons = {
        "can distribute only across tensor model parallel groups: tp is 1": layout.tp == 1,
        "must be false when sequence parallel is enabled": layout.sequence_parallel,
        "is not modelled with a second tensor dimension": layout.tp_columns > 1,
        "is for layer_input alone, which all of the ranks hold": others,
        f"has parts of {[*ranks]} ranks, but tp is {layout.tp}": ranks != {layout.tp},
    }
    return refusal("distribute_saved_activations", reasons) if ranks else ""


def _check_partition(plan: Plan, problem: Problem) -> None:
    lay = problem.layout
    shape = [len(chunks) for chunks in plan.partition]
    if shape != [lay.vpp] * lay.pp:
        raise PlanError(
            f"partition has {shape} chunks per rank, but the layout needs {[lay.vpp] * lay.pp}"
        )
    if plan.turns and (lay.pp == 1 or lay.vpp != 2):
        words = f"pp {lay.pp} with vpp {lay.vpp}"
        raise PlanError(f"{plan.schedule} needs several stages of two chunks, not {words}")
    virtual = plan.virtual
    layers = [layer for chunk in virtual for layer in chunk]
    model = problem.workload.model
    if layers != list(range(model.num_layers + model.mtp_layers)):
        raise PlanError("partition must contain every layer once, in order of the virtual stages")
    stages, usual = (
        stages_of(one.partition, model.num_layers) for one in (plan, problem.base_plan)
    )
    if [one.prediction for one in stages] != [one.prediction for one in usual]:
        raise PlanError(
            "partition must leave layers that predict more tokens in the chunk that the layout says"
        )
    if not all(virtual[1:-1]):
        raise PlanError("partition has an empty chunk in the middle: give it a layer")


def _check_cuts(plan: Plan, problem: Problem) -> None:
    stages, model = problem.layout.num_chunks, problem.workload.model
    if any(cut >= stages for cut in plan.cuts):
        raise PlanError(f"cuts {plan.cuts} must be among the virtual stages 1 to {stages - 1}")
    beside = {
        "experts": model.experts is not None,
        "layers that predict more tokens": model.mtp_layers > 0,
        "weights that do not train": problem.workload.partly,
        "separate passes for weight gradients": plan.halves,
        "parameters gathered per layer": plan.state("parameter").gather == "layer",
    }
    if plan.cuts and (found := refusal("cuts are not modelled with", beside)):
        head = head_parameters(problem)[0] / 1e6
        raise PlanError(f"{found}; each would add a head of {head:,.1f} M parameters")


def _check_table(problem: Problem) -> None:
    memory = problem.workload.model.memory
    if memory is None or memory.home == "device":
        return
    found = table_on_host(problem.workload, problem.layout, problem.system.states)
    held, up, down = (gib(nbytes) for nbytes in found)
    raise PlanError(
        f"a memory table on the host is not lowered: {held} GiB of the table and its states would "
        f"leave the device, and a rank's step would copy {up} GiB of rows up and {down} GiB of "
        "gradients down"
    )


def _check_host_states(plan: Plan) -> None:
    gradient, optimizer = plan.state("gradient"), plan.state("optimizer")
    if optimizer.home == "host" and optimizer.update == "backward":
        raise PlanError("an optimizer in host memory updates once per step, not in the backward")
    if gradient.home == "host" and optimizer.home == "device":
        raise PlanError("gradients in host memory need the optimizer in host memory")
    if plan.state("parameter").home == "host" and optimizer.update == "backward":
        raise PlanError("parameters in host memory are updated once per step, not in the backward")


def _check_pieces(plan: Plan, problem: Problem) -> None:
    if cut := [state.kind for state in plan.states if state.pieces and state.kind != "optimizer"]:
        raise PlanError(f"only optimizer states can be cut into pieces, not the {cut[0]} states")
    optimizer = plan.state("optimizer")
    pieces = optimizer.pieces
    if pieces is None:
        return
    if optimizer.update == "backward":
        raise PlanError("pieces of optimizer states update once per step, not in the backward")
    away = sorted(set(pieces.places) - {"device"})
    home = "host" if away else "device"
    if optimizer.home != home:
        raise PlanError(
            f"places {', '.join(away) or 'device'} of pieces keep their states on the {home}: "
            f"the optimizer's home is {optimizer.home}, and must be {home}"
        )
    if why := too_early(plan, problem, pieces):
        raise PlanError(why)
    shares = [rank_sharded(problem, plan, rank, optimizer) for rank in range(problem.layout.pp)]
    if away and pieces.size > min(shares):
        raise PlanError(
            f"pieces of {pieces.size:,} parameters are larger than a rank's share of optimizer "
            f"states: size must be at most {min(shares):,}"
        )


def too_early(plan: Plan, problem: Problem, pieces: Pieces) -> str:
    """Return why pieces cannot be updated during the last backward; empty if they need not be or
    can."""
    if pieces.start == "norm":
        return ""
    lay, system, gradient = problem.layout, problem.system, plan.state("gradient")
    late = gradient.shards == 1 and gradient.home == "device" and not system.zero.reduce_overlap
    reasons = {
        "the norm of all gradients is not known yet, so nothing can be clipped by it; clip must be "
        "false": pieces.clip,
        "their visits need slots": not pieces.slots and "visit" in pieces.places,
        "parameters at home on the host are updated after the backward; start must be norm": (
            plan.state("parameter").home == "host"
        ),
        f"sequence parallelism sums whole gradients of norms, but system {system.name} has whole "
        "buckets; start must be norm": (lay.sequence_parallel and system.zero.whole_buckets),
        "tied embeddings exchange their gradient after the backward; start must be norm": (
            problem.embedding_ranks is not None
        ),
        "the pipeline sums gradients and reduces them after its last pass; start must be norm": (
            gradient.release == "step"
        ),
        f"system {system.name} reduces gradients after the backward; start must be norm": (
            lay.has_peers and late
        ),
        "other ranks reduce gradients of experts; start must be norm": (
            problem.workload.model.experts is not None
        ),
    }
    return refusal("pieces that start as their gradients become ready:", reasons)


def check_ready_order(last: Mapping[int, Pass], order: Sequence[Pass]) -> None:
    at = [order.index(last[chunk]) for chunk in sorted(last, reverse=True)]
    if at != sorted(at):
        raise PlanError(
            "pieces that start as their gradients become ready need the chunks' last backwards in "
            "order from the last chunk to the first"
        )


def graph_conflict(plan: Plan, problem: Problem) -> str:
    """Return why the stack's CUDA graphs do not allow a plan; empty if they do.

    Megatron-core 0.16.1, transformer_config.py: CUDA graphs are not supported with CPU offloading,
    full recomputation needs the graph of a whole iteration, and a recomputed module may not contain
    a graph (`moe` with moe_router). A graph's addresses are fixed, so parameters gathered per layer
    are refused too.
    """
    kernels = problem.system.kernels
    if not kernels.captures:
        return ""
    fates = [rule.fate for rule in plan.rules]
    gathered = gathers_by_layer(plan.state("parameter"), problem.layout)
    reasons = {
        "activations on the host": any(map(leaves, fates)),
        "whole layers recomputed": not kernels.captures_iteration
        and any(_whole(fate) for fate in fates),
        "the module moe recomputed": "moe_router" in kernels.cuda_graphs
        and any("router_scores" in (rule.select.activations or ()) for rule in plan.rules),
        "recomputation during another operator's collective": any(
            isinstance(fate, Recompute) and fate.window is not None for fate in fates
        ),
        "parameters gathered per layer": gathered,
        "an optimizer in the backward": plan.state("optimizer").update == "backward",
    }
    scope = {"layer": "layers"}.get(kernels.cuda_graphs, kernels.cuda_graphs)
    return refusal(f"CUDA graphs of {scope} ({problem.system.name}) do not allow", reasons)


def _whole(fate: Fate) -> bool:
    if isinstance(fate, Recompute | Split) and isinstance(fate.scope, Group):
        return True
    return isinstance(fate, Recompute) and fate.whole and fate.scope == "layer"


def check_rules(plan: Plan, problem: Problem, matched: Collection[int] | None) -> None:
    """Raise PlanError for a rule that matches no saved tensor of any rank, and for an activation
    name that no model has (a misspelt name beside names that match). `matched`: the indices of the
    rules that match; None skips the first check, because some ranks are not lowered."""
    tables = (problem.embedding, *problem.layer_kinds, problem.head)
    activations = {name for table in tables for name in table.activations}
    for index, rule in enumerate(plan.rules if matched is not None else ()):
        if index not in (matched or ()):
            text = _select_text(rule.select, activations)
            raise PlanError(f"rule matches no saved tensor: {text}")
    names = ACTIVATIONS | activations
    for rule in plan.rules:
        if not names.issuperset(rule.select.activations or ()):
            text = _select_text(rule.select, names)
            raise PlanError(f"rule names an activation that no model saves: {text}")


def _select_text(select: Select, names: Collection[str]) -> str:
    """A selector's restrictions as text, with a similar name if an activation is not in `names`."""
    values = {key: value for key, value in asdict(select).items() if value not in (None, False)}
    words = ", ".join(f"{key}={value!r}" for key, value in values.items())
    unknown = [name for name in select.activations or () if name not in names]
    hint = closest(unknown[0], names) if unknown else ""
    return f"Select({words}){hint}"
