"""The text of a pipeline's stages: read, printed, and as the partition of a plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.stages import (
    Stage,
    base_partition,
    read_stages,
    stages_of,
    stages_text,
)
from tests.problems import LLAMA, problem


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Exx|L", "'x' is none of E, t, m, L"),
        ("tE|L", "expected E, t, m"),
        ("EtmtL", "expected E, t, m"),
        ("Et||tL", "stage 2 holds nothing"),
        ("Et*999999999999L", "more than 65,536 letters"),
        ("Et|tL", "2 layers in 2 stages, but test-llama has 4 layers and pp x vpp = 2"),
        ("Ettttmm|L", "4 layers and 2 prediction layers in 2 stages"),
        ("Etttt|t|L", "5 layers in 3 stages"),
    ],
)
def test_a_wrong_text_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        problem(pp=2, stages=text)


def test_a_layout_decides_the_base_plan() -> None:
    made = problem(pp=2, vpp=2, global_batch=2, stages="E|tt|tt|L")
    assert made.base_plan.partition == (((), (2, 3)), ((0, 1), ()))
    assert stages_text(stages_of(made.base_plan.partition, 4)) == "E|(tt|)*2L"
    assert base_partition(LLAMA, Layout(pp=2)) == (((0, 1),), ((2, 3),))
