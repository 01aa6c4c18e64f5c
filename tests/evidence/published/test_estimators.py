"""Closed forms of others: golden values, identities, and the ledger's own bytes beside them."""

import pytest
from msgspec.structs import replace

from rematbench.evidence.published.estimators import (
    fujii_estimate,
    korthikanti_activation_bytes,
    korthikanti_layer_bytes,
)
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model
from rematbench.inputs.paths import data_dir
from tests.problems import all_methods, layers, plan_of, problem

GIB = 1 << 30
GOLDEN = [
    ((2, 1, 1, 1, 4), 44.8726, 22.6445),
    ((1, 2, 1, 1, 4), 67.3089, 22.6445),
    ((2, 1, 2, 1, 128), 11.9193, 20.75),
    ((2, 2, 1, 2, 128), 23.1374, 22.6445),
]
"""(tp, cp, pp, micro-batch, GPUs) of Llama-3.1 8B at 8,192 tokens: states, activations (GiB)."""


def layout(tp: int, cp: int, pp: int, micro_batch: int, gpus: int) -> Layout:
    dp = gpus // (tp * cp * pp)
    return Layout(tp=tp, cp=cp, pp=pp, dp=dp, micro_batch=micro_batch, global_batch=gpus * 8)


@pytest.mark.parametrize(("degrees", "states", "activations"), GOLDEN)
def test_fujii_reproduces_its_authors_values(
    degrees: tuple[int, int, int, int, int], states: float, activations: float
) -> None:
    found = fujii_estimate(load_model("llama-3.1-8b"), layout(*degrees), 8192)
    assert found.state_bytes / GIB == pytest.approx(states, abs=5e-5)
    assert found.activation_bytes / GIB == pytest.approx(activations, abs=5e-5)


def test_fujii_interleaving_multiplies_activations_only() -> None:
    model = load_model("llama-3.1-8b")
    plain = Layout(tp=2, pp=4, dp=2, global_batch=16)
    woven = replace(plain, vpp=2)
    one, two = fujii_estimate(model, plain, 8192), fujii_estimate(model, woven, 8192)
    assert two.state_bytes == one.state_bytes
    assert two.activation_bytes == pytest.approx(one.activation_bytes * (1 + 3 / 8))


def test_fujii_tied_embeddings_count_once() -> None:
    model = load_model("llama-3.1-8b")
    one = Layout(global_batch=1)
    tied = fujii_estimate(replace(model, tied_embeddings=True), one, 8192)
    apart = fujii_estimate(model, one, 8192)
    assert apart.state_bytes - tied.state_bytes == 18 * model.hidden * model.vocab


def test_fujii_layer_bytes_are_the_ledgers() -> None:
    """One layer more costs (12 + 4 g/a + 8 H/h) s b h / (t c) in both."""
    p = problem(model=layers(1), system="megatron-kwai", tp=2, cp=2)
    more = problem(model=layers(2), system="megatron-kwai", tp=2, cp=2)
    tensors = p.layer(0).activations
    saved = sum(tensors[n].nbytes for n in p.layer(0).saved if tensors[n].differentiable)
    estimates = [fujii_estimate(q.workload.model, q.layout, q.workload.seq_len) for q in (p, more)]
    assert estimates[1].activation_bytes - estimates[0].activation_bytes == saved


# -- Korthikanti et al. -----------------------------------------------------------------------


def test_korthikanti_first_stage() -> None:
    """A pipeline's first stage holds L layers' worth whatever p; interleaving a little more."""
    model = load_model("gpt-22b")
    p1 = Layout(tp=8, sp=True, micro_batch=4, global_batch=4)
    p4 = replace(p1, pp=4)
    unit = 2048 * 4 * 6144 / 8
    layer = korthikanti_layer_bytes(model, p1, 2048)
    head = 4 * unit * (1 + model.vocab / 6144)
    assert korthikanti_layer_bytes(model, p1, 2048, "full") == 2 * unit
    assert korthikanti_activation_bytes(model, p1, 2048) == 48 * layer + unit + head
    assert korthikanti_activation_bytes(model, p4, 2048) == 48 * layer + 4 * unit
    woven = korthikanti_activation_bytes(model, replace(p4, vpp=3), 2048)
    assert woven == pytest.approx(48 * layer * (1 + 3 / 12) + 4 * unit)


# -- figure 9 of ATC 2024 --------------------------------------------------------------------------


SHEET = read_sheet(data_dir("published") / "runs.csv")
ROWS = [row for row in SHEET if row["table"] == "Figure 9"]
BASE = {"none": "keep_all", "balanced": "balanced_checkpointing"}


def test_there_are_25_cells() -> None:
    assert len(ROWS) == 25


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model']}-{r['gpus']}")
def test_fit_paper_gives_the_published_alpha(row: dict[str, str]) -> None:
    given = read_case(row, all_methods()).problem()
    plan = plan_of(given, f"{BASE[row['recompute']]}+pp_offload", fit="paper")
    assert plan.fit["bound"] == "paper estimate"
    assert plan.fit["alpha"] == pytest.approx(float(row["offload_fraction"]), abs=0.001)
