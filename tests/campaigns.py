"""Measurement campaigns and centers that the tests of src/rematbench/worlds/slurm share."""

import json
from pathlib import Path
from typing import Any

from rematbench.worlds.slurm.campaign import Campaign, load_campaign_suite
from tests.problems import all_methods

ROOT = Path(__file__).resolve().parents[1]


def tiny(name: str, **fields: Any) -> dict[str, Any]:
    """A problem of a suite's file."""
    known = {"why": "tests", "model": "tiny-llama", "cluster": "this-machine"}
    return {"name": name, **known, "system": "rematbench", **fields}


def suite_text(problems: list[dict[str, Any]], **top: Any) -> str:
    """A suite's file, a line for each of its keys."""
    every = {**top, "problems": problems}
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in every.items())


def campaign(tmp_path: Path, cluster: str = "this-machine", gpus: int = 2, **top: Any) -> Campaign:
    """Two methods on one problem."""
    path = tmp_path / "measure.yaml"
    head = {"methods": ["keep_all", "full_recompute"], "cell_minutes": 5} | top
    sizes = {"gpus": gpus, "seq_len": 64, "global_batch": gpus, "precision": "fp32"}
    path.write_text(suite_text([tiny("one", cluster=cluster, **sizes)], **head))
    return Campaign(load_campaign_suite(path), all_methods())


def center_file(tmp_path: Path, **slurm: Any) -> str:
    """A copy of this machine's cluster file with another slurm section."""
    text = (ROOT / "config/clusters/this-machine.yaml").read_text()
    text = text[: text.index("slurm:")]
    section = {"source": "tests"} | slurm
    path = tmp_path / "cluster.yaml"
    path.write_text(text + f"slurm: {json.dumps(section)}\n")
    return str(path)
