"""`snakemake measure`: what a change makes due again, and what runs where, without a Slurm."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.targets import targets
from tests.tables import tables
from tests.workflow.checkout import ROOT, Checkout
from tests.worlds.slurm.local_slurm import TOOLS

SUITE = tables(__file__)["suite"]
FINISH = """
from pathlib import Path
from rematbench.plugins.discover import discover
from rematbench.worlds.slurm.runner import CellRecord, encode
from rematbench.worlds.slurm.campaign import Campaign, load_campaign_suite
from rematbench.worlds.records.store import Store
made = Campaign(load_campaign_suite(Path("config/measure.yaml")), discover())
store = Store(Path("results/measure/cells"))
for cell in made.cells:
    record = CellRecord(key=made.key(cell), cell=cell, status="oom", written="now")
    store.write(record.key, encode(record))
"""
"""Every cell has a final record, as if it had been executed."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout after `snakemake measure`, its cells' records given."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("run-cells wants torch, even where nothing is left to run")
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    (checkout.path / "config/measure.yaml").write_text(SUITE)
    given = checkout.run([sys.executable, "-c", FINISH])
    assert given.returncode == 0, given.stderr
    done = checkout.snakemake("measure")
    assert done.returncode == 0, done.stderr
    return checkout


def due(checkout: Checkout) -> set[str]:
    """Bundles that would be submitted."""
    done = checkout.snakemake("measure", "--dry-run")
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"wildcards: measured=measure, bundle=(\S+)", done.stdout))


def test_cells_without_seconds_have_a_table_and_a_line_in_place_of_a_figure(
    measured: Checkout,
) -> None:
    folder = measured.path / "results/measure"
    assert "| oom" in (folder / "tables/measured_speed.md").read_text()
    assert (folder / "figures/measured_speed.txt").read_text().startswith("no figure: no cell was")
    assert [path.name for path in (folder / "figures").iterdir()] == ["measured_speed.txt"]


def edited(path: Path, old: str, new: str) -> str:
    """Replace a text in a file; the file's text before."""
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))
    return before


def test_newer_times_and_how_jobs_are_asked_for_make_nothing_due(measured: Checkout) -> None:
    for path in (*(measured.path / "methods").glob("*.py"), measured.path / "config/measure.yaml"):
        path.touch()
    path = measured.path / "config/clusters/this-machine.yaml"
    before = edited(path, "  nodes: 2\n", "  nodes: 2\n  setup: [module load new]\n")
    assert due(measured) == set()
    path.write_text(before)


@pytest.mark.full
def test_code_parameters_and_new_problems_make_their_own_bundles_due(measured: Checkout) -> None:
    """Code of one method, parameters of another, and a problem of another shape: all in one plan,
    and nothing else in it."""
    method, suite = (
        measured.path / "methods/full_recompute.py",
        measured.path / "config/measure.yaml",
    )
    code = edited(method, '"""', '"""Edited. ')
    before = edited(suite, "alpha: 0.5", "alpha: 0.75")
    one = SUITE[SUITE.index("  - name: one") : SUITE.index("variants:")]
    four = one.replace("name: one", "name: four").replace("gpus: 2", "gpus: 4")
    edited(suite, "variants:", f"{four}variants:")
    names = ("keep_all", "full_recompute", "pp_offload", "megatron_core")
    new = {f"{name}.2x2.0" for name in names}
    assert due(measured) == new | {"full_recompute.1x2.0", "pp_offload.1x2.0"}
    method.write_text(code)
    suite.write_text(before)


@pytest.mark.full
def test_retry_makes_the_bundle_of_a_finished_failure_due(measured: Checkout) -> None:
    folder = measured.path / "results/measure"
    (record,) = folder.glob("cells/one.keep_all.*.json")
    made = [folder / "bundles/keep_all.1x2.0.json", folder / "executed.csv"]
    kept = {path: path.read_bytes() for path in (record, *made)}
    words = ("rematbench", "cells", "config/measure.yaml", "--store", "results/measure/cells")
    done = measured.run([*words, "--again", "oom", "--cell", "one.keep_all.0"])
    assert done.returncode == 0, done.stderr
    assert "one.keep_all.0: status was oom; it will run again" in done.stdout
    assert due(measured) == {"keep_all.1x2.0"}
    for path, data in kept.items():
        path.write_bytes(data)
    assert due(measured) == set()


def test_too_many_gpu_hours_are_refused_planned_or_run(measured: Checkout, short: bool) -> None:
    path = measured.path / "config/clusters/this-machine.yaml"
    before = edited(path, "  nodes: 2\n", "  nodes: 2\n  gres: gpu\n")
    suite = measured.path / "config/measure.yaml"
    cells = edited(suite, "steps: 2", "steps: 4")
    for words in ((),) if short else ((), ("--dry-run",)):
        dear = measured.snakemake("measure", *words, "--config", "max_gpu_hours=0.01")
        assert dear.returncode == 1
        assert "predicted GPU-hours exceed max_gpu_hours 0.01" in dear.stdout + dear.stderr
        assert "(4 submissions, the largest" in dear.stdout + dear.stderr
        assert "Finished jobid" not in dear.stdout + dear.stderr
    path.write_text(before)
    suite.write_text(cells)


def test_only_what_is_executed_or_told_to_leaves_the_machine() -> None:
    """Rules without an accelerator are local; simulate_on: slurm moves those that compute."""
    where = {target.name: "SIMULATE_HERE" if target.simulates else "True" for target in targets()}
    for path in (ROOT / "workflows").glob("*.smk"):
        for rule in re.split(r"^rule ", path.read_text(), flags=re.MULTILINE)[1:]:
            if "    shell:" in rule:  # a target has no job
                local = re.search(r"^    localrule: (\w+)$", rule, re.MULTILINE)
                where[rule.partition(":")[0]] = local[1] if local else "job"
    assert [name for name, place in where.items() if place == "job"] == ["executed"]
    following = {name for name, place in where.items() if place == "SIMULATE_HERE"}
    assert following == {"bundle", "matrix", "predict", "study"}


def test_nothing_overrides_the_profile_and_no_rule_retries() -> None:
    """profiles/default is loaded by itself and wins over --profile; a rule's retries are nested in
    those of the job step."""
    assert [path.name for path in (ROOT / "profiles").iterdir()] == ["slurm"]
    assert (ROOT / "slurm").resolve() == ROOT / "profiles/slurm"
    rules = "".join(path.read_text() for path in (ROOT / "workflows").glob("*.smk"))
    assert "retries" not in rules


def without_slurm(folder: Path) -> str:
    """A PATH with the tools of this one but Slurm's."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in Path(place).glob("*"):
            link = folder / tool.name
            if tool.name not in TOOLS and not link.is_symlink():
                link.symlink_to(tool)
    return str(folder)


@pytest.mark.full
def test_all_is_planned_with_the_profile_and_refused_without_slurm(
    measured: Checkout, tmp_path: Path
) -> None:
    """A plan needs no Slurm; to submit does, and says so before anything else."""
    for name in ("measured", "searched"):
        (measured.path / "results" / name).symlink_to(ROOT / "results" / name)
    words = ("snakemake", "all", "--profile", "slurm", "--config", "simulate_on=slurm")
    path = without_slurm(tmp_path / "bin")
    refused = measured.run(words, path)
    assert refused.returncode == 1
    said = [line.strip() for line in refused.stderr.splitlines() if "Slurm" in line]
    assert said == ["no Slurm here: sbatch is not on PATH (without --profile slurm it runs here)"]
    done = measured.run([*words, "--dry-run"], path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("matrix", "predict", "study", "bundle"):
        (asked, *_) = re.findall(rf"^rule {name}:.*?resources: (.*?)$", done.stdout, re.M | re.S)
        assert "mem_mb=2000" in asked
        assert "runtime=60" in asked, "what the center allows a job"


@pytest.mark.soak
def test_the_committed_suite_is_executed_here(tmp_path: Path) -> None:
    """`config/measure.yaml` on this machine's CPUs, really: every cell ends well."""
    pytest.importorskip("torch", reason="cells are executed with torch")
    checkout = Checkout(tmp_path)
    done = checkout.snakemake("measure")
    assert done.returncode == 0, done.stderr
    rows = read_sheet(checkout.path / "results/measure/executed.csv")
    assert [row["status"] for row in rows] == ["ok"] * 5
    losses = {row["cell"]: row["losses"] for row in rows}
    assert losses["tiny-one.full_recompute.0"] == losses["tiny-one.keep_all.0"]
    assert all(row["torch"] for row in rows)


def test_without_a_gpu_measure_ends_in_one_line(tmp_path: Path) -> None:
    """Before anything is installed: the copy has no environment and gets none."""
    shutil.copy2(ROOT / "bench", tmp_path / "bench")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    given = os.environ | {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    done = subprocess.run(
        [tmp_path / "bench", "measure"], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "bench: no accelerator: nvidia-smi lists no GPU, so there is nothing to measure\n"
    )
    assert not (tmp_path / ".venv").exists()
