"""Losses and gradient norms of three engines (our executor, Megatron-core, DeepSpeed) that train
the same weights on the same batches.

Rows differ in the degrees of the layout, in what ZeRO shards and in settings of the policy. Batch
and seed are the same, so every row is compared with the executor's first row of the same precision.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY
from rematbench.problem import Problem
from rematbench.workload import Precision
from rematbench.worlds.packages.process import (
    BaselineError,
    Device,
    baselines,
    job,
    policy,
    run_jobs,
)
from rematbench.worlds.records.measured import BOUNDS, Engine, Measured, whole_norms
from rematbench.worlds.records.record import Record, provenance, run_spec

STEPS = 2
EXECUTOR = "executor"
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


class Row(NamedTuple):
    """One run of an engine: its name in the table, and the fields of its layout and the settings of
    its policy that differ from the defaults."""

    name: str
    layout: dict[str, Any]
    settings: dict[str, Any]


ROWS: dict[str, tuple[Row, ...]] = {
    EXECUTOR: (Row("one", {}, {}), Row("dp2-zero3", {"dp": 2, "zero_stage": 3}, {})),
    "megatron_core": (
        Row("one", {}, {}),
        Row("one-full", {}, {"recompute": "full"}),
        Row("one-offload", {}, {"offload_modules": ["core_attn", "mlp_norm"]}),
        Row("tp2", {"tp": 2}, {}),
        Row("cp2", {"cp": 2}, {}),
        Row("pp2", {"pp": 2}, {}),
        Row("dp2", {"dp": 2}, {}),
    ),
    "deepspeed": (
        Row("zero1", {}, {}),
        Row("one-tiled", {}, {"mlp_tiles": 2, "loss_tiles": 4}),
        Row("dp2-zero0", {"dp": 2, "zero_stage": 0}, {}),
        Row("dp2-zero2", {"dp": 2, "zero_stage": 2}, {}),
        Row("dp2-zero3", {"dp": 2, "zero_stage": 3}, {"checkpointing": "plain"}),
        Row("dp2-zero3-offload", {"dp": 2, "zero_stage": 3}, {"offload_optimizer": True}),
        Row("ulysses2", {"dp": 2, "ulysses": 2}, {}),
        Row("ulysses2-zero3", {"dp": 2, "ulysses": 2, "zero_stage": 3}, {}),
    ),
}


def problem(layout: dict[str, Any], precision: Precision) -> Problem:
    """The problem of a run: tiny-llama, 64 tokens, nodes with one GPU, four sequences per step
    (unless `layout` sets another number)."""
    spec = Job.at(
        Layout(**{"global_batch": 4, **layout}),
        model="tiny-llama",
        cluster=replace(load_cluster("h800-80gb"), gpus_per_node=1),
        system="deepspeed" if "ulysses" in layout else "rematbench",
        seq_len=64,
        precision=precision,
    )
    return make_problem(spec)


def agreement_records(device: Device = "cpu", gpus: int = 0) -> Iterator[tuple[str, Record]]:
    """Yield (file name without suffix, record) for every engine and precision as soon as the run
    has ended. torch and the packages must be installed. On CUDA all rows run at the same time,
    except rows that need more than `gpus` GPUs, which are left out. BaselineError if an engine
    gives no record; on CUDA it comes after the records of the other engines."""
    if device == "cpu":
        for precision in PRECISIONS:
            for engine, rows in ROWS.items():
                yield from _engine(engine, precision, rows, device).items()
        return
    discover()  # both are loaded once, before the threads read them
    baselines()
    asked = [
        (engine, precision, [row], device)
        for precision in PRECISIONS
        for engine in ROWS
        for row in _rows(engine, device, gpus)
    ]
    broken: list[BaselineError] = []
    with ThreadPoolExecutor(len(asked)) as pool:
        for run in as_completed([pool.submit(_engine, *one) for one in asked]):
            try:
                yield from run.result().items()
            except BaselineError as error:
                broken.append(error)
    if broken:
        raise broken[0]


def _rows(engine: str, device: Device, gpus: int) -> list[Row]:
    return [row for row in ROWS[engine] if device == "cpu" or Layout(**row.layout).gpus <= gpus]


def _engine(
    engine: str, precision: Precision, rows: Sequence[Row], device: Device
) -> dict[str, Record]:
    if engine == EXECUTOR:
        records = [executor_record(problem(row.layout, precision), device) for row in rows]
    else:
        options: dict[str, Any] = {"steps": STEPS, "timed_steps": 0, "device": device}
        jobs = [
            job(problem(row.layout, precision), policy(engine, row.settings), **options)
            for row in rows
        ]
        records = run_jobs(engine, jobs)
    return {
        record_name(engine, row, precision): record
        for row, record in zip(rows, records, strict=True)
    }


def record_name(engine: str, row: Row, precision: Precision) -> str:
    return f"{engine}-{row.name}-{precision}"


def disagreements(records: dict[str, Record]) -> dict[str, str]:
    """The reason why a record disagrees with the executor's record of the same precision, by record
    name: its status is not ok, or its first loss or the norm of its first whole gradient differs by
    more than the bound. KeyError if the executor's record is missing."""
    wrong = {}
    for precision in PRECISIONS:
        base = records[f"{EXECUTOR}-{ROWS[EXECUTOR][0].name}-{precision}"].measured
        for name, record in records.items():
            if record.spec.precision != precision:
                continue
            seen = record.measured
            if base is None or seen is None:
                wrong[name] = f"{record.status}: {record.reason}"
                continue
            loss, norm = seen.first_errors(base)
            bound = BOUNDS[precision]
            if not (loss <= bound and norm <= bound):
                apart = f"loss by {loss:.1e}, gradient norm by {norm:.1e}"
                wrong[name] = f"differs from the executor: {apart} (bound {bound:g})"
    return wrong


def executor_record(target: Problem, device: Device = "cpu", steps: int = STEPS) -> Record:
    from rematbench.worlds.torch import rank_processes as torch_job  # noqa: PLC0415  # torch is optional
    from rematbench.worlds.torch.case import Case  # noqa: PLC0415
    from rematbench.worlds.torch.rank_processes import execute_cases  # noqa: PLC0415

    case = Case(
        name=EXECUTOR,
        problem=target,
        plan=target.base_plan,
        steps=steps,
        measure=False,
        device=device,
        timed_steps=0,
    )
    (result,) = execute_cases([case])
    spec = run_spec(target, discover().resolve(IDENTITY, {}), "executed")
    versions = torch_job.versions(device)
    engine = Engine(
        label="rematbench executor",
        stack={"torch": versions["torch"]},
        device=versions["device"] if device == "cuda" else "cpu",
    )
    seen = Measured(
        losses=tuple(result.losses),
        gradient_norms=whole_norms(result.gradient_norms),
        parameter_norms=tuple(result.gradient_norms),
    )
    ok = result.status == "ok"
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status="ok" if ok else "failed",
        reason=result.reason,
        measured=seen if ok else None,
        engine=engine if ok else None,
        provenance=provenance(),
    )
