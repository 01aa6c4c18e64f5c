"""`simulate --estimator`: what a paper's closed form believes, beside the ledger."""

from typing import Any

from rich.console import Console

from rematbench.choose.outcome import Outcome
from rematbench.cli.options import Request
from rematbench.cli.show import Shown
from rematbench.cost.estimators import SAFE_SHARE
from rematbench.host.console import CommandError, gib, grid, percent, plain
from rematbench.plan import Unsupported
from rematbench.published.closed_forms import ClosedForm, EstimatorName, closed_form


def estimated(asked: Request, outcome: Outcome, name: EstimatorName) -> ClosedForm | None:
    """The estimate asked for; CommandError names what the formula has no term for."""
    if name == "ledger" or outcome.plan is None:
        return None
    found = closed_form(name, asked.problem, outcome.plan)
    if isinstance(found, Unsupported):
        raise CommandError(f"--estimator {name} {found.reason}")
    return found


def estimate_result(form: ClosedForm) -> dict[str, Any]:
    """The JSON of an estimate: bytes of the first pipeline rank."""
    return {
        "name": form.name,
        "rank": 0,
        "state_bytes": form.state_bytes,
        "activation_bytes": form.activation_bytes,
        "total_bytes": form.total_bytes,
    }


def show_estimate(out: Console, shown: Shown, form: ClosedForm) -> None:
    """States, activations and their sum by the formula and by the ledger, per rank."""
    evaluation = shown.outcome.evaluation
    assert evaluation is not None
    heads = ("states", "activations", "peak")
    table = grid(
        "rank (GiB)",
        *(f"ledger {head}" for head in heads),
        *(f"{form.name} {head}" for head in heads),
        "difference",
    )
    for index, rank in enumerate(evaluation.ranks):
        states = rank.parameter + rank.gradient + rank.optimizer
        activations = rank.activation_peak + rank.pools
        theirs: tuple[str, ...] = ("-",) * 4
        if index == 0:
            believed = (form.state_bytes, form.activation_bytes, form.total_bytes)
            off = 100 * (form.total_bytes / rank.device_peak - 1)
            theirs = (*(gib(nbytes) for nbytes in believed), f"{off:+.1f} %")
        ours = (gib(nbytes) for nbytes in (states, activations, rank.device_peak))
        table.add_row(str(index), *ours, *theirs)
    out.print()
    out.print(table)
    out.print(plain(f"{form.name}: {form.remark}"))
    if form.name == "fujii":
        hbm = shown.request.problem.cluster.hbm_bytes
        share = form.total_bytes / hbm
        word = "safe" if share < SAFE_SHARE else "not called safe"
        out.print(plain(f"80 % rule: {percent(share)} of {gib(hbm)} GiB: {word}"))
    out.print(plain("the formula speaks of the first rank only, and counts no transients"))
