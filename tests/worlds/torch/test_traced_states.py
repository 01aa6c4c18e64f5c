"""Methods of optimizer states traced at scale: 7B under ZeRO 3 on the node of published logs."""

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.evaluation import program_bytes
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.plan import Plan
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import all_methods

SPEC = Job(
    model="llama-7b", cluster="h100-80gb-dos", system="rematbench", gpus=4, seq_len=2048,
    global_batch=4, zero_stage=3,
)  # fmt: skip
TEXTS = (
    "zero_offload",
    "optimizer_offload:share=0.5,visiting=0.5",
    "full_recompute+optimizer_offload:share=1,start=ready,clip=false",
)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_ledgers(text: str) -> None:
    """After every action; the states that stay, but for the loss and what has no place in them."""
    loaded = {
        "model": load_model("llama-7b"),
        "cluster": load_cluster("h100-80gb-dos"),
        "system": load_system("rematbench"),
    }
    problem = make_problem(replace(SPEC, **loaded))
    plan = all_methods().resolve(text).plan(problem)
    assert isinstance(plan, Plan)
    program = lower(plan, problem)
    traced = trace_rank(problem, plan)
    assert traced.bytes_after == list(live_bytes(program.ranks[0].actions()))
    (rank,) = program_bytes(problem, plan, program)
    states = rank.parameter + rank.gradient + rank.optimizer
    assert abs(traced.state_bytes - states) < 1e-3 * states
