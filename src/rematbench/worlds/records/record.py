"""One run as data: the request (RunSpec) and the result (Record), as JSON files.

All worlds write the same Record: `published` numbers are transcribed, `simulated` numbers come from
the event simulator, `traced` and `executed` numbers from the real code.
"""

import datetime
import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo, asdict, astuple, fields, replace

import rematbench
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import PHASES, resolve
from rematbench.evaluate.evaluation import RankBytes
from rematbench.evaluate.result import Result, Status
from rematbench.evaluate.verdict import Retries, retries
from rematbench.host.declared import facts, flat
from rematbench.host.errors import UserError
from rematbench.host.files import write_atomically
from rematbench.inputs.constants import Calibration
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import StackChoice
from rematbench.plan import Plan, Schedule
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.workload import Workload
from rematbench.worlds.records.measured import Engine, Measured

World = Literal["published", "simulated", "traced", "executed"]
FORMAT: Literal[2] = 2
"""The format of a record's JSON. Format 1 had no such number, and other fields for packages."""
HASH_DIGITS = 16
OF_A_STEP = (
    *("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu"),
    *("host_node_bytes", "recompute_flop", "offload_bytes"),
)


class RecordError(UserError):
    """A record that cannot be read or replayed; the message is one line."""


class Start(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a method starts from, where it differs from the problem's base plan: partition,
    schedule, and the bytes that tuned plans leave free on each device."""

    partition: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    schedule: Schedule | None = None
    reserve_bytes: int = 0

    def plan(self, problem: Problem) -> Plan:
        own = {"partition": self.partition, "schedule": self.schedule}
        given = {key: value for key, value in own.items() if value is not None}
        return replace(problem.base_plan, **given)


class RunSpec(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of a run: one method with its parameters, and the workload, layout and stack of
    one problem.

    Cluster, system and calibration are given by name and by the hash of their content, so that a
    changed constant makes another run.
    """

    method: str
    parameters: dict[str, dict[str, Any]]
    cluster: str
    cluster_hash: str
    system: str
    system_hash: str
    calibration_hash: str
    layout: Layout
    stack: StackChoice = StackChoice()
    start: Start = Start()
    world: World = "simulated"

    @property
    def run_id(self) -> str:
        return content_hash(self)


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and when a record was made, and by which code and constants. Traced and executed
    records also name torch, the device and the number of ranks on each host. `text` is always
    empty; committed records of format 2 have the field, for the hash of a training text."""

    rematbench: str
    python: str
    platform: str
    written: str
    calibration_date: str = ""
    calibration_hash: str = ""
    torch: str = ""
    device: str = ""
    ranks_per_host: tuple[int, ...] = ()
    text: str = ""


class Metrics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one repeat, in seconds, bytes and FLOP; MFU and HFU are fractions. `warmup`:
    the repeat is a warm-up and not a measurement."""

    step_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float
    mfu_dense: float
    hfu: float
    peak_device_bytes: int
    peak_host_bytes: int
    host_node_bytes: int
    recompute_flop: float
    offload_bytes: int
    warmup: bool = False


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a run. Runs that are out of memory or unsupported have a record too. Without an
    `engine`, the simulator or rematbench's executor made the run."""

    run_id: str
    spec: RunSpec
    status: Status
    reason: str = ""
    plan_hash: str = ""
    plan: Plan | None = None
    repeats: tuple[Metrics, ...] = ()
    ranks: tuple[RankBytes, ...] = ()
    headroom_bytes: int | None = None
    host_headroom_bytes: int | None = None
    binds: str = ""
    allocator_retries: Retries | None = None
    measured: Measured | None = None
    engine: Engine | None = None
    provenance: Provenance
    format: Literal[2] = FORMAT

    @property
    def world(self) -> World:
        return self.spec.world


def content_hash(value: object) -> str:
    """A short SHA-256 of a value's canonical JSON (sorted keys, without fields at their defaults).
    Adding a field with a default does not change the hashes of existing values."""
    return _hash(without_defaults(value))


def same_content(value: Struct, stored: str) -> bool:
    """Whether `stored` is a hash of the value: its `content_hash`, or the hash with default fields
    included, which older records have."""
    return stored in (content_hash(value), _hash(flat(value)))


def _hash(value: object) -> str:
    plain = msgspec.to_builtins(value, str_keys=True)
    text = msgspec.json.encode(plain, order="sorted")
    return hashlib.sha256(text).hexdigest()[:HASH_DIGITS]


def without_defaults(value: object) -> object:
    """A value as JSON types, in which fields of structs at their default value are left out."""
    if isinstance(value, RunSpec):
        return _as_stored(value, _given(asdict(value), fields(value)))
    if isinstance(value, Struct):
        return _given(flat(value), facts(type(value)).values())
    if isinstance(value, Mapping):
        return {str(key): without_defaults(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [without_defaults(item) for item in value]
    return msgspec.to_builtins(value, str_keys=True)


BASE = "base"
"""The parameter group in a stored spec for the start and the stack choices but attention."""


def _as_stored(spec: RunSpec, plain: dict[str, Any]) -> dict[str, Any]:
    """Convert the JSON of a spec's fields to its JSON in records: the attention kernel stands
    beside the other facts, the start and the other stack choices form the parameter group BASE, and
    the precision is written even at its default."""
    chosen = msgspec.to_builtins(without_defaults(spec.start))
    chosen |= msgspec.to_builtins(without_defaults(spec.stack))
    chosen.pop("attention", None)
    rest = {key: value for key, value in plain.items() if key not in ("stack", "start")}
    parameters = plain["parameters"] | ({BASE: chosen} if chosen else {})
    always = {"attention": spec.stack.attention, "precision": spec.precision}
    return {**rest, **always, "parameters": parameters}


def _from_stored(stored: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_as_stored`."""
    spec = dict(stored)
    chosen = (spec.get("parameters") or {}).pop(BASE, {})
    chosen |= {"attention": spec.pop("attention")} if "attention" in spec else {}
    of_stack = facts(StackChoice)
    spec["stack"] = {key: value for key, value in chosen.items() if key in of_stack}
    spec["start"] = {key: value for key, value in chosen.items() if key not in of_stack}
    return spec


def _given(values: Mapping[str, Any], known: Iterable[FieldInfo]) -> dict[str, Any]:
    """The JSON of the values that differ from their defaults, by name."""
    found = {}
    for one in known:
        usual = one.default_factory() if callable(one.default_factory) else one.default
        if usual is msgspec.NODEFAULT or values[one.name] != usual:
            found[one.encode_name] = without_defaults(values[one.name])
    return found


def plan_hash(problem: Problem, plan: Plan) -> str:
    """The hash of the resolved plan: the fate of every site in bytes, partition, order, states and
    transfers. Plans whose rules are worded differently but decide the same have equal hashes.
    Addresses do not count, because no executor of rematbench sets addresses."""
    table = []
    for rank, chunks in enumerate(plan.partition):
        for chunk in range(len(chunks)):
            sites = ChunkOps.of_plan(problem, plan, rank, chunk).sites
            for phase in PHASES:
                fates, _ = resolve(plan, sites, phase, 0)
                given = ((site, astuple(fate)) for site, fate in fates.items())
                # Records that are older than the last field keep their hashes.
                table.append([[*site, fate if fate[-1] else fate[:-1]] for site, fate in given])
    windows = [r for r in plan.rules if (r.select.micro_batches, r.select.slices) != (None, None)]
    rest = replace(plan, rules=tuple(windows), fit={})
    deeds = msgspec.to_builtins(rest, str_keys=True)
    del deeds["addresses"]
    if not plan.cuts:  # so that records from before these fields keep their hashes
        del deeds["cuts"]
    if not plan.slices:
        del deeds["slices"]
    for rule in deeds["rules"]:
        if rule["select"]["slices"] is None:
            del rule["select"]["slices"]
    for state in deeds["states"]:
        if state["pieces"] is None:  # older records keep their hashes
            del state["pieces"]
        else:
            state["pieces"]["wire"] = "param"  # the only value of a former field
    return _hash([table, deeds])


def run_spec(
    problem: Problem, method: Composition, world: World = "simulated", base: Plan | None = None
) -> RunSpec:
    """The spec of a run. If `base`, the plan that the method starts from, differs from the
    problem's base plan, the spec contains the differing values."""
    usual = problem.base_plan
    base = base or usual
    return RunSpec(
        **asdict(problem.workload),
        method=method.name,
        parameters=method.parameters,
        cluster=problem.cluster.name,
        cluster_hash=content_hash(problem.cluster),
        system=problem.system.name,
        system_hash=content_hash(problem.system),
        calibration_hash=content_hash(problem.calibration.hashed_for(problem.cluster.generation)),
        layout=problem.layout,
        stack=replace(problem.chosen, hbm_bytes=None),  # the cluster's hash covers it
        start=Start(
            partition=None if base.partition == usual.partition else base.partition,
            schedule=None if base.schedule == usual.schedule else base.schedule,
            reserve_bytes=problem.reserve_bytes,
        ),
        world=world,
    )


def provenance(calibration: Calibration | None = None) -> Provenance:
    """The provenance of a record made now by this interpreter and this code."""
    return Provenance(
        rematbench=rematbench.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        calibration_date=calibration.date if calibration else "",
        calibration_hash=content_hash(calibration) if calibration else "",
    )


def make_record(result: Result, method: Composition, requested: Problem | None = None) -> Record:
    """The record of a simulated run. `requested`: the problem that the user named, if a package's
    version of it (worlds/packages/stack.py) was simulated."""
    problem, plan, base = result.problem, result.plan, None if requested else result.base
    spec = run_spec(requested or problem, method, base=base)
    evaluation, verdict = result.evaluation, result.verdict
    repeats: tuple[Metrics, ...] = ()
    if evaluation is not None and not evaluation.not_timed:
        repeats = (
            Metrics(
                peak_device_bytes=max(evaluation.peak_device_bytes),
                peak_host_bytes=max(evaluation.peak_host_bytes),
                **{name: getattr(evaluation, name) for name in OF_A_STEP},
            ),
        )
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status=result.status,
        reason=result.reason,
        plan_hash=plan_hash(problem, plan) if plan else "",
        plan=plan,
        repeats=repeats,
        ranks=evaluation.ranks if evaluation else (),
        headroom_bytes=result.headroom_bytes,
        host_headroom_bytes=verdict.host_headroom_bytes if verdict else None,
        binds=verdict.binds if verdict else "",
        allocator_retries=retries(problem, plan, evaluation) if plan and evaluation else None,
        provenance=provenance(problem.calibration),
    )


def write_record(record: Record, path: Path) -> None:
    """Write a record atomically, so that no reader sees a partial file."""
    write_atomically(path, encode_record(record))


def keep_record(record: Record, folder: Path, name: str) -> None:
    """Write a record as `folder`/`name`.json without its plan (the plan's hash stays). If only the
    provenance differs, the file is left as it is, so that a second run changes no date."""
    record = replace(record, plan=None)
    path = folder / f"{name}.json"
    if path.is_file():
        old = read_record(path)
        if replace(old, provenance=record.provenance) == record:
            return
    write_record(record, path)


def encode_record(record: Record) -> bytes:
    return msgspec.json.format(record_json(record), indent=1) + b"\n"


def record_json(record: Record) -> bytes:
    plain = msgspec.to_builtins(record, str_keys=True)
    plain["spec"] = _as_stored(record.spec, plain["spec"])
    return msgspec.json.encode(plain, order="sorted")


def decode_record(stored: bytes) -> Record:
    """The record in a file's bytes; msgspec's DecodeError or ValidationError if they hold none."""
    plain = msgspec.json.decode(stored)
    if isinstance(plain, dict) and isinstance(plain.get("spec"), dict):
        plain["spec"] = _from_stored(plain["spec"])
    return msgspec.convert(plain, Record)


def read_record(path: Path) -> Record:
    """Read a record file; RecordError with the path if it is missing or not a record."""
    try:
        return decode_record(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        text = f"{path}: not a record of the supported format {FORMAT}: {error}"
        raise RecordError(text) from error


def read_records(paths: Iterable[Path]) -> list[tuple[str, Record]]:
    """(problem name, record) of every record file, by path; a folder stands for all files below
    it."""
    files = sorted(
        file for path in paths for file in ([path] if path.is_file() else path.rglob("*.json"))
    )
    return [(file.name.split(".")[0], read_record(file)) for file in files]
