"""PEFT itself, traced on fake tensors beside the operator table, where it is installed."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.costs.test_adapters import RANK, made, saved
from tests.tables import tables

pytestmark = pytest.mark.full
TOKENS = 256
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def traced(modules: list[str], dropout: float, *, narrow: bool, frozen_a: bool) -> float:
    """Bytes a token that autograd keeps of a layer, the mean of two, with the widths of 8B."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig  # noqa: PLC0415 - slow, and only here

    from baselines.transformers import flash_shim  # noqa: PLC0415 - as above
    from baselines.transformers.saved import ROPE, Recorder  # noqa: PLC0415
    from baselines.transformers.traced_step import Setup, build  # noqa: PLC0415

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    setup = Setup(seq_len=TOKENS, batch=1, attention="sdpa", precision="bf16")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        model = build(config, setup)
        patch.setattr(
            torch.nn.Module, "to", lambda module, *_, **__: module
        )  # it swaps no fake tensors
        own = peft.LoraConfig(r=RANK, target_modules=modules, lora_dropout=dropout)
        model = peft.get_peft_model(model, own, autocast_adapter_dtype=False)
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.data = one.data.to(torch.bfloat16 if narrow else torch.float32)
            if frozen_a and "lora_A" in name:
                one.requires_grad = False
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        states = [*model.parameters(), *model.buffers(), ids]
        with flash_shim.installed("sdpa", fake=True), Recorder(model, states) as recorder:
            loss = model(input_ids=ids, labels=ids).loss
        kept = recorder.release()
        del loss
    inside = [one for one in kept if ".layers" in one.module and one.function != ROPE]
    return sum(one.nbytes * one.layers for one in inside) / 2 / TOKENS


@pytest.mark.parametrize(("facts", "words"), tables(__file__)["kept"])
def test_a_layer_keeps_what_peft_keeps(facts: dict[str, Any], words: dict[str, Any]) -> None:
    """To the byte; a mask of torch's CPU dropout has the tensor's type."""
    usual: dict[str, Any] = {"modules": MODULES, "dropout": 0.0, "narrow": True, "frozen_a": False}
    problem = made(lora_rank=RANK, **facts)
    ours = (saved(problem, 0, 2) + saved(problem, 1, 2)) / 2
    assert traced(**{**usual, **words}) == ours
