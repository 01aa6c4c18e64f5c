"""Reads the command line of a Hugging Face trainer: Transformers, TRL, LLaMA-Factory, ms-swift,
OpenRLHF.

Sources of names and defaults: Transformers 4.57, TrainingArguments; accelerate 1.11,
commands/launch.py; torchrun; DeepSpeed 0.19.8, launcher/runner.py; ms-swift 4.6.0,
swift/arguments/sft_args.py and swift/trainers/arguments.py; OpenRLHF 0.8, cli/train_sft.py.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from rematbench.foreign.deepspeed import read_deepspeed
from rematbench.foreign.reading import (
    Options,
    Reading,
    first_value,
    whole,
    without_effect,
)
from rematbench.foreign.shell import Script, options_of
from rematbench.foreign.trainers import merge, read_accelerate_deepspeed, read_trainer
from rematbench.inputs.configfile import ConfigError, read_mapping
from rematbench.inputs.foreign import Package, package_of

SIGNS = {"per_device_train_batch_size", "model_name_or_path", "finetuning_type"}
SIGNS |= {"micro_train_batch_size"}
PROGRAMS: dict[tuple[str, str], Package] = {
    ("swift", "sft"): "ms-swift",
    ("swift", "pt"): "ms-swift",
    ("llamafactory-cli", "train"): "LLaMA-Factory",
}
OPENRLHF = {
    "pretrain": "model_name_or_path",
    "micro_train_batch_size": "per_device_train_batch_size",
    "max_len": "max_length",
    "packing_samples": "packing",
}
"""Names of OpenRLHF, each with the name of Transformers."""
VERL = {
    "model.partial_pretrain": "model_name_or_path",
    "data.micro_batch_size_per_gpu": "per_device_train_batch_size",
    "data.train_batch_size": "train_batch_size",
    "data.max_length": "max_length",
    "model.enable_gradient_checkpointing": "gradient_checkpointing",
    "ulysses_sequence_parallel_size": "sequence_parallel_size",
}
"""Names of verl's trainer of supervised fine-tuning (verl 0.5, trainer/config/sft_trainer.yaml),
each with the name of Transformers."""
VERL_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "train_batch_size": 256,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "fsdp": "full_shard",
    "bf16": True,
}
"""The defaults of the same file; fsdp_sft_trainer.py has the kernel, the shards, the precision."""
TRAINERS = ("TRL", "LLaMA-Factory", "axolotl")
LAUNCHER = {
    "ntasks_per_node": "gpus_per_node",
    "gpus_per_node": "gpus_per_node",
    "num_gpus": "gpus_per_node",
    "nproc_per_node": "gpus_per_node",
    "nodes": "nodes",
    "num_nodes": "nodes",
    "num_machines": "nodes",
    "nnodes": "nodes",
    "num_processes": "gpus",
}
"""Options of launchers and of Slurm, each with the value of a job; later ones count."""
NAMES = {*LAUNCHER, "include", "exclude", "module", "hostfile", "local_rank", "standalone"}
"""Options that the launcher reads."""
ENVIRONMENT = {"NPROC_PER_NODE": "gpus_per_node", "NNODES": "nodes"}
PLUGIN = {"use_deepspeed", "zero_stage", "deepspeed_config_file", "offload_optimizer_device"}
PLUGIN |= {"offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"}
"""Options of `accelerate launch` about DeepSpeed."""
FILES = (".yaml", ".yml")
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def trainer_of(script: Script, words: list[str]) -> Package | None:
    """The package whose trainer a command starts; None for every other command."""
    options = {name.replace("-", "_") for name in options_of(words)}
    programs = [word.rsplit("/", 1)[-1] for word in words if not word.startswith("-")]
    if any(word.startswith("verl.trainer.") for word in words):
        return "Transformers"
    for pair in pairwise(programs):
        if pair in PROGRAMS:
            return PROGRAMS[pair]
    if not options & SIGNS:
        content = _content(script, words) if programs[:1] else None
        return package_of(content) if content else None
    if options & {"finetuning_type", "cutoff_len"}:
        return "LLaMA-Factory"
    trl = programs[:1] == ["trl"] or "sft.py" in programs
    return "TRL" if trl else "Transformers"


def read_command(script: Script, words: list[str], package: Package) -> Reading:
    """The reading of a trainer's command.  ConfigError for a wrong value."""
    options = {name.replace("-", "_"): value for name, value in options_of(words).items()}
    headers = {name.replace("-", "_"): value for name, value in script.headers.items()}
    data = {name: _value(values) for name, values in options.items() if name not in NAMES}
    if "micro_train_batch_size" in data:
        _openrlhf(data, words)
    if any(word.startswith("verl.trainer.") for word in words):
        data = _verl(words)
    precision = str(data.pop("mixed_precision", "")).lower()
    if precision in ("bf16", "fp16"):
        data.setdefault(precision, True)
    config = data.pop("config_file", None)
    package, data = _with_file(script, words, package, data)
    batch = data.pop("train_batch_size", None)
    plugin = {name: data.pop(name) for name in PLUGIN & data.keys()}
    reading = read_trainer(data, script.file, package)
    reading.command = True
    if batch is not None:
        reading.put("global_batch", whole(batch, script.file, "--train_batch_size"), "batch")
    _launcher(reading, script, {**headers, **options})
    if plugin:
        reading.system = "huggingface-deepspeed"
        read_accelerate_deepspeed(reading, plugin)
    if config:
        reading.files.append(Path(str(config)))
    _document(reading, script)
    slurm = sorted(set(headers) - LAUNCHER.keys())
    reading.ignored += [f"#SBATCH {name}" for name in slurm if without_effect(name)]
    return reading


def _openrlhf(data: dict[str, Any], words: list[str]) -> None:
    """Give OpenRLHF's options the names of Transformers and accelerate."""
    for name, other in OPENRLHF.items():
        if name in data:
            data[other] = data.pop(name)
    data["use_deepspeed"] = True
    data.setdefault("zero_stage", 2)
    if data.pop("adam_offload", None):
        data["offload_optimizer_device"] = "cpu"
    if data.get("flash_attn") is True:
        data["flash_attn"] = "flash_attention_2"
    data["stage"] = "sft" if any("train_sft" in word for word in words) else "rl"


def _verl(words: list[str]) -> dict[str, Any]:
    """The options of verl, `data.max_length=1024`, by the names of Transformers."""
    given = dict(
        word.lstrip("+").split("=", 1) for word in words if re.match(r"\+?[a-z_.]+=", word)
    )
    data = {VERL.get(name, name): _value([value]) for name, value in given.items()}
    sft = any("sft_trainer" in word for word in words)
    return {**VERL_DEFAULTS, **data, "stage": "sft" if sft else "rl"}


def _with_file(
    script: Script, words: list[str], package: Package, data: dict[str, Any]
) -> tuple[Package, dict[str, Any]]:
    """The options together with those of the YAML file that the command names (`trl sft --config
    x.yaml`, `llamafactory-cli train x.yaml lr=1`); the command's count."""
    data |= {name: value for name, _, value in _overrides(words)}
    content = _content(script, words)
    if not content:
        return package, data
    data.pop("config", None)
    return package_of(content) or package, {**content, **data}


def _content(script: Script, words: list[str]) -> dict[str, Any]:
    """The content of the trainer's YAML that a command names, if it is beside the script."""
    for word in words:
        beside = Path(script.file).parent / Path(word).name
        if word.endswith(FILES) and beside.is_file():
            content = read_mapping(beside, str(beside))
            if package_of(content) in TRAINERS:
                return content
    return {}


def _overrides(words: list[str]) -> list[tuple[str, str, str]]:
    start = next((index for index, word in enumerate(words) if word.endswith(FILES)), len(words))
    plain = [word for word in words[start:] if re.match(r"\w+=", word)]
    return [word.partition("=") for word in plain]


def _value(values: list[str]) -> Any:
    """The first value of an option: words after it can be the program that a launcher starts."""
    if not values:
        return True
    return (
        int(values[0])
        if re.fullmatch(r"-?\d+", values[0])
        else WORDS.get(values[0].lower(), values[0])
    )


def _launcher(reading: Reading, script: Script, options: Options) -> None:
    """Set GPUs and nodes: of the environment, of Slurm's headers, of the launcher's options."""
    for name, value in ENVIRONMENT.items():
        text = " ".join(script.variables.get(name, []))
        if text.isdigit():
            reading.put(value, int(text), name)
    for option, value in LAUNCHER.items():
        text = first_value(options, option)
        if text.isdigit() and int(text):
            reading.put(value, int(text), f"--{option}")
    devices = " ".join(script.variables.get("CUDA_VISIBLE_DEVICES", []))
    devices = first_value(options, "include", devices).rpartition(":")[2]  # localhost:0,1
    if not {"gpus", "gpus_per_node"} & reading.values.keys() and devices.replace(",", "").isdigit():
        count = len([one for one in devices.split(",") if one])
        reading.put("gpus_per_node", count, "CUDA_VISIBLE_DEVICES")


def _document(reading: Reading, script: Script) -> None:
    """Read the DeepSpeed configuration that the script itself writes."""
    for named in list(reading.files):
        if named.name not in script.documents:
            continue
        reading.files.remove(named)
        try:
            data = json.loads(script.documents[named.name])
        except json.JSONDecodeError as error:
            raise ConfigError(script.file, named.name, f"not JSON ({error})") from error
        merge(reading, read_deepspeed(data, f"{script.file}: {named.name}"))
