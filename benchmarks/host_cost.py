"""Host cost of the executor per action, in microseconds on this machine's CPU.

The executor on meta tensors does no arithmetic: what is left is the interpreter's own work, torch's
dispatch, and the two modes that only traces have (remembered shapes, the tracker of bytes: about a
third of it), so a GPU's step costs the host less.  Host cost, not speed: on a GPU it must stay
below a kernel's time.  Run it on a quiet machine: `./bench run python benchmarks/host_cost.py`
(needs torch); `--small` traces one method, to see that it runs.
"""

import argparse
import sys
import time
from collections import defaultdict

import torch

from rematbench.engine.program.action import Action
from rematbench.evaluate.outcome import make_problem
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.spec.layout import Layout
from rematbench.spec.problemspec import ProblemSpec
from rematbench.worlds.torch import executor, trace

METHODS = ("keep_all", "full_recompute", "memo", "mst")


def measured(method: str) -> dict[str, tuple[int, float]]:
    """Action kind -> (number of actions, median seconds of one action) in one traced step."""
    spent: dict[str, list[float]] = defaultdict(list)
    act = executor.Executor._act

    def timed(self: executor.Executor, action: Action, micro_batch: int, chunk: int) -> None:
        start = time.perf_counter()
        act(self, action, micro_batch, chunk)
        spent[action.kind.value].append(time.perf_counter() - start)

    layout = Layout(tp=2, sp=True, pp=2, dp=1, global_batch=16)
    spec = ProblemSpec.at(
        layout, model="llama-7b", cluster="h800-80gb", system="rematbench", seq_len=4096
    )
    problem = make_problem(spec)
    plan = discover().resolve(method).plan(problem)
    assert isinstance(plan, Plan), plan
    executor.Executor._act = timed  # type: ignore[method-assign]  # a probe of this script only
    try:
        trace.trace_rank(problem, plan)
    finally:
        executor.Executor._act = act  # type: ignore[method-assign]
    return {kind: (len(times), sorted(times)[len(times) // 2]) for kind, times in spent.items()}


def main() -> None:
    """Print the median microseconds per action by kind (rows) and method (columns)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one method")
    methods = METHODS[:1] if parser.parse_args().small else METHODS
    columns = {method: measured(method) for method in methods}
    kinds = sorted({kind for column in columns.values() for kind in column})
    lines = [f"torch {torch.__version__}, one rank of llama-7b tp 2 pp 2, median us per action"]
    lines.append(f"{'kind':<8}" + "".join(f"{method:>18}" for method in methods))
    for kind in kinds:
        cells = [columns[method].get(kind) for method in methods]
        texts = [f"{1e6 * c[1]:.1f} x {c[0]}" if c else "-" for c in cells]
        lines.append(f"{kind:<8}" + "".join(f"{text:>18}" for text in texts))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
