"""Published closed-form estimates of memory, to print next to the ledger.  A formula refuses a run
outside its scope, with the reason."""

from typing import Literal

from msgspec import Struct

from rematbench.evidence.published.estimators import fujii_estimate, phaze_estimate
from rematbench.plan import Plan, Recompute, Unsupported
from rematbench.problem import Problem, rank_parameters

EstimatorName = Literal["ledger", "fujii", "phaze"]


class ClosedForm(Struct, frozen=True, kw_only=True):
    """Bytes of the first pipeline rank by a published formula; papers estimate no other rank."""

    name: EstimatorName
    state_bytes: float
    activation_bytes: float
    remark: str

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


def closed_form(name: EstimatorName, problem: Problem, plan: Plan) -> ClosedForm | Unsupported:
    """The estimate of a plan by a formula. Unsupported, with the reason, if the formula does not
    cover the plan; `ledger` is not a formula and always unsupported."""
    if name == "fujii":
        return _fujii(problem, plan)
    if name == "phaze":
        return _phaze(problem, plan)
    return Unsupported("the ledger is not a formula")


def _fujii(problem: Problem, plan: Plan) -> ClosedForm | Unsupported:
    reason = fujii_refusal(problem) or _not_plain(problem, plan)
    if reason:
        return Unsupported(reason)
    found = fujii_estimate(problem.workload.model, problem.layout, problem.workload.seq_len)
    return ClosedForm(
        name="fujii",
        state_bytes=found.state_bytes,
        activation_bytes=found.activation_bytes,
        remark="Fujii et al., arXiv 2411.06465: below 80 % of device memory is called safe",
    )


def fujii_refusal(problem: Problem) -> str:
    """The reason why Fujii's formula does not cover a problem; empty if it does."""
    lay, model = problem.layout, problem.workload.model
    rules = (
        (problem.attention != "flash", "assumes flash attention"),
        (not model.gated, f"assumes a gated MLP, not {model.mlp}"),
        (lay.tp > 1 and not lay.sp, "assumes sequence parallelism with tp"),
        (
            lay.zero_stage != 1,
            f"assumes a distributed optimizer (zero 1), not zero {lay.zero_stage}",
        ),
        (lay.ulysses > 1, "has no term for ulysses"),
        (model.experts is not None, "has no term for experts"),
        (model.drops, "assumes no dropout"),
    )
    return next((text for broken, text in rules if broken), "")


def _not_plain(problem: Problem, plan: Plan) -> str:
    """Why a formula without recomputation does not cover a plan; empty where it does."""
    plain = problem.base_plan
    changed = (
        (bool(plan.rules), "assumes that every activation is kept (keep_all)"),
        (bool(plan.mini_sequences), "has no term for mini-sequences"),
        (plan.partition != plain.partition, "assumes layers spread evenly"),
        (plan.states != plain.states, "has no term for states kept elsewhere"),
    )
    return next((text for broken, text in changed if broken), "")


def _phaze(problem: Problem, plan: Plan) -> ClosedForm | Unsupported:
    reason = phaze_refusal(problem, plan)
    if reason:
        return Unsupported(reason)
    recomputes = bool(plan.rules)
    first = plan.partition[0][0]
    stage = problem.embedding.saved_bytes + sum(problem.layer(n).saved_bytes for n in first)
    stash = problem.layer(first[0]).activations["layer_input"].nbytes if recomputes else stage
    form = phaze_estimate(rank_parameters(problem, plan, 0), stage, stash, problem.layout.pp)
    return ClosedForm(
        name="phaze",
        state_bytes=form.state_bytes,
        activation_bytes=form.activation_bytes,
        remark="Wang et al., ICML 2024: no fp32 gradients or masters, no fragmentation",
    )


def phaze_refusal(problem: Problem, plan: Plan) -> str:
    """The reason why PHAZE's formula does not cover a plan; empty if it does."""
    lay = problem.layout
    whole = all(getattr(rule.fate, "whole", False) for rule in plan.rules)
    some = any(rule.select.layers is not None for rule in plan.rules)
    fates = {type(rule.fate) for rule in plan.rules}
    rules = (
        (lay.vpp > 1, "has no term for interleaved stages"),
        (lay.zero_stage > 1, f"shards no states, not zero {lay.zero_stage}"),
        (problem.workload.model.experts is not None, "has no term for experts"),
        (bool(plan.mini_sequences), "has no term for mini-sequences"),
        (not fates <= {Recompute} or not whole or some, "recomputes whole stages or nothing"),
        (plan.states != problem.base_plan.states, "has no term for states kept elsewhere"),
    )
    return next((text for broken, text in rules if broken), "")
