"""Rules become bytes: exact integers of rows, byte budgets, who wins, what matches."""

from typing import Any

import pytest

from rematbench.costs.operators.ops import Activation
from rematbench.engine.lowering.blocks.fates import ChunkSites, Resolved, resolve
from rematbench.plan import (
    ByteBudget,
    Fate,
    Keep,
    Offload,
    Plan,
    PlanError,
    Recompute,
    Rule,
    Select,
    Split,
)
from tests.tables import tables

TABLES = tables(__file__)

SITES = ChunkSites(
    stage=1,
    chunk=0,
    sites={
        ("layer", 0, "norm"): Activation("norm", 10, 8),
        ("layer", 0, "wide"): Activation("wide", 20, 16),
        ("layer", 1, "norm"): Activation("norm", 10, 8),
        ("layer", 1, "wide"): Activation("wide", 20, 16),
        ("head", 0, "loss_saved"): Activation("loss_saved", 20, 4),
    },
    layers=(6, 7),
)


def fates(*rules: Rule, phase: Any = "steady", micro_batch: int = 0) -> dict[str, Resolved]:
    plan = Plan(partition=(((0,),),), rules=rules)
    table, _ = resolve(plan, SITES, phase, micro_batch)
    return {f"{part[0]}{layer}.{name}": fate for (part, layer, name), fate in table.items()}


def everywhere(fate: Fate) -> Rule:
    return Rule(Select(), fate)


def test_the_last_rule_that_matches_wins() -> None:
    table = fates(everywhere(Offload()), Rule(Select(layers=(7,)), Recompute()), everywhere(Keep()))
    assert set(table.values()) == {Resolved(80, 0, 0), Resolved(320, 0, 0)}
    table = fates(everywhere(Keep()), Rule(Select(layers=(7,)), Recompute(scope="layer")))
    assert table["l1.norm"] == Resolved(0, 0, 80, "layer")
    assert table["l0.norm"] == Resolved(80, 0, 0)
    assert table["h0.loss_saved"] == Resolved(80, 0, 0)


@pytest.mark.parametrize("select", TABLES["misses"])
def test_a_selector_that_misses(select: dict[str, Any]) -> None:
    chosen = Select(**{name: tuple(values) for name, values in select.items()})
    assert fates(Rule(chosen, Offload())) == fates()


def test_micro_batch_ranges_are_half_open() -> None:
    window = Rule(Select(micro_batches=(1, 3)), Offload())
    gone = [fates(window, micro_batch=i)["l0.wide"].offload_bytes for i in range(4)]
    assert gone == [0, 320, 320, 0]


def test_kept_leaves_what_earlier_rules_decided() -> None:
    table = fates(
        Rule(Select(activations=("norm",)), Recompute()),
        Rule(Select(layers=(6,), activations=("wide",)), Keep()),
        Rule(Select(kept=True), Offload()),
    )
    assert table["l0.norm"] == Resolved(0, 0, 80)
    assert table["l0.wide"] == table["l1.wide"] == Resolved(0, 320, 0)


def test_split_shares_rows_of_the_ranks_own_shard() -> None:
    """10 rows of the shard: 3 leave, 4 are rebuilt, 3 stay; gathered tensors hold 2 of each."""
    table = fates(everywhere(Split(offload=0.35, recompute=0.45, scope="layer")))
    assert table["l0.norm"] == Resolved(3 * 8, 3 * 8, 4 * 8, "layer")
    assert table["l0.wide"] == Resolved(6 * 16, 6 * 16, 8 * 16, "layer")


def test_a_split_of_decimal_tenths_is_exact() -> None:
    for tenths in range(11):
        fate = fates(everywhere(Split(offload=tenths / 10)))["l0.norm"]
        assert fate.offload_bytes == tenths * 8


def test_a_split_of_more_than_everything_is_refused() -> None:
    with pytest.raises(PlanError, match=r"norm: offload 0.6 \+ recompute 0.5 exceed 1"):
        fates(everywhere(Split(offload=0.6, recompute=0.5)))


@pytest.mark.parametrize(("alpha", "granularity", "expected"), TABLES["budgets"])
def test_a_byte_budget_takes_the_largest_first(
    alpha: float, granularity: int, expected: list[int]
) -> None:
    """880 bytes: the boundary tensor is split, equal sizes keep their order, the budget is rounded
    up to the granularity and never exceeds what there is."""
    table = fates(everywhere(ByteBudget(alpha=alpha, granularity=granularity, min_bytes=1)))
    assert [fate.offload_bytes for fate in table.values()] == expected
    assert all(
        fate.nbytes == site.nbytes
        for fate, site in zip(table.values(), SITES.sites.values(), strict=True)
    )


def test_a_budget_spans_the_sites_it_won_and_no_small_ones() -> None:
    table = fates(everywhere(ByteBudget(alpha=1.0, granularity=1, min_bytes=81)))
    assert [fate.offload_bytes for fate in table.values()] == [0, 320, 0, 320, 0]
    budget = ByteBudget(
        alpha=0.5, granularity=1, min_bytes=1
    )  # of the two wide tensors, not of all
    table = fates(Rule(Select(activations=("wide",)), budget))
    assert [fate.offload_bytes for fate in table.values()] == [0, 320, 0, 0, 0]


def test_mixed_means_more_than_one_fate() -> None:
    assert not Resolved(8, 0, 0).mixed
    assert Resolved(8, 0, 8).mixed
    assert Resolved(0, 8, 8).mixed
