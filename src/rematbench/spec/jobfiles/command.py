"""Reads the command line of a Hugging Face trainer: Transformers, TRL, LLaMA-Factory, ms-swift.

Sources of names and defaults: Transformers 4.57, TrainingArguments; accelerate 1.11,
commands/launch.py; torchrun; DeepSpeed 0.19.8, launcher/runner.py; ms-swift 4.6.0,
swift/arguments/sft_args.py and swift/trainers/arguments.py.
"""

import json
from pathlib import Path
from typing import Any

from rematbench.spec.configfile import ConfigError
from rematbench.spec.foreign import Package
from rematbench.spec.jobfiles.deepspeed import read_deepspeed
from rematbench.spec.jobfiles.reading import Options, Reading, first_value, without_effect
from rematbench.spec.jobfiles.shell import Script, options_of
from rematbench.spec.jobfiles.trainers import merge, read_accelerate_deepspeed, read_trainer

SIGNS = {"per_device_train_batch_size", "model_name_or_path", "finetuning_type"}
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
ENVIRONMENT = {"NPROC_PER_NODE": "gpus_per_node", "NNODES": "nodes"}
PLUGIN = {"use_deepspeed", "zero_stage", "deepspeed_config_file", "offload_optimizer_device"}
PLUGIN |= {"offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"}
"""Options of `accelerate launch` about DeepSpeed."""
FILES = (".json", ".yaml", ".yml")
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def trainer_of(words: list[str]) -> Package | None:
    """The package whose trainer a command starts; None for every other command."""
    options = {name.replace("-", "_") for name in options_of(words)}
    programs = [word.rsplit("/", 1)[-1] for word in words if not word.startswith("-")]
    for package, names in (("ms-swift", {"swift"}), ("LLaMA-Factory", {"llamafactory-cli"})):
        at = next((index for index, word in enumerate(programs) if word in names), None)
        if at is not None and programs[at + 1 : at + 2] and programs[at + 1] in _TASKS:
            return package  # type: ignore[return-value]
    if not options & SIGNS:
        return None
    if options & {"finetuning_type", "cutoff_len"}:
        return "LLaMA-Factory"
    trl = programs[:1] == ["trl"] or "sft.py" in programs
    return "TRL" if trl else "Transformers"


_TASKS = ("sft", "pt", "train")


def read_command(script: Script, words: list[str], package: Package) -> Reading:
    """The reading of a trainer's command.  ConfigError for a wrong value."""
    options = {name.replace("-", "_"): value for name, value in options_of(words).items()}
    headers = {name.replace("-", "_"): value for name, value in script.headers.items()}
    data = {name: _value(values) for name, values in options.items() if name not in LAUNCHER}
    config = data.pop("config_file", None)
    plugin = {name: data.pop(name) for name in PLUGIN & data.keys()}
    reading = read_trainer(data, script.file, package)
    reading.command = True
    _launcher(reading, script, {**headers, **options})
    if plugin:
        reading.system = "huggingface-deepspeed"
        read_accelerate_deepspeed(reading, plugin)
    for word in (config, data.get("config"), *words):
        if isinstance(word, str) and word.endswith(FILES) and not word.startswith("-"):
            named = Path(word)
            if named not in reading.files and (word == config or _is_there(reading, named)):
                reading.files.append(named)
    _document(reading, script)
    slurm = sorted(set(headers) - LAUNCHER.keys())
    reading.ignored += [f"#SBATCH {name}" for name in slurm if without_effect(name)]
    return reading


def _is_there(reading: Reading, named: Path) -> bool:
    return (Path(reading.file).parent / named.name).is_file()


def _value(values: list[str]) -> Any:
    if not values:
        return True
    text = values[0] if len(values) == 1 else values
    return WORDS.get(text.lower(), text) if isinstance(text, str) else text


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
