"""Every guard says no, by name, to a job that breaks it and to no other."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from msgspec import convert
from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.common.resources import require_memory
from baselines.deepspeed.plan import DeepSpeed, pieces
from baselines.megatron_core import guards as megatron
from baselines.megatron_core.plan import MegatronCore
from rematbench.inputs.system import StackChoice
from rematbench.workload import Experts, Latent
from rematbench.worlds.packages.limits import active_reasons, setup_of
from rematbench.worlds.packages.process import PackageJob
from tests.baselines.cases import GPT, TINY, Asked, asked_job
from tests.tables import tables

Changes = Mapping[str, Any]
TRACED: Changes = {"world": "traced"}
BIASED: Changes = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}


EXPERTS = Experts(count=4, active=2, ffn=32)
UNFUSED = {"stack": StackChoice(attention="unfused")}
LATENT: Changes = {
    **{"latent": Latent(kv_rank=16, nope=8, rope=8, v=8), "head_dim": 16},
    "num_kv_heads": TINY.num_heads,
}
NAMED: dict[str, Changes] = {
    "away": {"offload_modules": ("core_attn",)},
    "biased gelu": {"mlp": "gelu", **BIASED},
    "experts": {"experts": EXPERTS},
    "latent": LATENT,
    "traced": TRACED,
    "unfused": UNFUSED,
}


class Broken(NamedTuple):
    """Words of the refusal; what the policy says; what is changed of a job that runs."""

    words: str
    policy: Changes = MappingProxyType({})
    model: Changes = MappingProxyType({})
    layout: Changes = MappingProxyType({})
    run: Changes = MappingProxyType({})
    job: Changes = MappingProxyType({})


def changed(baseline: str, case: Broken) -> PackageJob:
    gelu = case.model.get("mlp") == "gelu"
    job = asked_job(baseline, Asked("one", model=GPT if gelu else TINY))
    spec = replace(
        job.run,
        model=replace(job.run.model, **case.model),
        layout=replace(job.run.layout, **case.layout),
        **case.run,
    )
    return replace(job, run=spec, **case.job)


def broken(baseline: str) -> list[Broken]:
    """The cases of the table; a word in place of changes is one of NAMED."""
    return [
        Broken(
            words, **{part: NAMED[to] if isinstance(to, str) else to for part, to in cell.items()}
        )
        for words, cell in tables(__file__)[baseline]
    ]


MEGATRON, DEEPSPEED = broken("megatron"), broken("deepspeed")


@pytest.mark.parametrize("case", MEGATRON, ids=[case.words for case in MEGATRON])
def test_megatron_core_refuses(case: Broken) -> None:
    with pytest.raises(NotRunnable, match=case.words) as refusal:
        megatron.check(changed("megatron_core", case), convert({**case.policy}, MegatronCore))
    assert str(refusal.value).startswith("megatron_core: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", DEEPSPEED, ids=[case.words for case in DEEPSPEED])
def test_deepspeed_refuses(case: Broken) -> None:
    setup = setup_of(changed("deepspeed", case).run)
    reasons = active_reasons(DeepSpeed(**case.policy).limits(setup))
    assert re.search(case.words, reasons[0])


def test_a_machine_does_not_start_what_it_cannot_hold() -> None:
    """Weights and gradients of every rank; a traced job has none."""
    large = changed("megatron_core", Broken("", model={"num_layers": 80, "hidden": 262144}))
    with pytest.raises(NotRunnable, match=r"1 ranks of .* hold at least [\d,.]+ GiB .* are free"):
        require_memory(large)
    require_memory(replace(large, run=replace(large.run, world="traced")))
    require_memory(replace(large, device="cuda"))
    require_memory(asked_job("megatron_core", Asked("tp2-dp2")))


def test_what_breaks_no_guard_passes() -> None:
    megatron.check(asked_job("megatron_core", Asked("pp2-vpp2")), MegatronCore())
    run = asked_job("deepspeed", Asked("ulysses2")).run
    assert not active_reasons(DeepSpeed().limits(setup_of(run)))


def test_every_guard_has_its_case() -> None:
    """As many reasons as a check goes through, counted where they are written."""
    job = asked_job("megatron_core", Asked("one"))
    policy, setup = MegatronCore(), setup_of(job.run)
    reasons = [
        *policy.limits(setup), *megatron._pipeline(job, policy),
        *megatron._executed(job.run, policy),
    ]  # fmt: skip
    assert len(reasons) == len(MEGATRON)
    assert len(DeepSpeed().limits(setup)) == len(DEEPSPEED)


@pytest.mark.parametrize("rows", [1, 7, 24, 64])
def test_tiles_are_as_many_as_torch_makes(rows: int) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(rows)
    assert all(pieces(rows, n) == len(whole.chunk(n)) for n in range(1, rows + 9))
