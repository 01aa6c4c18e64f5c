"""Bytes of training states by ZeRO stage, in closed form."""

import pytest
from msgspec.structs import replace

from rematbench.costs import states
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_system
from tests.cost_constants import COMMON

MEGATRON = load_system("megatron-core")  # 2 + 4 bytes a parameter, optimizer 12
PARAMETERS = 1001


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (2 * 1001, 4 * 1001, 12 * 1001)),
        (1, (2 * 1001, 4 * 1001, 12 * 126)),
        (2, (2 * 1001, 4 * 126, 12 * 126)),
        (3, (2 * 126, 4 * 126, 12 * 126)),
    ],
)
def test_zero_stages(stage: int, expected: tuple[int, int, int]) -> None:
    layout = Layout(dp=4, cp=2, zero_stage=stage)  # type: ignore[arg-type]  # 0 to 3
    found = states.state_bytes(PARAMETERS, layout, MEGATRON)
    assert (found.parameter, found.gradient, found.optimizer) == expected
    assert found.total == sum(expected)


def test_optimizer_traffic() -> None:
    # gradients read twice, states read and written, compute parameters written
    assert states.optimizer_traffic_bytes(10, 2, 4, 12, COMMON) == 10 * (2 * 4 + 2 * 12 + 2)
    more = replace(COMMON, optimizer_extra_bytes=8.0)
    assert states.optimizer_traffic_bytes(10, 2, 4, 12, more) == 10 * (34 + 8)
