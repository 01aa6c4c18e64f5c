"""Facts of stacks act where they are declared to act, and nowhere else."""

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import asdict, replace

from rematbench.evaluate.evaluator import evaluate
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.effects import ACTS, Use
from rematbench.inputs.facts import check_system
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.load import load_cluster, load_system, names
from rematbench.inputs.precision import in_precision
from rematbench.inputs.stackfacts import NO_FACTS
from rematbench.inputs.system import FACTS, FlatSystem, System, flat, with_facts
from rematbench.plan import Offload, Plan, PlanError, Recompute
from rematbench.problem import Problem
from rematbench.workload import Experts, Model, Workload
from tests.problems import GPT, LLAMA, calibration, rule

WIDE = {"hidden": 1024, "num_heads": 8, "head_dim": 128, "num_layers": 2, "vocab": 32003}
ROTARY = replace(LLAMA, **WIDE, num_kv_heads=2, ffn=2816)
LEARNED = replace(GPT, **WIDE, num_kv_heads=8, ffn=4096, max_positions=4096)
CAPPED = replace(ROTARY, logit_soft_cap=30.0, attention_soft_cap=50.0)
MIXTURE = replace(ROTARY, experts=Experts(count=16, active=4, ffn=512))
NODE = 4
"""GPUs of a node."""

JOBS: list[dict[str, Any]] = [
    {"global_batch": 2},
    {"dp": 4, "zero_stage": 1, "global_batch": 8},
    {"dp": 2, "zero_stage": 1, "global_batch": 2, "seq_len": 128},
    {"dp": 4, "zero_stage": 2, "global_batch": 8},
    {"dp": 8, "zero_stage": 3, "global_batch": 16},
    {"tp": 2, "pp": 2, "global_batch": 4},
    {"tp": 8, "global_batch": 1},
    {"tp": 2, "pp": 2, "vpp": 1, "dp": 2, "zero_stage": 0, "global_batch": 8},
    {"cp": 2, "dp": 4, "zero_stage": 1, "global_batch": 8},
    {"pp": 2, "dp": 4, "zero_stage": 3, "global_batch": 16},
    {"zero_stage": 3, "global_batch": 2, "hosted": True},
    {"dp": 8, "zero_stage": 3, "global_batch": 16, "hosted": True},
    {"dp": 4, "zero_stage": 1, "global_batch": 8, "hosted": True},
    {"dp": 8, "zero_stage": 3, "global_batch": 16, "parameters": True},
    {"global_batch": 2, "offloads": True},
    {"micro_batch": 8, "global_batch": 16, "rebuilds": True},
    {"global_batch": 2, "flash": False},
    {"dp": 2, "zero_stage": 1, "global_batch": 2, "flash": False, "precision": "fp32"},
    {"dp": 2, "zero_stage": 1, "global_batch": 4, "model": LEARNED},
    {"tp": 2, "global_batch": 1, "model": CAPPED},
    {"dp": 8, "ep": 8, "zero_stage": 1, "global_batch": 8, "model": MIXTURE},
    {"dp": 8, "ep": 8, "zero_stage": 1, "global_batch": 16, "model": MIXTURE, "pairs": True},
]
OTHER: dict[str, list[Any]] = {
    "attention": ["fa2", "fa3", "unfused"],
    "rank_order": [("dp", "cp", "tp", "pp"), ("pp", "dp", "cp", "tp")],
    "vocab_multiple": [1, 128, 4096],
    "bucket_bytes": [1, 10**6, 10**9],
    "prefetch_elements": [0, 1, 10**8],
    "live_elements": [1, 3 * 10**6, 10**9],
    "sub_group_parameters": [0, 10**5, 10**6],
    "step_scratch_bytes": [0, 4, 6],
    "late_state_bytes": [0, 4],
    "optimizer_bytes": [4, 8, 12],
    "held_logit_bytes": [0, 2],
    "param_bytes": [2, 4],
    "model_parallel": [("tp", "pp", "vpp")],
    "zero_stages": [(0, 1, 2, 3)],
    "pipeline_zero_stages": [(0, 1, 2, 3)],
    "features": [("activation_offload", "optimizer_offload", "param_offload", "ulysses")],
}


def others(name: str, value: Any) -> list[Any]:
    """Other values of a fact."""
    hint = get_type_hints(FlatSystem)[name]
    if name in OTHER:
        found = OTHER[name]
    elif hint is bool:
        found = [False, True]
    elif (literals := get_args(hint)) and isinstance(literals[0], str):
        found = list(literals)
    else:
        found = [1, 2, 4]
    return [other for other in found if other != value]


def legal(system: System) -> bool:
    try:
        check_system(system, "")
    except ConfigError:
        return False
    return True


@cache
def cluster() -> Any:
    return replace(load_cluster("h100-80gb-dos"), gpus_per_node=NODE)


class Drawn:
    """A stack on a job: its use, and its numbers (None for a job that the stack does not run)."""

    def __init__(self, system: System, job: dict[str, Any]) -> None:
        job = dict(job)
        model: Model = job.pop("model", ROTARY)
        flash, offloads = job.pop("flash", True), job.pop("offloads", False)
        precision = job.pop("precision", "bf16")
        rebuilds, self.seq_len = job.pop("rebuilds", False), job.pop("seq_len", 4096)
        hosted, parameters = job.pop("hosted", False), job.pop("parameters", False)
        if hosted or parameters:
            system = with_facts(system, optimizer_on_host=True, parameters_on_host=parameters)
        if job.pop("pairs", False) and "ep_overlap" in system.accepts.features:
            system = with_facts(system, ep_overlap="interleaved")
        layout = Layout(**job)
        self.system, self.layout, self.model = system, layout, model
        self.use = Use(
            system, layout, model, flash, offloads, layout.gpus > NODE, rebuilds, precision
        )

    def numbers(self, **facts: Any) -> Any:
        system = with_facts(self.system, **facts)
        system = in_precision(system, self.use.precision, self.layout.zero_stage)
        try:
            given = Problem(
                Workload(model=self.model, seq_len=self.seq_len, precision=self.use.precision),
                cluster(),
                system,
                self.layout,
                calibration(),
                "flash" if self.use.flash else "unfused",
            )
            found = evaluate(given, self.plan(given))
        except (LayoutError, RateError, PlanError):
            return None
        ranks = tuple(asdict(rank) for rank in found.ranks)
        return found.step_s, ranks, found.reserved_bytes, found.host_node_bytes

    def plan(self, given: Problem) -> Plan:
        rules = [rule(Offload(), "fc2_in")] * self.use.offloads
        rules += [rule(Recompute(), "up_out")] * self.use.rebuilds
        return given.base_plan.with_rules(*rules)


@cache
def drawn(stack: str) -> list[tuple[Drawn, Any]]:
    made = [Drawn(load_system(stack), job) for job in JOBS]
    return [(one, base) for one in made if (base := one.numbers()) is not None]


def facts() -> Iterator[str]:
    return (name for name in FACTS if name not in NO_FACTS)


def test_every_fact_declares_where_it_acts() -> None:
    assert set(ACTS) == set(facts())


def changes(stack: str, name: str, idle_jobs: int) -> tuple[bool, bool]:
    """(whether the fact acts in a job of the stack, whether it changes such a job).  In at most
    `idle_jobs` drawn jobs where it does not act, it must change nothing."""
    acts = changed = False
    draw, idle = Random(f"{stack} {name}"), 0
    for one, base in draw.sample(drawn(stack), len(drawn(stack))):
        values = others(name, flat(one.system)[name])
        for value in draw.sample(values, len(values)):
            system = with_facts(one.system, **{name: value})
            active = ACTS[name](one.use) or ACTS[name](one.use._replace(system=system))
            skipped = changed if active else idle >= idle_jobs
            if skipped or not legal(system) or (numbers := one.numbers(**{name: value})) is None:
                continue
            acts, changed = acts or active, changed or numbers != base
            idle += not active
            said = f"{name} {flat(one.system)[name]} -> {value} at {one.layout}"
            assert active or numbers == base, said
    return acts, changed


@pytest.mark.parametrize("stack", names("system"))
def test_facts_act_where_they_are_declared_to(stack: str) -> None:
    for name in facts():
        acts, changed = changes(stack, name, idle_jobs=2)
        assert changed == acts, f"{name} changes no job of {stack}"


@pytest.mark.full
@pytest.mark.parametrize("stack", names("system"))
def test_facts_act_nowhere_else(stack: str) -> None:
    for name in facts():
        changes(stack, name, idle_jobs=1000)


def test_every_fact_acts_somewhere() -> None:
    """But those that say what a stack accepts."""
    uses = [one.use for stack in names("system") for one, _ in drawn(stack)]
    idle = {name for name in facts() if not any(map(ACTS[name], uses))}
    abilities = {"model_parallel", "zero_stages", "pipeline_zero_stages", "features"}
    assert idle == abilities | {"wide_attention"}
