"""The laws of the executed world, over launches that run once per module."""

from collections.abc import Sequence
from functools import cache

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.worlds.torch import worker
from rematbench.worlds.torch.batch import Batch, make_batch
from rematbench.worlds.torch.case import Case, Result, combine
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.worlds.torch import reference

FLOOR = 1e-6
"""Share of the largest gradient below which one is rounding of zero (a key's bias)."""


def launch(cases: Sequence[Case]) -> dict[str, tuple[Case, Result]]:
    """One launch of all cases in processes that the runtime starts, by name."""
    results = execute_cases(cases, timeout_s=120.0)
    return {case.name: (case, result) for case, result in zip(cases, results, strict=True)}


def run_here(case: Case) -> Result:
    """In this process (one rank needs no other)."""
    return combine(case, [worker.run_case(case, 0, torch.device("cpu"), {})])


def bytes_differ(case: Case, result: Result) -> list[str]:
    """Where a rank's live bytes differ from its ledger; the twin law wants nothing."""
    program = case.program or lower(case.plan, case.problem)
    wrong = []
    for rank in result.ranks:
        actions = list(program.ranks[rank.place.pp].actions())
        expected = list(live_bytes(actions))
        assert len(expected) == len(rank.bytes_after)
        pairs = zip(actions, expected, rank.bytes_after, strict=True)
        wrong += [f"{rank.place} {a} {want} {got}" for a, want, got in pairs if want != got]
    return wrong


COMPOSITIONS = (
    "balanced_checkpointing+pp_offload",
    "selective_recompute+pp_offload",
    "pp_offload+mst",
    "mst+full_recompute",
    "mst+balanced_checkpointing",
    "memo+mst",
    "full_recompute+pp_offload",
    "lynx_heu+pp_offload",
)

_KNOWN: dict[tuple[object, ...], reference.Run] = {}


def reference_of(case: Case) -> reference.Run:
    """The single-process autograd model on the same batches."""
    work, lay = case.problem.workload, case.problem.layout
    key = (work, lay.global_batch, case.seed, case.steps, case.ignored, case.optimizer)
    if key not in _KNOWN:
        _KNOWN[key] = reference.train(case.problem, batches(case), case.seed, case.optimizer)
    return _KNOWN[key]


def batches(case: Case) -> list[Batch]:
    """What a case trains on."""
    work, lay = case.problem.workload, case.problem.layout
    return [
        make_batch(work, lay.global_batch, case.seed, step, case.ignored)
        for step in range(case.steps)
    ]


def exact_along(case: Case, result: Result) -> reference.Run:
    """The same model in float64 at each step's weights of a run: those that the run's own gradients
    lead to.  So no step's rounding reaches the next one's comparison through AdamW."""
    return reference.train(
        case.problem, batches(case), case.seed, case.optimizer, along=result.gradients
    )


def gradient_error(case: Case, result: Result) -> float:
    """Largest norm-wise error of a parameter's gradient over the steps."""
    return max(gradient_errors(case, result))


def differs(case: Case, result: Result, want: reference.Run) -> float:
    """Largest error of any step's gradients (norm-wise) and losses (relative)."""
    losses = zip(result.losses, want.losses, strict=True)
    return max(*gradient_errors(case, result, want), *(abs(a / b - 1.0) for a, b in losses))


def gradient_errors(case: Case, result: Result, wanted: reference.Run | None = None) -> list[float]:
    """Of each step, the largest norm-wise error of a parameter's gradient."""
    errors = []
    wanted = wanted or reference_of(case)
    for got, want in zip(result.gradients, wanted.gradients, strict=True):
        assert got.keys() == want.keys()
        floor = FLOOR * max(float(g.norm()) for g in want.values())
        errors.append(
            max(
                float((got[n].double() - want[n]).norm()) / max(float(want[n].norm()), floor)
                for n in want
            )
        )
    return errors


def same_bits(a: Result, b: Result) -> bool:
    """Whether two runs have equal losses and gradients, bit by bit."""
    return a.losses == b.losses and all(
        torch.equal(x[name], y[name])
        for x, y in zip(a.gradients, b.gradients, strict=True)
        for name in x
    )


@cache
def settings() -> dict[str, str]:
    """Settings that make each method do something at these sizes (a `METHOD key=value` text)."""
    return {
        "keep_all": "",
        "full_recompute": "",
        "balanced_checkpointing": "",
        "selective_recompute": "activations=act_out,fc2_in",
        "memo": "alpha=0.5 exempt_layers=1",
        "mst": "mlp_chunks=3 head_chunks=5",
        "pp_offload": "alpha=0.6 granularity=256 min_bytes=512",
        "pipe_offload": "chunks=1",
    }
