"""One forward, loss and backward of a model of Transformers on tensors without values.

Bytes are sizes of storages, without the allocator's rounding, workspaces, and memory that a kernel
allocates for itself. Parameters and token ids are states; gradients are states as soon as autograd
makes them (`set_to_none`). As in Transformers' Trainer, keys and values are not cached, and the
output with its logits is not held during the backward, unless `holds_output` is set.
"""

from contextlib import ExitStack, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
from msgspec import Struct
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from baselines.common.interface import NotRunnable
from baselines.transformers import flash_shim
from baselines.transformers.families import model_class
from baselines.transformers.flash_shim import FLASH
from baselines.transformers.phases import Peak, Phases, watch_ends
from baselines.transformers.saved import Recorder, SavedTensor

Kernel = Literal["eager", "sdpa", "flash_attention_2"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Setup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setup of a traced step: attention implementation, gradient checkpointing, sizes.
    `holds_output`: the training loop keeps the model's output until the backward is over."""

    seq_len: int
    batch: int = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    attention: Kernel = "sdpa"
    checkpointing: bool = False
    holds_output: bool = False


class StepTrace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a traced step. `saved` are the storages that autograd keeps between forward and
    backward; `held_besides_bytes` are the bytes of all other storages alive at that time. The
    remaining fields are peaks by phase and bytes of states."""

    saved: tuple[SavedTensor, ...]
    held_besides_bytes: int
    peaks: tuple[Peak, ...]
    parameter_bytes: int
    gradient_bytes: int
    shim: tuple[str, ...]
    layers: int

    @property
    def saved_bytes(self) -> int:
        return sum(kept.nbytes * kept.layers for kept in self.saved)

    @property
    def activation_peak_bytes(self) -> int:
        return max(peak.activation_bytes for peak in self.peaks)


def build(config: PreTrainedConfig, setup: Setup) -> Any:
    """The model in training mode; under fake tensors its weights take no memory."""
    made = deepcopy(config)
    made.use_cache = False  # as Transformers' Trainer does
    kind = model_class(made)
    if setup.attention == "sdpa" and not kind._supports_sdpa:
        raise NotRunnable(f"{kind.__name__} of Transformers has no SDPA: eager or {FLASH}")
    # A model under construction requires flash_attn, or a GPU; so the name is set afterwards.
    kernel = "eager" if setup.attention == FLASH else setup.attention
    model = kind._from_config(made, dtype=DTYPES[setup.precision], attn_implementation=kernel)
    model.config._attn_implementation = setup.attention
    model.train()
    if setup.checkpointing:
        model.activation_checkpointing_enable()
    return model


def run(config: PreTrainedConfig, setup: Setup, *, fake: bool = True) -> StepTrace:
    """A traced step, or with `fake` false a real step of a small model on this CPU."""
    if setup.attention != "eager":
        _no_squares(config, setup)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        return _run(config, setup, fake=fake)


def _run(config: PreTrainedConfig, setup: Setup, *, fake: bool) -> StepTrace:
    model = build(config, setup)
    ids = torch.zeros(setup.batch, setup.seq_len, dtype=torch.int64)
    parameters = list(model.parameters())
    states = [*parameters, *model.buffers(), ids]
    meter = Phases()
    meter.states(states)
    watch_ends(model, meter)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: meter.gradients([p.grad]))
    with flash_shim.installed(setup.attention, fake=fake) as shim, meter:
        with Recorder(model, states) as recorder:
            output = model(input_ids=ids, labels=ids)
        loss, held = output.loss, output if setup.holds_output else None
        del output
        besides = meter.device_bytes - recorder.alive_bytes
        saved = recorder.release()
        meter.phase = "loss_backward"
        loss.backward()
        del loss, held
    return StepTrace(
        saved=tuple(saved),
        held_besides_bytes=besides,
        peaks=meter.peaks(),
        parameter_bytes=sum(p.untyped_storage().nbytes() for p in parameters),
        gradient_bytes=sum(p.grad.untyped_storage().nbytes() for p in parameters),
        shim=shim,
        layers=config.num_hidden_layers,
    )


def _no_squares(config: PreTrainedConfig, setup: Setup) -> None:
    """Raise NotRunnable if any tensor outside the flash kernel is seq_len x seq_len, in the forward
    or the backward. The check runs two layers with a seq_len that no other dimension has."""
    small = deepcopy(config)
    small.num_hidden_layers = 2
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = build(small, setup)
        rows = setup.seq_len
        widths = {n for p in model.parameters() for n in p.shape}
        rows = next(n for n in range(rows, 2 * rows + len(widths) + 2) if n not in widths)
        ids = torch.zeros(setup.batch, rows, dtype=torch.int64)
        stack.enter_context(flash_shim.installed(setup.attention, fake=True))
        stack.enter_context(flash_shim.NoSquares(rows))
        model(input_ids=ids, labels=ids).loss.backward()
