"""Verdicts and records: what fits, what binds, and that every outcome is a row on disk."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rematbench.evaluate.evaluator import evaluate
from rematbench.evaluate.result import Result, evaluate_method, evaluate_plan
from rematbench.plan import Plan, Recompute, Rule, Select
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.worlds.records.record import (
    Record,
    RecordError,
    content_hash,
    make_record,
    plan_hash,
    read_record,
    run_spec,
    same_content,
    write_record,
)
from tests.problems import all_methods, layers, plan_of, problem

REGISTRY = all_methods()
KEEP = REGISTRY.resolve("keep_all")
MEASURED = Path(__file__).resolve().parents[2] / "results" / "measured"


def case(**cluster: int) -> Problem:
    p = problem(model=layers(8), pp=4, global_batch=8, system="megatron-core")
    changed = msgspec.structs.replace(p.cluster, **cluster)
    return replace(p, cluster=changed, evaluator=evaluate)


def sized(usable: int) -> Problem:
    return case(non_torch_bytes=case().cluster.hbm_bytes - usable)


def outcome(p: Problem, spec: str = "keep_all", **settings: float) -> Result:
    return evaluate_method(p, REGISTRY.resolve(spec, settings), checked=True)


def test_a_fitting_plan_is_ok_with_headroom() -> None:
    p = case()
    got = outcome(p)
    assert (got.status, got.reason) == ("ok", "")
    reserved = got.evaluation.reserved_bytes
    assert reserved >= max(got.evaluation.peak_device_bytes)
    assert got.verdict.headroom_bytes == p.usable_bytes - reserved
    assert got.verdict.host_headroom_bytes == p.cost.host_room_bytes < p.cluster.host_bytes
    assert got.verdict.binds == "nothing"


def test_the_verdict_turns_where_the_allocator_fails() -> None:
    """Reserved bytes fit exactly; the tensors themselves do not fit in one byte less than they
    take, however hard the allocator tries."""
    got = outcome(case())
    reserved, peaks = got.evaluation.reserved_bytes, got.evaluation.peak_device_bytes
    exact, short = outcome(sized(reserved)), outcome(sized(max(peaks) - 1))
    assert (exact.status, exact.verdict.headroom_bytes) == ("ok", 0)
    assert (short.status, short.verdict.headroom_bytes) == ("oom", max(peaks) - 1 - reserved)
    rank = peaks.index(max(peaks))
    assert short.reason.startswith(f"device memory of pipeline rank {rank}: ")


def test_host_memory_binds_too() -> None:
    settings = {"alpha": 1.0, "min_bytes": 256, "granularity": 64}
    got = outcome(case(host_bytes=1), "pp_offload", **settings)
    assert got.status == "oom"
    assert got.verdict.headroom_bytes > 0 > got.verdict.host_headroom_bytes
    assert got.verdict.binds.startswith("host memory of a node")


def test_unsupported_and_failed_are_outcomes() -> None:
    p = replace(problem(), evaluator=evaluate)
    refused = record(p, "pp_offload")
    assert (refused.status, refused.repeats, refused.plan) == ("unsupported", (), None)
    assert "pp >= 3" in refused.reason

    class Wrong(msgspec.Struct, frozen=True):
        name: ClassVar[str] = "wrong"

        def plan(self, problem: Problem, base: Plan) -> Plan:
            return base.with_rules(Rule(Select(activations=("nothing",)), Recompute()))

    got = evaluate_method(p, Composition((Wrong(),)))
    assert got.status == "failed"
    assert "rule matches no saved tensor" in got.reason


def test_checked_and_memoised_runs_agree() -> None:
    p = case()
    plan = plan_of(p, "balanced_checkpointing")
    proved = evaluate_plan(p, plan, checked=True)
    assert proved.proof is not None
    assert evaluate_plan(p, plan) == msgspec.structs.replace(proved, proof=None)


# -- records ---------------------------------------------------------------------------------


def record(p: Problem, spec: str = "keep_all") -> Record:
    method = REGISTRY.resolve(spec)
    return make_record(evaluate_method(p, method), method)


@pytest.mark.parametrize("spec", ["keep_all", "balanced_checkpointing+pp_offload", "memo"])
def test_records_survive_the_disk(tmp_path: Path, spec: str) -> None:
    made = record(case(), spec)
    write_record(made, tmp_path / "deep" / "r.json")
    assert read_record(tmp_path / "deep" / "r.json") == made
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_run_ids_follow_content() -> None:
    p = case()
    same, other = run_spec(case(), KEEP), run_spec(sized(10**9), KEEP)
    assert run_spec(p, KEEP).run_id == same.run_id != other.run_id
    ids = {
        run_spec(p, REGISTRY.resolve("pp_offload", {"alpha": a})).run_id for a in (0.1, 0.2, None)
    }
    assert len(ids) == 3


def test_a_new_field_at_its_default_changes_no_run_id() -> None:
    """Later versions add fields to models, clusters, stacks and layouts."""
    spec = run_spec(case(), KEEP)
    model = spec.model
    router = ("router", dict[str, int], msgspec.field(default_factory=dict))
    grown = msgspec.defstruct(
        "Model", [("adapters", int, 1), router],
        bases=(type(model),), frozen=True, kw_only=True,
    )  # fmt: skip
    values = {name: getattr(model, name) for name in model.__struct_fields__}
    assert content_hash(grown(**values)) == content_hash(model)
    assert content_hash(grown(**values, adapters=8)) != content_hash(model)
    assert msgspec.structs.replace(spec, model=grown(**values)).run_id == spec.run_id


def test_records_of_before_defaults_were_left_out_are_replayed() -> None:
    cluster = case().cluster
    whole = msgspec.json.encode(msgspec.to_builtins(cluster, str_keys=True), order="sorted")
    stored = hashlib.sha256(whole).hexdigest()[: len(content_hash(cluster))]
    assert stored != content_hash(cluster)
    assert same_content(cluster, stored)
    assert not same_content(msgspec.structs.replace(cluster, hbm_bytes=1), stored)


def test_plan_hashes_are_of_the_resolved_table() -> None:
    p = case()
    plain = p.base_plan
    said = plain.noting(remark="other words")
    twice = plain.with_rules(
        Rule(Select(activations=("q",)), Recompute()),
        Rule(Select(activations=("q",), parts=("layer",)), Recompute(scope="consumer")),
    )
    once = plain.with_rules(Rule(Select(activations=("q",)), Recompute()))
    assert plan_hash(p, plain) == plan_hash(p, said)
    assert plan_hash(p, once) == plan_hash(p, twice) != plan_hash(p, plain)


def test_a_record_of_another_format_says_so(tmp_path: Path) -> None:
    """Format 1 had a package's numbers apart; a later one is not read either."""
    path = tmp_path / "r.json"
    plain = json.loads((MEASURED / "executed" / "tp2.keep_all.0.json").read_text())
    for parts in ({"observed": None}, {"format": 3}):
        path.write_text(json.dumps(plain | parts))
        with pytest.raises(RecordError, match=r"r\.json: not a record of the supported format 2"):
            read_record(path)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"run_id": 3}'])
def test_a_file_that_is_no_record_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"r\.json: not a record"):
        read_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "none.json")
