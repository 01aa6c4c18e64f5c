"""What is asked of a cluster, what is refused at once, and what a bundle makes of a cell's end."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rematbench.cli import app
from rematbench.cli_text import CommandError
from rematbench.configfile import ConfigError
from rematbench.discover import discover
from rematbench.load import load_cluster
from rematbench.record import content_hash
from rematbench.slurm import runner as runner_module
from rematbench.slurm.cellrecord import MAX_ATTEMPTS, decode, is_final
from rematbench.slurm.cells import Campaign, execute_words, load_measurement
from rematbench.slurm.launch import Allocation, torchrun
from rematbench.slurm.nodefacts import NodeFacts, cgroup_limit, oddities, shortages
from rematbench.slurm.queue import UNLIMITED, Node, minutes
from rematbench.slurm.resources import executed_resources
from rematbench.slurm.runner import Runner
from rematbench.slurm.settings import load_site
from rematbench.slurm.submissions import check_partition, refuse, submissions
from rematbench.store import Store

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = """
  - name: {name}
    why: tests
    model: tiny-llama
    cluster: {cluster}
    system: rematbench
    gpus: {gpus}
    seq_len: 64
    global_batch: {gpus}
    precision: fp32
"""


def campaign(tmp_path: Path, cluster: str = "this-machine", gpus: int = 2, **top: Any) -> Campaign:
    """Two methods on one problem."""
    path = tmp_path / "measure.yaml"
    head = {"methods": ["keep_all", "full_recompute"], "cell_minutes": 5} | top
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())
    problem = PROBLEM.format(name="one", cluster=cluster, gpus=gpus)
    path.write_text(f"{text}problems:{problem}")
    return Campaign(load_measurement(path), discover())


def site_file(tmp_path: Path, **slurm: Any) -> str:
    """A copy of this machine's cluster file with another slurm section."""
    text = (ROOT / "config/clusters/this-machine.yaml").read_text()
    text = text[: text.index("slurm:")]
    section = {"source": "tests"} | slurm
    path = tmp_path / "cluster.yaml"
    path.write_text(text + f"slurm: {json.dumps(section)}\n")
    return str(path)


def node(**changes: Any) -> Node:
    """A node of a default partition."""
    known: dict[str, Any] = {
        "partition": "main",
        "name": "n1",
        "default": True,
        "cpus": 8,
        "mem_mb": 4000,
        "gres": "gpu:2",
        "minutes": UNLIMITED,
        "up": True,
    }
    return Node(**known | changes)


# ---- the slurm section


@pytest.mark.parametrize("name", ["h800-80gb", "a100-80gb-roce400", "this-machine"])
def test_examples_load(name: str) -> None:
    assert load_site(name).slurm.nodes >= 2


def test_the_section_changes_no_prediction(tmp_path: Path) -> None:
    path = site_file(tmp_path, partition="other", nodes=7)
    assert content_hash(load_cluster(path)) == content_hash(load_cluster("this-machine"))


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ({"partitoin": "x"}, "did you mean 'partition'"),
        ({"gres": "gpu:2"}, "without a count"),
        ({"extra": "--partition=x"}, "has a key of its own"),
        ({"minutes": 0}, ">= 1"),
    ],
)
def test_a_wrong_section_is_one_line(tmp_path: Path, slurm: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm") as error:
        load_site(site_file(tmp_path, **slurm))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cluster_without_the_section_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="add `slurm:`"):
        load_site("h200-141gb")


def test_setup_lines_come_first_and_values_are_quoted() -> None:
    text = load_site("h800-80gb").slurm.shell_setup()
    assert text.startswith("module load cuda/12.8 nccl && . /shared")
    assert "export NCCL_SOCKET_IFNAME='bond0' && " in text


# ---- bundles and resources


def test_a_new_method_moves_no_cell_of_another(tmp_path: Path) -> None:
    few = campaign(tmp_path).bundles
    more = campaign(tmp_path, methods=["full_recompute", "selective_recompute", "keep_all"]).bundles
    assert {name: more[name] for name in few} == few


def test_keys_follow_the_request_and_the_steps(tmp_path: Path) -> None:
    keys = [
        made.key(made.cells[0])
        for made in (campaign(tmp_path), campaign(tmp_path), campaign(tmp_path, steps=4))
    ]
    assert keys[0] == keys[1] != keys[2]


def test_an_edited_method_changes_the_keys_of_its_own_cells(tmp_path: Path) -> None:
    folder = tmp_path / "methods"
    folder.mkdir()
    text = (ROOT / "methods/keep_all.py").read_text()
    for name in ("first", "second"):
        (folder / f"{name}.py").write_text(text.replace('"keep_all"', f'"{name}"'))

    def keys() -> dict[str, str]:
        base = campaign(tmp_path, methods=["first", "second", "first+second"])
        made = Campaign(base.suite, discover([folder]))
        return {cell.variant.method: made.key(cell) for cell in made.cells}

    before = keys()
    with (folder / "second.py").open("a") as file:
        file.write("# edited\n")
    after = keys()
    assert {name for name in after if after[name] != before[name]} == {"second", "first+second"}


def test_a_bundle_holds_what_the_time_limit_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceed the 60 minutes"):
        _ = campaign(tmp_path, cell_minutes=90).bundles
    assert campaign(tmp_path, cell_minutes=50).bundles["keep_all.1x2.0"].minutes == 55


def test_resources_of_one_and_of_several_nodes(tmp_path: Path) -> None:
    path = site_file(tmp_path, gres="gpu", partition="p", nodes=4, cpus_per_node=2)
    one = campaign(tmp_path, path, gpus=2)
    (alone, *_) = (executed_resources(one.site, bundle) for bundle in one.bundles.values())
    assert (alone["gres"], alone["nodes"], alone["mpi"], alone["tasks"]) == ("gpu:2", 1, None, None)
    assert alone["qos"] is None
    two = campaign(tmp_path, path, gpus=4)
    (both, *_) = (executed_resources(two.site, bundle) for bundle in two.bundles.values())
    assert (both["nodes"], both["tasks"], both["mpi"]) == (2, 2, "srun")
    assert both["tasks_per_gpu"] == 0, "or the executor passes --ntasks-per-gpu beside --ntasks"


def test_the_command_of_a_cell_is_what_a_person_types(tmp_path: Path) -> None:
    words = execute_words(campaign(tmp_path).cells[0])
    assert words[0] == "keep_all"
    assert words[words.index("--seq-len") + 1] == "64"
    assert "--no-sp" not in words


def test_several_nodes_start_by_srun_in_node_order() -> None:
    spans = Allocation(nodes=2, gpus_per_node=4, job_id="7")
    command = torchrun(spans, ["module"])
    assert command[:3] == ["srun", "--nodes", "2"]
    assert '--node-rank="$SLURM_NODEID"' in command[-1]
    local = torchrun(Allocation(nodes=2, gpus_per_node=4), ["module"])
    assert "--nproc-per-node=8" in local


# ---- before submitting


def test_a_budget_refuses_and_names_the_largest(tmp_path: Path) -> None:
    path = site_file(tmp_path, gres="gpu", nodes=4)
    made = campaign(tmp_path, path)
    rows = submissions(made, Store(tmp_path / "store"))
    assert [row.gpus for row in rows] == [2, 2]
    assert all(0 < row.gpu_hours < row.most_gpu_hours for row in rows)
    with pytest.raises(CommandError, match=r"exceed max_gpu_hours 0\.01"):
        refuse(made, rows, max_gpu_hours=0.01, ask_slurm=False)
    refuse(made, rows, max_gpu_hours=10.0, ask_slurm=False)


def test_more_nodes_than_the_site_has_are_refused(tmp_path: Path) -> None:
    made = campaign(tmp_path, site_file(tmp_path, nodes=2), gpus=8)
    rows = submissions(made, Store(tmp_path / "store"))
    with pytest.raises(CommandError, match=r"needs 4 nodes; .* allows 2"):
        refuse(made, rows, max_gpu_hours=0.0, ask_slurm=False)


@pytest.mark.parametrize(
    ("slurm", "nodes", "words"),
    [
        ({"partition": "p"}, [node()], "no partition p (known: main)"),
        ({}, [node(up=False)], "it is not up"),
        ({}, [node(minutes=5)], "allows 5"),
        ({"gres": "gpu:h800"}, [node()], "gpu:h800; the default partition has 0 such of 1"),
        ({"mem_mb_per_node": 5000}, [node()], "5000 MB of memory"),
        ({"cpus_per_node": 9}, [node()], "9 CPUs"),
        ({"gres": "gpu"}, [node(gres="gpu:1")], "2 gpu;"),
    ],
)
def test_what_no_node_holds_is_refused(
    tmp_path: Path, slurm: dict[str, Any], nodes: list[Node], words: str
) -> None:
    made = campaign(tmp_path, site_file(tmp_path, **slurm))
    bundle = next(iter(made.bundles.values()))
    with pytest.raises(CommandError) as error:
        check_partition(made, bundle, nodes)
    assert words in str(error.value)


def test_what_a_node_holds_passes(tmp_path: Path) -> None:
    made = campaign(tmp_path, site_file(tmp_path, gres="gpu", cpus_per_node=8))
    for gres in ("gpu:2", "gpu:h800:2(S:0-1)", "nic:1,gpu:a:1,gpu:b:1"):
        check_partition(made, next(iter(made.bundles.values())), [node(gres=gres)])


@pytest.mark.parametrize(
    ("text", "value"),
    [("infinite", UNLIMITED), ("1-00:00:00", 1440), ("2-3", 3060), ("12:00", 12), ("1:30:00", 90)],
)
def test_time_limits(text: str, value: int) -> None:
    assert minutes(text) == value


# ---- on the node

FACTS = NodeFacts(
    host="n1",
    kernel="k",
    memory_bytes=100,
    available_bytes=90,
    cgroup_bytes=50,
    memlock_bytes=10,
    cpus=2,
    numa_nodes=2,
    numa_cpus={"node0": 2, "node1": 0},
    gpu_numa={"0000:01:00.0": 1},
)


def test_pinned_bytes_against_memory_and_control_group() -> None:
    assert not shortages(FACTS, 50)
    assert "cgroup limit" in " ".join(shortages(FACTS, 51))
    assert len(shortages(FACTS, 96)) == 2, "memory less what the system needs"
    assert any("ulimit -l" in text for text in oddities([FACTS], 11))


def test_a_slow_device_and_a_far_gpu_are_named() -> None:
    def rated(host: str, rate: float) -> NodeFacts:
        canary: list[dict[str, float | str]] = [{"device": "gpu 0", "gemm_flop_per_s": rate}]
        return msgspec.structs.replace(FACTS, host=host, canary=canary)

    found = oddities([rated("n1", 100.0), rated("n2", 99.0), rated("n3", 50.0)])
    assert [text for text in found if "median" in text] == [
        "n3: gpu 0: gemm_flop_per_s is 51 % of the median"
    ]
    assert sum("no CPU of NUMA node 1" in text for text in found) == 3


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "cg/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "cg/job/memory.max").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert cgroup_limit(tmp_path / "cg", own) == 1000


# ---- a bundle's cells

FAKE = """
import os, sys, time
from pathlib import Path
kind, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
if kind == "ok":
    out.write_text('{"status": "ok", "reason": "", "losses": [1.0]}')
elif kind == "oom":
    out.write_text('{"status": "failed", "reason": "rank 0: Error: Connection closed by peer"}')
    (out.parent / "record.json.error.1").write_text("failed\\nDistBackendError: timed out\\n")
    (out.parent / "record.json.error.3").write_text("oom\\nOutOfMemoryError: 2 GiB wanted\\n")
    sys.exit(1)
elif kind == "nan":
    out.write_text('{"status": "failed", "reason": "nan: loss of step 0 is nan"}')
    sys.exit(1)
elif kind == "killed":
    out.write_text('{"status": "failed", "reason": "rank 0: Error: Connection closed by peer"}')
    sys.stderr.write("exitcode: -9 (pid: 7)\\n")
    sys.exit(1)
elif kind == "hangs":
    time.sleep(600)
elif kind == "preempted":
    os.kill(os.getppid(), 15)
    time.sleep(600)
else:
    sys.exit("ValueError: no good")
"""


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]) -> None:
    """Cells end as told, by method."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def command(allocation: Allocation, words: list[str]) -> list[str]:
        return [sys.executable, str(script), kinds[next(w for w in words if w in kinds)], *words]

    monkeypatch.setattr(runner_module, "torchrun", command)
    monkeypatch.setattr(runner_module, "all_facts", lambda *_: [FACTS])


def run(made: Campaign, method: str, folder: Path, **more: Any) -> tuple[Any, str]:
    """A bundle's records, and what it said."""
    said: list[str] = []
    store = Store(folder, is_final=is_final)
    allocation = Allocation(nodes=1, gpus_per_node=2)
    bundle = made.bundle(f"{method}.1x2.0")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        records = Runner(made, bundle, store, allocation, say=said.append, **more).run()
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    return records, " ".join(said)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("ok", "ok", ""),
        ("oom", "oom", "OutOfMemoryError"),
        ("killed", "oom", "signal 9"),
        ("nan", "nan", "loss of step 0"),
        ("broken", "failed", "no good"),
    ],
)
def test_every_end_of_a_cell_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str, words: str
) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": kind})
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert (record.status, record.final, record.attempts) == (status, True, 1)
    assert words in record.reason
    assert [host.host for host in record.hosts] == ["n1"]


def test_a_cell_over_its_limit_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": "hangs"})
    real = runner_module.run_limited
    monkeypatch.setattr(runner_module, "run_limited", lambda w, log, _, s: real(w, log, 0.5, s))
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert record.status == "timeout"


def test_a_failing_cell_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [{"method": "keep_all", "name": "again"}]
    made = campaign(tmp_path, methods=["keep_all"], variants=variants)
    fake(tmp_path, monkeypatch, {"keep_all": "broken"})
    records, _ = run(made, "keep_all", tmp_path / "store")
    assert [record.status for record in records] == ["failed", "failed"]


def test_a_preempted_cell_is_tried_again_and_then_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": "preempted"})
    for attempt in range(1, MAX_ATTEMPTS + 1):
        records, said = run(made, "keep_all", tmp_path / "store")
        assert records is None
        assert "SIGTERM" in said
        (path,) = (tmp_path / "store").glob("*.json")
        record = decode(path.read_bytes())
        assert (record.status, record.attempts) == ("preempted", attempt)
        assert record.final == (attempt == MAX_ATTEMPTS)
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert record.status == "preempted", "now a result: it stops no other cell"


def test_a_failing_node_check_is_no_cells_result_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": "ok"})

    def broken(*_: object) -> list[NodeFacts]:
        raise RuntimeError("the node check failed: no such node")

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "all_facts", broken)
        records, said = run(made, "keep_all", tmp_path / "store")
    assert records is None
    assert "no such node" in said
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert (record.status, record.attempts) == ("ok", 2)


def test_a_finished_cell_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": "ok"})
    run(made, "keep_all", tmp_path / "store")
    fake(tmp_path, monkeypatch, {"keep_all": "broken"})
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert record.status == "ok"


def test_pinned_bytes_that_do_not_fit_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = campaign(tmp_path)
    fake(tmp_path, monkeypatch, {"keep_all": "ok"})
    monkeypatch.setattr(runner_module, "host_bytes", lambda *_: 96)
    (record,), _ = run(made, "keep_all", tmp_path / "store")
    assert record.status == "failed"
    assert record.reason.startswith("not started: n1: memory")


def test_resume_without_slurm_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Snakefile").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["resume", "smoke"])
    assert isinstance(done.exception, CommandError)
    assert "no Slurm here: squeue is not on PATH" in str(done.exception)
