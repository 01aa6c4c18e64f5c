"""Megatron-core's parameters by the project's names, to write weights and split gradients."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from baselines.common.weights import Piece, weight
from rematbench.workload import Model
from rematbench.worlds.torch.parameters import ParameterSpec

INSIDE = {
    "input_layernorm": ("attn_norm",),
    "self_attention.linear_qkv": ("q", "k", "v"),
    "self_attention.linear_qkv.layer_norm": ("attn_norm",),
    "self_attention.linear_proj": ("proj",),
    "pre_mlp_layernorm": ("mlp_norm",),
    "mlp.linear_fc1": ("up_out",),
    "mlp.linear_fc1.layer_norm": ("mlp_norm",),
    "mlp.linear_fc2": ("fc2",),
}
"""The project's names by a layer's module. TransformerEngine's linears contain norms."""
ENDS = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "embedding.position_embeddings.weight": "position.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
    "output_layer.weight": "lm_head.weight",
}


def names_of(chunk: Any, model: Model) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    """Every parameter of a GPTModel with the names of the weights in its rows, in order."""
    for name, parameter in chunk.named_parameters():
        if name in ENDS:
            tied = name == "output_layer.weight" and model.tied_embeddings
            yield parameter, ("embedding.weight" if tied else ENDS[name],)
            continue
        _, _, local, rest = name.split(".", 3)
        layer = chunk.decoder.layers[int(local)].layer_number - 1
        module, _, kind = rest.rpartition(".")
        if kind.startswith("layer_norm_"):
            module, kind = f"{module}.layer_norm", kind.removeprefix("layer_norm_")
        inside = INSIDE[module]
        if inside == ("up_out",) and model.gated:
            inside = ("gate_out", "up_out")
        yield parameter, tuple(f"layers.{layer}.{part}.{kind}" for part in inside)


def _join(parts: list[Tensor], groups: int) -> Tensor:
    """Join several weights in one tensor: q, k and v by KV head, or gate and then up."""
    if len(parts) != 3:
        return torch.cat(parts)
    return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 1)


def _parts(whole: Tensor, count: int, model: Model, groups: int) -> list[Tensor]:
    if count != 3:
        return list(whole.chunk(count))
    per_group = model.num_heads // model.num_kv_heads * model.head_dim
    rows = whole.reshape(groups, -1, *whole.shape[1:])
    sizes = [per_group, model.head_dim, model.head_dim]
    return [part.flatten(0, 1) for part in torch.split(rows, sizes, 1)]


def fill(
    chunk: Any, model: Model, specs: dict[str, ParameterSpec], seed: int, place: tuple[int, int]
) -> None:
    """Write the project's weights into a chunk; `place` is (tensor-parallel rank, degree)."""
    tp_rank, tp = place
    with torch.no_grad():
        for parameter, names in names_of(chunk, model):
            parts = [weight(specs[name], seed, tp_rank, tp) for name in names]
            parameter.copy_(_join(parts, model.num_kv_heads // tp))


def gradient_pieces(
    chunk: Any, model: Model, specs: dict[str, ParameterSpec], place: tuple[int, int]
) -> Iterator[Piece]:
    """This rank's parts of the gradients, as views of their buffers where possible. Gradients of
    replicated parameters are returned by the first rank only."""
    tp_rank, tp = place
    for parameter, names in names_of(chunk, model):
        grad = parameter.main_grad  # type: ignore[attr-defined]
        parts = _parts(grad, len(names), model, model.num_kv_heads // tp)
        for name, part in zip(names, parts, strict=True):
            if specs[name].split is not None or tp_rank == 0:
                yield Piece(name, tp_rank, part)
