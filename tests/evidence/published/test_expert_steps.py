"""Steps of models with experts on Megatron's stacks: no whole-step constant was fitted to them.

The bars (half of the rows within 12 %, three quarters within 20 %) were written down before the
rows were predicted.  The attention kernel of config/systems/megatron-core-2026.yaml was not.
"""

from statistics import median, quantiles
from typing import Any

from rematbench.evaluate.evaluation import speed
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED
from rematbench.inputs.load import calibration
from rematbench.plugins.discover import discover
from tests.predicted import read_of

REGISTRY = discover(())


def timed_rows() -> list[dict[str, Any]]:
    """The rows with a published speed and dispatcher."""
    return [row for row in read_of("moe.csv") if row[SPEED] and row["dispatcher"]]


def error(row: dict[str, Any]) -> float:
    """The signed error of a row's predicted speed."""
    return float(row[f"pred_{SPEED}"]) / float(row[SPEED]) - 1.0


def test_steps_are_predicted_within_the_bars() -> None:
    errors = [abs(error(row)) for row in timed_rows()]
    assert len(errors) >= 18
    assert median(errors) <= 0.12
    assert quantiles(errors, n=4)[2] <= 0.20


def test_a_router_that_is_forced_to_balance_is_predicted_best() -> None:
    """Long contexts, where the router and nothing else differs: balance is what is simulated, and
    a natural router is slower by the tokens of its worst rank."""
    rows = [row for row in timed_rows() if row["table"].startswith("long context")]
    forced = [error(row) for row in rows if "forced" in row["router"]]
    natural = [error(row) for row in rows if "natural" in row["router"]]
    assert len(forced) == len(natural) == 4
    assert max(map(abs, forced)) <= 0.05
    assert min(natural) > max(forced)


def test_a_constant_utilisation_predicts_them_worse() -> None:
    """The same rows at the median model FLOPs utilisation of all of them."""
    used = []
    for row in timed_rows():
        problem = read_case(row, REGISTRY).problem()
        tokens = problem.layout.global_batch * problem.workload.seq_len
        step_s = tokens / (float(row[SPEED]) * problem.layout.gpus)
        used.append(speed(problem, step_s).mfu_causal)
    constant = [abs(median(used) / share - 1.0) for share in used]
    assert median(abs(error(row)) for row in timed_rows()) < median(constant)


def test_what_ran_fits() -> None:
    """No row that is read ran out of memory: the one that did prints no layout."""
    verdicts = [(row["status"], row["pred_status"]) for row in read_of("moe.csv")]
    assert set(verdicts) == {("ok", "ok")}
    assert len(verdicts) >= 54


def test_none_of_them_is_fitted() -> None:
    sources = {row["source"] for row in timed_rows()}
    assert len(sources) >= 2
    assert not [rule for rule in calibration().fit if any(rule.source in one for one in sources)]
