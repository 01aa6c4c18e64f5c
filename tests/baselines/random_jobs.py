"""DeepSpeed jobs drawn by a seed: small models and layers of large ones, in every setting."""

from random import Random
from typing import Any, NamedTuple

from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.plan import Unsupported
from rematbench.problem import Problem
from rematbench.workload import Model
from rematbench.worlds.packages.process import policy
from tests.problems import make_problem

CHECKPOINTING = ("none", "none", "plain", "plain", "partitioned", "cpu", "partitioned_cpu")


class Drawn(NamedTuple):
    """A problem and the baseline's settings."""

    problem: Problem
    settings: dict[str, Any]


def draw(seed: int) -> Drawn:
    """The first job of a seed that DeepSpeed runs."""
    random = Random(seed)
    while True:
        big = random.random() < 0.5
        model = _model(random, big=big)
        layout = _layout(random)
        seq_len = random.choice([512, 1024, 4096, 16384] if big else [64, 128, 512, 1024])
        precision = random.choice(["bf16", "bf16", "fp32"])
        settings = _settings(random, layout["zero_stage"])
        try:
            problem = make_problem(
                model=model, cluster="a800-80gb", system="deepspeed", layout=Layout(**layout),
                seq_len=seq_len, precision=precision, attention="flash",
            )  # fmt: skip
        except (LayoutError, ConfigError):
            continue
        if not isinstance(policy("deepspeed", settings).plan(problem), Unsupported):
            return Drawn(problem, settings)


def _model(random: Random, *, big: bool) -> Model:
    gpt = random.random() < 0.4
    heads = random.choice([16, 32, 64] if big else [4, 8, 16])
    head_dim = random.choice([64, 128] if big else [32, 64])
    hidden = heads * head_dim
    kv_heads = heads if gpt else random.choice([heads, heads // 2, heads // 4])
    mlp = "gelu" if gpt else random.choice(["swiglu", "swiglu", "geglu"])
    widths = [2 * hidden, (8 * hidden // 3) // 32 * 32, 4 * hidden, 7 * hidden // 2]
    ffn = 4 * hidden if gpt else random.choice(widths)
    bias = random.random() < (0.8 if gpt else 0.2)
    return Model(
        name="drawn",
        num_layers=random.randint(1, 5 if big else 6),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=random.choice([32000, 50304, 128256] if big else [512, 2000, 8192]),
        mlp=mlp,  # type: ignore[arg-type]
        norm="layernorm" if gpt else "rmsnorm",
        position="learned" if gpt and random.random() < 0.7 else "rope",
        tied_embeddings=random.random() < 0.4,
        qkv_bias=bias,
        proj_bias=gpt and bias,
        mlp_bias=gpt and bias,
        post_norm=random.random() < 0.1,
    )


def _layout(random: Random) -> dict[str, Any]:
    dp = random.choice([1, 2, 2, 4, 8])
    stage = random.choice([0, 1, 2, 2, 3, 3, 3])
    ulysses = random.choice([degree for degree in (1, 1, 1, 2, 4, 8) if degree <= dp])
    micro_batch = random.choice([1, 1, 2, 4])
    count = random.choice([1, 1, 2, 3])
    return {
        "dp": dp,
        "ulysses": ulysses,
        "zero_stage": stage,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * count * (dp // ulysses),
    }


def _settings(random: Random, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {"checkpointing": random.choice(CHECKPOINTING)}
    if stage and random.random() < 0.3:
        found["offload_optimizer"] = True
    if stage == 3 and random.random() < 0.25:
        found["offload_param"] = True
    if stage and random.random() < 0.3:
        found["overlap_comm"] = True
    for name in ("mlp_tiles", "loss_tiles"):
        if random.random() < 0.2:
            found[name] = random.choice([2, 4])
    return found
