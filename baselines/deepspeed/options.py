"""The keys of DeepSpeed's configuration for the facts of a stack.

Source: deepspeed 0.19.8, runtime/zero/config.py.  A fact without a key is in NO_OPTION, and `flags`
lists its value as assumed; tests hold every fact to one of the tables.
"""

from collections.abc import Iterator
from typing import Any

from rematbench.inputs.effects import ACTS
from rematbench.problem import Problem
from rematbench.worlds.packages.limits import ABILITIES, assumed_facts, use_of

KEYS = {
    "bucket_bytes": "reduce_bucket_size",
    "prefetch_elements": "stage3_prefetch_bucket_size",
    "live_elements": "stage3_max_live_parameters",
    "sub_group_parameters": "sub_group_size",
    "whole_buckets": "contiguous_gradients",
}
"""Keys of zero_optimization by fact."""
POLICY = ("reduce_overlap", "optimizer_on_host", "parameters_on_host", "param_bytes")
"""Facts that the configuration of a policy and a job has."""
NO_OPTION = frozenset(ACTS) - {*KEYS, *POLICY, *ABILITIES}
"""Facts that no key gives: the model's code, its package's or the environment's."""


def stack_values(problem: Problem, zero: dict[str, Any]) -> dict[str, Any]:
    """The values of zero_optimization for the facts that act in a job.  A bucket is no larger than
    the one that is in `zero`: buckets are allocated whole."""
    system, use = problem.system, use_of(problem)
    values: dict[str, Any] = {
        "bucket_bytes": min(
            system.zero.bucket_bytes // max(1, system.states.grad_bytes)
            or zero["reduce_bucket_size"],
            zero["reduce_bucket_size"],
        ),
        "prefetch_elements": system.zero.prefetch_elements,
        "live_elements": system.zero.live_elements,
        "sub_group_parameters": system.zero.sub_group_parameters or None,
        "whole_buckets": system.zero.whole_buckets,
    }
    return {
        KEYS[fact]: value for fact, value in values.items() if value is not None and ACTS[fact](use)
    }


def assumed(problem: Problem, *, offloads: bool) -> Iterator[str]:
    """The facts that act in a job and that no key gives, with their values."""
    return assumed_facts(problem, {*KEYS, *POLICY}, offloads=offloads)
