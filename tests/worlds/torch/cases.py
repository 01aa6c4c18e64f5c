"""The grid of the twin and gradient tests: tiny models, layouts, plans and methods by name."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate, program_bytes
from rematbench.plan import (
    Keep,
    MiniSequence,
    Offload,
    Plan,
    Recompute,
    Rule,
    Select,
    Split,
    Unsupported,
    Window,
)
from rematbench.problem import Problem
from rematbench.workload import Experts, Latent, Model, Precision
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch.case import Case
from tests.problems import (
    FULL,
    GPT,
    LLAMA,
    SKELETAL,
    by_layer,
    half,
    on,
    problem,
    remade,
    rule,
    transfers,
)
from tests.tables import tables

TABLES = tables(__file__)

TINY = replace(LLAMA, name="tiny", num_layers=2, hidden=64, head_dim=16, ffn=96, vocab=160)
TINY_GPT = replace(
    GPT, name="tiny-gpt", num_layers=2, hidden=64, head_dim=16, ffn=96, vocab=160, dropout=0.0
)
TIED = replace(TINY, name="tiny-tied", tied_embeddings=True)
EXPERTS = Experts(count=8, active=2, ffn=32)
MIXTURE = replace(TINY, name="tiny-mixture", qk_norm=True, experts=EXPERTS)
SHARED = replace(
    MIXTURE,
    name="tiny-shared",
    qk_norm=False,
    experts=replace(EXPERTS, router="sigmoid", router_bias=True, shared_ffn=48, dense_layers=(0,)),
)
LATENT = replace(
    TINY,
    name="tiny-latent",
    num_kv_heads=4,
    head_dim=12,
    latent=Latent(q_rank=24, kv_rank=16, nope=8, rope=4, v=6),
)
SEQ = 32

LAYOUTS: dict[str, dict[str, Any]] = TABLES["layouts"]
"""The issue's layouts and a few more, by name."""
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = TABLES["expert_layouts"]
"""Layouts of models with experts."""
STAGED: dict[str, dict[str, Any]] = {
    "tp2-ep2-pp2-vpp2-stages": EXPERT_LAYOUTS["tp2-ep2-pp2-vpp2"] | {"stages": "Et|ttt|ttt|tmL"}
}
"""Layouts whose stages fit one number of layers."""

MLP = ("mlp_norm", "fc1", "act", "mul", "fc2")
MLP_SAVED = ("mlp_norm_out", "gate_out", "up_out", "act_out", "fc2_in")


def tiny(
    layout: str, precision: Precision = "fp64", model: Model | None = None, **changes: Any
) -> Problem:
    """A tiny problem on a named layout; deep enough for its chunks."""
    degrees = (LAYOUTS | EXPERT_LAYOUTS | STAGED)[layout]
    model = model or (MIXTURE if layout in EXPERT_LAYOUTS else TINY)
    layers = max(model.num_layers, degrees.get("pp", 1) * degrees.get("vpp", 1))
    made = problem(model=replace(model, num_layers=layers), seq_len=SEQ, **(changes | degrees))
    work = replace(made.workload, precision=precision)
    return remade(made, workload=work, evaluator=evaluate)


def two_a_chunk(layout: str, model: Model) -> Model:
    """The model with two layers for each chunk of a layout."""
    degrees = (LAYOUTS | EXPERT_LAYOUTS | STAGED)[layout]
    return replace(model, num_layers=2 * degrees.get("pp", 1) * degrees.get("vpp", 1))


def mini(plan: Plan) -> Plan:
    """The MLP in three pieces, the head and its loss in five; both ragged."""
    runs = (MiniSequence(MLP, 3), MiniSequence(("lm_head", "loss"), 5))
    return replace(plan, mini_sequences=runs)


def mini_dropped(plan: Plan) -> Plan:
    """The same, and nothing inside kept."""
    inside = Select(activations=(*MLP_SAVED, "loss_saved"))
    return mini(plan.with_rules(Rule(inside, Recompute())))


def windows(plan: Plan) -> Plan:
    """Rebuilt beside collectives of this layer's and the next one's backward, and before a
    receive; without the collective, before the reader."""
    ahead = Window(op="qkv", direction="backward", layer_offset=1)
    return plan.with_rules(
        rule(Recompute(window=ahead), "up_out", "act_out", "fc2_in"),
        rule(Recompute(window=Window(op="fc1", direction="backward")), "q", "k", "v"),
        rule(Recompute(window=Window(op="recv", direction="before_recv")), "mlp_norm_out"),
    )


def mini_windows(plan: Plan) -> Plan:
    """The MLP in pieces; beside its collectives a tensor is rebuilt that exists whole, and one that
    exists by piece."""
    beside = rule(Recompute(window=Window(op="fc1", direction="backward")), "lse", "act_out")
    return mini(plan.with_rules(beside))


def pieces(plan: Plan, ops: tuple[str, ...], dropped: str) -> Plan:
    """A run that neither begins nor ends where a layer's norms and linears do, and what is dropped
    inside it."""
    made = replace(plan, mini_sequences=(MiniSequence(ops, 3),))
    return made.with_rules(rule(Recompute(), dropped))


PLANS: dict[str, Callable[[Plan], Plan]] = {
    "keep": lambda plan: plan,
    "offload": lambda plan: plan.with_rules(half()),
    "offload-layers": lambda plan: by_layer(plan.with_rules(half(0.7))),
    "offload-slots": lambda plan: transfers(plan.with_rules(half()), reload_slots=4, release_lag=2),
    "full": lambda plan: plan.with_rules(*FULL),
    "full-kept": lambda plan: plan.with_rules(*FULL, rule(Offload(), "attn_out")),
    "rows": lambda plan: plan.with_rules(
        rule(Split(offload=0.25, recompute=0.375), "fc2_in", "attn_norm_out", "q", "up_out")
    ),
    "skeletal": lambda plan: by_layer(plan.with_rules(*SKELETAL)),
    "windows": windows,
    "mini": mini,
    "mini-dropped": mini_dropped,
    "mini-windows": mini_windows,
    "mini-first": lambda plan: pieces(plan, ("fc1", "act"), "gate_out"),
    "mini-qkv": lambda plan: pieces(plan, ("attn_norm", "qkv"), "attn_norm_out"),
    "mini-last": lambda plan: pieces(plan, ("act", "mul", "fc2"), "act_out"),
}
"""Raw plans: every mechanism of the vocabulary on its own.  keep, offload* and full compute the
same numbers as keep_all; the others split a GEMM."""
EXPERT_PLANS: dict[str, Callable[[Plan], Plan]] = {
    "expert-rows": lambda plan: plan.with_rules(
        rule(
            Split(offload=0.25, recompute=0.375),
            *("router_scores", "expert_fc1_out", "expert_fc2_in", "q"),
        )
    ),
    "expert-parts": lambda plan: by_layer(
        plan.with_rules(
            rule(Split(offload=0.5), *("router_scores", "permutation", "expert_in", "expert_probs"))
        )
    ),
}
"""Raw plans for layers with experts: rows of what is row by row, and bytes of the rest."""
HALF_PLANS: dict[str, Callable[[Plan], Plan]] = {
    "zb-h1": lambda plan: replace(plan, schedule="zb-h1"),
    "zb-h2-offload": lambda plan: replace(PLANS["offload-slots"](plan), schedule="zb-h2"),
    "zb-h2-full": lambda plan: replace(PLANS["full"](plan), schedule="zb-h2"),
    "zb-v": lambda plan: plan.turned("zb-v"),
    "v-half-offload": lambda plan: PLANS["offload"](plan).turned("v-half"),
    "v-min-full": lambda plan: PLANS["full"](plan).turned("v-min"),
    "zb-h1-mini": lambda plan: replace(mini_dropped(plan), schedule="zb-h1"),
    "vocab-1": lambda plan: replace(plan, schedule="vocab-1"),
    "vocab-2-offload": lambda plan: replace(PLANS["offload"](plan), schedule="vocab-2"),
    "interlaced-full": lambda plan: replace(PLANS["full"](plan), schedule="interlaced"),
}
"""Raw plans with weight gradients, or a vocabulary that stages share, in passes of their own."""
KEYS = Rule(Select(parts=("layer",), activations=("k", "v")), Keep())
"""Slices read the keys and values of earlier ones."""
SLICE_PLANS: dict[str, Callable[[Plan], Plan]] = {
    "slices": lambda plan: replace(plan, slices=(8, 8, 8, 8)),
    "slices-gpipe": lambda plan: replace(plan, slices=(16, 12, 4), schedule="gpipe"),
    "slices-full": lambda plan: replace(PLANS["full"](plan).with_rules(KEYS), slices=(12, 20)),
    "slices-offload": lambda plan: replace(
        PLANS["offload"](plan).with_rules(KEYS), slices=(20, 12)
    ),
}
"""Raw plans with passes over slices of a sequence."""
SAME_NUMBERS = ("offload", "offload-layers", "full")


def in_host_memory(case: Case, *kinds: str) -> Case:
    """The case with some kinds of states in host memory."""
    states = (replace(s, home="host") if s.kind in kinds else s for s in case.plan.states)
    plan = replace(case.plan, states=tuple(states))
    return Case(**{**vars(case), "name": f"{case.name} {'+'.join(kinds)}", "plan": plan})


def case(layout: str, plan: str, **changes: Any) -> Case:
    """A raw plan on a layout."""
    given = tiny(layout, **changes)
    return Case(
        name=f"{layout} {plan}",
        problem=given,
        plan=(PLANS | EXPERT_PLANS | HALF_PLANS | SLICE_PLANS)[plan](given.base_plan),
        ignored=0.1,
        gradients=True,
    )


def tight(given: Problem) -> Problem:
    """On a device that holds full recomputation but not keep_all: what must go has to be chosen."""
    base = given.base_plan
    peaks = [
        max(rank.device_peak for rank in program_bytes(given, plan, lower(plan, given)))
        for plan in (base, PLANS["full"](base))
    ]
    return on(given, hbm_bytes=sum(peaks) // 2, non_torch_bytes=0)


def method_case(layout: str, name: str, method: Any) -> Case | str:
    """A method on a layout, or its reason not to plan."""
    given = tight(tiny(layout)) if "lynx" in name else tiny(layout)
    plan = method.plan(given, given.base_plan)
    if isinstance(plan, Unsupported):
        return plan.reason
    if refused := refusals(given, plan):
        return refused[0]
    return Case(name=f"{layout} {name}", problem=given, plan=plan, ignored=0.1, gradients=True)
