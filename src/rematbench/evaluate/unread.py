"""Facts of a stack that nobody has read: the usual value stands in for them, which is said."""

from rematbench.inputs.configfile import ASSUMED
from rematbench.inputs.effects import ACTS, Use
from rematbench.inputs.system import flat
from rematbench.problem import Problem


def use_of(problem: Problem) -> Use:
    """The use of the problem's stack by a plan that keeps all activations, on one node."""
    return Use(
        system=problem.system,
        layout=problem.layout,
        model=problem.workload.model,
        flash=problem.attention == "flash",
        precision=problem.workload.precision,
    )


def unread_facts(problem: Problem) -> dict[str, str]:
    """The facts of the problem's stack that nobody has read and that change its prediction, each
    with its reason."""
    sources, use = problem.system.sources, use_of(problem)
    return {
        key: sources[key].removeprefix(ASSUMED)
        for key, acts in ACTS.items()
        if sources.get(key, "").startswith(ASSUMED) and acts(use)
    }


def unread(problem: Problem) -> str:
    """The same facts with their values, in one line; empty if there are none."""
    values = flat(problem.system)
    facts = [f"{key} {_word(values[key])}" for key in unread_facts(problem)]
    return f"assumed without a source: {', '.join(facts)}" if facts else ""


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
