"""What `compare` tries: rules without names."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rematbench.advise.candidates.candidate import Variant, load_compare
from rematbench.advise.compare.compositions import (
    Contender,
    composed,
    compositions,
    first_candidates,
)
from rematbench.evidence.published.row_cases import recompute_method
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model
from rematbench.plan import (
    MiniSequence,
    Offload,
    Plan,
    Recompute,
    Rule,
    Select,
    Split,
    Transfers,
)
from rematbench.plugins.kinds import KINDS, TUNED, changed_kinds, clash
from rematbench.plugins.policies import Policy, applicable_settings
from rematbench.problem import Problem
from rematbench.workload import Model
from tests.problems import all_methods, make_problem


def demo(system: str = "megatron-kwai") -> Problem:
    layout = Layout(pp=4, vpp=2, global_batch=8, zero_stage=1)
    return make_problem(
        model="llama-7b", cluster="a800-80gb", system=system, layout=layout, seq_len=12288
    )


# -- the rule of compositions -----------------------------------------------------------------


def alone(name: str, *kinds: str, tuned: bool = False) -> tuple[Contender, Plan]:
    """A candidate, with a plan that changes these kinds."""
    candidate = Contender((Variant(name, name),), origin="method")
    plan = demo().base_plan
    for kind in kinds:
        plan = CHANGES[kind](plan)
    return candidate, plan.noting(bound=TUNED) if tuned else plan


LAYER = Select(parts=("layer",))
CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "rebuild": lambda plan: plan.with_rules(Rule(LAYER, Recompute())),
    "offload": lambda plan: plan.with_rules(Rule(LAYER, Offload())),
    "ends": lambda plan: plan.with_rules(Rule(Select(parts=("head",)), Recompute())),
    "pieces": lambda plan: replace(plan, mini_sequences=(MiniSequence(("fc1",), 2),)),
}


def named(pairs: list[tuple[Contender, Plan]], most: int) -> set[str]:
    groups = compositions(demo().base_plan, pairs, most)
    return {"+".join(candidate.name for candidate in group) for group in groups}


def test_methods_compose_when_they_change_different_things() -> None:
    a, b, c = alone("a", "rebuild"), alone("b", "offload"), alone("c", "ends", "pieces")
    assert named([c, b, a], 3) == {"a+b", "a+c", "b+c", "a+b+c"}
    assert named([a, b, c], 2) == {"a+b", "a+c", "b+c"}
    both = alone("d", "rebuild", "offload")
    assert named([b, both, a], 3) == {"a+b", "a+d"}
    assert named([both, c], 3) == {"d+c"}
    assert named([a, alone("nothing")], 3) == set()


def test_only_one_of_a_composition_is_tuned_to_fit() -> None:
    one, two = alone("a", "rebuild", tuned=True), alone("b", "offload", tuned=True)
    assert named([one, two], 2) == set()
    assert named([one, alone("b", "offload")], 2) == {"a+b"}


def test_kinds_are_read_off_the_plan() -> None:
    base = demo().base_plan
    layer = Select(parts=("layer",))
    cases: list[tuple[Any, set[str]]] = [
        (base, set()),
        (base.with_rules(Rule(layer, Recompute())), {"rebuild"}),
        (base.with_rules(Rule(layer, Offload())), {"offload"}),
        (base.with_rules(Rule(layer, Split(offload=0.5, recompute=0.5))), {"offload", "rebuild"}),
        (base.with_rules(Rule(Select(parts=("head",)), Recompute())), {"ends"}),
        (replace(base, mini_sequences=(MiniSequence(("fc1",), 2),)), {"pieces"}),
        (replace(base, schedule="gpipe"), {"partition"}),
        (base.noting(alpha=1.0), set()),
    ]
    for plan, kinds in cases:
        assert changed_kinds(base, plan) == kinds
    assert {kind for _, kinds in cases for kind in kinds} | {"states"} == set(KINDS)


def test_a_composition_plans_on_the_plan_before_it() -> None:
    group = (alone("a")[0], alone("b")[0])
    base = demo().base_plan.noting(mark=1.0)
    candidate = composed(group, base)
    assert (candidate.name, candidate.base, candidate.family) == ("a+b", base, "a+b")


def test_operators_that_a_model_has_not_are_left_out() -> None:
    settings = applicable_settings(
        {"ops": ["fc1", "act", "mul"], "scope": "layer"}, demo(system="megatron-core")
    )
    assert settings == {"ops": ["fc1", "act"], "scope": "layer"}


def test_policies_name_known_methods_and_say_why() -> None:
    registry = all_methods()
    for policy in load_compare().policies:
        assert isinstance(policy, Policy)
        registry.resolve(policy.method, policy.settings)
        assert policy.name.partition(":")[0] == policy.method
        assert policy.why.strip()


def test_a_composition_may_not_overrule_its_base() -> None:
    """Judged by the composed plan: what the base left whole may change, what it decided may not."""
    p = demo()
    rebuilt = Rule(Select(parts=("layer",), activations=("fc2_in",)), Recompute())
    base = p.base_plan.with_rules(rebuilt)
    moved = Select(parts=("layer",), activations=("fc2_in",))
    cases: list[tuple[Plan, str]] = [
        (base.with_rules(Rule(Select(parts=("layer",), kept=True), Offload())), ""),
        (base.with_rules(Rule(moved, Offload())), "fc2_in"),
        (p.base_plan.with_rules(Rule(moved, Offload())), "rules"),
    ]
    for plan, what in cases:
        assert clash(p, base, plan) == what
    offloading = p.base_plan.with_rules(Rule(Select(parts=("layer",)), Offload()))
    assert (
        clash(p, offloading, replace(offloading, transfers=Transfers(release_lag=3))) == "transfers"
    )
    other = replace(p.base_plan, partition=p.base_plan.partition[::-1])
    assert clash(p, other, p.base_plan) == "partition"
    assert clash(p, p.base_plan, other) == ""


def tried(model: Model, system: str = "megatron-core-0.16") -> set[str]:
    """The names that compare tries first for a model on a stack."""
    on = make_problem(model=model, system=system, layout=Layout(), seq_len=64, cluster="h100-80gb")
    return {one.name for one in first_candidates(all_methods(), load_compare(), on)}


def test_policies_of_trainers_are_tried_on_their_stacks_with_the_keys_that_set_them() -> None:
    model = load_model("llama-7b")
    trainers = {policy.name: policy for policy in load_compare().policies if policy.keys}
    ours = {f"megatron_core:offload={more}core_attn,attn_proj" for more in ("", "qkv_linear,")}
    assert trainers.keys() == {"full_recompute:inputs=host", "selective_recompute:op", *ours}
    found = {
        system: tried(model, system) & trainers.keys()
        for system in (
            "trl",
            "torchtitan",
            "huggingface-deepspeed",
            "megatron-core-0.16",
            "rematbench",
        )
    }
    assert found == {
        "trl": {*trainers} - ours,
        "torchtitan": {"selective_recompute:op"},
        "huggingface-deepspeed": {"full_recompute:inputs=host"},
        "megatron-core-0.16": ours,
        "rematbench": {"full_recompute:inputs=host"},
    }
    op = trainers["selective_recompute:op"]
    named, settings = recompute_method("selective(op)", all_methods())
    assert (named, {key: [*value] for key, value in settings.items() if key != "scope"}) == (
        op.method, {key: op.settings[key] for key in ("keep", "held")}
    )  # fmt: skip
    on = make_problem(
        model=model, system="megatron-core-0.16", layout=Layout(), seq_len=64, cluster="h100-80gb"
    )
    for name in ours:  # the keys are those that the package's own options print
        method: Any = all_methods().resolve(name, None, on).methods[0]
        assert trainers[name].keys in method.flags(on)
    assert not any(policy.applies(model) for policy in trainers.values())  # none of the search


def test_modules_of_experts_are_policies_of_their_models_alone() -> None:
    dense, routed = (load_model(name) for name in ("llama-7b", "qwen3-30b-a3b"))
    shared = replace(routed, experts=replace(routed.experts, shared_ffn=64))
    names = [tried(model) for model in (dense, routed, shared)]
    assert names[1] - names[0] == {
        f"selective_recompute:{modules}" for modules in ("moe_act", "moe_act,layernorm", "moe")
    }
    assert names[2] - names[1] == {"selective_recompute:shared_experts"}


def test_modules_of_latent_attention_are_policies_of_their_models_alone() -> None:
    dense, routed = (load_model(name) for name in ("minicpm3-4b", "deepseek-v3"))
    plain, more, both = (tried(model) for model in (load_model("llama-7b"), dense, routed))
    assert more - plain == {"selective_recompute:mla_up_proj"}
    assert more < both
    assert "selective_recompute:mla_up_proj,moe_act,layernorm" in both
