"""One line that compares a run with the same run without its recipe."""

from dataclasses import replace

from msgspec.structs import fields

from rematbench.cli.options import RunOptions, request
from rematbench.cli.show import BANNERS
from rematbench.evaluate.result import Result, evaluate_method
from rematbench.host.console import gib, rounded, seconds
from rematbench.workload import Quantised, Trained


def without_recipe(run: RunOptions, method: str = "") -> Result | None:
    """The run without its recipe; None if it has no recipe.  `method` replaces its method."""
    if run.problem["recipe"] == Quantised().recipe:
        return None
    own = [field for field in fields(Quantised) if field.name not in Trained.__struct_fields__]
    problem = run.problem | {field.name: field.default for field in own}
    asked = request(replace(run, problem=problem, method=method or run.method), name_broken=False)
    return evaluate_method(asked.problem, asked.method, asked.base)


def beside(plain: Result, result: Result) -> str:
    """A line that compares the run (`result`) with the run without its recipe (`plain`)."""
    words = f"in {result.problem.workload.precision} without its recipe"
    before, after = plain.device_total_bytes, result.device_total_bytes
    if before is None:
        return f"{words}: {plain.reason}"
    room = f"{BANNERS[plain.status]}, {gib(before)} GiB in all"
    if after is not None:
        change = f"{gib(abs(after - before))} {'more' if after > before else 'less'}"
        room += f" ({change} with it)"
    if not plain.timed:
        return f"{words}: {room}"
    step_s, rate = plain.timed.step_s, rounded(plain.timed.tokens_per_s_per_gpu)
    gain = f" ({step_s / result.timed.step_s:.2f} times as fast with it)" if result.timed else ""
    return f"{words}: step {seconds(step_s)}, {rate} tokens/s/GPU{gain}; {room}"
