"""Refusals, at the start, of jobs that Megatron-core would refuse late, run wrongly or not end."""

import importlib.util

from baselines.common.interface import NotRunnable
from baselines.megatron_core.plan import MegatronCore
from rematbench.worlds.packages.limits import Reason, setup_of
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec


def check(job: PackageJob, policy: MegatronCore) -> None:
    """Raise NotRunnable with the first reason to refuse the job, if there is one."""
    run = job.run
    for broken, reason in (
        *policy.limits(setup_of(run)),
        *_pipeline(job, policy),
        *_executed(run, policy),
        *(_with_transformer_engine(run, policy) if has_transformer_engine(job) else []),
    ):
        if broken:
            raise NotRunnable(f"megatron_core: {reason}")


def has_transformer_engine(job: PackageJob) -> bool:
    """Whether a job runs on TransformerEngine's layers: on GPUs, if it is installed."""
    there = importlib.util.find_spec("transformer_engine") is not None
    return there and job.device == "cuda" and job.run.world == "executed"


def _with_transformer_engine(run: RunSpec, policy: MegatronCore) -> list[Reason]:
    return [
        (
            run.precision == "fp32",
            "fp32 on TransformerEngine, whose products are in TF32 and whose only attention in "
            "fp32 materialises the scores",
        ),
        policy.norms(run.model),
    ]


def _pipeline(job: PackageJob, policy: MegatronCore) -> list[Reason]:
    lay, run_on_cpu = job.run.layout, job.device == "cpu" and job.run.world == "executed"
    return [
        (
            lay.vpp > 1 and lay.pp == 2 and policy.batch_p2p and job.run.world == "executed",
            "interleaving on pp 2 with batched p2p gives wrong gradients: both neighbours are the "
            "same rank, and only the order tells messages apart; set batch_p2p=false",
        ),
        (
            policy.overlap_grad_reduce and job.run.world == "traced",
            "overlap_grad_reduce on fake tensors (coalesced collectives have none)",
        ),
        (
            policy.overlap_p2p and run_on_cpu,
            "overlap_p2p over gloo gives wrong losses (seen on pp 2 interleaved)",
        ),
        (policy.batch_p2p and policy.overlap_p2p, "batch_p2p and overlap_p2p exclude each other"),
        (policy.overlap_p2p and lay.vpp == 1, "overlap_p2p is for the interleaved schedule"),
    ]


def _executed(run: RunSpec, policy: MegatronCore) -> list[Reason]:
    here = run.world == "executed"
    return [
        (
            here and run.model.dropout > 0,
            "dropout has no common stream of random numbers to compare",
        ),
        (here and run.model.experts is not None, "experts are traced here, not executed"),
        (here and run.model.latent is not None, "latent attention is traced here, not executed"),
        (here and run.model.qk_norm, "norms over heads are traced here, not executed"),
        (
            here and policy.bias_activation_fusion and run.model.mlp == "gelu",
            "the fused GELU is the tanh approximation, which no other engine here computes",
        ),
    ]
