"""Stacks and clusters with a base, kernels by name, and whose constants count."""

import json
import re
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import system_variant
from rematbench.evaluate.result import assumed, evaluate_plan
from rematbench.evaluate.unread import unread, unread_facts
from rematbench.evidence.bands import band_of, with_band
from rematbench.evidence.job_evidence import published_stack, unlike_shipped
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.facts import GENERATIONS
from rematbench.inputs.job import DEFAULT_SYSTEM
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import (
    calibration,
    claim_of_row,
    load_cluster,
    load_system,
    names,
)
from rematbench.inputs.paths import data_dir
from rematbench.inputs.stackfacts import (
    DEFAULT,
    chain,
    defaults,
    differences,
    facts,
    other_versions,
)
from rematbench.inputs.system import FACTS, System, with_facts
from rematbench.plan import Plan
from rematbench.problem import Problem, rank_parameters
from tests.problems import all_methods, make_problem
from tests.tables import tables

TABLES = tables(__file__)

APP = command_line()


def stack(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\nversion: here\n{text}", encoding="utf-8")
    return path


def made(**changes: Any) -> Problem:
    given: dict[str, Any] = {
        "model": "llama-7b",
        "cluster": "h100-80gb",
        "system": "megatron-core",
        "layout": Layout(tp=2, sp=True),
        "seq_len": 4096,
    }
    return make_problem(**(given | changes))


def test_a_file_has_its_base_but_for_what_it_says(tmp_path: Path) -> None:
    text = "base: nemo-24.12\ntp_overlap: {value: backward, source: mine}\n"
    mine, base = load_system(stack(tmp_path, text)), load_system("nemo-24.12")
    assert mine.constants == base.constants == ("megatron-core",)  # the nearest fitted one
    assert mine.sources["tp_overlap"] == "mine"
    same = {"name": base.name, "version": base.version, "constants": base.constants}
    assert with_facts(mine, **same, tp_overlap="gemm", sources=base.sources) == base


def test_an_override_needs_a_source(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="attention: a value that overrides the base needs a source"
    ):
        load_system(stack(tmp_path, "base: megatron-core\nattention: fa3\n"))


def test_compiled_torchtitan_is_what_a_row_that_compiles_runs() -> None:
    shipped, row = (
        load_system("torchtitan-compiled"),
        system_variant(load_system("torchtitan"), ("compile",)),
    )
    assert isinstance(row, System)
    assert row != load_system("torchtitan")
    named = {"name": row.name, "version": row.version}
    assert replace(shipped, **named, sources=row.sources, constants=row.constants) == row
    assert shipped.constants == ("torchtitan",)
    layout = Layout(dp=8, zero_stage=3, global_batch=8)
    assert published_stack(made(system=shipped.name, layout=layout)) == "torchtitan"


def test_bases_do_not_go_round(tmp_path: Path) -> None:
    first = stack(tmp_path, f"base: {tmp_path}/second.yaml\n", "first")
    stack(tmp_path, f"base: {first}\n", "second")
    with pytest.raises(ConfigError, match="is itself based on this file"):
        load_system(first)


def test_an_unknown_base_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"first\.yaml: base: unknown system 'nothing'"):
        load_system(stack(tmp_path, "base: nothing\n", "first"))


@pytest.mark.parametrize("name", ["torchtitan", "other"])
def test_a_copy_has_the_constants_of_its_base_under_any_name(tmp_path: Path, name: str) -> None:
    found = made(system=str(stack(tmp_path, "base: torchtitan\n", name)))
    assert found.constants[2] == "torchtitan"
    assert found.cost.stack == calibration().systems["torchtitan"]


def test_a_name_alone_gives_a_users_file_no_constants(tmp_path: Path) -> None:
    text = Path("config/clusters/h100-80gb.yaml").read_text(encoding="utf-8")
    copied = tmp_path / "h100-80gb.yaml"
    copied.write_text(text, encoding="utf-8")
    assert load_cluster(copied).constants == ()
    assert made(cluster=str(copied)).constants[1] == "default"
    based = tmp_path / "based.yaml"
    based.write_text(
        "name: slow\nbase: h100-80gb\npeak_flop_per_s: {value: 4e14, source: mine}\n",
        encoding="utf-8",
    )
    found = made(cluster=str(based))
    assert found.constants[1] == "h100-80gb"
    assert found.cluster.peak_flop_per_s == 4e14


def test_a_kernel_by_name_has_its_own_speed() -> None:
    table = made().layer(0)
    op = next(op for op in table.ops if op.name == "attention")
    times = {name: made(attention=name).cost.op_s(op, "forward") for name in ("fa1", "fa2", "fa3")}
    assert times["fa1"] > times["fa2"] > times["fa3"]
    assert made().cost.op_s(op, "forward") == times["fa2"]
    assert made(attention="fa3").chosen.attention == "fa3"
    assert made(attention="unfused").kernel == "unfused"
    assert made(system="huggingface", layout=Layout()).attention == "unfused"
    assert made(system="huggingface", layout=Layout(), attention="fa2").attention == "flash"


def test_a_kernel_that_the_gpu_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(RateError, match=r"attention 'fa3' on ampere: .*Hopper"):
        made(cluster="a100-80gb-selene", attention="fa3")
    words = ["simulate", "keep_all", "--model", "llama-7b", "--cluster", "a100-80gb-selene"]
    words += ["--gpus", "8", "--seq-len", "4096", "--global-batch", "8", "--tp", "8"]
    refused = CliRunner().invoke(APP, [*words, "--attention", "fa3"])
    assert isinstance(refused.exception, RateError)
    shown = CliRunner().invoke(APP, [*words, "--notes"])
    kernels = "attention fa2, norm fused, RoPE fused, activation fused, loss in place, on ampere"
    told = f"{kernels}; constants of cluster a100-80gb-selene, stack megatron-core"
    assert f"assumes: {told}" in " ".join(shown.output.split())
    answer = CliRunner().invoke(APP, [*words, "--json"])
    assert json.loads(answer.stdout)["job"]["assumes"] == told


def test_what_is_assumed_is_of_the_model_and_of_the_stack() -> None:
    given = {"system": "huggingface-fused", "layout": Layout()}
    assert assumed(made(model="gpt-7b", **given)).startswith(
        "attention fa2, norm fused, loss fused"
    )
    eager = assumed(made(system="torchtitan", layout=Layout()))
    named = "norm eager, RoPE complex, activation eager, loss eager, on hopper"
    assert eager.startswith(f"attention fa2, {named}; constants of ")


def test_a_row_whose_note_names_a_release_is_of_that_stack() -> None:
    assert claim_of_row("megatron-core", "NeMo 24.12, seconds per step") == (
        "nemo-24.12",
        {"": "keep_all"},
    )
    assert claim_of_row("megatron-core", "Fujii") == ("megatron-core", {})
    assert claim_of_row("megatron-lm", "NeMo 24.12") == ("megatron-lm", {})


def test_facts_say_who_says_them() -> None:
    found = facts("nemo-24.12")
    assert found["attention"].file == "nemo-24.12"
    assert found["vocab_multiple"].file == "megatron-core"
    changed = differences("nemo-24.12")
    assert all(flat(load_system("megatron-core"))[k] != f.value for k, f in changed.items())
    assert differences("megatron-core") == {}


@pytest.mark.parametrize("name", names("system"))
def test_every_fact_is_said_or_marked_as_default(name: str) -> None:
    system, told, unsaid = load_system(name), facts(name), defaults(name)
    not_facts = {"name", "version", "sources", "constants", "scales"}
    assert set(told) | set(unsaid) == set(FACTS) - not_facts
    assert not set(told) & set(unsaid)
    assert all(fact.value == flat(system)[key] for key, fact in unsaid.items())
    assert {"norm", "rope"} <= set(told)


def test_a_fact_that_no_file_gives_is_marked_as_default() -> None:
    explained = CliRunner().invoke(APP, ["systems", "megatron-lm"]).output
    line = next(line for line in explained.splitlines() if "held_logit_bytes" in line)
    assert line.split("|")[2].split() == ["0"]
    assert line.split("|")[3].split() == [DEFAULT]


SLOW = "3.958e14"
"""40 % of an H800's FLOP/s."""


def slow_cluster(folder: Path, form: str) -> Path:
    """A cluster file named h800-80gb with 40 % of its FLOP/s: a whole copy, or on its base."""
    path = folder / "h800-80gb.yaml"
    shipped = Path("config/clusters/h800-80gb.yaml").read_text(encoding="utf-8")
    based = f"name: h800-80gb\nbase: h800-80gb\npeak_flop_per_s: {{value: {SLOW}, source: mine}}\n"
    text = shipped.replace("9.895e14", SLOW) if form == "copy" else based
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", ["copy", "based"])
def test_a_cluster_of_other_flops_has_no_evidence_of_its_name(tmp_path: Path, form: str) -> None:
    slow = slow_cluster(tmp_path, form)
    given: dict[str, Any] = {
        "model": "llama-65b",
        "system": "megatron-kwai",
        "layout": Layout(tp=4, sp=True, pp=4, dp=4, global_batch=64),
    }
    shipped, found = made(cluster="h800-80gb", **given), made(cluster=str(slow), **given)
    assert "cluster" not in band_of(shipped, "keep_all").outside
    unlike = ["peak_flop_per_s"] + ["constants"] * (form == "copy")
    said = f"cluster unlike any shipped cluster (differs from h800-80gb in: {', '.join(unlike)})"
    said += ", a GPU of 395.8 TFLOP/s and 3.35 TB/s, of which no rate is published"
    assert band_of(found, "keep_all").outside["cluster"] == said
    words = ["--model", "llama-65b", "--cluster", str(slow), "--system", "megatron-kwai"]
    words += ["--gpus", "64", "--seq-len", "4096", "--global-batch", "64", "--tp", "4", "--pp", "4"]
    told = CliRunner().invoke(APP, ["simulate", "full_recompute", *words]).output
    assert said in " ".join(told.split())
    assert "inside of the published range" not in told
    listed = CliRunner().invoke(APP, ["compare", *words, "--only", "full_recompute"]).output
    assert said in " ".join(listed.split())


def test_shipped_clusters_and_their_memory_are_like_shipped() -> None:
    assert {unlike_shipped(made(cluster=name)) for name in ("h100-80gb", "h800-80gb")} == {""}
    clusters = [one for one in map(load_cluster, names("cluster")) if not one.roofline]
    problem = made()
    for cluster in clusters:
        bigger = replace(cluster, hbm_bytes=2 * cluster.hbm_bytes, name="mine", host_bytes=1 << 40)
        assert not unlike_shipped(dataclass_replace(problem, cluster=bigger))


@pytest.mark.parametrize(("name", "tp", "each"), TABLES["logits"])
def test_bytes_of_a_logit_at_the_losss_backward(name: str, tp: int, each: int) -> None:
    """Held output, log-softmax, the gradients of both, and their sum where words are divided."""
    given = made(model="llama3-8b", cluster="a100-80gb", system=name, layout=Layout(tp=tp, sp=True))
    loss = given.head.op("loss")
    gradient = given.head.activations["logits"].nbytes
    kept = sum(given.head.activations[tensor].nbytes for tensor in loss.saves)
    logits = 4096 * given.workload.model.vocab // tp
    assert kept + gradient + loss.scratch_backward_bytes == each * logits


def test_deepspeed_is_the_decoder_that_its_baseline_runs() -> None:
    pin = (data_dir("baselines") / "deepspeed" / "requirements.txt").read_text(encoding="utf-8")
    release = re.search(r"deepspeed==([0-9.]+)", pin)
    plain, layers = load_system("deepspeed"), load_system("huggingface-deepspeed")
    for found in (plain, layers):
        assert f"DeepSpeed {release[1]}" in found.version
    assert (plain.norm_kernel, plain.rope_kernel) == ("torch", "eager")


# -- versions -----------------------------------------------------------------------------------


def test_versions_of_a_stack_name_a_shipped_stack_and_differ_from_it() -> None:
    families = {name: chain(name)[0][1].get("version_of") for name in names("system")}
    versions = {name: of for name, of in families.items() if of}
    assert versions.keys() >= {"megatron-core-0.16", "huggingface-flash-4.4x", "torchtitan-2026"}
    for name, of in versions.items():
        assert of in names("system")
        assert families[of] is None
        assert other_versions(name)[of].keys() == other_versions(of)[name].keys() != set()
        assert all(fact.source for fact in differences(name).values())
        assert re.search(r"\d", load_system(name).version)
    assert other_versions("rematbench") == {}


def test_the_commands_default_is_todays_megatron_core() -> None:
    assert DEFAULT_SYSTEM == "megatron-core-0.16"
    own = {"loss_keeps_logits", "cudnn_first", "features", "host_tensors"}
    assert differences(DEFAULT_SYSTEM).keys() == own
    kernels = {one: load_system(DEFAULT_SYSTEM).attention_on(one) for one in GENERATIONS}
    assert kernels == {"ampere": "fa2", "hopper": "cudnn", "blackwell": "cudnn"}
    given = made(system=DEFAULT_SYSTEM, layout=Layout(tp=8, global_batch=8))
    assert band_of(given, "keep_all").outside["stack"] == f"stack {DEFAULT_SYSTEM}"
    assert given.cost.stack == made().cost.stack
    before, now = (made(system=name).head.op("loss") for name in ("megatron-core", DEFAULT_SYSTEM))
    wide = 4 * 4096 * made().system.padded_vocab(made().workload.model.vocab, 2) // 2
    assert before.scratch_forward_bytes - now.scratch_forward_bytes == wide


def test_the_foreach_optimizer_holds_a_tensor_of_each_parameter() -> None:
    """A report of 76 GiB on one A100 for all parameters of a Qwen2 of 7B, in bf16."""
    plain, foreach = (
        made(
            model="qwen2-7b", cluster="a100-80gb-single", system=name, seq_len=2048,
            layout=Layout(global_batch=16, zero_stage=0),
        )
        for name in ("huggingface-flash", "huggingface-flash-4.4x")
    )  # fmt: skip
    plan = all_methods().resolve("full_recompute")
    peaks = []
    for problem in (plain, foreach):
        answer = plan.plan(problem)
        assert isinstance(answer, Plan)
        peaks.append(evaluate(problem, answer).peak_device_bytes[0])
    count = rank_parameters(foreach, foreach.base_plan, 0)
    assert peaks[1] == pytest.approx(10 * count, rel=1e-3)
    assert peaks[0] < 9 * count
    reserved = peaks[1] + foreach.non_torch_bytes
    assert reserved / 2**30 == pytest.approx(76, rel=0.05)


def fsdp(gpus: int, micro_batch: int) -> Layout:
    return Layout(dp=gpus, zero_stage=3, micro_batch=micro_batch, global_batch=gpus * micro_batch)


CONTEXT = Layout(cp=2, dp=2, zero_stage=3, global_batch=2)
OPERATORS = "selective_recompute:keep=[q,v,attn_out,lse,gate_out],held=[fc2_out],scope=layer"


@pytest.mark.parametrize(
    ("stack", "cluster", "recipe", "method", "layout", "rate", "reserved_gib"),
    [
        # A log of late 2025: 4 H100, eager, full recomputation.
        ("2026", "h100-96gb-hbm2e", "none", "full_recompute", CONTEXT, 5615, 44.8),
        # An issue of 2025-03: 8 H100; compiled, the loss eager.
        ("compiled", "h100-96gb-hbm2e", "none", OPERATORS, fsdp(8, 1), 6500, 47.65),
        # Its benchmarks of 2025-06 (1af29373, llama3-8b_h200_202506_trainy-whitefiber.md).
        ("2025-06", "h200-141gb", "fp8", OPERATORS, fsdp(32, 2), 10938, 47.96),
        ("2025-06", "h200-141gb", "fp8", OPERATORS, fsdp(64, 2), 10753, 46.97),
    ],
)
def test_torchtitan_of_a_quarter_has_its_speed_and_bytes(
    stack: str, cluster: str, recipe: str, method: str, layout: Layout, rate: float,
    reserved_gib: float,
) -> None:  # fmt: skip
    """Llama-3.1-8B, 8,192 tokens: published tokens/s/GPU and reserved bytes."""
    given = made(
        model="llama-3.1-8b", cluster=cluster, system=f"torchtitan-{stack}", seq_len=8192,
        layout=layout, recipe=recipe,
    )  # fmt: skip
    answer = all_methods().resolve(method).plan(given)
    assert isinstance(answer, Plan)
    found = with_band(evaluate_plan(given, answer), method.partition(":")[0])
    assert found.band is not None
    assert found.band[0] < rate < found.band[1]
    assert found.evaluation is not None
    assert found.evaluation.reserved_bytes / 2**30 == pytest.approx(reserved_gib, rel=0.1)


# -- facts without a source -----------------------------------------------------------------------

OWN = TABLES["own"]


def test_a_stack_without_a_base_says_which_facts_it_leaves_open(tmp_path: Path) -> None:
    """Each fact where it changes the prediction; a file that is based on it has the same ones."""
    path = str(stack(tmp_path, OWN))
    found = set(unread_facts(made(system=path)))
    open_facts = {"norm", "rope", "loss_in_place", "loss_keeps_logits", "step_scratch_bytes"}
    assert found == open_facts
    assert unread_facts(made(system=path, model="llama3-8b")).keys() - found == {"repeats_kv"}
    assert found - unread_facts(made(system=path, model="gpt-7b")).keys() == {"norm", "rope"}
    assert "loss_keeps_logits true" in assumed(made(system=path))
    text = f"base: {path}\nloss_keeps_logits: {{value: false, source: mine}}\n"
    based = made(system=str(stack(tmp_path, text, "based")))
    assert found - unread_facts(based).keys() == {"loss_keeps_logits"}
    stated = OWN + "norm: torch\nrope: eager\nloss_keeps_logits: false\nloss_in_place: false\n"
    whole = stack(tmp_path, f"{stated}step_scratch_bytes: 0\n", "whole")
    assert unread(made(system=str(whole))) == ""


def test_a_fact_of_a_stack_that_none_of_its_models_has_is_said() -> None:
    """Of a Llama on a stack of GPT models; not of the models that the stack ran."""
    alone = {"layout": Layout()}
    llama = {name: unread_facts(made(system=name, **alone)).keys() for name in names("system")}
    assert {name: set(keys) for name, keys in llama.items() if keys} == {
        "megatron-lm": {"norm", "rope", "fused_swiglu"},
        "megatron-lm-vocabulary": {"norm", "rope", "fused_swiglu"},
        "megatron-deepspeed": {"norm", "fused_swiglu"},
        "llm-foundry": {"rope", "fused_swiglu"},
    }
    assert not any(unread(made(system=name, model="gpt-7b", **alone)) for name in names("system"))
    eager = made(system="megatron-deepspeed", **alone)
    assert (eager.system.norm_kernel, eager.system.rope_kernel) == ("eager", "eager")
    assert "norm eager, RoPE eager" in assumed(eager)


def test_sinks_need_a_kernel_that_has_them() -> None:
    job: dict[str, Any] = {"model": "gpt-oss-120b", "system": DEFAULT_SYSTEM}
    job |= {"layout": Layout(dp=8, ep=8, global_batch=8), "cluster": "h100-80gb"}
    assert "attention cudnn with its sinks" in assumed(made(**job))
    with pytest.raises(RateError, match="'fa2' does not support attention sinks"):
        made(**job, attention="fa2")
    with pytest.raises(RateError, match="'fa2' does not support attention sinks"):
        made(**job | {"cluster": "a100-80gb"})


@pytest.mark.parametrize(("system", "zero_stage", "twice"), TABLES["buckets"])
def test_buckets_of_ddp_hold_the_gradients_again(system: str, zero_stage: int, twice: bool) -> None:
    one, two = (
        made(system=system, layout=Layout(dp=dp, global_batch=dp, zero_stage=zero_stage))
        for dp in (1, 2)
    )
    pools = [evaluate(each, each.base_plan).ranks[0].pools for each in (one, two)]
    gradients = one.system.states.grad_bytes * one.workload.model.parameters
    assert pools[1] - pools[0] == (gradients if twice else 0)
