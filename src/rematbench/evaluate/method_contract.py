"""The contract of every method, checked on five tiny problems before the method's own tests.

The tests apply the contract to every file of methods/; `rematbench methods --check FILE` applies it
to any file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import issue_order
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import calibration, load_cluster, load_system
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import entry_of
from rematbench.plugins.file_checks import CONTRACT_CHECKS, FORMAT_CHECKS, MethodFile, first_problem
from rematbench.plugins.registry import Method, MethodError, Registry
from rematbench.problem import Problem
from rematbench.workload import Model, Workload

LLAMA = Model(
    name="contract-llama",
    num_layers=4,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=128,
    mlp="swiglu",
    norm="rmsnorm",
    position="rope",
    tied_embeddings=False,
)
GPT = msgspec.structs.replace(
    LLAMA,
    name="contract-gpt",
    num_kv_heads=4,
    ffn=128,
    mlp="gelu",
    norm="layernorm",
    position="learned",
    dropout=0.1,
    qkv_bias=True,
    proj_bias=True,
    mlp_bias=True,
)
COMPOSED_ON = ("pp", "vpp")


@cache
def problems() -> dict[str, Problem]:
    """Return the five tiny problems by name: one GPU, a tensor-parallel GPT with unfused attention,
    a pipeline, an interleaved pipeline, full sharding."""
    made = {
        "one": _problem(),
        "tp": _problem(GPT, attention="unfused", layout=Layout(tp=2, dp=2, global_batch=4)),
        "pp": _problem(layout=Layout(pp=4, global_batch=6)),
        "vpp": _problem(layout=Layout(pp=2, vpp=2, tp=2, global_batch=4)),
        "fsdp": _problem(system="torchtitan", layout=Layout(dp=4, zero_stage=3, global_batch=4)),
    }
    return {name: replace(p, evaluator=evaluate) for name, p in made.items()}


def _problem(
    model: Model = LLAMA,
    *,
    system: str = "rematbench",
    attention: Any = "flash",
    layout: Layout = Layout(),  # noqa: B008  # frozen
) -> Problem:
    """A problem of kilobytes per tensor; on nodes of one GPU, any degrees are a legal layout."""
    return Problem(
        Workload(model=model, seq_len=32),
        msgspec.structs.replace(load_cluster("h800-80gb"), gpus_per_node=1),
        load_system(system),
        layout,
        calibration(),
        attention,
    )


def check_plan(method: Method, problem: Problem) -> None:
    """Check that the method's `plan` is a pure function.  The plan must survive JSON, be lowered,
    be safe and free all its allocations; or the method must give a reason why there is none.  Raise
    MethodError or the plan's own error."""
    plan = method.plan(problem, problem.base_plan)
    if plan != method.plan(problem, problem.base_plan):
        raise MethodError("plan is not a pure function: two calls return different plans")
    if isinstance(plan, Unsupported):
        if not plan.reason:
            raise MethodError("plan returned Unsupported without a reason")
        return
    if not isinstance(plan, Plan):
        raise MethodError(f"plan returned a {type(plan).__name__}, not a Plan")
    if msgspec.json.decode(msgspec.json.encode(plan), type=Plan) != plan:
        raise MethodError("the plan changes when it is encoded as JSON and decoded")
    program = lower(plan, problem)
    check(program)
    for ledger in issue_order(program):
        if left := ledger.device_left_bytes + ledger.host_left_bytes:
            raise MethodError(f"{left} bytes are never freed")


def check_on_top(method: Method, under: Method, problem: Problem) -> None:
    """Check a method's plan on top of another method's plan: it must be lowered and be safe, or the
    method must give a reason why there is none."""
    base = under.plan(problem, problem.base_plan)
    if isinstance(base, Unsupported):
        return
    plan = method.plan(problem, base)
    if not isinstance(plan, Unsupported):
        check(lower(plan, problem))


@contextmanager
def _one_line_error(path: Path, check: str) -> Iterator[None]:
    """Turn any exception inside the block into a MethodError of one line: file, check,
    exception."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise MethodError(f"{path}: {check}: {type(error).__name__}: {text}") from error


def check_file(path: Path, shipped: Registry) -> Iterator[str]:
    """Run every check on a method file and yield the name of each check that passes.  Raise
    MethodError with a message of one line at the first check that fails."""
    entry = entry_of(path)
    file = MethodFile(path=path, name=entry.name, cls=entry.cls, doc=entry.doc)
    yield "the file loads and defines a method"
    for checks in (FORMAT_CHECKS, CONTRACT_CHECKS):
        if problem := first_problem(file, checks):
            raise MethodError(f"{path}: {problem}")
        yield from checks
    method: Method = entry.cls()
    for name, made in problems().items():
        with _one_line_error(path, f"the plan on {name!r}"):
            check_plan(method, made)
        yield (
            f"the plan on {name!r} is pure, can be lowered and is safe, or is refused with a reason"
        )
    for other in shipped.methods.values():
        if other.name == entry.name:
            continue
        for name in COMPOSED_ON:
            with _one_line_error(path, f"{other.name}+{entry.name} on {name!r}"):
                check_on_top(method, other.cls(), problems()[name])
            with _one_line_error(path, f"{entry.name}+{other.name} on {name!r}"):
                check_on_top(other.cls(), method, problems()[name])
        yield f"it composes with {other.name}, in both orders"
