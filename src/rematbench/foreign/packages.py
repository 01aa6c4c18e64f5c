"""Reads files of any recognised package, and merges their values."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rematbench.foreign.adapters import read_peft
from rematbench.foreign.command import read_command, read_launcher, trainer_of
from rematbench.foreign.deepspeed import read_deepspeed
from rematbench.foreign.keys import declared
from rematbench.foreign.megatron import (
    ENGINE,
    is_launch,
    is_swift,
    read_arguments,
    read_factory,
    read_megatron,
    read_swift,
)
from rematbench.foreign.nanotron import read_nanotron
from rematbench.foreign.reading import Reading, named_file
from rematbench.foreign.shell import Script, options_of, read_script
from rematbench.foreign.torchtitan import read_torchtitan
from rematbench.foreign.torchtune import read_torchtune
from rematbench.foreign.trainers import FSDP_SYSTEM, merge, read_accelerate, read_trainer
from rematbench.inputs.configfile import ConfigError, read_mapping, read_text
from rematbench.inputs.foreign import REFUSED, package_of, pointer
from rematbench.inputs.huggingface import is_huggingface

READ = "launch lines of Megatron and of Hugging Face trainers, DeepSpeed JSON, YAML of accelerate, "
READ += "TRL, LLaMA-Factory, axolotl, torchtune and nanotron, TOML of torchtitan, config.json of "
READ += "the model, adapter_config.json of PEFT"
STRUCTURED = {".json", ".yaml", ".yml", ".toml"}
SIZES = {"hidden_size", "n_embd", "d_model", "dim", "architectures", "num_hidden_layers"}
SIZES |= {"text_config", "llm_config", "language_config", "thinker_config"}
"""Keys of which every config.json has at least one beside its model_type."""
ENVIRONMENT: dict[str, tuple[str, dict[str, Any]]] = {
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:true", {"expandable_segments": True}),
    "PYTORCH_ALLOC_CONF": ("expandable_segments:true", {"expandable_segments": True}),
    "CUDA_LAUNCH_BLOCKING": ("1", {"launch_blocking": True}),
}
"""Variables of the environment with the facts of the stack that they state."""
UNREAD = {"CELOSS_PARALLEL_SIZE": "a loss in pieces of this many tokens is not modelled"}
"""Variables of the environment that change the job and are not read, each with the reason."""
RECIPES = {
    "tune": "a torchtune recipe",
    "run_recipe.py": "a Megatron-Bridge recipe",
    "setup_experiment.py": "a Megatron-Bridge recipe",
    "nemo": "a NeMo recipe",
    "nemorun": "a NeMo recipe",
    "OLMo-sft.py": "an OLMo-core recipe",
    "main_training.py": "a configuration of fms-fsdp",
    "finetuning.py": "a line of Llama Cookbook",
    "llama_finetuning.py": "a line of Llama Cookbook",
    "colossalai": "a job of Colossal-AI",
    "torchtitan.train": "a torchtitan configuration in Python",
    "run_train.sh": "a torchtitan configuration in Python",
}
"""Programs whose configuration is inside their own package, each with the words for it."""


def read_files(paths: list[Path], variables: Mapping[str, str] | None = None) -> Reading:
    """The merged values of all files, and of existing files that these name.  `variables`:
    variables of the environment.  ConfigError for an unknown kind of file or for contradicting
    values."""
    environment = {name: [value] for name, value in (variables or {}).items()}
    readings = [read_file(path, environment) for path in paths]
    whole = max(readings, key=lambda reading: _RANK.index(reading.package))
    present = {path.resolve() for path in paths}
    for reading in readings:
        if reading is not whole:
            merge(whole, reading)
    for path, named in ((path, named) for path in paths for named in list(whole.files)):
        other = named_file(path, named)
        if other.is_file() and other.resolve() not in present:
            present.add(other.resolve())
            merge(whole, read_file(other, environment))
    if whole.system == "huggingface-deepspeed":  # DeepSpeed converts fp32 adapters
        whole.values.pop("trained_dtype", None)
    adapts = "lora_rank" in whole.values and whole.system == FSDP_SYSTEM
    if adapts and not {"wide_weights", "base_dtype"} & whole.values.keys():
        whole.put("base_dtype", "bf16", "fsdp")  # accelerate makes only trained weights fp32
    names = {path.name for path in present}
    whole.files = [named for named in whole.files if named.name not in names]
    if whole.package == "Transformers" and "precision" not in whole.values:
        wide = not whole.files and whole.values.pop("wide_weights", 0)
        whole.put("precision", "fp32" if wide else "bf16", "precision")
        whole.assumed.append(f"neither --bf16 nor --fp16: {whole.values['precision']}")
    for named in whole.files if "zero_stage" not in whole.values else ():
        _by_name(whole, named)
    return whole


def _by_name(whole: Reading, named: Path) -> None:
    """Guess the ZeRO stage and the homes of states from the name of a file that does not exist here
    (`zero3`, `ds_z2_offload.json`, as in ms-swift and LLaMA-Factory; config/foreign/axolotl.yaml
    has what the names of axolotl's files do not say)."""
    stage = re.search(r"(?:zero|z|stage)[-_]?([0-3])", named.name.lower())
    if stage is None or "partial" in named.name:  # `file_job` refuses what nothing says
        return
    whole.put("zero_stage", int(stage[1]), str(named))
    unsharded = {"huggingface-flash": "huggingface-deepspeed"}  # the name is of accelerate's file
    whole.system = unsharded.get(whole.system, whole.system)
    if whole.package == "axolotl":
        for name, value in declared("axolotl").defaults.get(named.name, {}).items():
            whole.put(name, value, str(named))
    for word in ("compile", "autotp", "fp8"):
        if word in named.name:
            whole.refused.append(f"{named} is not here, and its name says {word}")
    moves = re.search(r"(no_)?offload(_param|_optim)?", named.name.lower())
    if moves and not moves[1]:
        homes = ("optimizer", "parameters") if stage[1] == "3" else ("optimizer",)
        for name in homes:
            if name.startswith((moves[2] or "").strip("_")):
                whole.put(name, "host", str(named))
    if named.suffix:  # a name without a suffix is a file inside ms-swift
        whole.notes.append(f"{named} is not here: its states are assumed from its name")


_RANK = (
    *("config.json", "PEFT", "DeepSpeed", "accelerate", "TRL", "LLaMA-Factory", "axolotl"),
    *("Transformers", "ms-swift", "torchtitan", "torchtune", "nanotron", "Megatron"),
)
"""Packages in the order of how much of a job their files state, the least first."""


def read_file(path: Path, variables: dict[str, list[str]]) -> Reading:
    """Read one file into a Reading.  ConfigError for a file of an unknown kind."""
    label = str(path)
    if path.suffix not in STRUCTURED:
        return _launch(path, label, variables)
    data = _mapping(path, label)
    package = package_of(data)
    if package is None and is_huggingface(data) and SIZES & data.keys():
        reading = Reading(file=label, package="config.json")
        reading.put("model", label, "config.json")
        return reading
    if package is None:
        raise ConfigError(label, "", f"the kind of this file is unknown; supported: {READ}")
    if package == "Megatron":
        return read_arguments(data["MODEL_ARGS"], label, variables)
    return _package(package, data, label)


READERS: dict[str, Callable[[Mapping[str, Any], str], Reading]] = {
    "DeepSpeed": read_deepspeed,
    "accelerate": read_accelerate,
    "nanotron": read_nanotron,
    "torchtitan": read_torchtitan,
    "torchtune": read_torchtune,
    "PEFT": read_peft,
}
"""The readers of packages other than Hugging Face trainers."""
CONFIGURED: tuple[str, ...] = ("torchtitan", "torchtune", "nanotron")
"""Packages whose commands name a file that states the whole job."""


def _package(package: str, data: Mapping[str, Any], label: str) -> Reading:
    if package in REFUSED:
        raise ConfigError(label, "", pointer(package, label))
    if package == "LLaMA-Factory" and ENGINE & data.keys():
        return read_factory(data, label)
    if package in READERS:
        return READERS[package](data, label)
    return read_trainer(data, label, package)


def _launch(path: Path, label: str, variables: dict[str, list[str]]) -> Reading:
    if path.suffix == ".py":
        problem = "a Python configuration, which is not read: give its values as options"
        raise ConfigError(label, "", problem)
    script = read_script(read_text(path, label), label, variables)
    reading = _command(script) or _configured(script)
    if reading is None:
        raise ConfigError(label, "", _unread(script))
    reading.facts |= _environment(script)
    reading.refused += [f"{name}: {UNREAD[name]}" for name in UNREAD if name in script.variables]
    reading.notes += [f"loop: {words}" for words in dict.fromkeys(script.loops)]
    if script.absent:
        absent = ", ".join(dict.fromkeys(script.absent))
        reading.notes.append(f"scripts that are sourced but not here are not read: {absent}")
    if script.undecided:
        tests = ", ".join(dict.fromkeys(script.undecided))
        text = "conditions on values that the script does not set, which count as empty"
        reading.notes.append(f"{text}: {tests}")
    return reading


def _environment(script: Script) -> dict[str, Any]:
    """The facts that variables of the environment state: those of the script, and those that a
    command passes on (`--export=ALL,NAME=1`, ray's `{"env_vars": {"NAME": "1"}}`)."""
    texts = [f"{name}={' '.join(values)}" for name, values in script.variables.items()]
    texts += [" ".join(words) for words in script.commands]
    facts: dict[str, Any] = {}
    for variable, (word, stated) in ENVIRONMENT.items():
        passed = re.compile(rf"\b{variable}[\W]*[=:][\W]*[\w:.,]*\b{word}", re.IGNORECASE)
        if any(passed.search(text.replace(" ", "")) for text in texts):
            facts |= stated
    return facts


def _unread(script: Script) -> str:
    """Why no command of a script is read, in words: which file or program it starts instead."""
    all_words = [word for words in script.commands for word in words]
    all_words += [text for texts in script.variables.values() for text in texts]
    named = [word for word in all_words if Path(word).suffix in STRUCTURED]
    path = named_file(script.file, named[-1]) if named else None
    if path and path.is_file():
        package = package_of(_mapping(path, str(path)))
        words = pointer(package, str(path)) if package in REFUSED else "which is not a job"
        return f"the command names {named[-1]}, {words}"
    if named:
        return f"the command names {named[-1]}, which was not found: read that file"
    if script.absent:
        return f"it sources {', '.join(script.absent)}, which was not found"
    for word in all_words:
        if recipe := RECIPES.get(word.rsplit("/", 1)[-1]):
            return f"{recipe}, which is not read: give its values as options of simulate"
    if script.undecided:
        tests = ", ".join(dict.fromkeys(script.undecided))
        return f"what it starts depends on values that it does not set (--set NAME=VALUE): {tests}"
    line = "--num-layers and --seq-length, or --model_name_or_path"
    return f"no launch line with {line} (supported: {READ})"


def _configured(script: Script) -> Reading | None:
    """Read a command of torchtitan, torchtune or nanotron into a Reading: the file that it names as
    an option or in CONFIG_FILE, with the command's own values (`--training.local_batch_size 2`,
    `optimizer.lr=1e-5`)."""
    config = script.variables.get("CONFIG_FILE", [])
    for words in reversed(script.commands):
        for word in (*words, *config):
            path = named_file(script.file, word.rpartition("=")[2])
            if path.suffix not in STRUCTURED or not path.is_file():
                continue
            data = _mapping(path, str(path))
            package = package_of(data)
            if package is None or package not in CONFIGURED:
                continue
            options = options_of(words)
            own = {name: (values or ["true"])[0] for name, values in options.items() if "." in name}
            own |= dict(text.split("=", 1) for text in words if re.match(r"[\w.]+=", text))
            for option, written in own.items():
                _put(data, option.replace("-", "_").split("."), yaml.safe_load(written))
            reading = READERS[package](data, script.file)
            read_launcher(reading, script, options)
            if alone := [one for one in words if one.endswith("_single_device")]:
                reading.put("gpus", 1, alone[0])  # this is torchtune's name for one GPU
            return reading
    return None


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value in a section of a file, except `job.config_file`, which names the file itself."""
    *sections, key = path
    for section in sections:
        data = data.setdefault(section, {})
    if path != ["job", "config_file"]:
        data[key] = value


def _command(script: Script) -> Reading | None:
    """Read the last command that starts a training into a Reading, or all variables together if the
    command is in another file."""
    commands = [words for words in script.commands if words[0] not in ("echo", "printf")]
    variables = [
        one for values in script.variables.values() for text in values for one in text.split()
    ]
    for words in (*reversed(commands), variables):
        if is_launch(words):
            return read_megatron(script, words)
        if is_swift(words):
            return read_swift(script, words)
        package = None if words is variables else trainer_of(script, words)
        if package is not None:
            return read_command(script, words, package)
    return None


def _mapping(path: Path, label: str) -> dict[str, Any]:
    if path.suffix != ".toml":
        return dict(read_mapping(path, label))
    try:
        return tomllib.loads(read_text(path, label))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(label, "", str(error)) from error
