"""The keys of DeepSpeed's configuration for the facts of a stack.

Source: deepspeed 0.19.8, runtime/zero/config.py. `flags` lists facts as assumed if they have an
effect in a job and have no key here.
"""

from typing import Any

from rematbench.problem import Problem

KEYS = {
    "bucket_bytes": "reduce_bucket_size",
    "prefetch_elements": "stage3_prefetch_bucket_size",
    "live_elements": "stage3_max_live_parameters",
    "sub_group_parameters": "sub_group_size",
    "whole_buckets": "contiguous_gradients",
}
POLICY = ("reduce_overlap", "optimizer_on_host", "parameters_on_host", "param_bytes")
"""Facts that the policy and the job set in the configuration."""


def stack_values(problem: Problem, made: dict[str, Any]) -> dict[str, Any]:
    """The values of zero_optimization for the facts that have an effect in a job. A bucket is at
    most as large as the one in `made`, because DeepSpeed allocates the memory of a whole bucket."""
    lay, zero, host = problem.layout, problem.system.zero, problem.system.host
    stage, third = lay.zero_stage if lay.state_shards > 1 else 0, lay.zero_stage == 3
    overlapped = zero.reduce_overlap and lay.dp * lay.cp > 1 and stage < 2
    ahead = third and (stage > 0 or host.parameters_on_host) and zero.data_parallel == "zero"
    grouped = third and (host.host_gradients if host.optimizer_on_host else stage > 0)
    useful = {
        "bucket_bytes": overlapped or (zero.whole_buckets and stage > 0),
        "prefetch_elements": ahead,
        "live_elements": ahead and zero.prefetch_elements > 0 and zero.gather_overlap,
        "sub_group_parameters": grouped and zero.sub_group_parameters > 0,
        "whole_buckets": stage > 0 and zero.bucket_bytes > 0,
    }
    values = {KEYS[fact]: getattr(zero, fact) for fact, is_so in useful.items() if is_so}
    bucket, key = made["reduce_bucket_size"], KEYS["bucket_bytes"]
    if key in values:
        own = zero.bucket_bytes // max(1, problem.system.states.grad_bytes)
        values[key] = min(own or bucket, bucket)
    return values
