"""GEMM overlap exists only over links that the library has it for."""

from dataclasses import replace as remade

from msgspec.structs import replace

from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem


def given(tp: int, system: str = "nemo-24.12") -> Problem:
    spec = Job(
        model="llama-3.1-70b",
        cluster="h100-80gb",
        system=system,
        gpus=64,
        seq_len=8192,
        global_batch=64,
        tp=tp,
    )
    stack = with_facts(load_system(system), gemm_overlap_links="nvlink")
    return make_problem(replace(spec, system=stack))


def test_a_group_that_leaves_the_node_overlaps_only_in_the_backward() -> None:
    assert [given(tp).tp_overlap for tp in (4, 8, 16)] == ["gemm", "gemm", "backward"]
    assert [given(tp, "megatron-core").tp_overlap for tp in (8, 16)] == ["backward", "backward"]


def test_the_overlap_changes_the_step_only_where_it_acts() -> None:
    def step_s(problem: Problem, **facts: str) -> float:
        changed = remade(problem, system=with_facts(problem.system, **facts), _memo={}, _weights={})
        return changed.cost.evaluate(changed.base_plan).step_s

    inside, across = given(8), given(16)
    assert step_s(inside) == step_s(inside, gemm_overlap_links="all")
    assert step_s(across) > step_s(across, gemm_overlap_links="all")
    assert step_s(across) == step_s(across, tp_overlap="backward")


def test_an_nvlink_domain_larger_than_a_server_keeps_the_overlap() -> None:
    problem = given(16)
    domain = replace(problem.cluster, gpus_per_node=64)
    assert remade(problem, cluster=domain, _memo={}, _weights={}).tp_overlap == "gemm"
