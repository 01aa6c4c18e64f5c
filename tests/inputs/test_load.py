"""Configuration files: what loads, where each number comes from, and the exact error lines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rematbench.evidence.bands import band_of
from rematbench.inputs.configfile import ConfigError, read_mapping
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import Kind, calibration, load_cluster, load_model, load_system, names
from rematbench.inputs.paths import data_dir
from rematbench.workload import Model
from tests.problems import make_problem
from tests.tables import tables

KINDS: tuple[Kind, ...] = ("model", "cluster", "system")
LOADERS: dict[Kind, Callable[[str | Path], Any]] = {
    "model": load_model,
    "cluster": load_cluster,
    "system": load_system,
}

MODEL = tables(__file__)["model"]


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(kind: Kind, name_or_path: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        LOADERS[kind](name_or_path)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in names(kind)])
def test_every_config_loads_under_its_own_name(kind: Kind, name: str) -> None:
    assert LOADERS[kind](name).name == name


def numbers(data: dict[str, Any]) -> set[str]:
    """Keys of a configuration whose value is a number, some numbers or a switch (a section has one
    source)."""
    sections = {
        key for key, value in data.items() if isinstance(value, dict) and "value" not in value
    }
    assert all(len(data[key]["source"]) > 5 for key in sections)
    plain = {
        k: v["value"] if isinstance(v, dict) else v for k, v in data.items() if k not in sections
    }
    return {
        key
        for key, value in plain.items()
        if any(
            isinstance(one, int | float) for one in (value if isinstance(value, list) else [value])
        )
    }


@pytest.mark.parametrize("kind", ["cluster", "system"])
def test_every_number_has_a_source(kind: Kind) -> None:
    for name in names(kind):
        path = data_dir("config") / f"{kind}s" / f"{name}.yaml"
        sources, data = LOADERS[kind](name).sources, read_mapping(path, name)
        data.pop("rows", None)
        assert numbers(data) <= set(sources)
        assumed = {
            key for key, entry in data.items() if isinstance(entry, dict) and "assumed" in entry
        }
        assert "base" in data or numbers(data) | assumed == set(sources)
        assert all(len(text) > 5 for text in sources.values())


def test_every_model_has_a_source() -> None:
    assert all(len(load_model(name).source) > 40 for name in names("model"))


def test_a_published_system_name_is_an_alias() -> None:
    assert load_system("torchtitan (FSDP2)") is load_system("torchtitan")
    assert load_system("llm-foundry (FSDP)").zero.data_parallel == "fsdp"


def test_my_own_files_load(tmp_path: Path) -> None:
    model = load_model(yaml_file(tmp_path, MODEL))
    assert (model.name, model.parameters, model.source) == ("mine", 4_000_000, "a test")
    own = MODEL.replace("vocab: 2048", "vocab: {value: 4096, source: my tokenizer}")
    (tmp_path / "own").mkdir()
    assert load_model(yaml_file(tmp_path / "own", own)).source == "a test; vocab: my tokenizer"


def test_an_edited_file_counts_at_once(tmp_path: Path) -> None:
    assert load_model(yaml_file(tmp_path, MODEL)).vocab == 2048
    assert load_model(yaml_file(tmp_path, MODEL.replace("2048", "4096"))).vocab == 4096


def test_a_fitted_value_says_so(tmp_path: Path) -> None:
    text = (data_dir("config") / "clusters" / "this-machine.yaml").read_text(encoding="utf-8")
    head, _, tail = text.partition("hbm_bytes_per_s:")
    rest = tail[tail.index("non_torch_bytes:") :]
    fitted = f"{head}hbm_bytes_per_s: {{value: 2e10, fitted: stream.py}}\n{rest}"
    cluster = load_cluster(yaml_file(tmp_path, fitted))
    assert cluster.hbm_bytes_per_s == 2e10
    assert cluster.sources["hbm_bytes_per_s"] == "fitted: stream.py"


@pytest.mark.parametrize(("change", "line"), tables(__file__)["mistakes"])
def test_a_mistake_in_a_model_file_is_one_line(
    tmp_path: Path, change: tuple[str, str], line: str
) -> None:
    assert change[0] in MODEL
    path = yaml_file(tmp_path, MODEL.replace(*change))
    allowed = ", ".join(sorted(Model.__struct_fields__))
    assert error_of("model", path) == f"{path}: {line.replace('ALLOWED', allowed)}"


def test_an_unknown_name_is_one_line_with_the_nearest() -> None:
    known = ", ".join(names("system"))
    assert error_of("system", "megatron-kwia") == (
        f"unknown system 'megatron-kwia'; did you mean 'megatron-kwai'? (known: {known})"
    )
    assert error_of("cluster", "h80").startswith("unknown cluster 'h80'; did you mean 'h800-80gb'?")
    assert error_of("model", "zzz").startswith("unknown model 'zzz' (known: deepseek-v2, ")


def test_a_missing_or_broken_file_is_one_line(tmp_path: Path) -> None:
    assert error_of("cluster", "no/where.yaml") == "no/where.yaml: no such cluster file"
    path = yaml_file(tmp_path, "- 1\n")
    assert error_of("cluster", path) == (
        f"{path}: the top level must be a mapping of names to values"
    )
    broken = tmp_path / "config.json"
    broken.write_text("{", encoding="utf-8")
    assert error_of("model", broken).startswith(f"{broken}: line 1: Expecting property name")


def changed(kind: Kind, name: str, old: str, new: str, folder: Path) -> Path:
    text = (data_dir("config") / f"{kind}s" / f"{name}.yaml").read_text(encoding="utf-8")
    assert old in text
    return yaml_file(folder, text.replace(old, new))


def test_a_new_generation_is_a_section_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constants in calibration.yaml, a cluster file that names it, and no code."""
    text = (data_dir("config") / "calibration.yaml").read_text(encoding="utf-8")
    section = text[text.index("  ampere:\n") : text.index("  blackwell:")]
    config = tmp_path / "config"
    config.mkdir()
    made = text.replace("networks:\n", f"{section.replace('ampere', 'feynman')}\nnetworks:\n", 1)
    (config / "calibration.yaml").write_text(made, encoding="utf-8")
    path = changed("cluster", "h800-80gb", "generation: hopper", "generation: feynman", tmp_path)
    assert not calibration().has_rates(load_cluster(path).generation)
    monkeypatch.setattr("rematbench.inputs.load.data_dir", lambda kind: tmp_path / kind)
    assert load_cluster(path).generation == "feynman"
    new = calibration()
    assert new.gpu("feynman") == new.gpu("ampere")


def test_blackwell_streams_as_hopper_and_no_constant_is_fitted_to_its_steps() -> None:
    rates = calibration()
    assert rates.gpu("blackwell").hbm_efficiency == rates.gpu("hopper").hbm_efficiency
    problem = make_problem(
        layout=Layout(), model="llama-7b", cluster="b200-180gb", system="nemo-24.12", seq_len=4096
    )
    assert "published, but" in band_of(problem, "keep_all").outside["generation"]


def test_an_anchor_is_merged_and_given_keys_win(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("one: &one {a: 1, b: 2}\ntwo: {<<: *one, b: 3}\n")
    assert read_mapping(path, "merged.yaml")["two"] == {"a": 1, "b": 3}
    path.write_text("one: &one {a: 1}\ntwo: {<<: *one, b: 3, b: 4}\n")
    with pytest.raises(ConfigError, match="'b' is given twice"):
        read_mapping(path, "merged.yaml")


def test_an_alias_may_have_a_slash() -> None:
    assert load_system("nemo-24.12/25.02").name == load_system("nemo-25.04").name == "nemo-24.12"
    assert load_system("megatron-lm-23e00ed0 / te-2.11").name == "megatron-lm-23e00ed0"
    with pytest.raises(ConfigError, match="no such system file"):
        load_system("nemo-24.12/25.03")


def test_a_folder_of_a_stacks_name_hides_no_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trl").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_system("trl").name == "trl"
