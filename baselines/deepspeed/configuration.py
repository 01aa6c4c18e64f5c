"""A configuration of DeepSpeed, as `flags` prints it: what it says of a job and of a policy."""

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.deepspeed.plan import DeepSpeed
from rematbench.worlds.packages.limits import holding, overruled, setup_of
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec

SAID = ("checkpointing", "offload_optimizer", "offload_param", "overlap_comm")
"""The settings of a policy that a configuration says: tiles are code."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOADED = ("offload_optimizer", "offload_param")
CODE = ("optimizer", "scheduler")
"""Objects that this baseline gives to `deepspeed.initialize` itself: AdamW, and no schedule."""


def check(job: PackageJob, policy: DeepSpeed) -> None:
    """Raise NotRunnable with the first reason why DeepSpeed, or this baseline, runs no such job."""
    for reason in holding(policy.limits(setup_of(job.run))):
        raise NotRunnable(f"deepspeed: {reason}")


def read(text: str) -> dict[str, Any]:
    """The configuration; NotRunnable if the text is no configuration."""
    try:
        given: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        msgspec.convert(given.get("zero_optimization"), dict[str, Any])
    except msgspec.DecodeError as error:
        raise NotRunnable(
            f"deepspeed: the options are no JSON object with zero_optimization ({error})"
        ) from error
    return given


def policy_of(job: PackageJob, policy: DeepSpeed) -> DeepSpeed:
    """The policy that a job's options say, for the guards. NotRunnable for options that say another
    job, or another policy than the settings beside them."""
    given = read(job.options)
    _agree(given, job.run)
    homes = {name: _home(given, name) for name in OFFLOADED}
    for name, home in homes.items():
        if home not in ("none", "cpu"):
            raise NotRunnable(f"deepspeed: {name} to {home!r} is not run here (allowed: none, cpu)")
    checkpointing = "none"
    if "activation_checkpointing" in given:
        saved = _object(given, "activation_checkpointing")
        words = ["partitioned"] * bool(saved.get("partition_activations"))
        words += ["cpu"] * bool(saved.get("cpu_checkpointing"))
        checkpointing = "_".join(words) or "plain"
    said = replace(
        policy,
        checkpointing=checkpointing,
        offload_optimizer=homes["offload_optimizer"] == "cpu",
        offload_param=homes["offload_param"] == "cpu",
        overlap_comm=bool(_object(given, "zero_optimization").get("overlap_comm")),
    )
    beside = overruled(policy, said, SAID)
    if beside:
        raise NotRunnable(f"deepspeed: {beside}")
    return said


def accepted(given: dict[str, Any]) -> None:
    """Raise NotRunnable for what DeepSpeed's own reading refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415  # run.py has imported it

    alone = {key: value for key, value in given.items() if key != "train_batch_size"}
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


class _Said(NamedTuple):
    name: str
    said: Any
    wanted: Any


def _agree(given: dict[str, Any], run: RunSpec) -> None:
    """Raise NotRunnable for the first value by which a configuration says another job."""
    lay = run.layout
    zero = _object(given, "zero_optimization")
    older = "bf16" not in given and "bfloat16" in given
    half = "bfloat16" if older else "bf16"
    found = [
        _Said("zero_optimization.stage", zero.get("stage", 0), lay.zero_stage),
        _Said(f"{half}.enabled", _enabled(given, half), run.precision == "bf16"),
        _Said("fp16.enabled", _enabled(given, "fp16"), run.precision == "fp16"),
        *_batch(given, run),
        _Said("sequence_parallel_size", given.get("sequence_parallel_size", 1), lay.ulysses),
        _Said("gradient_clipping", given.get("gradient_clipping", 0.0), 0.0),
        *(_Said(name, given.get(name), None) for name in CODE),
    ]
    for name, said, wanted in found:
        if said != wanted:
            words = [msgspec.json.encode(value).decode() for value in (said, wanted)]
            raise NotRunnable(f"deepspeed: {name} {words[0]}, the job has {words[1]}")


def _batch(given: dict[str, Any], run: RunSpec) -> list[_Said]:
    """The batch sizes that a configuration says, beside those of the job. Any two of the three
    sizes give the third; with one alone DeepSpeed accumulates no gradients."""
    lay = run.layout
    wanted = dict(
        zip(BATCH, (lay.global_batch, lay.micro_batch, lay.num_micro_batches), strict=True)
    )
    said = {name: given[name] for name in BATCH if given.get(name) is not None}
    if len(said) < 2:
        said.setdefault("gradient_accumulation_steps", 1)
    if len(said) < 2:
        said["train_batch_size"] = None
    return [_Said(name, value, wanted[name]) for name, value in said.items()]


def _enabled(given: dict[str, Any], name: str) -> Any:
    return _object(given, name).get("enabled", False)


def _home(given: dict[str, Any], name: str) -> Any:
    return _object(_object(given, "zero_optimization"), name).get("device", "none")


def _object(given: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of a configuration; empty if the configuration has none."""
    found = given.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise NotRunnable(f"deepspeed: {name} {found!r}: expected an object")
    return found
