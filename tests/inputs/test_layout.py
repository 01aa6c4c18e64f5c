"""Every rule of check_layout, broken once: one error that names the rule and the numbers."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.workload import Workload

LLAMA = load_model("llama-65b")


def check(
    layout: dict[str, Any],
    *,
    system: str = "megatron-kwai",
    seq_len: int = 4096,
    model: dict[str, Any] | None = None,
) -> None:
    work = Workload(model=replace(LLAMA, **(model or {})), seq_len=seq_len)
    check_layout(Layout(**layout), work, load_system(system))


def test_a_published_layout_breaks_no_rule() -> None:
    check({"tp": 2, "cp": 2, "pp": 8, "vpp": 5, "dp": 8, "global_batch": 256}, seq_len=8192)


BROKEN: list[tuple[str, dict[str, Any]]] = [
    (
        "dp 3 must be a multiple of ulysses = 2 (ulysses groups ranks of dp)",
        {"layout": {"dp": 3, "ulysses": 2, "global_batch": 6}, "system": "deepspeed"},
    ),
    (
        "global_batch 9 must be a multiple of replicas x micro_batch = 4",
        {"layout": {"dp": 2, "micro_batch": 2, "global_batch": 9}},
    ),
    ("vpp = 2 needs pp > 1", {"layout": {"vpp": 2}}),
    (
        "interleaved 1F1B needs micro-batches % pp == 0, but 6 % 4 != 0",
        {"layout": {"pp": 4, "vpp": 2, "global_batch": 6}},
    ),
    (
        "zero_stage 2 with pp = 2: in a pipeline, system megatron-kwai has only ZeRO stages 0, 1",
        {"layout": {"pp": 2, "zero_stage": 2, "global_batch": 2}},
    ),
    (
        "80 layers cannot fill pp x vpp = 128 chunks",
        {"layout": {"pp": 16, "vpp": 8, "global_batch": 16}},
    ),
    ("64 heads must be a multiple of tp x ulysses = 3", {"layout": {"tp": 3}}),
    (
        "seq_len 4096 exceeds the 2048 learned positions of llama-65b",
        {"layout": {}, "model": {"position": "learned", "max_positions": 2048}},
    ),
    (
        "8 KV heads and tp = 3: one must divide the other",
        {"layout": {"tp": 3}, "model": {"num_heads": 24, "num_kv_heads": 8}},
    ),
    ("ffn 22018 must be a multiple of tp = 4", {"layout": {"tp": 4}, "model": {"ffn": 22018}}),
    (
        "seq_len 4098 must be a multiple of 2 x cp = 4 (each cp rank takes two slices)",
        {"layout": {"cp": 2}, "seq_len": 4098},
    ),
    (
        "cp = 2 around a ring has no sliding windows (TransformerEngine); a stack with cp_kind: "
        "allgather has",
        {
            "layout": {"cp": 2},
            "model": {"attention_window": (1024,) * LLAMA.num_layers},
            "system": "megatron-core",
        },
    ),
    (
        "seq_len 4098 must be a multiple of cp x tp = 4 (with sp)",
        {"layout": {"tp": 4}, "seq_len": 4098},
    ),
    (
        "system torchtitan has no context parallelism, but cp = 2 (another version has it: "
        "torchtitan-2026)",
        {"layout": {"cp": 2}, "system": "torchtitan"},
    ),
    (
        "system megatron-kwai has no Ulysses all-to-all, but ulysses = 2",
        {"layout": {"dp": 2, "ulysses": 2}},
    ),
    (
        "system rematbench has no Ulysses inside context parallelism, but cp = 2 with ulysses = 2",
        {"layout": {"dp": 2, "ulysses": 2, "cp": 2}, "system": "rematbench"},
    ),
    (
        "seq_len 4098 must be a multiple of ulysses (x tp with sp) = 4",
        {"layout": {"dp": 4, "ulysses": 4}, "seq_len": 4098, "system": "rematbench"},
    ),
    (
        "6 KV heads per rank and ulysses = 4: one must divide the other",
        {
            "layout": {"dp": 4, "ulysses": 4},
            "model": {"num_heads": 24, "num_kv_heads": 6},
            "system": "rematbench",
        },
    ),
]


@pytest.mark.parametrize(("rule", "case"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_a_broken_rule_is_named(rule: str, case: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as error:
        check(**case)
    assert str(error.value) == rule
