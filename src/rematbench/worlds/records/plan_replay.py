"""Replay a record: evaluate its problem and plan again, for stages and the timeline."""

from pathlib import Path

from msgspec import Struct

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import Program
from rematbench.evaluate.evaluation import PlanEvaluation, evaluate_program
from rematbench.evaluate.evaluator import reserved
from rematbench.evaluate.problems import make_problem
from rematbench.host.declared import facts, flat
from rematbench.host.table import GIB
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job
from rematbench.inputs.load import Kind, load_cluster, load_system, names
from rematbench.inputs.system import System
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.workload import Workload
from rematbench.worlds.records.record import Record, RecordError, RunSpec, read_record, same_content


class Replay(Struct, frozen=True, kw_only=True):
    """A plan evaluated again from its record; `evaluation` has the intervals of actions only if a
    timeline was requested."""

    title: str
    problem: Problem
    plan: Plan
    program: Program
    evaluation: PlanEvaluation


def replay(path: Path, *, cluster: str = "", system: str = "", timeline: bool = False) -> Replay:
    """Evaluate the plan of a record file; RecordError if the record has no plan or its inputs have
    changed. `cluster` and `system` are files for a cluster and a stack that config/ does not have;
    if they are not given, NAME.yaml in the record's folder is read."""
    record = read_record(path)
    own: dict[Kind, str] = {"cluster": record.spec.cluster, "system": record.spec.system}
    found = {"cluster": cluster, "system": system}
    for kind, name in own.items():
        beside = path.with_name(f"{name}.yaml")
        if not found[kind] and name not in names(kind) and beside.is_file():
            found[kind] = str(beside)
    if record.plan is None:
        raise RecordError(f"run {record.run_id} has no plan ({record.status}: {record.reason})")
    problem = recorded_problem(record, **found)
    return replay_plan(problem, record.plan, record.spec.method, timeline=timeline)


def replay_plan(problem: Problem, plan: Plan, method: str, *, timeline: bool = False) -> Replay:
    program = lower(plan, problem)
    evaluation = evaluate_program(problem, plan, program, record=timeline)
    work, alpha = problem.workload, plan.fit.get("alpha")
    over = reserved(problem, program, evaluation.ranks).nbytes - problem.usable_bytes
    words = (
        method if alpha is None else f"{method} alpha {float(alpha):.3g}",
        work.model.name,
        f"{work.seq_len:,} tokens",
        f"{problem.layout.gpus} x {problem.cluster.gpu}",
        f"does not fit by {over / GIB:.1f} GiB" if over > 0 else "",
    )
    return Replay(
        title=", ".join(word for word in words if word),
        problem=problem,
        plan=plan,
        program=program,
        evaluation=evaluation,
    )


def recorded_problem(record: Record, cluster: str = "", system: str = "") -> Problem:
    """The problem of a record; RecordError if cluster, system or constants have changed."""
    spec = record.spec
    try:
        here, stack = load_cluster(cluster or spec.cluster), load_system(system or spec.system)
    except ConfigError as error:
        files = "pass its file with --cluster or --system"
        raise RecordError(f"run {record.run_id}: {error}; {files}") from error
    problem = spec_problem(spec, here, stack)
    rates = problem.calibration.hashed_for(here.generation)
    now = {"cluster": problem.cluster, "system": problem.system, "calibration": rates}
    for what, value in now.items():
        if not same_content(value, getattr(spec, f"{what}_hash")):
            text = f"its {what} has changed since the run; simulate it again"
            raise RecordError(f"run {record.run_id} cannot be replayed: {text}")
    return problem


def spec_problem(spec: RunSpec, cluster: str | Cluster = "", system: str | System = "") -> Problem:
    """The problem of a spec, made from the present config/. `cluster` and `system` (names, files or
    values) replace those of the spec."""
    work = {name: getattr(spec, name) for name in facts(Workload)}
    there = {"cluster": cluster or spec.cluster, "system": system or spec.system}
    return make_problem(Job.at(spec.layout, **work, **there, **flat(spec.stack)))
