"""Kernels and collectives that DeepSpeed's engine dispatches for one more layer of its baseline's
model: a process of its own, because a trace leaves DeepSpeed changed.

usage: launches_deepspeed.py LAYOUT MODEL (writes a JSON object: of a step's last micro-batch the
forward, the backward, and what the engine runs beside them)
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

from msgspec.structs import replace
from torch import Tensor

from baselines.deepspeed import engine, run
from rematbench.worlds.packages.process import job, policy
from rematbench.worlds.torch.batch import Batch
from tests.baselines.cases import TINY, Asked, deep
from tests.baselines.dispatched import Launches, of_more_layers

WIDE = {"hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "ffn": 14336}
MODELS = {"tiny": (TINY, (4, 3)), "8b": (replace(TINY, **WIDE), (12, 8))}
"""A model and its two numbers of layers: at 8B's width both are past what ZeRO 3 keeps gathered for
the backward (stage3_max_live_parameters, 1e9)."""


def launches(layout: str, model: str, num_layers: int) -> Counter[str]:
    """Of the last micro-batch of a whole model, after the pass that ZeRO 3 records."""
    given = deep(Asked(layout, {}, MODELS[model][0], "bf16"), num_layers)
    asked = job(given, policy("deepspeed", {}), steps=1)
    asked = replace(asked, run=replace(asked.run, world="traced"))
    seen = Launches()

    def counted(rig: engine.Rig, batch: Batch, scale: float, see: Callable[[Tensor], None]) -> None:
        def enters(phase: str) -> Callable[..., None]:
            return lambda *_: setattr(seen, "phase", phase)

        hooks = (
            rig.engine.register_forward_pre_hook(lambda *_: seen.found.clear()),
            rig.decoder.register_forward_pre_hook(enters("forward"), prepend=True),
            rig.decoder.register_forward_hook(enters("engine")),
        )
        with seen:
            micro_steps(rig, batch, scale, see)
        for hook in hooks:
            hook.remove()

    micro_steps = engine.micro_steps
    with patch.object(engine, "micro_steps", counted):
        run.trace(asked)
    return seen.found


def main() -> None:
    """More layers less fewer."""
    layout, model = sys.argv[1:]
    more, less = MODELS[model][1]
    found = [launches(layout, model, count) for count in (more, less)]
    sys.stdout.write(json.dumps(of_more_layers(*found, layers=more - less)))


if __name__ == "__main__":
    main()
