"""`rematbench compare` as typed: results, mistakes, my own files."""

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.candidates.candidate import load_compare
from rematbench.advise.compare.comparison import Comparison
from rematbench.cli.compare import runnable
from rematbench.cli.options import Request, RunOptions, request
from rematbench.evaluate.breakdown import PARTS
from rematbench.evaluate.result import Result
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables.claims import scored_cells
from tests.cli.test_cli import PIPE
from tests.problems import all_methods
from tests.typed import typed


def test_the_csv_says_what_simulate_says(tmp_path: Path) -> None:
    path = tmp_path / "compare.csv"
    ran = typed("compare", *PIPE, "--limit", "60", "-o", str(path))
    assert ran.code == 0
    assert ran.out.splitlines()[4].startswith("FASTEST: ")  # behind the heading
    rows = {row["name"]: row for row in read_sheet(path)}
    assert rows["memo+mst"]["origin"] == "composition"
    assert rows["selective_recompute"]["same_as"] == "keep_all"
    for name in ("keep_all", "selective_recompute", "memo", "memo+mst"):
        alone = json.loads(typed("simulate", name, *PIPE, "--json").out)
        row = rows[name]
        assert row["status"] == alone["status"]
        for key in ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "headroom_bytes"):
            assert float(row[key]) == alone[key]
        assert sum(float(row[f"{part}_s"]) for part in PARTS) == pytest.approx(alone["step_s"])
        assert float(row["peak_device_bytes"]) == alone["peak_device_bytes"]["max"]
        assert name in ran.out
        told = trust(typed("simulate", name, *PIPE).out)
        assert told == f"evidence: {row['evidence']}"
        ends = [float(row[f"{end}_tokens_per_s_per_gpu"]) for end in ("low", "high")]
        assert [alone["band"]["low"], alone["band"]["high"]] == ends
        assert alone["fits"] == row["fits"]
    assert "in-sample" not in ran.out


def trust(text: str) -> str:
    """The line of `simulate` about the evidence for predictions like this one."""
    return next(line for line in text.splitlines() if line.startswith("evidence: "))


def test_a_stack_is_known_by_its_facts_and_not_by_its_name(tmp_path: Path) -> None:
    job = ("full_recompute", "--gpus", "64", "--seq-len", "8192", "--global-batch", "64")
    job += ("--model", "llama-7b", "--cluster", "h800-80gb", "--tp", "2", "--pp", "4")
    mine = tmp_path / "mine.yaml"
    copy = "name: mine\nversion: '1'\nbase: megatron-kwai\n"
    mine.write_text(copy)
    told = trust(typed("simulate", *job, "--system", str(mine)).out)
    assert told == trust(typed("simulate", *job, "--system", "megatron-kwai").out)
    assert "stack" not in told
    mine.write_text(copy + "zero_stages: {value: [0, 1, 2, 3], source: mine}\n")
    assert told == trust(typed("simulate", *job, "--system", str(mine)).out)
    mine.write_text(copy + "tp_overlap: {value: none, source: mine}\n")
    assert "stack with facts of no shipped stack" in trust(
        typed("simulate", *job, "--system", str(mine)).out
    )


def test_my_model_and_my_cluster(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 32000, "hidden_act": "silu",
    }  # fmt: skip
    model, cluster = tmp_path / "config.json", tmp_path / "mine.yaml"
    model.write_text(json.dumps(config))
    cluster.write_text(CLUSTER)
    job = ("--model", str(model), "--cluster", str(cluster), "--gpus", "4", "--seq-len", "2048")
    rows = tmp_path / "compare.csv"
    words = (*job, "--global-batch", "8", "--limit", "60", "--notes")
    ran = typed("compare", *words, "-o", str(rows))
    assert ran.code == 0
    assert "on 4 x A100 (mine)" in ran.out
    assert "FASTEST: " in ran.out
    assert "mechanism " in ran.out
    assert "unsupported: pp_offload: needs pp >= 3" in ran.out
    assert "unsupported: lynx_heu: needs tp, cp or pp > 1" in ran.out
    offloading = [row for row in read_sheet(rows) if "pp_offload" in row["name"]]
    assert [(row["name"], row["status"]) for row in offloading] == [("pp_offload", "unsupported")]


CLUSTER = """
source: a test
name: mine
base: a100-40gb-abci
gpu: A100
gpus_per_node: 4
numa_nodes: 1
"""


def asked_of(**problem: Any) -> Request:
    return request(RunOptions(method="keep_all", problem={"system": "megatron-core", **problem}))


@cache
def compared() -> tuple[Comparison, list[Result]]:
    """A comparison of few rows."""
    options = dict(zip((w[2:].replace("-", "_") for w in PIPE[::2]), PIPE[1::2], strict=True))
    numbers = {k: int(v) for k, v in options.items() if v.isdigit()}
    asked = asked_of(**{**options, **numbers})
    config = replace(load_compare(), policies=load_compare().policies[2:4])
    comparison = Comparison(asked.job, config, limit_s=60)
    return comparison, comparison.everything()


def test_the_fastest_plan_that_runs_is_named_where_the_fastest_runs_nowhere() -> None:
    fitting = [one for one in compared()[1] if one.fits and not one.same_as]
    first, second = fitting[:2]
    fewer = [replace(first, runs_on=()), *(replace(one, runs_on=("ours",)) for one in fitting[1:])]
    assert runnable(fewer).startswith(f"FASTEST that an engine can run: {second.method}, ")
    assert runnable([replace(one, runs_on=()) for one in fitting]) == ""
    assert runnable(fewer[1:]) == ""


# -- Fujii's 80 % rule ------------------------------------------------------------------------

ROW = {
    "source": "Fujii et al., x", "table": "t", "cluster": "h100-94gb-tsubame4",
    "system": "megatron-core", "model": "llama-3.1-8b", "gpus": "4", "seq_len": "8192",
    "global_batch": "32", "micro_batch": "1", "tp": "1", "sp": "yes", "cp": "2", "pp": "1",
    "vpp": "1", "dp": "2", "zero_stage": "1", "attention": "flash", "recompute": "none",
    "offload_fraction": "0", "precision": "bf16", "status": "ok", "note": "",
}  # fmt: skip


def test_the_rule_is_scored_on_what_its_formula_speaks_of() -> None:
    """67.3 + 22.6 GiB of 93.6 are 96 %; with tensor parallelism over four GPUs it is half."""
    low = {**ROW, "tp": "4", "cp": "1", "dp": "1"}
    rows = [
        ROW, low, {**low, "status": "oom"}, {**ROW, "status": "oom"}, {**low, "status": "dash"},
        {**ROW, "recompute": "full"}, {**ROW, "offload_fraction": "0.5"}, {**ROW, "tp": "3"},
        {**low, "sp": "no"}, {**ROW, "status": "unknown"}, {**ROW, "zero_stage": "3"},
    ]  # fmt: skip
    assert [(cell["status"], cell["safe"]) for cell in scored_cells(rows, all_methods())] == [
        ("ok", False), ("ok", True), ("oom", True), ("oom", False), ("dash", True),
    ]  # fmt: skip


@pytest.mark.full
def test_a_gib_more_goes_to_states_or_to_activations() -> None:
    """The command of docs/systems.md: of the first row the host holds fewer states, of the others
    as many, and no row is slower."""
    text = (data_dir("config").parent / "docs" / "systems.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"\./bench run rematbench (compare .*--hbm-bytes.*)", text)
    words = shlex.split(line)
    (small,) = re.findall(r"--hbm-bytes (\d+)", line)
    answers = []
    for nbytes in (small, str(int(small) + 2**30)):
        ran = typed(*[nbytes if word == small else word for word in words], "--json")
        rows = json.loads(ran.out)["rows"]
        answers.append({row["name"]: row for row in rows})
    before, after = answers
    first = "memo+optimizer_offload"
    assert after[first]["host_node_bytes"] < before[first]["host_node_bytes"]
    assert after[first]["step_s"] <= before[first]["step_s"]
    other = "optimizer_offload:share=1+memo"
    assert after[other]["step_s"] <= before[other]["step_s"]
