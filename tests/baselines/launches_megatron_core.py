"""Kernels that Megatron-core itself dispatches for one more layer, forward and backward, and its
collectives: a process of its own, because the shim stays for good.

usage: launches_megatron_core.py MODEL ATTENTION... (writes a JSON object by model)
"""

import json
import sys
from collections import Counter

from baselines.megatron_core import shim

shim.install(real=False)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from baselines.megatron_core import fake_schedules, rank_engine  # noqa: E402
from baselines.megatron_core.plan import MegatronCore  # noqa: E402
from rematbench.worlds.packages.process import job, policy  # noqa: E402
from tests.baselines.cases import GPT, TINY, Asked, deep  # noqa: E402
from tests.baselines.dispatched import Launches, of_more_layers  # noqa: E402

MODELS = {"gpt": replace(GPT, dropout=0.1), "llama": TINY}


def launches(model: str, attention: str, num_layers: int) -> Counter[str]:
    """Of one micro-batch on one of two tensor-parallel ranks, all layers and both ends."""
    given = deep(Asked("tp2-no-sp", {}, MODELS[model], "bf16"), num_layers, attention=attention)
    asked = job(given, policy("megatron_core", {}), steps=1)
    asked = replace(asked, run=replace(asked.run, world="traced"))
    dist.init_process_group("fake", rank=0, world_size=asked.run.layout.gpus, store=FakeStore())
    place = rank_engine.join_groups(asked)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rig = rank_engine.build(asked, MegatronCore(), place, torch.device("cpu"))
        batches = fake_schedules._batches(asked.run)[:1]
        with Launches() as counted:
            rank_engine.run_step(rig, batches)
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
