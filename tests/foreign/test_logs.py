"""A trainer's log becomes a row with its card, which the commands of sheets read."""

from pathlib import Path

import pytest

from rematbench.evidence.published.sheets import read_sheet
from rematbench.foreign.logs import read_log
from rematbench.inputs.configfile import ConfigError
from tests.typed import typed

MEGATRON = """
 iteration 1/ 9 | elapsed time per iteration (ms): 9000.5 | lm loss: 1.0E+01 |
[Rank 0] memory (MB) | allocated: 200.0 | max allocated: 310.5 | reserved: 330 | max reserved: 330.0
 iteration 2/ 9 | elapsed time per iteration (ms): 8000.0 |
 iteration 3/ 9 | elapsed time per iteration (ms): 7000.0 |
 iteration 4/ 9 | elapsed time per iteration (ms): 7100.0 |
 iteration 5/ 9 | elapsed time per iteration (ms): 7300.0 |
"""
TITAN = "".join(
    f"step: {step}  loss: 7.1  memory: 43.50GiB(45.76%)  tps: {tps}  mfu: 30.1%\n"
    for step, tps in ((1, "900"), (2, "6,000"), (3, "7,400"), (4, "7,500"), (5, "7,700"))
)
TRAINER = "{'train_runtime': 80.0, 'train_steps_per_second': 0.125, 'epoch': 1.0}"


def test_each_trainer_prints_its_median_step_and_largest_peak() -> None:
    peak = {"peak_device_bytes": round(310.5 * 2**20), "peak_kind": "allocated"}
    assert read_log(MEGATRON, "log") == {"step_s": pytest.approx(7.1), **peak}
    peak = {"peak_device_bytes": round(43.5 * 2**30), "peak_kind": "reserved"}
    assert read_log(TITAN, "log") == {"tokens_per_s_per_gpu": 7500.0, **peak}
    assert read_log(TRAINER, "log") == {"step_s": 8.0}
    with pytest.raises(ConfigError, match=r"log: steps: the log prints none of Megatron's"):
        read_log("loss 3.1", "log")


def test_a_row_with_its_card_is_predicted(tmp_path: Path) -> None:
    log, rows, answers = (tmp_path / name for name in ("train.log", "rows.csv", "predicted.csv"))
    log.write_text(MEGATRON)
    words = ["--model", "llama-7b", "--cluster", "a100-80gb", "--gpus", "8", "--tp", "2"]
    words += ["--seq-len", "4096", "--global-batch", "64", "--source", "me", "--gpu", "A100"]
    words += ["--command", "torchrun a.py", "--commit", "v1", "--recompute", "full_recompute"]
    for _ in range(2):
        assert typed("row", str(log), "-o", str(rows), *words).code in (0, None)
    first, second = read_sheet(rows)
    assert first == second
    assert first["note"] == "command torchrun a.py; commit v1; gpu A100"
    assert typed("predict", str(rows), "-o", str(answers), "--processes", "1").code in (0, None)
    assert [row["pred_status"] for row in read_sheet(answers)] == ["ok", "ok"]
