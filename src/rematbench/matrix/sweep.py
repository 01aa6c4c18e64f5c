"""The grand matrix, simulated: every arm at one layout, and every arm at its best layout.

The two tables are never mixed: the first isolates the effect of a method, the second has the
layouts that a user would run.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rematbench.host.garbage import collect_rarely
from rematbench.matrix.cell import Cell, Programs, Tried
from rematbench.matrix.layouts import Candidate, candidates
from rematbench.matrix.spec import MatrixSpec, Work
from rematbench.plugins.registry import Composition, Registry
from rematbench.simulate.breakdown import busiest
from rematbench.spec.configfile import ConfigError
from rematbench.spec.load import load_cluster, load_model, load_system

SAME, BEST = "same layout", "best layout"
TABLES = (SAME, BEST)
NOT_RUN = "not run"
DEGREES = ("tp", "cp", "pp", "vpp", "dp")
NOTHING = "no candidate layout holds even the states"

Line = dict[str, Any]
Result = tuple[Line, Tried | None]


def run_matrix(
    spec: MatrixSpec,
    registry: Registry,
    models: Sequence[str] = (),
    seq_lens: Sequence[int] = (),
) -> Iterator[tuple[list[Line], list[Line]]]:
    """(result lines, candidate lines) of every cell.  `models`, `seq_lens`: only the cells with
    these values (empty: all).  ConfigError for a value that the matrix does not declare."""
    collect_rarely()
    works = {work.model: work for work in spec.works}
    _check_known("models", models, works)
    _check_known("seq_lens", seq_lens, spec.seq_lens)
    for name in models or works:
        for seq_len in seq_lens or spec.seq_lens:
            programs = Programs()
            for cluster in spec.clusters:
                yield run_cell(spec, registry, works[name], cluster, seq_len, programs)


def _check_known(key: str, wanted: Iterable[object], known: Collection[object]) -> None:
    for value in wanted:
        if value not in known:
            raise ConfigError(
                "", f"matrix: {key}", f"no {value!r} (known: {', '.join(map(str, known))})"
            )


def run_cell(
    spec: MatrixSpec, registry: Registry, work: Work, cluster: str, seq_len: int, programs: Programs
) -> tuple[list[Line], list[Line]]:
    """The result lines of a cell for both tables, and the lines of its candidates."""
    model, machine = load_model(work.model), load_cluster(cluster)
    listed = candidates(spec, work, model, machine, load_system(spec.system), seq_len)
    where = {"model": work.model, "cluster": cluster, "gpus": work.gpus, "seq_len": seq_len}
    told = [_candidate_line(where, candidate) for candidate in listed]
    cell = Cell(listed, programs, registry)
    results = _results(spec, registry, cell, where)
    for table in TABLES:
        _add_parts([result for result in results if result[0]["table"] == table], programs)
    return [line for line, _ in results], told


def _results(spec: MatrixSpec, registry: Registry, cell: Cell, where: Line) -> list[Result]:
    arms = {arm.name: (arm, arm.resolved(registry)) for arm in spec.all_arms(registry)}
    shared = _shared(spec, cell, arms[spec.baseline][1])
    results: list[Result] = []
    for arm, method in arms.values():
        head = {**where, "arm": arm.name, "of": arm.of, "method": method.name}
        if arm.seq_lens and where["seq_len"] not in arm.seq_lens:
            results += [({"table": table, **head, "status": NOT_RUN}, None) for table in TABLES]
            continue
        one = cell.timed(cell.weighed(shared, arm.name, method)) if shared else None
        best, count = (one, 1) if arm.one_layout else cell.best(arm.name, method)
        results.append(({"table": SAME, **head, **_result(one, 1)}, one))
        results.append(({"table": BEST, **head, **_result(best, count)}, best))
    return results


def _shared(spec: MatrixSpec, cell: Cell, baseline: Composition) -> Candidate | None:
    """The candidate with the one layout of the cell: the baseline's best candidate with at least
    `same_layout_pp` pipeline ranks; where the baseline fits at none of these, its best candidate;
    where the baseline fits nowhere, the candidate that misses the fewest bytes.  None where the
    cell has no candidate."""
    found = [
        cell.best(spec.baseline, baseline, least_pp=least_pp)[0]
        for least_pp in (spec.same_layout_pp, 1)
    ]
    known = [tried for tried in found if tried is not None]
    fitting = [tried for tried in known if tried.status == "ok"]
    return next((tried.candidate for tried in (*fitting, *known)), None)


def _candidate_line(where: Line, candidate: Candidate) -> Line:
    fate = {"fate": candidate.fate, "estimated_step_s": candidate.estimated_s}
    return {**where, **_layout(candidate), **fate}


def _layout(candidate: Candidate) -> Line:
    lay = candidate.layout
    degrees = {key: getattr(lay, key) for key in DEGREES}
    return {**degrees, "micro_batches": lay.num_micro_batches, "global_batch": lay.global_batch}


def _result(tried: Tried | None, count: int) -> Line:
    """The columns of an arm at a candidate (None: the cell has no candidate)."""
    if tried is None:
        return {"status": "oom", "reason": NOTHING, "tried": 0}
    line: Line = {"status": tried.status, "reason": tried.reason, "tried": count}
    line |= _layout(tried.candidate)
    problem, plan, weight = tried.candidate.problem, tried.plan, tried.weight
    if problem is None or plan is None or weight is None:
        return line
    line |= {
        "alpha": plan.fit.get("alpha"),
        "peak_device_bytes": weight.peak_bytes,
        "reserved_bytes": weight.reserved_bytes,
        "usable_bytes": problem.usable_bytes,
        "headroom_bytes": problem.usable_bytes - weight.reserved_bytes,
        "host_node_bytes": weight.host_node_bytes,
        "host_headroom_bytes": problem.cost.host_room_bytes - weight.host_node_bytes,
    }
    line |= {f"{where}_short_bytes": short for where, short in weight.missing(problem).items()}
    found = tried.evaluation
    if found is None:
        return line
    busy, _ = busiest(found.simulation)
    return line | {
        "step_s": found.step_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "mfu_causal": found.mfu_causal,
        "mfu_dense": found.mfu_dense,
        "hfu": found.hfu,
        "recompute_flop": found.recompute_flop,
        "offload_bytes": found.offload_bytes,
        "idle_share": 1.0 - busy / found.step_s,
    }


def _add_parts(results: list[Result], programs: Programs) -> None:
    """Add the parts of the step, as shares, to the line of the fastest fitting arm."""
    fitting = [(line, tried) for line, tried in results if tried and tried.evaluation]
    if not fitting:
        return
    line, tried = max(fitting, key=lambda result: result[1].speed)
    problem, plan = tried.candidate.problem, tried.plan
    assert problem is not None
    assert plan is not None
    parts = programs.parts(problem, plan)
    line |= {f"part_{name}": seconds / line["step_s"] for name, seconds in parts.items()}
