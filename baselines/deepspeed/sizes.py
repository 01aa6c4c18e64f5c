"""What the replays of DeepSpeed's memory know of a job: sizes, the stage, and settings."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rematbench.plugins.discover import load_module

if TYPE_CHECKING:
    from baselines.deepspeed.weights import KEPT_WHOLE
else:  # this file is loaded by its path
    KEPT_WHOLE = load_module(Path(__file__).with_name("weights.py")).KEPT_WHOLE

MAX_LIVE, REUSE, PREFETCHED = 1_000_000_000, 1_000_000_000, 50_000_000
"""stage3_max_live_parameters, _max_reuse_distance and _prefetch_bucket_size, as deepspeed 0.19.8
has them: elements."""


class Sizes(NamedTuple):
    """Bytes of an element, of weights (`element`) and of what is reduced; ranks that share; the
    bucket's elements.

    Whether the optimizer is on the host (`offloaded`), parameters are (`away`); whether tiles are
    made again in layers that run again (`remade`).  Of ZeRO 3 elements that may be whole, that are
    fetched ahead at once, within which a weight is kept for its next use (`reuse`), and of what it
    never releases.  The stage, and whether reductions overlap.
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
