"""Every rule of check_layout, broken once: one error that names the rule and the numbers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.stages import (
    Stage,
    base_partition,
    read_stages,
    stages_of,
    stages_text,
)
from rematbench.workload import Workload
from tests.problems import LLAMA, problem
from tests.tables import tables

TABLES = tables(__file__)

LARGE = load_model("llama-65b")


def check(
    layout: dict[str, Any],
    *,
    system: str = "megatron-kwai",
    seq_len: int = 4096,
    model: dict[str, Any] | None = None,
) -> None:
    work = Workload(model=replace(LARGE, **(model or {})), seq_len=seq_len)
    check_layout(Layout(**layout), work, load_system(system))


def test_a_published_layout_breaks_no_rule() -> None:
    check({"tp": 2, "cp": 2, "pp": 8, "vpp": 5, "dp": 8, "global_batch": 256}, seq_len=8192)


@pytest.mark.parametrize(("rule", "case"), TABLES["broken"])
def test_a_broken_rule_is_named(rule: str, case: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as error:
        check(**case)
    assert str(error.value) == rule


# -- the text of a pipeline's stages: read, printed, and as the partition of a plan ----------------


@pytest.mark.parametrize(
    ("text", "counts", "prediction"),
    [  # Megatron-core's own examples
        ("Et*4|(tttt|)*14tmL", [4] * 15 + [1], 15),
        ("Et*3|(tt|)*29,m|L", [3] + [2] * 29 + [0, 0], 30),
        ("Et|(tt|)*30L", [1] + [2] * 30 + [0], None),
        ("E|(t|t)*2|L", [0, 1, 2, 1, 0], None),
    ],
)
def test_texts_are_read(text: str, counts: list[int], prediction: int | None) -> None:
    stages = read_stages(text)
    assert [len(stage.layers) for stage in stages] == counts
    assert [at for at, stage in enumerate(stages) if stage.prediction] == (
        [] if prediction is None else [prediction]
    )
    layers = [layer for stage in stages for layer in (*stage.layers, *stage.prediction)]
    assert layers == [*range(sum(counts) + (prediction is not None))]
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.head for stage in stages] == [False] * (len(stages) - 1) + [True]


@given(st.lists(st.integers(1, 6), max_size=9), st.integers(0, 6), st.integers(0, 2), st.booleans())
def test_a_printed_text_is_read_back(
    inner: list[int], first: int, prediction: int, alone: bool
) -> None:
    """Equal stages in a row become a factor."""
    counts, at, stages = [first, *inner, 1], 0, []
    for count in counts:
        stages.append(Stage(tuple(range(at, at := at + count)), embedding=not stages))
    predicted = tuple(range(at, at + prediction))
    if alone and prediction:
        stages += [Stage((), predicted), Stage((), head=True)]
    else:
        stages[-1] = stages[-1]._replace(prediction=predicted, head=True)
    assert read_stages(stages_text(tuple(stages))) == tuple(stages)


def test_a_printed_text_has_factors() -> None:
    assert stages_text(read_stages("Ettt|" + "tt|" * 29 + "m|L")) == "Ettt|(tt|)*29m|L"


@pytest.mark.parametrize(("text", "reason"), TABLES["wrong_texts"])
def test_a_wrong_text_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        problem(pp=2, stages=text)


def test_a_layout_decides_the_base_plan() -> None:
    made = problem(pp=2, vpp=2, global_batch=2, stages="E|tt|tt|L")
    assert made.base_plan.partition == (((), (2, 3)), ((0, 1), ()))
    assert stages_text(stages_of(made.base_plan.partition, 4)) == "E|(tt|)*2L"
    assert base_partition(LLAMA, Layout(pp=2)) == (((0, 1),), ((2, 3),))
