"""What a person types: one clear line for a mistake, results for out of memory and unsupported."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from rematbench.cli.app import COMMANDS, WORKFLOW, word
from rematbench.cli.doctor import cluster_yaml
from rematbench.worlds.records.record import read_record
from tests.tables import tables
from tests.typed import typed

DEMO = [
    *("--model", "llama-7b", "--cluster", "a800-80gb", "--gpus", "4"),
    *("--seq-len", "4096", "--global-batch", "8"),
]
FIT = ["--cluster", "h100-80gb", "--seq-len", "4096"]
PIPE = [*DEMO, "--system", "megatron-kwai", "--pp", "4", "--vpp", "2"]
KEYS = """
allocator_retries band fits step_s tokens_per_s_per_gpu mfu_causal mfu_dense hfu peak_device_bytes
peak_host_bytes recompute_flop offload_bytes parameters headroom_bytes binds status reason job
run_with reserved_bytes device_total_bytes device_total_checked
"""


def words_of(places: Iterable[str]) -> list[str]:
    return [word(place) for place in places]


@pytest.mark.parametrize("command", words_of((*COMMANDS, *WORKFLOW)))
def test_every_command_has_help_with_an_example(command: str) -> None:
    ran = typed(command, "--help")
    assert ran.code == 0
    example, _, _ = ran.out.partition("Example:")[2].partition("Options:")
    assert f"rematbench {command}" in example
    if command in words_of(COMMANDS):  # a person has no checkout
        places = ("results/", "config/", "src/", "tests/")
        assert not [path for path in places if path in example]


def listed(text: str) -> list[str]:
    """The commands of a help text, in its order."""
    lines = text.partition("Commands:")[2].partition("\n\n")[0].splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].strip()]


NAMES = """
methods plan simulate compare timeline stages predict validate calibrate doctor flags make
table expect run-cells cells execute trace measure measure-gpu
baseline
"""
"""Names that are a contract."""


def test_help_lists_what_a_person_uses_and_help_all_every_command() -> None:
    short, every = listed(typed("--help").out), listed(typed("--help-all").out)
    assert len(short) == 22
    assert sorted(short) == sorted([*words_of(COMMANDS), "baseline"])
    assert sorted(every) == sorted([*short, *words_of(WORKFLOW)])
    assert set(NAMES.split()) <= set(every)
    assert listed(typed("--help").out) == short  # --help-all changes nothing that lasts
    assert len(every) - 1 + len(listed(typed("baseline", "--help").out)) <= 38


LOADED = """
import sys
from rematbench.cli.app import main
sys.argv[1:] = ["compare", "--help"]
try:
    main()
except SystemExit:
    print(*sorted(sys.modules))
"""


def test_a_command_loads_no_library_that_draws_or_fits_and_no_other_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"numpy", "rematbench.cli.compare"} <= loaded
    assert loaded.isdisjoint({"matplotlib", "pandas", "scipy", "seaborn", "jinja2", "torch"})
    assert loaded.isdisjoint({"rematbench.cli.table", "rematbench.cli.make"})


@pytest.mark.parametrize(("line", "told"), tables(__file__)["mistakes"])
def test_a_mistake_is_one_line_and_exit_code_2(line: str, told: str) -> None:
    short = {"DEMO": DEMO, "FIT": FIT, "PIPE": PIPE}
    ran = typed(*(each for word in shlex.split(line) for each in short.get(word, [word])))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert told in ran.err
    assert ran.err.startswith("rematbench")


def test_json_has_the_agreed_keys() -> None:
    ran = typed(
        "simulate", "balanced_checkpointing+pp_offload", *PIPE, "--set", "alpha=.5", "--json"
    )
    found = json.loads(ran.out)
    assert ran.code == 0
    assert found.keys() == set(KEYS.split())
    assert found["status"] == "ok"
    assert found["parameters"]["pp_offload"]["alpha"] == 0.5
    per_rank = found["peak_device_bytes"]["per_rank"]
    assert found["peak_device_bytes"]["max"] == max(per_rank)
    assert len(per_rank) == 4
    assert found["offload_bytes"] > 0


def test_a_person_reads_the_verdict_first_and_no_op_aloud() -> None:
    ran = typed("simulate", "selective_recompute", *PIPE, "--notes")
    assert ran.code == 0
    verdict, speed = ran.out.index("FITS"), ran.out.index("tokens/s/GPU")
    assert verdict < speed
    assert "MFU, causal" in ran.out
    assert "MFU, dense" in ran.out
    assert "has no effect on this problem" in ran.out
    assert "world: simulated" in ran.out
    assert ran.out.isascii()
    short = typed("simulate", "selective_recompute", *PIPE).out
    assert re.search(r"\n\d+ more notes: --notes$", short.rstrip())
    assert "MFU, dense" not in short


def test_the_bytes_of_ranks_are_drawn(tmp_path: Path) -> None:
    drawn = tmp_path / "ranks.svg"
    assert typed("simulate", "keep_all", *PIPE, "--plot", str(drawn)).code == 0
    text = drawn.read_text()
    assert all(word in text for word in ("rank 3", "optimizer", "FITS: "))
    wrong = typed("simulate", "keep_all", *PIPE, "--plot", str(tmp_path / "ranks.txt"))
    assert "expected a file of .pdf, .png, .svg" in wrong.err


def test_a_recipe_has_bf16_beside_it() -> None:
    job = "--model llama-3.1-8b --cluster h100-80gb --gpus 8 --seq-len 4096 --global-batch 64"
    words = ["simulate", "keep_all", *job.split(), "--tp", "2", "--recipe", "fp8"]
    told = " ".join(typed(*words).out.split())
    assert re.search(
        r"in bf16 without its recipe: step .* times as fast with it\); .* GiB in all", told
    )
    found = json.loads(typed(*words, "--json").out)
    assert found["without_recipe"]["step_s"] > found["step_s"]


def test_partition_moves_layers() -> None:
    sizes = "3,4,4,5,3,4,4,5"
    ran = typed("plan", "keep_all", *PIPE, "--partition", sizes, "--rank", "3", "--json")
    partition = json.loads(ran.out)["partition"]
    assert [len(chunks[0]) for chunks in partition] == [3, 4, 4, 5]
    assert partition[3][1] == [27, 28, 29, 30, 31]


def test_another_partition_is_another_run(tmp_path: Path) -> None:
    ids = set()
    for number, sizes in enumerate(("4,4,4,4,4,4,4,4", "3,4,4,5,3,4,4,5")):
        path = tmp_path / f"{number}.json"
        typed("simulate", "keep_all", *PIPE, "--partition", sizes, "--out", str(path))
        ids.add(read_record(path).run_id)
    assert len(ids) == 2


def test_gpipe_takes_as_long_and_keeps_every_micro_batch() -> None:
    found = []
    for more in ((), ("--gpipe",)):
        options = (*PIPE[: PIPE.index("--vpp")], *PIPE[PIPE.index("--vpp") + 2 :], *more)
        found.append(json.loads(typed("simulate", "keep_all", *options, "--json").out))
    assert (
        found[1]["peak_device_bytes"]["per_rank"][-1]
        > 2 * found[0]["peak_device_bytes"]["per_rank"][-1]
    )
    assert found[1]["step_s"] == pytest.approx(found[0]["step_s"], rel=0.05)


@pytest.mark.parametrize("mine", [False, True])
def test_a_record_is_replayed_as_stages_and_trace(tmp_path: Path, mine: bool) -> None:
    """Also where its stack is a file beside it."""
    record, trace, stages = (tmp_path / name for name in ("run.json", "trace.json", "stages.csv"))
    stack = tmp_path / "mine.yaml"
    stack.write_text("name: mine\nversion: '1'\nbase: megatron-core\n")
    more = ["--system", str(stack)] if mine else []
    assert typed("simulate", "keep_all", *PIPE, *more, "--out", str(record)).code == 0
    assert read_record(record).status == "ok"
    assert typed("stages", str(record), "-o", str(stages)).code == 0
    assert len(stages.read_text().splitlines()) == 1 + 4
    assert typed("timeline", str(record), "-o", str(trace)).code == 0
    step_s = json.loads(trace.read_text())["otherData"]["step_s"]
    assert step_s == pytest.approx(read_record(record).repeats[0].step_s, rel=1e-9)


def test_doctor_writes_a_cluster_file_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert typed("doctor", "--write", str(path)).code == 0
    again = typed("doctor", "--write", str(path))
    assert again.code == 2
    assert "exists" in again.err
    ran = typed("simulate", "keep_all", *DEMO, "--cluster", str(path), "--gpus", "8")
    assert ran.code == 0
    assert "(mine)" in ran.out


@pytest.mark.parametrize(("gpu", "told"), tables(__file__)["generations"])
def test_doctor_takes_a_generation_from_files_of_such_gpus(gpu: str, told: str) -> None:
    text = cluster_yaml("mine", [(gpu, 80 << 30)])
    assert told in text
    assert ("hbm_bytes_per_s:\n  value: 2.04e+12" in text) is ("A100" in gpu)


def test_a_sheet_keeps_its_bad_rows(tmp_path: Path) -> None:
    sheet, out = tmp_path / "rows.csv", tmp_path / "pred.csv"
    head = "model,system,cluster,gpus,seq_len,global_batch,tp,pp,dp,recompute\n"
    good = "llama-7b,megatron-core,a800-80gb,4,4096,8,2,1,2,full\n"
    bad = "llama-7b,megatron-core,a800-80gb,4,4096,8,3,1,2,full\n"
    sheet.write_text(head + good + bad)
    ran = typed("predict", str(sheet), "-o", str(out), "--processes", "1")
    assert ran.code == 0
    lines = out.read_text().splitlines()
    assert ",ok," in lines[1]
    assert ",failed,gpus 4 is not tp x cp x pp x dp = 6" in lines[2]
