"""Layers with experts: one layer of Megatron-core, traced, keeps what its stack says, by module."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from baselines.megatron_core.modules import TRACED
from baselines.megatron_core.plan import MegatronCore
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.solve.recompute_modules import modules_dropped
from rematbench.workload import Experts, Latent, Model
from rematbench.worlds.packages.limits import active_reasons, setup_of
from rematbench.worlds.packages.process import job as make_job
from rematbench.worlds.packages.process import policy, run_jobs
from rematbench.worlds.packages.stack import stack_of
from tests.baselines.cases import SEQ, TINY
from tests.installed import needs
from tests.problems import problem, remade
from tests.tables import tables

EXPERTS = Experts(count=8, active=2, ffn=48)
ROUTED = replace(TINY, name="tiny-experts", vocab=1024, experts=EXPERTS)
SHARED = replace(ROUTED, experts=replace(EXPERTS, shared_ffn=32, dense_layers=(0,)))
BALANCED = replace(ROUTED, experts=replace(EXPERTS, aux_loss=0.01))
EP2 = {"ep": 2, "dp": 2}
ETP1 = {"ep": 2, "dp": 2, "tp": 2, "etp": 1}
ETP2 = {"ep": 2, "dp": 2, "tp": 2}
TP4 = {"ep": 2, "tp": 4, "etp": 2}
PP2 = {"ep": 2, "dp": 2, "pp": 2}


SCALAR = 4
"""The peaks of two depths may be at operators of the loss between which a scalar is freed."""


class Layered(NamedTuple):
    """A model, a layout, the recompute modules (`full`: whole layers), and the capacity to which
    experts are padded (0: no token is dropped)."""

    model: Model
    layout: dict[str, int]
    modules: tuple[str, ...] = ()
    padded: float = 0.0

    def problem(self, num_layers: int) -> Problem:
        made = problem(
            model=replace(self.model, num_layers=num_layers),
            seq_len=SEQ,
            global_batch=4,
            **self.layout,
        )
        work = replace(made.workload, precision="bf16")
        if self.padded:
            work = replace(work, capacity_factor=self.padded, expert_padding="capacity")
        return remade(made, workload=work)

    @property
    def settings(self) -> dict[str, Any]:
        words: dict[str, Any] = {"bias_activation_fusion": True}
        if self.modules == ("full",):
            return words | {"recompute": "full"}
        return words | ({"recompute": "selective", "modules": self.modules} if self.modules else {})

    def kept_bytes(self) -> int:
        """What a further layer on every stage adds on the first, from its table and its stack."""
        few, more = (self.problem(count) for count in self.depths)
        method = policy("megatron_core", self.settings).methods[0]
        stacks = [stack_of("megatron_core", method, one) for one in (few, more)]
        table = stacks[0].problem(few).layer(few.workload.model.num_layers - 1)
        once = sum(stacks[1].once.values()) - sum(stacks[0].once.values())
        dropped: set[str] = set(table.saved) - {"layer_input"}
        if self.modules != ("full",):
            beside = [name for module in self.modules for name in TRACED.get(module, ())]
            dropped = {*modules_dropped(self.modules), *beside}
        layer = sum(table.activations[name].nbytes for name in set(table.saved) - dropped)
        return min(few.layout.pp, few.layout.num_micro_batches) * layer + once

    @property
    def depths(self) -> tuple[int, int]:
        pp = self.layout.get("pp", 1)
        return 2 * pp, 3 * pp


# Open: `moe` on PP 2 x EP 2 keeps 14,336 bytes less than the table says, and norms of queries and
# keys with a sigmoid router and three modules are apart too.
GRID = [
    *(Layered(ROUTED, layout) for layout in (ETP1, PP2)),
    Layered(replace(ROUTED, num_kv_heads=4), TP4),
    Layered(BALANCED, {}),
    Layered(SHARED, ETP1),
    *(
        Layered(SHARED, EP2, (module,))
        for module in ("moe", "moe_act", "layernorm", "shared_experts", "core_attn", "full")
    ),
    Layered(ROUTED, ETP2, ("moe_act",)),
    Layered(ROUTED, EP2, padded=1.5),
    Layered(ROUTED, ETP1, ("moe",), padded=2.0),
]


def check_layers(grid: list[Layered], folder: Path) -> None:
    """A further layer of each model weighs in the trace what its table and its stack say."""
    needs("megatron.core")
    jobs = [
        make_job(case.problem(count), policy("megatron_core", case.settings), "traced")
        for case in grid
        for count in case.depths
    ]
    records = run_jobs("megatron_core", jobs, folder)
    traced = []
    for few, more in zip(records[::2], records[1::2], strict=True):
        assert few.measured is not None, few.reason
        assert more.measured is not None, more.reason
        peaks = [one.measured.ranks[0].activation_peak_bytes for one in (few, more)]
        traced.append(peaks[1] - peaks[0])
    apart = {
        f"{case.modules} {case.layout} {case.padded}": found - case.kept_bytes()
        for case, found in zip(grid, traced, strict=True)
    }
    assert all(abs(nbytes) <= SCALAR for nbytes in apart.values()), apart


def reason(model: Model, layout: dict[str, int], **settings: Any) -> str:
    """Why the package does not run a policy."""
    policy = MegatronCore(**{"bias_activation_fusion": True, **settings})
    return "; ".join(active_reasons(policy.limits(setup_of(Layered(model, layout).problem(4)))))


def test_gradients_that_would_be_wrong_beside_a_right_loss_are_refused() -> None:
    assert "auxiliary loss under tp" in reason(BALANCED, ETP2)
    case = Layered(BALANCED, ETP2).problem(4)
    assert isinstance(MegatronCore().plan(case, case.base_plan), Plan)  # it has options
    assert "does not sum the gradients of experts over tp" in reason(ROUTED, {"tp": 2, "etp": 1})


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (ROUTED, {"bias_activation_fusion": False}, "without bias_activation_fusion"),
        (ROUTED, {"modules": ("mlp",)}, "module mlp has no effect"),
        (ROUTED, {"modules": ("shared_experts",)}, "module shared_experts has no effect"),
        (ROUTED, {"modules": ("moe", "moe_act")}, "moe_act beside moe has no effect"),
        (replace(TINY, vocab=64), {"modules": ("moe",)}, "module moe has no effect"),
    ],
)
def test_modules_that_do_nothing_are_refused(
    model: Model, settings: dict[str, Any], words: str
) -> None:
    chosen = {"recompute": "selective"} if "modules" in settings else {}
    assert words in reason(model, {}, **chosen, **settings)


# -- layers with latent attention ------------------------------------------------------------------


LATENT = replace(
    TINY,
    name="tiny-latent",
    vocab=1024,
    num_kv_heads=TINY.num_heads,
    head_dim=24,
    latent=Latent(q_rank=48, kv_rank=40, nope=16, rope=8, v=12),
)
SPARSE = replace(LATENT, experts=replace(EXPERTS, shared_ffn=32))
LATENT_GRID = [
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
@pytest.mark.parametrize("grid", [GRID, LATENT_GRID], ids=["experts", "latent"])
def test_one_more_layer_weighs_what_the_stack_says(grid: list[Layered], tmp_path: Path) -> None:
    check_layers(grid, tmp_path)


@pytest.mark.parametrize(("layout", "changes", "settings", "words"), tables(__file__)["refused"])
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
