"""The project's weights and gradients by name, so that another engine computes the same model."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rematbench.costs.operators.ops import Part
from rematbench.workload import Model
from rematbench.worlds.torch.parameters import (
    ParameterSpec,
    full_weight,
    padded,
    shard,
    specs_by_name,
    square_sum,
)


def model_specs(model: Model, vocab: int) -> dict[str, ParameterSpec]:
    """Every parameter of the model by name; `vocab` is the padded vocabulary."""
    places: list[tuple[Part, int]] = [("embedding", 0), ("head", 0)]
    places += [("layer", i) for i in range(model.num_layers)]
    return specs_by_name(model, places, vocab)


def weight(spec: ParameterSpec, seed: int, tp_rank: int = 0, tp: int = 1) -> Tensor:
    """The part of a parameter that a tensor-parallel rank holds, in float64."""
    return shard(padded(full_weight(spec, seed), spec), spec, tp_rank, tp)


class Piece(NamedTuple):
    """A rank's part of a parameter's gradient; `order` is its place among the parts."""

    name: str
    order: int
    values: Tensor


def norms(pieces: Iterable[Piece], specs: dict[str, ParameterSpec]) -> dict[str, float]:
    """The norm of every parameter's gradient, from the pieces of all ranks. Each rank sends only
    the sums of squares of its pieces. Each part of a parameter comes from one rank only, so the
    sums can be added."""
    own: dict[str, float] = {}
    for piece in pieces:
        counted = _without_padding(piece, specs[piece.name])
        own[piece.name] = own.get(piece.name, 0.0) + square_sum(counted)
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    names = sorted({name for theirs in everyone for name in theirs})
    return {
        name: math.sqrt(math.fsum(theirs.get(name, 0.0) for theirs in everyone)) for name in names
    }


def _without_padding(piece: Piece, spec: ParameterSpec) -> Tensor:
    """A piece without the rows that pad the vocabulary at its end."""
    if not spec.rows:
        return piece.values
    first = piece.order * piece.values.shape[0]
    return piece.values[: max(0, spec.shape[0] - first)]


def assemble(pieces: Iterable[Piece], specs: dict[str, ParameterSpec]) -> dict[str, Tensor]:
    """The whole gradients on rank 0 (empty elsewhere), in float64 on the CPU, from all pieces."""
    own = [piece._replace(values=piece.values.to("cpu", copy=True)) for piece in pieces]
    first = dist.get_rank() == 0
    everyone: list[list[Piece]] | None = [[]] * dist.get_world_size() if first else None
    dist.gather_object(own, everyone, dst=0)
    by_name: dict[str, dict[int, Tensor]] = {}
    for piece in (piece for theirs in everyone or [] for piece in theirs):
        by_name.setdefault(piece.name, {})[piece.order] = piece.values
    whole: dict[str, Tensor] = {}
    for name in sorted(by_name):
        spec, parts = specs[name], by_name[name]
        ordered = [parts[order] for order in sorted(parts)]
        full = torch.cat(ordered, spec.split) if spec.split is not None else ordered[0]
        whole[name] = full[: spec.shape[0]].double()
    return whole
