"""Kernels that Megatron-core itself dispatches for one more layer, forward and backward, and its
collectives: a process of its own, because the shim stays for good.

usage: launches_megatron_core.py MODEL ATTENTION... (writes a JSON object by model)
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from baselines.megatron_core import shim

shim.install(real=False)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.transformer.moe import router, token_dispatcher  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from baselines.megatron_core import fake_schedules, rank_engine  # noqa: E402
from baselines.megatron_core.experts import install_balance  # noqa: E402
from baselines.megatron_core.plan import MegatronCore  # noqa: E402
from rematbench.workload import Experts  # noqa: E402
from rematbench.worlds.packages.process import job, policy  # noqa: E402
from tests.baselines.cases import GPT, TINY, Asked, deep  # noqa: E402
from tests.baselines.dispatched import Launches, of_more_layers  # noqa: E402

EXPERTS = Experts(count=8, active=2, ffn=48)
MODELS = {
    "gpt": replace(GPT, dropout=0.1),
    "llama": TINY,
    "experts": replace(TINY, experts=EXPERTS),
    "balanced": replace(TINY, experts=replace(EXPERTS, aux_loss=0.01)),
}
PARTS: dict[str, tuple[Any, str]] = {
    "router": (router.TopKRouter, "forward"),
    "expert_counts": (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess"),
    "permute": (token_dispatcher, "permute"),
    "sort": (token_dispatcher.MoEAlltoAllTokenDispatcher, "dispatch_postprocess"),
    "unsort": (token_dispatcher.MoEAlltoAllTokenDispatcher, "combine_preprocess"),
    "unpermute": (token_dispatcher, "unpermute"),
}
"""The functions behind the operators of a table."""


def within(counted: Launches, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose launches in a forward are counted under a name."""

    def named(*args: Any, **kwargs: Any) -> Any:
        before, counted.phase = counted.phase, name
        try:
            return call(*args, **kwargs)
        finally:
            counted.phase = before

    return named


def launches(model: str, attention: str, num_layers: int) -> Counter[str]:
    """Of one micro-batch on one of two tensor-parallel ranks (of experts: of two data-parallel
    ranks that share them), all layers and both ends."""
    experts = MODELS[model].experts
    layout = "dp2-ep2" if experts else "tp2-no-sp"
    given = deep(Asked(layout, {}, MODELS[model], "bf16"), num_layers, attention=attention)
    settings = {"bias_activation_fusion": True} if experts else {}
    asked = job(given, policy("megatron_core", settings), steps=1)
    asked = replace(asked, run=replace(asked.run, world="traced"))
    dist.init_process_group("fake", rank=0, world_size=asked.run.layout.gpus, store=FakeStore())
    place = rank_engine.join_groups(asked)
    balanced = install_balance(experts) if experts else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), balanced:
        rig = rank_engine.build(asked, MegatronCore(**settings), place, torch.device("cpu"))
        batches = fake_schedules._batches(asked.run)[:1]
        with Launches() as counted:
            plain = {name: getattr(*place) for name, place in PARTS.items()}
            for name, (owner, function) in PARTS.items():
                setattr(owner, function, within(counted, name, plain[name]))
            rank_engine.run_step(rig, batches)
            for name, (owner, function) in PARTS.items():
                setattr(owner, function, plain[name])
    rank_engine.leave_groups()
    dist.destroy_process_group()
    return counted.found


def main() -> None:
    """Three layers less two."""
    found = {}
    for model, attention in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        more, less = (launches(model, attention, count) for count in (3, 2))
        found[model] = of_more_layers(more, less)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
