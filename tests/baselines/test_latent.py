"""Layers with latent attention: one layer of Megatron-core, traced, keeps what its stack says, by
module; what is refused."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baselines.megatron_core.plan import MegatronCore
from rematbench.workload import Latent
from rematbench.worlds.packages.limits import active_reasons, setup_of
from tests.baselines.cases import TINY
from tests.baselines.test_experts import EP2, EXPERTS, PP2, Layered, check_layers

LATENT = replace(
    TINY,
    name="tiny-latent",
    vocab=1024,
    num_kv_heads=TINY.num_heads,
    head_dim=24,
    latent=Latent(q_rank=48, kv_rank=40, nope=16, rope=8, v=12),
)
SPARSE = replace(LATENT, experts=replace(EXPERTS, shared_ffn=32))
GRID = [
    Layered(LATENT, {}),
    Layered(LATENT, {}, ("mla_up_proj",)),
    *(
        Layered(SPARSE, EP2, modules)
        for modules in (
            (),
            ("mla_up_proj",),
            ("layernorm",),
            ("core_attn",),
            ("shared_experts",),
            ("moe_act",),
            ("moe",),
            ("mla_up_proj", "layernorm", "moe"),
            ("mla_up_proj", "layernorm", "moe_act"),
            ("full",),
        )
    ),
    Layered(SPARSE, PP2),
]


@pytest.mark.full
def test_one_more_layer_with_latent_attention_weighs_what_the_stack_says(tmp_path: Path) -> None:
    check_layers(GRID, tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "settings", "words"),
    [
        ({"tp": 2}, {}, {}, "latent attention under tp"),
        ({"cp": 2}, {}, {}, "latent attention under cp"),
        ({}, {"norm": "layernorm"}, {}, "latent attention with LayerNorm"),
        ({}, {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}, {}, "biases of latent"),
        ({}, {"mtp_layers": 1}, {}, "layers that predict more tokens"),
        ({}, {"latent": None}, {"recompute": "selective", "modules": ("mla_up_proj",)}, "no layer"),
    ],
)
def test_what_is_not_traced_is_refused(
    layout: dict[str, int], changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    """Under tp its gradients would be wrong beside a right loss."""
    setup = setup_of(Layered(LATENT, layout).problem(4))
    setup = setup._replace(work=replace(setup.work, model=replace(LATENT, **changes)))
    found = active_reasons(MegatronCore(**settings).limits(setup))
    assert any(words in reason for reason in found)


def test_flags_say_the_columns() -> None:
    flags = MegatronCore().flags(Layered(LATENT, {}).problem(4), whole=True)
    for words in (
        "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 40 --qk-head-dim 16",
        "--qk-pos-emb-head-dim 8 --v-head-dim 12",
    ):
        assert words in flags
    assert "--kv-channels" not in flags
