"""From the results of ranks to one result: losses summed, gradients assembled from their shards."""

import math

import torch
from torch import Tensor

from rematbench.spec.layout import Layout
from rematbench.worlds.torch.case import Case, GradientShard, RankResult, Result
from rematbench.worlds.torch.groups import state_rank


def combine(case: Case, ranks: list[RankResult]) -> Result:
    """The job's result from the results of all ranks. A gradient that is not finite makes the
    result `nan`, as a loss does."""
    steps = range(case.steps)
    norms = [_norms(case, ranks, step) for step in steps] if case.shards else []
    wrong = [
        f"NotFinite: gradient of {name} in step {step} has the norm {norm}"
        for step, of_step in enumerate(norms)
        for name, norm in of_step.items()
        if not math.isfinite(norm)
    ]
    if wrong:
        return Result(name=case.name, status="nan", reason=wrong[0])
    return Result(
        name=case.name,
        status="ok",
        losses=[sum(r.losses[step] for r in ranks if r.place.tp == 0) for step in steps],
        gradient_norms=norms,
        gradients=[_gradients(case, ranks, step) for step in steps] if case.gradients else [],
        ranks=ranks,
    )


def is_sharded(layout: Layout) -> bool:
    """Whether ZeRO spreads the state of each parameter over the state peers."""
    return layout.zero_stage >= 1 and layout.state_shards > 1


def _holders(case: Case, ranks: list[RankResult], name: str) -> list[list[RankResult]]:
    """The ranks that together hold a parameter once: per tensor-parallel rank its shards."""
    having = [r for r in ranks if name in r.gradients[0]]
    stage = min(r.place.pp for r in having)
    having = [r for r in having if r.place.pp == stage]
    split = having[0].gradients[0][name].spec.split is not None
    lay, order = case.problem.layout, case.problem.system.rank_order
    holders = []
    for tp in range(lay.tp if split else 1):
        peers = [r for r in having if r.place.tp == tp]
        peers.sort(key=lambda r: state_rank(lay, order, r.place))
        holders.append(peers if is_sharded(lay) else peers[:1])
    return holders


def _names(ranks: list[RankResult]) -> list[str]:
    return sorted({name for rank in ranks for name in rank.gradients[0]})


def _norms(case: Case, ranks: list[RankResult], step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _names(ranks):
        held = [r for peers in _holders(case, ranks, name) for r in peers]
        found[name] = sum(r.gradients[step][name].square_sum for r in held) ** 0.5
    return found


def _gradients(case: Case, ranks: list[RankResult], step: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in _names(ranks):
        parts = [
            _whole([r.gradients[step][name] for r in peers])
            for peers in _holders(case, ranks, name)
        ]
        spec = ranks[0].gradients[step].get(name) or next(
            r.gradients[step][name] for r in ranks if name in r.gradients[step]
        )
        full = torch.cat(parts, spec.spec.split) if spec.spec.split is not None else parts[0]
        found[name] = full[: spec.spec.shape[0]]  # without padded rows
    return found


def _whole(shards: list[GradientShard]) -> Tensor:
    """The gradient of one tensor-parallel rank, from its ZeRO shards."""
    values = [shard.values for shard in shards if shard.values is not None]
    flat = torch.cat(values)
    shape = torch.Size(shards[0].shape)
    return flat[: shape.numel()].view(shape)
