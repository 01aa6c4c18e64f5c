"""Facts of a stack that have no source, and a network that nobody published: predictions assume
usual values for them, and name these values."""

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.evaluate.effects import acting
from rematbench.host.console import worded
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ASSUMED
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import NETWORK
from rematbench.inputs.system import FACTS, Kernels, Loss, with_facts
from rematbench.plan import PlanError
from rematbench.problem import Problem

OF_A_MODEL = (*Kernels.__struct_fields__, *Loss.__struct_fields__)
"""Facts whose effect on a model, if they have any, also shows on one GPU."""
_answers: dict[bytes, list[str]] = {}
"""A cache of answers for jobs on one GPU, which many layouts of a model share."""


def unread_facts(problem: Problem) -> dict[str, str]:
    """The facts of the problem's stack without a source, each with the reason for its value. Facts
    that do not change the prediction of a plan that keeps all activations are left out."""
    sources = problem.system.sources
    assumed = [key for key in FACTS if sources.get(key, "").startswith(ASSUMED)]
    if not assumed:
        return {}
    others = [key for key in assumed if key not in OF_A_MODEL]
    found = _on_one_gpu(problem, [key for key in assumed if key in OF_A_MODEL])
    found = [*found, *acting(problem, problem.base_plan, others)] if others else found
    return {key: sources[key].removeprefix(ASSUMED) for key in assumed if key in found}


def _on_one_gpu(problem: Problem, facts: list[str]) -> list[str]:
    """The facts that act on the model on one GPU, where no experts exchange tokens."""
    layout = Layout(zero_stage=problem.layout.zero_stage, global_batch=2)
    system = with_facts(problem.system, ep_overlap="none", delayed_wgrad=False)
    one = problem.remade(layout=layout, system=system)
    given = (one.workload, one.cluster, system, layout, one.attention, one.backend)
    key = encode((*given, one.calibration.date, facts))
    if key not in _answers:
        _answers[key] = acting(one, one.base_plan, facts)
    return _answers[key]


def unread(problem: Problem) -> str:
    """The facts of `unread_facts` with their values, and how much a network without a source may
    change the step, in one line; empty if there are none."""
    values = flat(problem.system)
    facts = [fact_words(key, values[key]) for key in unread_facts(problem)]
    said = f"assumed without a source: {', '.join(facts)}" if facts else ""
    return "; ".join(part for part in (said, _unread_network(problem)) if part)


SLOWER = 0.5
"""The share of the assumed network rate with which the step is predicted again."""


def _unread_network(problem: Problem) -> str:
    """The assumed rate of a network that nobody published, and by how much the step of a plan that
    keeps all activations is longer on a slower one; empty for a job inside a node."""
    cluster, gpus = problem.cluster, problem.layout.gpus
    assumed = all(cluster.sources.get(key, "").startswith(ASSUMED) for key in NETWORK)
    if not assumed or gpus <= cluster.domain(gpus):
        return ""
    slower = replace(cluster, nic_bytes_per_s=SLOWER * cluster.nic_bytes_per_s)
    there = problem.remade(cluster=slower)
    try:
        here_s, there_s = (one.cost.evaluate(one.base_plan).step_s for one in (problem, there))
    except PlanError:
        return ""
    rate = f"{cluster.node_network_bytes_per_s / 1e9:g} GB/s a node"
    asked = "give nics_per_node and nic_bytes_per_s in a file of the cluster"
    longer = f"a step is {there_s / here_s - 1.0:.0%} longer at half this rate"
    return f"network of {rate} assumed: {longer} ({asked})" if here_s > 0 else ""


def fact_words(fact: str, value: object) -> str:
    """A fact with its value, as a stack's file has them."""
    return f"{fact} {str(value).lower() if isinstance(value, bool) else worded(value)}"
