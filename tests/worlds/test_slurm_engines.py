"""Baselines as cells of a campaign: who runs a name, its words, its key, its prediction."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.inputs.paths import data_dir
from rematbench.plugins.registry import MethodError
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.records.record import read_record
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm import campaign as cells_module
from rematbench.worlds.slurm.campaign import Campaign, CampaignCell
from rematbench.worlds.slurm.campaign_rows import cell_rows, number_rows
from tests.campaigns import ROOT, campaign
from tests.tables import tables

TABLES = tables(__file__)

FULL = {"method": "megatron_core", "settings": {"recompute": "full"}}


def both(tmp_path: Path, **top: Any) -> Campaign:
    """keep_all, Megatron-core, and its full recomputation."""
    known = {"methods": ["keep_all", "megatron_core"], "variants": [FULL]}
    return campaign(tmp_path, **known | top)


def by_name(made: Campaign) -> dict[str, CampaignCell]:
    return {cell.name: cell for cell in made.cells}


def test_methods_and_variants_may_name_baselines(tmp_path: Path) -> None:
    made = both(tmp_path)
    names = ["one.keep_all.0", "one.megatron_core.0", "one.megatron_core.1"]
    assert list(by_name(made)) == names
    assert list(made.bundles) == ["keep_all.1x2.0", "megatron_core.1x2.0"]
    assert [made.is_baseline(cell) for cell in made.cells] == [False, True, True]
    again = made.simulated(made.cells[2])
    kept = made.simulated(made.cells[1])
    assert again.recompute_flop > kept.recompute_flop == 0


def test_a_baseline_is_planned_on_the_stack_that_it_is(tmp_path: Path) -> None:
    made = both(tmp_path)
    assert [made.problem(cell.spec).system.name for cell in made.cells] == [
        "rematbench", "megatron-core", "megatron-core",
    ]  # fmt: skip


def test_words_are_what_a_person_types(tmp_path: Path) -> None:
    kept, _, full = (both(tmp_path, steps=4, warmup=5).words(cell) for cell in both(tmp_path).cells)
    assert kept[:2] == ["execute", "keep_all"]
    assert "--warmup" not in kept
    assert full[:3] == ["baseline", "run", "megatron_core"]
    assert full[full.index("--set") + 1] == "recompute=full"
    assert full[full.index("--system") + 1] == "megatron-core"
    assert full[-4:] == ["--steps", "4", "--warmup", "5"]


def keys(made: Campaign) -> list[str]:
    return [made.key(cell) for cell in made.cells]


def differ(before: list[str], after: list[str]) -> list[bool]:
    return [old != new for old, new in zip(before, after, strict=True)]


def test_the_warm_up_is_part_of_a_baselines_key_only(tmp_path: Path) -> None:
    before = keys(both(tmp_path))
    assert differ(before, keys(both(tmp_path))) == [False, False, False]
    assert differ(before, keys(both(tmp_path, warmup=3))) == [False, True, True]
    assert differ(before, keys(both(tmp_path, steps=7))) == [True, True, True]


@pytest.mark.parametrize(("file", "changed"), TABLES["own_keys"])
def test_the_code_and_pins_of_a_baseline_change_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, changed: bool
) -> None:
    copy = tmp_path / "baselines"
    shutil.copytree(data_dir("baselines"), copy)
    monkeypatch.setattr(
        cells_module, "data_dir", lambda kind: copy if kind == "baselines" else data_dir(kind)
    )
    before = keys(both(tmp_path))
    with (copy / file).open("a") as text:
        text.write("# edited\n")
    assert differ(before, keys(both(tmp_path))) == [False, changed, changed]


def test_pins_are_those_that_are_installed() -> None:
    """`./bench test` installs what a baseline's requirements.txt names."""
    line = next(line for line in (ROOT / "bench").read_text().splitlines() if "deepspeed=" in line)
    pinned = dict(word.split("=") for word in line.split("#")[0].split())
    for name, package in (("megatron", "megatron_core"), ("deepspeed", "deepspeed")):
        text = (data_dir("baselines") / package / "requirements.txt").read_text()
        assert text == f"{package.replace('_', '-')}=={pinned[name]}\n"


@pytest.mark.parametrize(("name", "words"), TABLES["unknown"])
def test_an_unknown_name_is_one_line_with_both_lists(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(MethodError) as found:
        _ = campaign(tmp_path, methods=["keep_all", name]).cells
    said = str(found.value)
    assert said.count("\n") == 0
    assert words in said
    if "unknown" in words:
        assert "methods: " in said
        assert "baselines: deepspeed, megatron_core)" in said


def test_a_setting_that_a_baseline_has_not_is_one_line(tmp_path: Path) -> None:
    wrong = {"method": "megatron_core", "settings": {"recomput": "full"}}
    made = campaign(tmp_path, methods=["keep_all"], variants=[wrong])
    with pytest.raises(MethodError, match=r"megatron_core has no setting 'recomput'.*'recompute'"):
        keys(made)


def test_rows_name_the_engine_before_anything_ran(tmp_path: Path) -> None:
    made = both(tmp_path)
    store = Store(tmp_path / "store")
    rows = number_rows(made, store)
    assert [row["engine"] for row in rows] == ["rematbench", "megatron-core", "megatron-core"]
    assert [row["status"] for row in cell_rows(made, store)] == ["waiting"] * 3
    assert rows[2]["simulated_peak_bytes"] < rows[1]["simulated_peak_bytes"]


def test_a_cell_of_a_package_is_predicted_with_what_the_package_holds(tmp_path: Path) -> None:
    """Llama 2 7B, states and inputs on the host: 4.48 GiB traced, of which the plan says 2.42."""
    traced = read_record(ROOT / "results/measured/traced/baselines/llama2-7b-4k-offload.json")
    settings = {"checkpointing": "cpu", "offload_optimizer": True, "offload_param": True}
    variant = {"method": "deepspeed", "settings": settings}
    made = both(tmp_path, methods=["keep_all"], variants=[variant])
    spec = made.suite.problems[0].changed(
        model="llama2-7b", cluster="h800-80gb", gpus=8, seq_len=4096, global_batch=8,
        zero_stage=3, precision="bf16",
    )  # fmt: skip
    made = Campaign(replace(made.suite, problems=(spec,)), made.registry)
    found = made.simulated(made.cells[1])
    seen = traced.measured
    peak = seen.ranks[0].peak_bytes
    assert max(found.peak_device_bytes) == pytest.approx(peak, rel=0.015)


def test_steps_are_the_observed_warm_up_and_timed_ones(tmp_path: Path) -> None:
    made = both(tmp_path, cluster="h800-80gb", steps=4, warmup=5)
    assert [made.steps(cell) for cell in made.cells] == [
        4 + TIMED_STEPS, 9 + TIMED_STEPS, 9 + TIMED_STEPS,
    ]  # fmt: skip
