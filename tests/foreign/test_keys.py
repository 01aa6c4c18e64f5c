"""Every key of a foreign file is read, said to be without effect, or named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rematbench.foreign import keys
from rematbench.foreign.adapters import read_peft
from rematbench.foreign.deepspeed import read_deepspeed
from rematbench.foreign.keys import Section, declared, dialect
from rematbench.foreign.megatron import read_arguments
from rematbench.foreign.nanotron import read_nanotron
from rematbench.foreign.reading import Reading
from rematbench.foreign.torchtitan import read_torchtitan
from rematbench.foreign.torchtune import read_torchtune
from rematbench.foreign.trainers import read_accelerate, read_trainer
from rematbench.inputs.configfile import ConfigError

SOURCES = Path(keys.__file__).parent
FOREIGN = ("surprise", "lora_rank_seed", "log_of_offload", "loss_type_name")
"""Keys that no package has, with words of keys without an effect."""
DIALECTS = ("accelerate", "deepspeed", "megatron", "nanotron", "peft", "torchtitan")
DIALECTS = (*DIALECTS, "torchtune", "trainers")
PACKAGES = ("TRL", "LLaMA-Factory", "axolotl", "Transformers", "ms-swift")


def read(name: str, data: Mapping[str, Any], package: str = "TRL") -> Reading:
    if name == "megatron":
        return read_arguments({"--num-layers": 2, "--fp16": True, **data}, "x", {})
    if name == "accelerate":
        fsdp = {"distributed_type": "DEEPSPEED" if "deepspeed_config" in data else "FSDP"}
        return read_accelerate(fsdp | data, "x")
    if name == "trainers":
        return read_trainer(data, "x", package)
    if name == "peft":
        return read_peft({"peft_type": "LORA", **data}, "x")
    readers = {"deepspeed": read_deepspeed, "nanotron": read_nanotron}
    readers |= {"torchtitan": read_torchtitan, "torchtune": read_torchtune}
    return readers[name](data, "x")


def nested(at: str, content: Mapping[str, Any]) -> dict[str, Any]:
    for part in reversed(at.split(".") if at else ()):
        content = {part: content}
    return dict(content)


def named(reading: Reading, at: str, key: str) -> bool:
    return any(one.strip("-") == f"{at}.{key}".lstrip(".") for one in reading.unknown)


SECTIONS = [(name, at) for name in DIALECTS for at in dialect(name)]


@pytest.mark.parametrize("key", FOREIGN)
@pytest.mark.parametrize(("name", "at"), SECTIONS)
def test_a_foreign_key_is_named_in_every_section(name: str, at: str, key: str) -> None:
    for package in PACKAGES if name == "trainers" else ("TRL",):
        reading = read(name, nested(at, {key: 3}), package)
        assert named(reading, at, key), (reading.unknown, reading.ignored)


def without(section: Section, key: str) -> Section:
    fields: dict[str, Any] = {}
    for field in Section.__struct_fields__:
        value = getattr(section, field)
        if isinstance(value, dict):
            value = {name: value[name] for name in value if name != key}
        elif isinstance(value, list):
            value = [name for name in value if name != key]
        fields[field] = value
    return Section(**fields)


@pytest.mark.parametrize(("name", "at"), SECTIONS)
def test_a_key_is_known_by_its_declaration_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, at: str
) -> None:
    sections = dialect(name)
    silent = []
    for key in sorted(sections[at].keys - {"num_layers", "fp16", "distributed_type"}):
        if f"{at}.{key}".lstrip(".") in sections:
            continue  # a section, whose own keys are named
        changed = {**sections, at: without(sections[at], key)}
        with monkeypatch.context() as patch:
            patch.setattr(keys, "dialect", lambda _, changed=changed: changed)
            try:
                reading = read(name, nested(at, {key: "1"}), "axolotl")
            except ConfigError:  # a wrong value is never silent
                continue
        if not named(reading, at, key) and not reading.refused:
            silent.append(key)
    assert silent == []


@pytest.mark.parametrize(("name", "at"), SECTIONS)
def test_a_key_is_declared_once(name: str, at: str) -> None:
    section = dialect(name)[at]
    parts = [getattr(section, field) for field in Section.__struct_fields__ if field != "prefix"]
    listed = [key for part in parts for key in dict.fromkeys(part)]
    assert len(listed) == len(section.keys)


def test_keys_that_a_reader_reads_are_in_its_code() -> None:
    code = "\n".join(path.read_text() for path in SOURCES.glob("*.py"))
    code += "\n".join(declared("launchers").names)  # of which readers take each
    idle = [
        (name, at, key)
        for name, at in SECTIONS
        for key in dialect(name)[at].read
        if key not in code and key.replace("_", "-") not in code
    ]
    assert idle == []


@pytest.mark.parametrize("value", [False, None, 0, "none", "false", "0"])
def test_a_feature_that_is_off_refuses_nothing(value: object) -> None:
    reading = read("trainers", {"use_adam_mini": value, "rl": value})
    assert not reading.refused
    assert not reading.unknown
