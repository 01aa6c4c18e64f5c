"""Published closed-form estimators of peak memory."""

from typing import Literal

from msgspec import Struct

from rematbench.inputs.layout import Layout
from rematbench.problem import Problem
from rematbench.workload import Model


class Estimate(Struct, frozen=True, kw_only=True):
    """A closed form's prediction for one GPU: bytes of the states and of the activations."""

    state_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


SAFE_SHARE = 0.8
"""Fujii et al.: an estimate below 80 % of device memory never met an out-of-memory error."""


def fujii_estimate(model: Model, layout: Layout, seq_len: int) -> Estimate:
    """Per-GPU bytes of the first pipeline stage: flash attention, sequence parallelism, a
    distributed optimizer, no recomputation, a gated MLP.

    Source: Fujii et al., arXiv 2411.06465: states (6 + 12 / (d c)) (h V / t + (2 L / p) h^2 (1 +
    g/a + 1.5 H/h + 1/h) / t), and with p = 1 a second h V / t and a final norm; activations s b h /
    (t c) ((12 + 4 g/a + 8 H/h) L + 8 p + [p = 1] 4 (1 + V/h)), times 1 + (p - 1) / (p v) if stages
    interleave.
    """
    h, p, t = model.hidden, layout.pp, layout.tp
    kv, wide = model.num_kv_heads / model.num_heads, model.ffn / h
    stage = 2 * model.num_layers / p * h**2 * (1 + kv + 1.5 * wide + 1 / h) / t
    parameters = h * model.vocab / t + stage
    if p == 1:
        parameters += (0 if model.tied_embeddings else h * model.vocab / t) + h
    units = (12 + 4 * kv + 8 * wide) * model.num_layers + 8 * p
    if p == 1:
        units += 4 * (1 + model.vocab / h)
    if layout.vpp > 1:
        units *= 1 + (p - 1) / (p * layout.vpp)
    return Estimate(
        state_bytes=(6 + 12 / layout.state_shards) * parameters,
        activation_bytes=seq_len * layout.micro_batch * h / (t * layout.cp) * units,
    )


def fujii_refusal(problem: Problem) -> str:
    """The reason why Fujii's formula does not cover a problem; empty if it does."""
    lay, model = problem.layout, problem.workload.model
    rules = (
        (problem.attention != "flash", "assumes flash attention"),
        (not model.gated, f"assumes a gated MLP, not {model.mlp}"),
        (lay.tp > 1 and not lay.sp, "assumes sequence parallelism with tp"),
        (
            lay.zero_stage != 1,
            f"assumes a distributed optimizer (zero 1), not zero {lay.zero_stage}",
        ),
        (lay.ulysses > 1, "has no term for ulysses"),
        (model.experts is not None, "has no term for experts"),
        (model.drops, "assumes no dropout"),
    )
    return next((text for broken, text in rules if broken), "")


Recomputation = Literal["none", "selective", "full"]


def korthikanti_layer_bytes(
    model: Model, layout: Layout, seq_len: int, recomputation: Recomputation = "none"
) -> float:
    """Activation bytes of one layer for one micro-batch: 16-bit GPT, unfused attention, dropout.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), table 2: s b h (34 + 5 a s / h) unsharded,
    (10 + 24/t + 5 a s / (h t)) under tensor parallelism, and the first formula over t with sequence
    parallelism.  Selective recomputation drops 5 a s / h; full recomputation keeps 2 (2/t with
    sequence parallelism: the input is kept in shards).
    """
    h, t = model.hidden, layout.tp
    unit = seq_len * layout.micro_batch * h
    whole = 1 / t if layout.sp else 1.0  # without sp these tensors are not split
    if recomputation == "full":
        return 2 * unit * whole
    scores = 5 * model.num_heads * seq_len / h if recomputation == "none" else 0.0
    return unit * (10 * whole + (24 + scores) / t)


def korthikanti_activation_bytes(
    model: Model, layout: Layout, seq_len: int, recomputation: Recomputation = "none"
) -> float:
    """Activation bytes of the first pipeline stage: L layers for every p; s b h p / t for the
    embedding dropout; with p = 1 also 4 (s b h / t) (1 + V/h) for the head.

    Source: Korthikanti et al. 2022, sections 4.2.3 and 4.3 and equation 5; interleaving stores
    1 + (p - 1) / (p v) times the layers' activations.
    """
    p, t = layout.pp, layout.tp
    unit = seq_len * layout.micro_batch * model.hidden
    layers = model.num_layers * korthikanti_layer_bytes(model, layout, seq_len, recomputation)
    if layout.vpp > 1:
        layers *= 1 + (p - 1) / (p * layout.vpp)
    head = 4 * unit / t * (1 + model.vocab / model.hidden) if p == 1 else 0.0
    return layers + unit * p / t + head
