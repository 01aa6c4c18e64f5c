"""Every guard says no, by name, to a job that breaks it and to no other."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import pytest
from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.common.resources import require_memory
from baselines.deepspeed import configuration as deepspeed
from baselines.deepspeed.plan import DeepSpeed, pieces
from baselines.megatron_core import guards as megatron
from baselines.megatron_core.arguments import policy_of
from baselines.megatron_core.modules import OffloadModule
from baselines.megatron_core.plan import MegatronCore
from rematbench.inputs.system import StackChoice
from rematbench.workload import Experts, Latent
from rematbench.worlds.packages.limits import setup_of
from rematbench.worlds.packages.process import PackageJob
from tests.baselines.cases import GPT, TINY, Asked, asked_job, asked_problem

Changes = Mapping[str, Any]
TRACED: Changes = {"world": "traced"}
BIASED: Changes = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}


EXPERTS = Experts(count=4, active=2, ffn=32)
UNFUSED = {"stack": StackChoice(attention="unfused")}
LATENT: Changes = {
    **{"latent": Latent(kv_rank=16, nope=8, rope=8, v=8), "head_dim": 16},
    "num_kv_heads": TINY.num_heads,
}
AWAY: Changes = {"offload_modules": ("core_attn",)}


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
    given = dict(case.job)
    named = {baseline: {**job.run.parameters[baseline], **given.pop("settings", {})}}
    return replace(job, run=replace(spec, parameters=named), **given)


MEGATRON = [
    Broken("biases of some linears", model={"mlp_bias": True}),
    Broken("ALiBi", model={"position": "alibi"}),
    Broken("post-norms", model={"post_norm": True}),
    Broken("sliding-window", model={"attention_window": (8, 0, 8, 0)}),
    Broken("soft caps", model={"attention_soft_cap": 50.0}),
    Broken("geglu", model={"mlp": "geglu"}),
    Broken("norms over heads", model={"qk_norm": True}),
    Broken("packed documents", run={"document_len": 8}),
    Broken("precision fp16", run={"precision": "fp16"}),
    Broken("zero_stage 2", layout={"zero_stage": 2}),
    Broken("hybrid sharding", layout={"dp": 4, "shard_degree": 2}),
    Broken("Ulysses", layout={"ulysses": 2}),
    Broken("KV heads replicated", model={"num_kv_heads": 1}, layout={"tp": 2}),
    Broken("only even ones", layout={"pp": 3}),
    Broken(
        "unfused attention under context",
        layout={"cp": 2},
        run=UNFUSED,
    ),
    Broken("micro-batches must be a multiple of pp", layout={"pp": 2, "vpp": 2, "global_batch": 6}),
    Broken("wrong gradients", policy={"batch_p2p": True}, layout={"pp": 2, "vpp": 2}),
    Broken("coalesced collectives", policy={"overlap_grad_reduce": True}, run=TRACED),
    Broken("wrong losses", policy={"overlap_p2p": True}, layout={"pp": 4, "vpp": 1}),
    Broken(
        "exclude each other",
        policy={"batch_p2p": True, "overlap_p2p": True},
        layout={"pp": 2},
        job={"device": "cuda"},
    ),
    Broken(
        "is for the interleaved",
        policy={"overlap_p2p": True},
        layout={"pp": 2},
        job={"device": "cuda"},
    ),
    Broken(
        "never ends",
        policy={"recompute": "selective", "modules": ("mlp",)},
        model={"mlp": "gelu", **BIASED},
    ),
    Broken("without modules", policy={"recompute": "selective", "modules": ()}),
    Broken("more than a chunk's 4", policy={"recompute": "full", "num_layers": 5}),
    Broken("num_layers 2 without", policy={"num_layers": 2}),
    Broken("method block without", policy={"recompute": "selective", "method": "block"}),
    Broken("modules mlp without", policy={"modules": ("mlp",)}),
    Broken("do not divide a chunk's 4", policy={"recompute": "full", "num_layers": 3}),
    Broken("attn_proj without", policy={"offload_modules": ("attn_proj", "mlp_norm")}),
    Broken("all five", policy={"offload_modules": get_args(OffloadModule)}),
    Broken("offloading with full", policy={"offload_modules": ("core_attn",), "recompute": "full"}),
    Broken(
        "tanh approximation",
        policy={"bias_activation_fusion": True},
        model={"mlp": "gelu", **BIASED},
    ),
    Broken(
        "GELU without biases",
        policy={"bias_activation_fusion": True},
        model={"mlp": "gelu", "qkv_bias": False, "proj_bias": False, "mlp_bias": False},
        run=TRACED,
    ),
    Broken("dropout", model={"dropout": 0.1}),
    Broken("without bias_activation_fusion", model={"experts": EXPERTS}),
    Broken(
        "experts are traced here",
        policy={"bias_activation_fusion": True},
        model={"experts": EXPERTS},
    ),
    Broken("offloads of latent attention", policy=AWAY, model=LATENT),
    Broken("latent attention is traced here", model=LATENT),
    Broken(
        f"latent attention, which {TINY.name} does not",
        job={"options": "--multi-latent-attention"},
    ),
    Broken(
        r"num_layers is 2, but the options say 1; modules is \('mlp',\), but the options say "
        r"\('core_attn',\)",
        job={"options": "--bf16", "settings": {"num_layers": 2, "modules": ["mlp"]}},
    ),
]
DEEPSPEED = [
    Broken("tensor parallelism", layout={"tp": 2}),
    Broken("set ulysses", layout={"cp": 2}),
    Broken("pipeline parallelism", layout={"pp": 2}),
    Broken("hybrid sharding", layout={"dp": 4, "shard_degree": 2}),
    Broken("packed documents", run={"document_len": 8}),
    Broken("dropout", model={"dropout": 0.1}),
    Broken("ALiBi", model={"position": "alibi"}),
    Broken("sliding-window", model={"attention_window": (8, 0, 8, 0)}),
    Broken("soft caps", model={"logit_soft_cap": 30.0}),
    Broken("norms over heads", model={"qk_norm": True}),
    Broken("precision fp16", run={"precision": "fp16"}),
    Broken("unfused attention", run=UNFUSED),
    Broken("ZeRO 0 with Ulysses", layout={"dp": 4, "ulysses": 2, "zero_stage": 0}),
    Broken("share out evenly", model={"num_kv_heads": 1}, layout={"dp": 2, "ulysses": 2}),
    Broken("needs zero_stage 3", policy={"offload_param": True}, layout={"zero_stage": 2}),
    Broken("needs zero_stage 1 to 3", policy={"offload_optimizer": True}, layout={"zero_stage": 0}),
    Broken("overlap_comm has no effect", policy={"overlap_comm": True}, layout={"zero_stage": 0}),
    Broken("tiled MLP with post-norms", policy={"mlp_tiles": 2}, model={"post_norm": True}),
    Broken("mlp_tiles 7: 24 rows make 6 tiles.*set 6 or 8", {"mlp_tiles": 7}, run={"seq_len": 12}),
    Broken("loss_tiles 90: 64 rows make 64 tiles.*set 64$", policy={"loss_tiles": 90}),
    Broken(
        "loss_tiles with tied embeddings",
        policy={"loss_tiles": 2},
        model={"tied_embeddings": True},
        layout={"zero_stage": 2},
    ),
]


@pytest.mark.parametrize("case", MEGATRON, ids=[case.words for case in MEGATRON])
def test_megatron_core_refuses(case: Broken) -> None:
    with pytest.raises(NotRunnable, match=case.words) as refusal:
        megatron.check(changed("megatron_core", case), MegatronCore(**case.policy))
    assert str(refusal.value).startswith("megatron_core: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", DEEPSPEED, ids=[case.words for case in DEEPSPEED])
def test_deepspeed_refuses(case: Broken) -> None:
    with pytest.raises(NotRunnable, match=case.words) as refusal:
        deepspeed.check(changed("deepspeed", case), DeepSpeed(**case.policy))
    assert str(refusal.value).startswith("deepspeed: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--recompute-granularity full --recompute-num-layers four", "four: expected a whole"),
        ("tiny --recompute-granularity full", "'tiny' stands before any argument"),
    ],
)
def test_arguments_that_cannot_be_read_are_named(text: str, words: str) -> None:
    job = asked_job("megatron_core", Asked("one"))
    own = MegatronCore().flags(asked_problem(Asked("one")))
    with pytest.raises(NotRunnable, match=words):
        policy_of(f"{text} {own}", MegatronCore(), job.run)


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
    deepspeed.check(asked_job("deepspeed", Asked("ulysses2")), DeepSpeed())


def test_every_guard_has_its_case() -> None:
    """As many reasons as a check goes through, counted where they are written."""
    job = asked_job("megatron_core", Asked("one"))
    policy, setup = MegatronCore(), setup_of(job.run)
    reasons = [
        *policy.limits(setup), *megatron._options(job, policy), *megatron._pipeline(job, policy),
        *megatron._executed(job.run, policy),
    ]  # fmt: skip
    assert len(reasons) == len(MEGATRON)
    assert len(DeepSpeed().limits(setup)) == len(DEEPSPEED)


@pytest.mark.parametrize("rows", [1, 7, 24, 64])
def test_tiles_are_as_many_as_torch_makes(rows: int) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(rows)
    assert all(pieces(rows, n) == len(whole.chunk(n)) for n in range(1, rows + 9))
