"""Random legal problems and plans: layouts, stacks, partitions, schedules, fates, transfers."""

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.inputs.load import load_system
from rematbench.plan import (
    ByteBudget,
    Fate,
    Group,
    Keep,
    MiniSequence,
    Offload,
    Pass,
    Plan,
    Recompute,
    Rule,
    Select,
    Share,
    Split,
    Transfers,
    Window,
)
from rematbench.problem import Problem
from rematbench.workload import Model
from tests.problems import BLOCKS, FULL, GPT, LLAMA, problem

SYSTEMS = (
    "rematbench",
    "megatron-kwai",
    "megatron-lm",
    "megatron-core",
    "torchtitan",
    "deepspeed",
    "internevo",
)
EXPERTS = ("rematbench", "megatron-kwai", "megatron-lm", "megatron-core", "torchtitan")
CONTEXT_PARALLEL = ("rematbench", "megatron-kwai", "megatron-core")
ROW_LOCAL = ("attn_norm_out", "mlp_norm_out", "fc2_in", "up_out", "q", "attn_residual")
"""Saved tensors of every layer that a part of the rows can rebuild."""
Partition = tuple[tuple[tuple[int, ...], ...], ...]
PHASES = ("warmup", "steady", "cooldown")


@st.composite
def models(draw: st.DrawFn, num_layers: int) -> Model:
    """Llama or GPT, one of the other blocks, or a Gemma-like mixture: norms after, windows in every
    other layer."""
    block = draw(st.sampled_from([{}, {}, *BLOCKS.values()]))
    base = replace(
        draw(st.sampled_from([LLAMA, GPT])),
        **block,
        num_layers=num_layers,
        tied_embeddings=draw(st.booleans()),
    )
    if block or draw(st.booleans()):
        return base
    windows = tuple(8 * (layer % 2) for layer in range(num_layers))
    return replace(base, post_norm=True, attention_window=windows)


@st.composite
def problems(draw: st.DrawFn, deeper: int = 0) -> Problem:
    """A small problem whose layout is legal; `deeper`: more layers."""
    system = draw(st.sampled_from(SYSTEMS))
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    dp = draw(st.sampled_from([1, 2]))
    groups = draw(st.integers(1, 3))
    m = pp * groups if vpp > 1 else draw(st.integers(1, 5))
    micro_batch = draw(st.integers(1, 2))
    layout: dict[str, Any] = {
        "tp": draw(st.sampled_from([1, 2])),
        "sp": draw(st.booleans()),
        "cp": draw(st.sampled_from([1, 2])),
        "pp": pp,
        "vpp": vpp,
        "dp": dp,
        "zero_stage": draw(st.integers(0, 1 if pp > 1 and system == "deepspeed" else 3)),
        "micro_batch": micro_batch,
        "global_batch": m * dp * micro_batch,
    }
    model = draw(models(pp * vpp + draw(st.integers(0, 2)) + deeper))
    if model.experts is not None:
        system = draw(st.sampled_from(EXPERTS))
    kind = load_system(system).parallel.cp_kind  # a ring has no windows, a gather no latent keys
    lacks = kind == "ring" and any(model.attention_window)
    lacks |= kind != "ring" and model.latent is not None
    if system not in CONTEXT_PARALLEL or lacks:
        layout["cp"] = 1
    if model.experts is not None:
        layout |= draw(expert_layouts(layout["tp"] * layout["cp"] * dp))
    elif system == "deepspeed" and dp == 2 and draw(st.booleans()):
        layout |= {"ulysses": 2, "tp": 1, "global_batch": m * micro_batch}
    attention = "flash" if layout["cp"] > 1 else draw(st.sampled_from(["flash", "unfused"]))
    return problem(model=model, system=system, attention=attention, **layout)


@st.composite
def expert_layouts(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """Degrees that fold experts onto the `ranks` of a stage."""
    etp = draw(st.sampled_from([n for n in (1, 2) if ranks % n == 0]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % (n * etp) == 0]))
    zero = draw(st.integers(0, 3))
    return {"sp": True, "ep": ep, "etp": etp, "zero_stage": zero, "ulysses": 1}


@st.composite
def partitions(draw: st.DrawFn, problem: Problem) -> Partition:
    """Any split of the layers into chunks, of which the first and the last may have none."""
    lay, total = problem.layout, problem.workload.model.num_layers
    least = 1 if lay.num_chunks < 3 else 0  # some chunk has layers
    inner = st.lists(
        st.integers(least, total - least), min_size=lay.num_chunks - 1,
        max_size=lay.num_chunks - 1, unique=True,
    )  # fmt: skip
    cuts = [0, *sorted(draw(inner)), total] if lay.num_chunks > 1 else [0, total]
    virtual = [tuple(range(a, b)) for a, b in pairwise(cuts)]
    return tuple(tuple(virtual[c * lay.pp + r] for c in range(lay.vpp)) for r in range(lay.pp))


@st.composite
def selects(
    draw: st.DrawFn, problem: Problem, names: tuple[str, ...], partition: Partition
) -> Select:
    """Some activations of the layers, everywhere or in part of the run."""
    where: dict[str, Any] = {}
    match draw(st.integers(0, 4)):
        case 1:
            last = problem.workload.model.num_layers - 1
            where["layers"] = tuple(draw(st.sets(st.integers(0, last), min_size=1)))
        case 2:
            where["micro_batches"] = (0, draw(st.integers(1, problem.layout.num_micro_batches)))
        case 3:
            holding = [rank for rank, chunks in enumerate(partition) if any(chunks)]
            where["stages"] = (draw(st.sampled_from(holding)),)
    chosen = draw(st.sets(st.sampled_from(names), min_size=1))
    return Select(parts=("layer",), activations=tuple(sorted(chosen)), **where)


@st.composite
def rule_sets(draw: st.DrawFn, problem: Problem, partition: Partition) -> tuple[Rule, ...]:
    """Rules of one kind of method, alone or composed."""
    names = saved_everywhere(problem)
    local = tuple(n for n in ROW_LOCAL if n in names)
    share = st.sampled_from([0.1, 0.25, 0.5])
    again: Fate = Recompute(scope=draw(st.sampled_from(["consumer", "layer"])))
    split = Split(offload=draw(share), recompute=draw(share), scope=again.scope)
    budget = ByteBudget(alpha=draw(st.floats(0, 1)), granularity=256, min_bytes=512)
    rules: list[Rule] = []
    match draw(st.integers(0, 6)):
        case 0:
            rules = [Rule(draw(selects(problem, local, partition)), again)]
        case 1:
            rules = [Rule(draw(selects(problem, local, partition)), split)]
        case 2:
            rules = [Rule(draw(selects(problem, names, partition)), Offload())]
        case 3:
            rules = [*FULL]
        case 4:
            inner = tuple(n for n in names if n != "layer_input")
            equal = problem.layout.tp == 2 and not problem.layout.sequence_parallel
            moved = Share(2, draw(st.sampled_from(["device", "host"]))) if equal else Offload()
            rules = [
                Rule(Select(parts=("layer",), activations=inner), again),
                Rule(Select(parts=("layer",), activations=("layer_input",)), moved),
            ]
        case 5:
            rules = [*grouped(partition)]
        case _:
            window = draw(
                st.sampled_from(
                    [
                        Window(op="qkv", direction="backward"),
                        Window(op="fc1", direction="backward", layer_offset=1),
                        Window(op="", direction="before_recv"),
                    ]
                )
            )
            fate = Recompute(scope="layer", window=window)
            rules = [Rule(Select(parts=("layer",), activations=local[:1]), fate)]
    if draw(st.booleans()):
        rules.append(Rule(Select(kept=True), budget))
    if draw(st.booleans()):
        rules.append(Rule(draw(selects(problem, names, partition)), Keep()))
    return tuple(rules)


def saved_everywhere(problem: Problem) -> tuple[str, ...]:
    """Saved tensors of a layer, of one with experts if there is one."""
    return problem.layer(problem.workload.model.num_layers - 1).saved


@st.composite
def all_transfers(draw: st.DrawFn) -> Transfers:
    """When copies move."""
    return Transfers(
        granularity=draw(st.sampled_from(["chunk", "layer"])),
        release_lag=draw(st.integers(1, 3)),
        prefetch_layers=draw(st.integers(1, 2)),
        before_send_phases=tuple(draw(st.sets(st.sampled_from(PHASES)))),
        reload_slots=draw(st.sampled_from([0, 2, 3])),
    )


@st.composite
def orders(draw: st.DrawFn, num_micro_batches: int) -> tuple[Pass, ...]:
    """Any order of one rank's passes in which each backward follows its forward."""
    shuffled = draw(st.permutations([*range(num_micro_batches)] * 2))
    seen: set[int] = set()
    passes = []
    for micro_batch in shuffled:
        passes.append(Pass(micro_batch not in seen, micro_batch, 0))
        seen.add(micro_batch)
    return tuple(passes)


@st.composite
def cases(draw: st.DrawFn, deeper: int = 0) -> tuple[Problem, Plan]:
    """A problem and a plan for it; `deeper`: more layers than the smallest."""
    given = draw(problems(deeper))
    lay = given.layout
    partition = draw(partitions(given))
    plan = replace(
        given.base_plan,
        partition=partition,
        rules=draw(rule_sets(given, partition)),
        transfers=draw(all_transfers()),
    )
    if lay.vpp == 1 and draw(st.booleans()):
        plan = replace(plan, schedule="gpipe")
    if lay.pp == 1 and draw(st.booleans()):
        plan = replace(plan, orders=(draw(orders(lay.num_micro_batches)),))
    norm = ("mlp_norm",) if given.workload.model.block == "sequential" else ()
    runs = ((*norm, "fc1", "act", "mul", "fc2"), ("lm_head", "loss"))
    pieces = tuple(MiniSequence(ops=run, count=draw(st.integers(2, 3))) for run in runs)
    if draw(st.integers(0, 4)) == 0:
        plan = replace(plan, rules=draw(st.sampled_from([(), FULL])), mini_sequences=pieces)
    exchanged = given.workload.model.tied_embeddings and lay.pp > 1  # after all backwards
    if lay.num_micro_batches == 1 and not exchanged and draw(st.booleans()):
        kept = tuple(fate for fate in plan.states if fate.kind != "optimizer")
        update = replace(plan.state("optimizer"), update="backward")
        plan = replace(plan, states=(*kept, update))
    return given, plan


def grouped(partition: Partition) -> tuple[Rule, ...]:
    """Each chunk rebuilt as one group from its input."""
    chunks = [chunk for rank in partition for chunk in rank if chunk]
    return tuple(
        rule
        for chunk in chunks
        for rule in (
            Rule(
                Select(parts=("layer",), layers=chunk),
                Recompute(scope=Group(first=chunk[0], last=chunk[-1])),
            ),
            Rule(Select(parts=("layer",), layers=chunk[:1], activations=("layer_input",)), Keep()),
        )
    )
