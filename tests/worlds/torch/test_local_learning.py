"""Plans that train blocks by losses of their own: no gradient crosses a cut (local learning)."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from rematbench.engine.lowering.blocks.chunk_ops import ChunkFacts, ChunkOps
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.simulate.op_level import simulate
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.paths import data_dir
from rematbench.plan import Plan, PlanError
from rematbench.plugins.discover import discover
from rematbench.problem import Problem, head_parameters, rank_parameters
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.parameters import full_weight, specs_by_name
from tests.problems import GPT, layers, plan_of, problem, slots
from tests.worlds.torch import cases, laws
from tests.worlds.torch.reference import Reference

FOLDER = data_dir("methods") / "other_objectives"


def local(p: Problem, spec: str = "local_learning") -> Plan:
    plan = discover([FOLDER]).resolve(spec).plan(p)
    assert isinstance(plan, Plan), plan
    return plan


def given(pp: int, model: Any = GPT) -> Problem:
    made = problem(model=layers(4, model), pp=pp, seq_len=cases.SEQ, global_batch=4)
    work = replace(made.workload, precision="fp64")
    return dataclasses.replace(made, workload=work, evaluator=evaluate, _memo={}, _weights={})


def test_no_gradient_is_sent_and_one_micro_batch_is_alive() -> None:
    p = given(4, layers(4, replace(GPT, dropout=0.0)))
    plan, usual = local(p), plan_of(p, "keep_all")
    program = lower(plan, p)
    check(program)
    messages = [
        (a.kind, a.op)
        for rank in program.ranks
        for a, *_ in rank.actions()
        if a.kind in (Kind.SEND, Kind.RECV) and a.op != "tied"
    ]
    assert set(messages) == {(Kind.SEND, "f"), (Kind.RECV, "f")}
    assert len(messages) == 2 * 3 * p.layout.num_micro_batches
    mine, other = (evaluate(p, one) for one in (plan, usual))
    most = [rank.activation_peak for rank in mine.ranks]
    assert most[0] < other.ranks[0].activation_peak
    assert max(most[1:]) <= other.ranks[-1].activation_peak
    more = rank_parameters(p, plan, 1) - rank_parameters(p, usual, 1)
    assert more == head_parameters(p)[0]
    assert "not lossless" in str(plan.fit["objective"])
    fill = 3 * 1.0  # three forwards, and no bubble after them: 1F1B has three more backwards
    assert simulate(program, slots).step_s == 3.0 * p.layout.num_micro_batches + fill


def test_blocks_are_offered_only_where_they_are_named() -> None:
    assert "local_learning" not in discover().methods
    assert "local_learning" in discover([FOLDER]).methods


def test_what_is_not_modelled_says_what_a_head_has() -> None:
    p = given(2)
    with pytest.raises(PlanError, match="virtual stages 1 to 1"):
        lower(replace(p.base_plan, cuts=(2,)), p)
    partly = dataclasses.replace(p, workload=replace(p.workload, lora_rank=2))
    with pytest.raises(PlanError, match=r"do not train.*M parameters"):
        lower(replace(partly.base_plan, cuts=(1,)), partly)


def autograd(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of all blocks' losses, and its gradients, where `detach` cuts between blocks."""
    model, plan = case.problem.workload.model, case.plan
    units = [
        unit
        for rank, chunks in enumerate(plan.partition)
        for unit in ChunkOps(case.problem, rank, 0, chunks[0], ChunkFacts(cuts=plan.cuts)).units
    ]
    specs = specs_by_name(model, [(u.table.part, u.layer) for u in units], model.vocab)
    weights = {n: full_weight(s, case.seed).requires_grad_() for n, s in specs.items()}
    plain = Reference(model, weights)
    (batch,) = laws.batches(case)[:1]
    x = weights["embedding.weight"][batch.ids]
    if model.position == "learned":
        x = x + weights["position.weight"][: x.shape[1]]
    total = torch.zeros((), dtype=torch.float64)
    for rank, (chunk,) in enumerate(plan.partition):
        for layer in chunk:
            x = plain.layer(x, f"layers.{layer}")
        prefix = f"local.{rank}." if rank + 1 in plan.cuts else ""
        if prefix or rank == len(plan.partition) - 1:
            tied = model.tied_embeddings and not prefix
            head = weights["embedding.weight" if tied else f"{prefix}lm_head.weight"]
            logits = plain.norm(x, f"{prefix}final_norm") @ head.T
            total = total + F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            x = x.detach()
    total.backward()
    return float(total.detach()), {n: w.grad for n, w in weights.items() if w.grad is not None}


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    made = []
    for name, model in (("gpt", cases.TINY_GPT), ("llama", cases.TINY)):
        p = given(2, model)
        for how in ("local_learning", "local_learning+full_recompute"):
            made.append(
                Case(name=f"{name}-{how}", problem=p, plan=local(p, how), steps=1, gradients=True)
            )
    return laws.launch(made)


@pytest.mark.parametrize("how", ["local_learning", "local_learning+full_recompute"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_equal_autograd_with_detach(
    launched: dict[str, Any], name: str, how: str
) -> None:
    case, result = launched[f"{name}-{how}"]
    assert result.status == "ok", result.reason
    loss, gradients = autograd(case)
    assert result.losses[0] == pytest.approx(loss, rel=1e-12)
    assert result.gradients[0].keys() == gradients.keys()
    for key, want in gradients.items():
        error = (result.gradients[0][key].double() - want).norm()
        assert error <= 1e-10 * max(float(want.norm()), 1e-3), key
    assert not laws.bytes_differ(case, result)
