"""Reads the command line of a Hugging Face trainer: Transformers, TRL, LLaMA-Factory, ms-swift,
OpenRLHF.

Sources of names and defaults: Transformers 4.57, TrainingArguments; accelerate 1.11,
commands/launch.py; torchrun; DeepSpeed 0.19.8, launcher/runner.py; ms-swift 4.6.0,
swift/arguments/sft_args.py and swift/trainers/arguments.py; OpenRLHF 0.8, cli/train_sft.py
(options) and models/actor.py (quantised weights).
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from rematbench.foreign.adapters import TARGETS
from rematbench.foreign.keys import declared, is_off, read_keys, read_sizes
from rematbench.foreign.megatron import ENGINE, read_factory
from rematbench.foreign.reading import Options, Reading, first_value, named_file
from rematbench.foreign.shell import Script, options_of
from rematbench.foreign.trainers import merge_document, read_accelerate_deepspeed, read_trainer
from rematbench.inputs.configfile import read_mapping
from rematbench.inputs.foreign import package_of

SIGNS = {"per_device_train_batch_size", "model_name_or_path", "finetuning_type"}
SIGNS |= {"micro_train_batch_size", "model.model_name_or_path"}
PROGRAMS: dict[tuple[str, str], str] = {
    ("swift", "sft"): "ms-swift",
    ("swift", "pt"): "ms-swift",
    ("swift", "rlhf"): "ms-swift",
    ("llamafactory-cli", "train"): "LLaMA-Factory",
}
TASKS = {"dpo", "grpo", "kto", "orpo", "cpo", "ppo", "rloo", "reward", "rlhf", "gkd", "simpo", "rm"}
TASKS |= {"prm", "xpo", "bco", "nash", "distill", "distillation", "distillm", "rft", "gspo", "dapo"}
"""Words in names of programs that do not train one model with one loss."""
MODULES = ("verl.trainer.", "openrlhf.cli.")
UNSLOTH = "unsloth-cli.py"
TRAINERS = ("TRL", "LLaMA-Factory", "axolotl", "Transformers")
NAMES = {"include", "exclude", "module", "hostfile", "local_rank", "standalone"}
"""Options of the launcher, which the trainer does not see."""
ENVIRONMENT = {"NPROC_PER_NODE": "gpus_per_node", "NGPU": "gpus_per_node", "NNODES": "nodes"}
PLUGIN = {"use_deepspeed", "zero_stage", "deepspeed_config_file", "offload_optimizer_device"}
PLUGIN |= {"offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"}
"""Options of `accelerate launch` about DeepSpeed."""
FILES = (".yaml", ".yml", ".json")
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def trainer_of(script: Script, words: list[str]) -> str | None:
    """The package whose trainer a command starts; None for every other command."""
    options = {name.replace("-", "_") for name in options_of(words)}
    programs = [word.rsplit("/", 1)[-1] for word in words if not word.startswith("-")]
    if UNSLOTH in programs or any(word.startswith(MODULES) for word in words):
        return "Transformers"
    for pair in pairwise(programs):
        if pair in PROGRAMS:
            return PROGRAMS[pair]
    if not options & SIGNS or programs[:1] == ["colossalai"]:
        content = _content(script, words) if programs[:1] else None
        return package_of(content) if content else None
    if options & {"finetuning_type", "cutoff_len"}:
        return "LLaMA-Factory"
    if any("swift/cli/" in word for word in words):
        return "ms-swift"
    trl = programs[:1] == ["trl"] or any("trl/" in word for word in words) or "sft.py" in programs
    return "TRL" if trl else "Transformers"


def read_command(script: Script, words: list[str], package: str) -> Reading:
    """Read a trainer's command into a Reading.  ConfigError for a wrong value."""
    options = {name.replace("-", "_"): value for name, value in options_of(words).items()}
    headers = {name.replace("-", "_"): value for name, value in script.headers.items()}
    package, data = _with_file(script, words, package, _data(words, options))
    if any(re.match(r"transformers[=~]=4\b", word) for one in script.commands for word in one):
        data["transformers_4"] = True
    config, micro = data.pop("config_file", None), data.pop("data.micro_batch_size", None)
    plugin = {name: data.pop(name) for name in PLUGIN & data.keys()}
    if package == "LLaMA-Factory" and (ENGINE & data.keys() or "USE_MCA" in script.variables):
        reading = read_factory(data, script.file)
    else:
        reading = read_trainer(data, script.file, package)
    reading.command = True
    read_launcher(reading, script, {**headers, **options})
    _variables_of_swift(reading, script, words)
    if micro is not None:  # verl counts all ranks
        ranks = reading.get("gpus_per_node", 1) * reading.get("nodes", 1)
        reading.put("micro_batch", max(1, int(micro) // ranks), "data.micro_batch_size")
    if not is_off(plugin.get("use_deepspeed")) or plugin.keys() - {"use_deepspeed"}:
        reading.system = "huggingface-deepspeed"
        read_accelerate_deepspeed(reading, plugin)
    if config:
        reading.files.append(Path(str(config)))
    # Read the DeepSpeed configuration that the script itself writes.
    for named in list(reading.files):
        if named.name in script.documents:
            reading.files.remove(named)
            merge_document(reading, script, named.name)
    read_keys(reading, headers, "launchers", prefix="#SBATCH ")
    return reading


def _data(words: list[str], options: Options) -> dict[str, Any]:
    """The values of a command under the names of Transformers, with the task as its `stage`."""
    known = NAMES | declared("launchers").names.keys()
    data = {name: _value(values) for name, values in options.items() if name not in known}
    data |= {name: options[name] for name in TARGETS if len(options.get(name, [])) > 1}
    if "micro_train_batch_size" in data or any("openrlhf" in word for word in words):
        data = _openrlhf(data, words)
    if any(word.startswith("verl.trainer.") for word in words):
        data |= _verl(words)
    if any(word.endswith(UNSLOTH) for word in words):
        data = {**declared("unsloth").defaults, **data}
        data["lora_rank"] = data.pop("r")
    config = data.pop("deepspeed_config", None)
    if data.get("deepspeed", config) in (True, config) and (config or "zero_stage" in data):
        data["deepspeed"] = config  # --deepspeed as a switch names no file
    precision = str(data.pop("mixed_precision", "")).lower()
    if precision in ("bf16", "fp16", "fp8"):
        data.setdefault(precision, True)
    if data.pop("dynamo_backend", None) == "inductor":
        data["torch_compile"] = True
    if named := [name for name in data if name.startswith("parallelism_config_")]:
        data["parallelism_config"] = {name: data.pop(name) for name in named}
    programs = [*words[:3], *(word for word in words if word.endswith(".py"))]
    programs += [module for word, module in pairwise(words) if word in ("-m", "--module")]
    parts = [re.split(r"[/._-]", word) for word in programs if not word.endswith(FILES)]
    tasks = [part for name in parts for part in name if part in TASKS]
    return {**data, "stage": tasks[-1]} if tasks else data


def _openrlhf(data: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """OpenRLHF's options under the names of Transformers and accelerate."""
    names = declared("openrlhf").names
    data = {names.get(name, name): value for name, value in data.items()}
    data["use_deepspeed"] = True
    data.setdefault("zero_stage", 2)
    if data.pop("adam_offload", None):
        data["offload_optimizer_device"] = "cpu"
    if not any("train_sft" in word for word in words):
        data["stage"] = "rl"
    if data.pop("ds.param_dtype", None) in ("bf16", None):
        data.setdefault("bf16", True)
    data = {"dtype": "bfloat16", "target_modules": "all-linear", **data}
    return {"bnb_4bit_use_double_quant": True, **data}


def _verl(words: list[str]) -> dict[str, Any]:
    """The options of verl (`data.max_length=1024`) under the names of Transformers."""
    pairs = [word.lstrip("+").split("=", 1) for word in words if re.match(r"\+*[\w.@/]+=", word)]
    verl = declared("verl")
    data = {verl.names.get(name, name): _value([value]) for name, value in pairs}
    sft = any("sft_trainer" in word for word in words)
    data = {**verl.defaults, **data, "stage": "sft" if sft else "rl"}
    by_tokens = data.pop("data.use_dynamic_bsz", "verl.trainer.sft_trainer" in words)
    if not is_off(by_tokens):  # verl 0.9 does so by default
        tokens = int(data.get("data.max_token_len_per_gpu", 8192))
        data["per_device_train_batch_size"] = max(1, tokens // int(data["max_length"]))
    return data


def _with_file(
    script: Script, words: list[str], package: str, data: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The options of a command and of the YAML file that it names (`trl sft --config x.yaml`,
    `llamafactory-cli train x.yaml lr=1`).  The command's value of a key replaces the file's."""
    start = next((index for index, word in enumerate(words) if word.endswith(FILES)), len(words))
    pairs = (word.split("=", 1) for word in words[start:] if re.match(r"\w+=", word))
    data |= {name: _value([value]) for name, value in pairs}
    content = _content(script, words)
    if not content:
        return package, data
    data.pop("config", None)
    return package_of(content) or package, {**content, **data}


def _content(script: Script, words: list[str]) -> dict[str, Any]:
    """The content of the trainer's YAML file that a command names; empty if it is not found."""
    for word in words:
        path = named_file(script.file, word)
        if word.endswith(FILES) and path.is_file():
            content = read_mapping(path, str(path))
            if package_of(content) in TRAINERS:
                return content
    return {}


def _value(values: list[str]) -> Any:
    """The first value of an option; further words may be the program that a launcher starts."""
    if not values:
        return True
    return (
        int(values[0])
        if re.fullmatch(r"-?\d+", values[0])
        else WORDS.get(values[0].lower(), values[0])
    )


def read_launcher(reading: Reading, script: Script, options: Options) -> None:
    """Set GPUs and nodes from the environment, and from Slurm's headers and the launcher's
    options."""
    for name, value in ENVIRONMENT.items():
        text = " ".join(script.variables.get(name, []))
        if text.isdigit():
            reading.put(value, int(text), name)
    read_sizes(reading, options)
    devices = " ".join(script.variables.get("CUDA_VISIBLE_DEVICES", []))
    devices = first_value(options, "include", devices).rpartition(":")[2]  # it may be localhost:0,1
    count = len([one for one in devices.split(",") if one.isdigit()])
    if count and not {"gpus", "gpus_per_node"} & reading.values.keys():
        reading.put("gpus_per_node", count, "CUDA_VISIBLE_DEVICES")


def _variables_of_swift(reading: Reading, script: Script, words: list[str]) -> None:
    """Refuse what variables say to ms-swift's command: more visible devices than processes, over
    which it then spreads the layers (swift/utils/torch_utils.py, get_device_map), and another
    sequence parallelism than Ulysses (swift/trainers/sequence_parallel/__init__.py)."""
    visible = " ".join(script.variables.get("CUDA_VISIBLE_DEVICES", [])).split(",")
    processes = " ".join(script.variables.get("NPROC_PER_NODE", ["1"]))
    own = reading.package == "ms-swift" and words[:1] == ["swift"] and processes.isdigit()
    if own and len(visible) > int(processes):
        text = f"{len(visible)} devices for NPROC_PER_NODE={processes} split layers (device_map)"
        reading.refused.append(f"CUDA_VISIBLE_DEVICES: {text}, which is not modelled")
    kind = " ".join(script.variables.get("SEQUENCE_PARALLEL_IMPL", []))
    if own and "ulysses" in reading.values and kind not in ("", "ulysses"):
        reading.refused.append(f"SEQUENCE_PARALLEL_IMPL: {kind} is not modelled (only ulysses)")
