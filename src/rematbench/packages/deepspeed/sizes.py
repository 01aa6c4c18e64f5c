"""The facts of a job for the replays of DeepSpeed's memory: sizes, ZeRO stage, settings."""

from typing import NamedTuple

from rematbench.packages.deepspeed.weights import KEPT_WHOLE

MAX_LIVE, REUSE, PREFETCHED = 1_000_000_000, 1_000_000_000, 50_000_000
"""Defaults of deepspeed 0.19.8, in elements. They are stage3_max_live_parameters,
stage3_max_reuse_distance and stage3_prefetch_bucket_size."""


class Sizes(NamedTuple):
    """Sizes and settings of a job under ZeRO.

    `element`: bytes of an element of weights; `reduced`: bytes of an element in reductions;
    `ranks`: ranks that share states; `bucket`: elements of the reduce bucket. `offloaded`, `away`:
    whether the optimizer, the parameters are on the host. `remade`: whether tiles are rebuilt in
    layers that are recomputed. `stage`: the ZeRO stage; `overlap`: whether reductions overlap the
    backward.

    Elements under ZeRO 3: `max_live` may be whole at once, `prefetched` are fetched ahead at once,
    `reuse` is the distance within which a weight is kept for its next use, and parameters of at
    most `kept_whole` are never released.
    """

    element: int
    reduced: int
    ranks: int
    bucket: int
    offloaded: bool = False
    max_live: int = MAX_LIVE
    prefetched: int = PREFETCHED
    reuse: int = REUSE
    kept_whole: int = KEPT_WHOLE
    stage: int = 3
    overlap: bool = False
    away: bool = False
    remade: bool = False
