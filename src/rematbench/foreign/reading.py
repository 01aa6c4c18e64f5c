"""The content of a training package's file: values of a job, and the keys that were not read."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.inputs.configfile import ConfigError


class Reading(Struct, kw_only=True):
    """The content of one file.

    `values`: values of the job, by the fields of Job and by terms from which job.py derives
    them (nodes, accumulation, shards, ...); `keys`: the file's key of each value;
    `model`: fields of Model; `facts`: facts of the stack; `system`: the shipped stack of the
    package; `method`: the method and its settings (None: the file does not say);
    `ignored`: keys without an effect on bytes or seconds; `unknown`: keys that are not read;
    `refused`: requests that are not modelled; `command`: the values are those of a command line,
    which replace those of the files that it names.
    """

    file: str
    package: str
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    model: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    system: str = ""
    method: tuple[str, dict[str, Any]] | None = None
    ignored: list[str] = []
    unknown: list[str] = []
    refused: list[str] = []
    notes: list[str] = []
    files: list[Path] = []
    command: bool = False

    def put(self, name: str, value: Any, key: str) -> None:
        """Set a value of the job, and remember the key that it comes from."""
        self.values[name] = value
        self.keys[name] = key

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the job, or `default` if the file does not have it."""
        return self.values.get(name, default)


Options = dict[str, list[str]]
"""The options of a launch line, each with its values."""


def first_value(options: Options, name: str, default: str = "") -> str:
    """The first value of an option, or `default` if the line does not have one."""
    return (options.get(name) or [default])[0]


AUTO = "auto"
"""A value that the trainer fills in."""


def whole(value: Any, file: str, key: str) -> int:
    """A positive whole number; ConfigError for any other value."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if isinstance(value, bool) or number < 1 or number != float(value):
        raise ConfigError(file, key, f"{value!r} is not a positive whole number")
    return number


def number(value: Any, file: str, key: str) -> float:
    """A number; ConfigError for any other value."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(file, key, f"{value!r} is not a number") from error


def put_numbers(reading: Reading, options: Options, names: Mapping[str, str]) -> None:
    """Set the values of a job that options give as positive whole numbers: `names` gives the value
    for each option.  ConfigError for any other number."""
    for option, name in names.items():
        if options.get(option):
            reading.put(name, whole(options[option][0], reading.file, f"--{option}"), f"--{option}")


def switch(value: Any, file: str, key: str) -> bool:
    """A switch; ConfigError for a value that is neither on nor off."""
    word = str(value).strip().lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0", "none"}:
        return False
    raise ConfigError(file, key, f"{value!r} is not a switch (allowed: true, false)")


def read_whole(
    reading: Reading, data: Mapping[str, Any], names: Mapping[str, str], prefix: str = ""
) -> set[str]:
    """Read positive whole numbers: `names` gives the value of a job for each key.  Returns the keys
    that were read; keys that are null or `auto` count as read."""
    done = set()
    for key, name in names.items():
        if key not in data:
            continue
        done.add(key)
        if data[key] is not None and data[key] != AUTO:
            where = prefix + key
            reading.put(name, whole(data[key], reading.file, where), where)
    return done


def sort_rest(
    reading: Reading, keys: set[str], without_effect: Callable[[str], bool], prefix: str = ""
) -> None:
    """Add the keys that were not read to `ignored` or `unknown`."""
    for key in sorted(keys):
        (reading.ignored if without_effect(key) else reading.unknown).append(prefix + key)


WITHOUT_EFFECT = (
    *("lr", "learning", "scheduler", "weight_decay", "decay", "warmup", "adam", "beta", "beta1"),
    *("beta2", "betas", "eps", "epsilon", "momentum", "clip", "clipping", "max_grad_norm", "seed"),
    *("save", "load", "resume", "log", "logging", "logger", "wandb", "tensorboard", "report"),
    *("eval", "evaluation", "evaluate", "val", "test", "metric", "metrics", "print", "profile"),
    *("profiling", "output", "dir", "path", "data", "dataset", "datasets", "split", "tokenizer"),
    *("template", "chat", "train_iters", "iters", "steps", "epochs", "samples", "exit", "hub"),
    *("push", "init", "special", "pad", "tokens", "overwrite", "preprocessing", "workers"),
    *("dataloader", "shuffle", "streaming", "interval", "timeout", "name", "project", "run"),
    *("time", "hint", "mmap", "inference", "progress", "throughput", "input", "user"),
    *("columns", "column", "loader", "verbose"),
    *("hint", "restarts", "mail", "evals", "saves", "sample", "ids", "affinity", "lazy"),
    *("profiler", "aio", "elasticity", "excess", "revision", "eos", "bos", "inputs"),
    *("assistant", "do_train", "jobid", "error", "comms", "multinode", "reporting", "generate"),
    *("initial", "loss_scale", "hysteresis", "window", "dump", "job", "debug", "monitor", "comm"),
    *("machine", "rank", "main", "ip", "port", "rdzv", "master", "backend", "downcast", "same"),
    *("network", "compute", "environment", "tpu", "trust", "remote", "mock", "cache", "merges"),
    *("description", "folder", "enable_wandb", "strict", "plot", "do", "max_samples", "ddp"),
    *("wall", "clock", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "gather"),
    *("distributed", "node", "tee", "dist", "ckpt", "async", "use_cpu", "vocab_file", "stage"),
    *("merge", "file", "nccl", "no_save", "no_load", "model_type", "entity", "group", "key"),
    *("field", "type", "message", "property", "mappings", "role", "messages", "start", "period"),
)
"""Words in the keys of values without an effect on bytes or seconds."""


WITH_EFFECT = {
    *("parallel", "vocab", "attention", "attn", "recompute", "offload", "offloading", "fp8"),
    *("fp4", "float8", "experts", "expert", "moe", "kernel", "kernels", "dtype"),
    *("degree", "compile", "types", "quantization", "quantize", "layers", "hidden", "heads"),
    *("mtp", "mla", "frozen", "freeze", "communication", "sliding"),
}
"""Words in the keys of values that can change bytes or seconds, whatever other words are there."""
NOT_OF_THE_STEP = {
    *("eval", "evaluation", "val", "test", "save", "load", "log", "logging", "tensorboard"),
    *("wandb", "ckpt", "checkpoint", "dataset", "tokenizer", "export", "init"),
}
"""Words in the keys of values that no training step uses, whatever other words are there."""


def without_effect(key: str) -> bool:
    """Whether the words of a key say that its value changes neither bytes nor seconds."""
    text = key.lower().replace("-", "_").strip("_")
    words = set(re.split(r"[_.]", text))
    if text in WITHOUT_EFFECT or words & NOT_OF_THE_STEP:
        return True
    return not words & WITH_EFFECT and bool(words & set(WITHOUT_EFFECT))
