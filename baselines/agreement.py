"""Losses and gradient norms of three engines on the same weights and batch: records, and a table.

python baselines/agreement.py FOLDER   runs them (minutes) and writes FOLDER/*.json and agreement.md
"""

import sys
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import msgspec  # noqa: E402  # after the path of the checkout

from rematbench.baselines import job, policy, run_jobs  # noqa: E402
from rematbench.cluster import Cluster  # noqa: E402
from rematbench.layout import Layout  # noqa: E402
from rematbench.load import load_cluster, load_model  # noqa: E402
from rematbench.problem import Problem  # noqa: E402
from rematbench.record import Record, write_record  # noqa: E402
from rematbench.suite import make_problem  # noqa: E402
from rematbench.torch.case import Case  # noqa: E402
from rematbench.torch.launch import execute_cases  # noqa: E402
from rematbench.torch.parameters import AdamW  # noqa: E402
from rematbench.workload import Precision  # noqa: E402

Row = tuple[str, dict[str, Any], dict[str, Any]]
MEGATRON: tuple[Row, ...] = (
    ("one", {}, {}),
    ("one-full", {}, {"recompute": "full"}),
    ("one-offload", {}, {"offload_modules": ["core_attn", "mlp_norm"]}),
    ("tp2", {"tp": 2}, {}),
    ("cp2", {"cp": 2}, {}),
    ("pp2", {"pp": 2}, {}),
    ("dp2", {"dp": 2}, {}),
)
DEEPSPEED: tuple[Row, ...] = (
    ("zero1", {}, {}),
    ("one-tiled", {}, {"mlp_tiles": 2, "loss_tiles": 4}),
    ("dp2-zero0", {"dp": 2, "zero_stage": 0}, {}),
    ("dp2-zero2", {"dp": 2, "zero_stage": 2}, {}),
    ("dp2-zero3", {"dp": 2, "zero_stage": 3}, {"checkpointing": "plain"}),
    ("ulysses2", {"dp": 2, "ulysses": 2}, {}),
)
BASELINES = {"megatron_core": MEGATRON, "deepspeed": DEEPSPEED}
STEPS = 2


def problem(layout: dict[str, Any], precision: Precision) -> Problem:
    """tiny-llama, 64 tokens, four sequences a step, on one-GPU nodes."""
    cluster: Cluster = msgspec.structs.replace(load_cluster("h800-80gb"), gpus_per_node=1)
    return make_problem(
        model=load_model("tiny-llama"),
        cluster=cluster,
        system="deepspeed" if "ulysses" in layout else "rematbench",
        layout=Layout(**{"global_batch": 4, **layout}),
        seq_len=64,
        precision=precision,
    )


def reference(precision: Precision) -> tuple[float, float]:
    """(loss, gradient norm) of the first step in the project's executor."""
    made = problem({}, precision)
    case = Case(
        name="executor",
        problem=made,
        plan=made.base_plan,
        steps=STEPS,
        measure=False,
        optimizer=AdamW(weight_decay=0.0),
    )
    (result,) = execute_cases([case])
    norms = result.gradient_norms[0].values()
    return result.losses[0], sum(v * v for v in norms) ** 0.5


def records(name: str, precision: Precision) -> list[Record]:
    """A baseline's records, in the order of its rows."""
    jobs = [
        job(problem(layout, precision), policy(name, settings), steps=STEPS)
        for _, layout, settings in BASELINES[name]
    ]
    return run_jobs(name, jobs)


def main(folder: Path) -> None:
    """Run everything; lines go to the table as they come."""
    lines = [
        "| engine | case | precision | loss | gradient norm | loss, relative | norm, relative |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for precision in ("fp32", "bf16"):
        assert precision in get_args(Precision)
        loss, norm = reference(precision)
        lines.append(f"| executor | one | {precision} | {loss:.7f} | {norm:.7f} | | |")
        for name, rows in BASELINES.items():
            for (case, _, _), record in zip(rows, records(name, precision), strict=True):
                write_record(record, folder / f"{name}-{case}-{precision}.json")
                lines.append(_line(name, case, precision, record, (loss, norm)))
        (folder / "agreement.md").write_text("\n".join(lines) + "\n")


def _line(name: str, case: str, precision: str, record: Record, wanted: tuple[float, float]) -> str:
    seen = record.observed
    if seen is None:
        return f"| {name} | {case} | {precision} | {record.status}: {record.reason} | | | |"
    loss, norm = seen.losses[0], seen.gradient_norm[0]
    errors = (abs(loss / wanted[0] - 1), abs(norm / wanted[1] - 1))
    words = " | ".join(f"{error:.1e}" for error in errors)
    return f"| {seen.label} | {case} | {precision} | {loss:.7f} | {norm:.7f} | {words} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
