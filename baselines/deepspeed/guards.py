"""What DeepSpeed, or this baseline of it, does not run: refused first, by name."""

from baselines.common.contract import NotRunnable
from baselines.deepspeed.plan import DeepSpeed
from rematbench.baselines.process import Job


def check(job: Job, policy: DeepSpeed) -> None:
    """Raise NotRunnable with the first reason."""
    for broken, reason in (*_job(job), *_policy(job, policy)):
        if broken:
            raise NotRunnable(f"deepspeed: {reason}")


def _job(job: Job) -> list[tuple[bool, str]]:
    run, model = job.run, job.run.model
    lay = run.layout
    return [
        (lay.tp > 1, "tensor parallelism (this baseline's model has none)"),
        (lay.cp > 1, "context parallelism (DeepSpeed has Ulysses: set ulysses)"),
        (lay.pp > 1, "pipeline parallelism (PipelineModule is not run here)"),
        (model.dropout > 0, "dropout has no common stream of random numbers to compare"),
        (model.position == "alibi", "ALiBi positions (this baseline's model has none)"),
        (any(model.attention_window), "sliding-window attention (this baseline's model has none)"),
        (
            model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
            "soft caps (this baseline's model has none)",
        ),
        (run.precision not in ("fp32", "bf16"), f"precision {run.precision} (fp32 and bf16 run)"),
        (run.attention == "unfused", "unfused attention (this baseline's model has flash only)"),
        (
            lay.ulysses > 1 and lay.replicas > 1 and lay.zero_stage == 0,
            "ZeRO 0 with Ulysses and dp",
        ),
        (model.num_kv_heads % lay.ulysses != 0, "KV heads that Ulysses cannot share out evenly"),
    ]


def _policy(job: Job, policy: DeepSpeed) -> list[tuple[bool, str]]:
    stage = job.run.layout.zero_stage
    return [
        (policy.offload_param and stage != 3, f"offload_param needs zero_stage 3, not {stage}"),
        (policy.offload_optimizer and stage == 0, "offload_optimizer needs zero_stage 1 to 3"),
        (
            policy.mlp_tiles > 1 and job.run.model.post_norm,
            "tiled MLP with post-norms (not in this baseline's model)",
        ),
    ]
