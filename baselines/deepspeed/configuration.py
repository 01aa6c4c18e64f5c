"""A configuration of DeepSpeed, as `flags` prints it: the job and the policy that it describes."""

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.deepspeed.plan import DeepSpeed
from rematbench.worlds.packages.limits import active_reasons, overridden, setup_of
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec

SETTINGS = ("checkpointing", "offload_optimizer", "offload_param", "overlap_comm")
"""The settings of a policy that a configuration has: tiles are code."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOADED = ("offload_optimizer", "offload_param")
CODE = ("optimizer", "scheduler")
"""Objects that this baseline gives to `deepspeed.initialize` itself: AdamW, and no schedule."""


def check(job: PackageJob, policy: DeepSpeed) -> None:
    """Raise NotRunnable with the first reason why DeepSpeed, or this baseline, cannot run a job."""
    for reason in active_reasons(policy.limits(setup_of(job.run))):
        raise NotRunnable(f"deepspeed: {reason}")


def read(text: str) -> dict[str, Any]:
    """Parse a configuration; NotRunnable if the text is not a configuration."""
    try:
        config: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        msgspec.convert(config.get("zero_optimization"), dict[str, Any])
    except msgspec.DecodeError as error:
        raise NotRunnable(
            f"deepspeed: the options are not a JSON object with zero_optimization ({error})"
        ) from error
    return config


def policy_of(job: PackageJob, policy: DeepSpeed) -> DeepSpeed:
    """The policy given by a job's options, for the guards. NotRunnable if the options contradict
    the job or the policy of its settings."""
    config = read(job.options)
    _agree(config, job.run)
    zero = _object(config, "zero_optimization")
    homes = {name: _object(zero, name).get("device", "none") for name in OFFLOADED}
    for name, home in homes.items():
        if home not in ("none", "cpu"):
            raise NotRunnable(f"deepspeed: {name} to {home!r} is not run here (allowed: none, cpu)")
    checkpointing = "none"
    if "activation_checkpointing" in config:
        saved = _object(config, "activation_checkpointing")
        words = ["partitioned"] * bool(saved.get("partition_activations"))
        words += ["cpu"] * bool(saved.get("cpu_checkpointing"))
        checkpointing = "_".join(words) or "plain"
    said = replace(
        policy,
        checkpointing=checkpointing,
        offload_optimizer=homes["offload_optimizer"] == "cpu",
        offload_param=homes["offload_param"] == "cpu",
        overlap_comm=bool(zero.get("overlap_comm")),
    )
    conflict = overridden(policy, said, SETTINGS)
    if conflict:
        raise NotRunnable(f"deepspeed: {conflict}")
    return said


def require_accepted(config: dict[str, Any]) -> None:
    """Raise NotRunnable for a configuration that DeepSpeed's own parser refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415  # run.py has imported it

    alone = {key: value for key, value in config.items() if key != "train_batch_size"}
    try:
        # There is one process here: the batch of all ranks is compared with the job's elsewhere.
        DeepSpeedConfig({**alone, "train_micro_batch_size_per_gpu": 1})
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise NotRunnable(f"deepspeed: the options: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The first line of an error; of pydantic's errors the place, the value and what is allowed."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return " ".join(str(error).split())
    first = errors()[0]
    return f"{'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}"


class _Field(NamedTuple):
    name: str
    value: Any
    job: Any


def _agree(config: dict[str, Any], run: RunSpec) -> None:
    """Raise NotRunnable for the first value by which a configuration says another job."""
    lay = run.layout
    zero = _object(config, "zero_optimization")
    older = "bf16" not in config and "bfloat16" in config
    half = "bfloat16" if older else "bf16"
    found = [
        _Field("zero_optimization.stage", zero.get("stage", 0), lay.zero_stage),
        _Field(f"{half}.enabled", _enabled(config, half), run.precision == "bf16"),
        _Field("fp16.enabled", _enabled(config, "fp16"), run.precision == "fp16"),
        *_batch(config, run),
        _Field("sequence_parallel_size", config.get("sequence_parallel_size", 1), lay.ulysses),
        _Field("gradient_clipping", config.get("gradient_clipping", 0.0), 0.0),
        *(_Field(name, config.get(name), None) for name in CODE),
    ]
    for name, said, wanted in found:
        if said != wanted:
            words = [msgspec.json.encode(value).decode() for value in (said, wanted)]
            raise NotRunnable(f"deepspeed: {name} {words[0]}, the job has {words[1]}")


def _batch(config: dict[str, Any], run: RunSpec) -> list[_Field]:
    """The batch sizes that a configuration says, next to those of the job. Any two of the three
    sizes give the third; with one alone DeepSpeed accumulates no gradients."""
    lay = run.layout
    wanted = dict(
        zip(BATCH, (lay.global_batch, lay.micro_batch, lay.num_micro_batches), strict=True)
    )
    said = {name: config[name] for name in BATCH if config.get(name) is not None}
    if len(said) < 2:
        said.setdefault("gradient_accumulation_steps", 1)
    if len(said) < 2:
        said["train_batch_size"] = None
    return [_Field(name, value, wanted[name]) for name, value in said.items()]


def _enabled(config: dict[str, Any], name: str) -> Any:
    return _object(config, name).get("enabled", False)


def _object(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise NotRunnable(f"deepspeed: {name} {found!r}: expected an object")
    return found
