"""Launches of the operator table beside those that the real packages dispatch for a layer."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace

from rematbench.costs.operators.launches import COUNTS, LAUNCHES, ROUTER, ROUTER_LOSS
from rematbench.inputs.load import load_system
from rematbench.inputs.paths import data_dir
from tests.baselines.cases import GPT, TINY, Asked, asked_problem
from tests.baselines.dispatched import Launches, of_more_layers
from tests.installed import needs
from tests.problems import remade

Choice = Literal["flash", "unfused"]
COPIES = 5
"""Copies of counts to the host (_maybe_dtoh_and_synchronize), for which a trace has stand-ins."""
DISPATCHED = {
    ("gpt", "unfused"): {"forward": 24, "backward": 44},
    ("llama", "flash"): {"forward": 38, "backward": 40},
}
"""Of one layer on one of two tensor-parallel ranks: megatron-core 0.16.1's local spec."""
MODELS = {"gpt": replace(GPT, dropout=0.1), "llama": TINY}
DEEPSPEED: dict[tuple[str, str], dict[str, float]] = {
    ("dp2", "tiny"): {"forward": 32, "backward": 82, "engine": 12},
    ("dp2-zero2", "tiny"): {"forward": 32, "backward": 82, "engine": 6},
    ("ulysses2", "tiny"): {
        **{"forward": 36, "forward collectives": 4},
        **{"backward": 84, "backward collectives": 4},
    },
    ("dp2-zero3", "8b"): {"forward": 37, "forward collectives": 4, "backward collectives": 4.5},
}
"""Of one layer of the baseline's decoder in DeepSpeed 0.19.8's engine, in a step's last
micro-batch; `engine`: beside forward and backward."""
TRANSFORMERS = {
    ("llama", "eager"): {"forward": 48, "backward": 91},
    ("llama", "sdpa"): {"forward": 37, "backward": 82},
    ("qwen3", "sdpa"): {"forward": 53, "backward": 116},
    ("gemma2", "eager"): {"forward": 75, "backward": 132},
}
"""Of one layer of Transformers 5.23.0 in a micro-batch that adds to gradients.  sdpa: all but the
attention kernel, which a trace only stands in for."""
FAMILIES = {
    "llama": TINY,
    "qwen3": replace(TINY, qk_norm=True),
    "gemma2": replace(
        TINY,
        mlp="geglu",
        post_norm=True,
        norm_offset=True,
        attention_soft_cap=50.0,
        attention_window=(16,),
    ),
}
SIZES = {
    "hidden_size": TINY.hidden,
    "num_attention_heads": TINY.num_heads,
    "num_key_value_heads": TINY.num_kv_heads,
    "head_dim": TINY.head_dim,
    "intermediate_size": TINY.ffn,
    "vocab_size": TINY.vocab,
}
KEYS = {"gemma2": {"sliding_window": 16}}  # of every other layer, as in the first and the third


@pytest.mark.full  # a package's import; the same count in this process: Transformers', below
@pytest.mark.parametrize(("model", "attention"), DISPATCHED)
def test_a_host_launches_in_proportion_to_the_table(model: str, attention: str) -> None:
    """Megatron-core also adds biases and gradients, copies and casts: about two dispatched kernels
    for one of the table, in both directions, which the fitted seconds of a launch hold.
    Collectives are as many."""
    found = of_megatron_core()[model]
    table = counted(Asked("tp2-no-sp", {}, MODELS[model], "bf16"), "rematbench", attention)  # type: ignore[arg-type]
    for phase, kernels in DISPATCHED[model, attention].items():
        assert found[phase] == kernels
        assert 1.5 <= kernels / table[phase] <= 2.2
        assert found[f"{phase} collectives"] == table[f"{phase} collectives"] == 2


@pytest.mark.full
def test_a_layer_of_experts_launches_what_its_table_says() -> None:
    """A gate is a product and the casts of the table; a balancing loss adds to both directions; the
    trace leaves out the copies of counts to the host."""
    found = of_megatron_core()
    plain, balanced, table = found["experts"], found["balanced"], LAUNCHES["alltoall"]
    assert plain["router"] == 1 + ROUTER[False].forward
    assert balanced["router"] == plain["router"] + ROUTER_LOSS[False].forward
    assert balanced["backward"] == plain["backward"] + ROUTER_LOSS[False].backward
    assert plain[COUNTS] == table[COUNTS].forward - COPIES
    for name in ("permute", "sort", "unsort", "unpermute"):
        assert plain[name] == table[name].forward


@pytest.mark.full
@pytest.mark.parametrize(("layout", "model"), DEEPSPEED)
def test_deepspeed_launches_more_than_the_table(layout: str, model: str) -> None:
    """Its decoder takes RoPE apart.  q, k and v are exchanged one by one, where the table has one
    all-to-all; and at 8B's width ZeRO 3 gathers a layer in four parts, where the lowering has one
    gather (neither moves a byte more)."""
    needs("deepspeed")
    found = dispatched("launches_deepspeed.py", layout, model)
    assert {key: found[key] for key in DEEPSPEED[layout, model]} == DEEPSPEED[layout, model]
    table = counted(Asked(layout, {}, TINY, "bf16"), "deepspeed", "flash")
    assert (table["forward"], table["backward"]) == (19, 25)
    if layout == "ulysses2":
        assert table["forward collectives"] == table["backward collectives"] == 2


@pytest.mark.parametrize(("family", "attention"), TRANSFORMERS)
def test_transformers_launches_more_than_the_table(family: str, attention: str) -> None:
    """q, k and v, gate and up are products of their own there; an eager norm is 8
    kernels and 16 back (7 and 12 here), RoPE of q and k 10 and 14 (8 and 8); and every parameter's
    gradient is added."""
    found = of_transformers(family, attention)
    assert found == TRANSFORMERS[family, attention]
    system = "huggingface" if attention == "eager" else "huggingface-flash"
    choice: Choice = "unfused" if attention == "eager" else "flash"
    table = counted(Asked("one", {}, FAMILIES[family], "bf16"), system, choice)
    own = {"forward": 1, "backward": 3} if attention == "sdpa" else {}
    ratio = {phase: found[phase] / (table[phase] - own.get(phase, 0)) for phase in found}
    assert 1.2 <= ratio["forward"] <= 1.6
    assert 1.75 <= ratio["backward"] <= 1.96


@cache
def of_megatron_core() -> dict[str, dict[str, float]]:
    """All in one process: importing the package takes seconds."""
    asked = (*DISPATCHED, ("experts", "flash"), ("balanced", "flash"))
    return dispatched("launches_megatron_core.py", *(word for key in asked for word in key))


def dispatched(script: str, *arguments: str) -> Any:
    """What a script counts in a process of its own."""
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-W", "ignore", str(path), *arguments]
    root = str(data_dir("config").parent)
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env=paths(root)
    )
    return json.loads(done.stdout.splitlines()[-1])


def of_transformers(family: str, attention: str) -> dict[str, float]:
    """Of a layer, in the second of two micro-batches."""
    pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    from baselines.transformers import flash_shim  # noqa: PLC0415
    from baselines.transformers.families import config_of  # noqa: PLC0415
    from baselines.transformers.traced_step import Setup, build  # noqa: PLC0415

    def whole(num_layers: int) -> Counter[str]:
        config = {**SIZES, **KEYS.get(family, {}), "num_hidden_layers": num_layers}
        setup: Any = {"seq_len": 24, "attention": attention}
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = build(config_of({"model_type": family, **config}), Setup(**setup))
            ids = torch.zeros(2, 24, dtype=torch.int64)
            with flash_shim.installed(attention, fake=True):
                made(input_ids=ids, labels=ids).loss.backward()
                with Launches() as seen:
                    made(input_ids=ids, labels=ids).loss.backward()
        return seen.found

    return of_more_layers(whole(3), whole(2))


def paths(root: str) -> dict[str, str]:
    """This process's environment, with the modules that it has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}


def counted(asked: Asked, system: str, attention: Choice) -> dict[str, int]:
    """Of the operator table, for one layer."""
    given = remade(asked_problem(asked), system=load_system(system), attention=attention)
    ops, cost = given.layer(0).ops, given.cost
    return {
        "forward": sum(cost.calls(op, "forward") for op in ops),
        "backward": sum(
            cost.calls(op, "backward_input") + cost.calls(op, "backward_weight") for op in ops
        ),
        "forward collectives": sum(bool(c) for op in ops for c in (op.gather, op.reduce)),
        "backward collectives": sum(
            bool(c) for op in ops for c in (op.regather, op.grad_gather, op.grad_reduce)
        ),
    }
