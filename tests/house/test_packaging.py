"""What is installed: one set of pins, one list of checks, a command, a wheel that stands alone."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import yaml

import rematbench
from tests.tables import tables

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.match(r"([\w.-]+)==([\w.]+)", line) for line in lines)
    return {canonical(match[1]): match[2] for match in found if match}


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!~ ;\[]", line)[0]) for line in requirements}


def test_environment_carries_the_direct_pins_of_the_lock() -> None:
    locked = pins(LOCK.splitlines())
    direct = names(PROJECT["dependencies"])
    *conda, pip = ENVIRONMENT["dependencies"]
    assert pins(conda + pip["pip"]) == {name: locked[name] for name in direct}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"python={oldest}" in conda


def test_environment_stands_alone_and_the_project_comes_after_it(tmp_path: Path) -> None:
    """Snakemake copies the file away, where `-e .` would have no project."""
    *conda, pip = ENVIRONMENT["dependencies"]
    assert all(isinstance(line, str) for line in conda)
    assert pins(pip["pip"]).keys() == {"shfmt-py"}
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s " "$PWD" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "environment.post-deploy.sh"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{ROOT} -m pip install --no-deps --editable ."


def test_whoever_cites_it_is_told_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    meta = json.loads((ROOT / "codemeta.json").read_text())
    (author,) = PROJECT["authors"]
    assert cited["authors"] == [author]
    assert [one["name"] for one in meta["author"]] == [author["name"]]
    assert cited["version"] == meta["version"] == rematbench.__version__
    assert str(cited["date-released"]) == meta["dateModified"]
    assert cited["keywords"] == meta["keywords"] == PROJECT["keywords"]
    assert meta["description"] == PROJECT["description"]
    assert cited["license"] == PROJECT["license"]
    assert meta["license"].endswith(PROJECT["license"])


def test_lock_pins_every_direct_dependency_once() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(pins(lines)) == len(lines)
    wanted = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["dev"])
    assert wanted <= pins(lines).keys()


MODULE = {"pillow": "PIL", "pyyaml": "yaml"}


def test_every_dependency_is_imported_or_has_a_reason() -> None:
    folders = ("src", "methods", "baselines", "figures", "tests", "benchmarks", "workflows")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = [path for path in [ROOT / "Snakefile", *files] if path.suffix in ("", ".py", ".smk")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in code)
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    extras = PROJECT["optional-dependencies"].values()
    declared = names(PROJECT["dependencies"]).union(*(names(extra) for extra in extras))
    idle = {name for name in declared if MODULE.get(name, name.replace("-", "_")) not in imported}
    assert idle == tables(__file__)["not_imported"].keys()


def test_ruff_names_files_that_exist() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert all(list(ROOT.glob(pattern)) for pattern in ruff["per-file-ignores"])


def test_lock_names_no_registry() -> None:
    words = ("://", "--index", "--extra-index", "--find-links")
    assert not [word for word in words if word in LOCK]


def test_pre_commit_runs_the_checks_of_bench() -> None:
    checks = re.findall(r"^ +check (.+)$", (ROOT / "bench").read_text(), re.MULTILINE)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    assert checks
    assert hooks == [f"./bench run {line}" for line in checks]


def test_console_script_exists() -> None:
    (script,) = entry_points(group="console_scripts", name="rematbench")
    assert script.value == "rematbench.cli.app:main"
    command = Path(sys.executable).with_name("rematbench")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "simulate" in done.stdout


def test_wheel_works_from_any_directory(tmp_path: Path) -> None:
    """The wheel, laid out alone: the checkout is out of its sight."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", site, wheel], check=True, capture_output=True)
    code = """
from rematbench.cli.app import main
from rematbench.inputs.paths import data_dir
for kind in ("config", "methods", "published"):
    print(data_dir(kind), len(list(data_dir(kind).iterdir())) > 0)
main()
"""
    done, copied = (
        subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        for words in (["methods"], ["examples", "work"])
    )
    assert done.returncode == 0, done.stderr
    assert copied.returncode == 0, copied.stderr
    assert (elsewhere / "work" / "recompute_mlp.py").is_file()
    data = site / "rematbench" / "_data"
    assert done.stdout.splitlines()[:3] == [
        f"{data / kind} True" for kind in ("config", "methods", "published")
    ]
    assert "keep_all" in done.stdout
