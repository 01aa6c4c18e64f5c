"""Steps of models with experts on Megatron's stacks: no whole-step constant was fitted to them.

The bars (half of the rows within 12 %, three quarters within 20 %) were written down before the
rows were predicted.  The attention kernel of config/systems/megatron-core-2026.yaml was not.
"""

from functools import cache
from statistics import median, quantiles

from rematbench.costs.flops import megatron_flop_per_token
from rematbench.evaluate.evaluation import speed
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.expert_columns import has_experts
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import Cell, RowError, read_sheet, text
from rematbench.plugins.discover import discover
from rematbench.spec.load import calibration
from rematbench.spec.paths import data_dir

REGISTRY = discover(())
MEGATRON_FLOP = "Megatron-LM num_floating_point_operations"


def published(row: Cell) -> float:
    """Tokens/s per GPU that a row prints, or that follow from its TFLOP/s; 0 without either."""
    if text(row, "tokens_per_s_per_gpu"):
        return float(row["tokens_per_s_per_gpu"])
    if text(row, "tflops_convention") != MEGATRON_FLOP or text(row, "dispatcher") == "":
        return 0.0
    try:
        case = read_case(row, REGISTRY)
    except RowError:
        return 0.0
    vocab = case.problem().system.padded_vocab(case.model.vocab, case.layout.tp)
    flop = megatron_flop_per_token(case.model, case.seq_len, vocab)
    return float(row["tflops_per_gpu_as_published"] or 0) * 1e12 / flop


@cache
def predicted() -> list[tuple[Cell, float]]:
    """The rows with a prediction and a published speed, each with its error."""
    rows = [row for row in read_sheet(data_dir("published") / "moe.csv") if has_experts(row)]
    found = []
    for row in predict_rows(rows, processes=1):
        if row["pred_status"] == "ok" and (there := published(row)):
            found.append((row, float(row["pred_tokens_per_s_per_gpu"]) / there - 1.0))
    return found


def test_steps_are_predicted_within_the_bars() -> None:
    errors = [abs(error) for _, error in predicted()]
    assert len(errors) >= 16
    assert median(errors) <= 0.12
    assert quantiles(errors, n=4)[2] <= 0.20


def test_a_constant_utilisation_predicts_them_worse() -> None:
    """The same rows at the median model FLOPs utilisation of all of them."""
    used = []
    for row, _ in predicted():
        problem = read_case(row, REGISTRY).problem()
        tokens = problem.layout.global_batch * problem.workload.seq_len
        step_s = tokens / (published(row) * problem.layout.gpus)
        used.append(speed(problem, step_s).mfu_causal)
    constant = [abs(median(used) / share - 1.0) for share in used]
    assert median(abs(error) for _, error in predicted()) < median(constant)


def test_none_of_them_is_fitted() -> None:
    sources = {row["source"] for row, _ in predicted()}
    assert len(sources) >= 2
    assert not [rule for rule in calibration().fit if any(rule.source in one for one in sources)]
