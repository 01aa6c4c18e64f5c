"""Jobs that DeepSpeed, or this baseline of it, does not run: refused first, by name."""

from baselines.common.contract import NotRunnable
from rematbench.packages.deepspeed.plan import DeepSpeed
from rematbench.packages.limits import holding, setup_of
from rematbench.packages.process import Job


def check(job: Job, policy: DeepSpeed) -> None:
    """Raise NotRunnable with the first reason."""
    for reason in holding(policy.limits(setup_of(job.run))):
        raise NotRunnable(f"deepspeed: {reason}")
