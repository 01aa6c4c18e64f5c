"""Printed flags are run: the baseline under them has the gradients of the method's own plan."""

import dataclasses
from functools import cache
from itertools import islice
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import baselines.deepspeed.options as deepspeed_options
import baselines.megatron_core.options as megatron_options
from baselines.megatron_core.options import partition_words
from baselines.megatron_core.plan import MegatronCore
from rematbench.evaluate.evaluation import RankBytes
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, partition_of_sizes
from rematbench.inputs.load import load_system
from rematbench.inputs.stackfacts import NO_FACTS
from rematbench.inputs.stages import stages_of
from rematbench.inputs.system import FACTS as STACK_FACTS
from rematbench.inputs.system import Accepts, with_facts
from rematbench.plan import Plan, Unsupported
from rematbench.workload import Experts
from rematbench.worlds.packages.flags import FlagsAnswer, fates, flags_of
from rematbench.worlds.packages.process import PackageJob, baselines, policy, run_jobs
from rematbench.worlds.packages.process import job as make_job
from rematbench.worlds.records.record import Record, World
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.baselines.cases import (
    GPT,
    LEFT_OUT,
    PATIENCE_S,
    STEPS,
    TINY,
    Asked,
    asked_problem,
    printed_settings,
    weighed,
)
from tests.installed import needs
from tests.problems import plan_of
from tests.tables import tables

TABLES = tables(__file__)

FP32 = 1e-5
ONE = Asked("one")
SCALARS = 6 * 4
"""The loss, its sum, their copies and gradients, and the count of labels: no tensor is missing."""
MEGATRON: dict[str, dict[str, Any]] = {
    "full_recompute": {"num_layers": "2"},
    "selective_recompute": {"activations": "attn_norm_out,mlp_norm_out"},
}
DEEPSPEED: dict[str, dict[str, Any]] = {"full_recompute": {}, "keep_all": {}}


@pytest.fixture
def assuming() -> None:
    """Answers also name the facts of the stack that act beside the options."""


@pytest.fixture(autouse=True)
def _no_facts(request: pytest.FixtureRequest) -> None:
    if "assuming" not in request.fixturenames:
        request.getfixturevalue("no_assumed_facts")


def answered(
    method: str, settings: dict[str, Any], baseline: str, asked: Asked = ONE
) -> tuple[Plan, FlagsAnswer]:
    problem = asked_problem(asked)
    plan = plan_of(problem, method, **settings)
    return plan, flags_of(problem, plan, baseline)


@cache
def executions() -> dict[str, Result]:
    """The methods' own executions, in one launch."""
    cases = [
        Case(
            name=f"{method} {settings}",
            problem=asked_problem(ONE),
            plan=answered(method, settings, baseline)[0],
            steps=STEPS,
            measure=False,
        )
        for baseline, methods in (("megatron_core", MEGATRON), ("deepspeed", DEEPSPEED))
        for method, settings in methods.items()
    ]
    results = execute_cases(cases)
    return {case.name: result for case, result in zip(cases, results, strict=True)}


def same_as_the_plan(method: str, settings: dict[str, Any], ran: Record) -> None:
    """Loss and every gradient norm of the method's own execution."""
    own = executions()[f"{method} {settings}"]
    assert own.status == "ok", own.reason
    seen = ran.measured
    assert seen is not None, ran.reason
    assert seen.losses == pytest.approx(own.losses, rel=FP32)
    assert seen.parameter_norms[0] == pytest.approx(own.gradient_norms[0], rel=10 * FP32, abs=1e-7)


def printed_job(baseline: str, answer: FlagsAnswer, world: World = "executed") -> PackageJob:
    """A job of the default policy under the printed settings: nothing else says them."""
    made, method = asked_problem(Asked("one")), policy(baseline)
    printed = printed_settings(answer.flags)
    job = make_job(made, method, world, settings=printed, timeout_s=PATIENCE_S)
    return replace(job, steps=STEPS if world == "executed" else 1, gradients=world == "executed")


def said(settings: dict[str, Any]) -> RankBytes:
    """Bytes of Megatron-core's policy with the tensors of its stack."""
    return weighed(policy("megatron_core", settings), asked_problem(Asked("one")))


def of_method(method: str, settings: dict[str, Any], baseline: str) -> list[PackageJob]:
    """Under what is printed; by the named policy; by none; and what is printed, traced."""
    _, answer = answered(method, settings, baseline)
    assert not answer.missing
    made = asked_problem(ONE)
    named = make_job(made, policy(baseline, answer.settings), steps=1, timeout_s=PATIENCE_S)
    none = make_job(made, policy(baseline), steps=1, timeout_s=PATIENCE_S)
    return [printed_job(baseline, answer), named, none, printed_job(baseline, answer, "traced")]


@cache
def ran(baseline: str) -> dict[str, list[Record]]:
    """All jobs of a baseline in one process (importing a package takes seconds), by what asked."""
    methods = MEGATRON if baseline == "megatron_core" else DEEPSPEED
    asked = {name: of_method(name, settings, baseline) for name, settings in methods.items()}
    records = iter(run_jobs(baseline, [job for jobs in asked.values() for job in jobs]))
    return {name: list(islice(records, len(jobs))) for name, jobs in asked.items()}


@pytest.mark.parametrize("settings", TABLES["policies"])
def test_the_arguments_of_a_policy_are_its_fields(settings: dict[str, Any]) -> None:
    policy = MegatronCore(**settings)
    assert printed_settings(policy.flags(asked_problem(ONE))) == policy.fields


@pytest.mark.parametrize(
    ("asked", "fused", "word"),
    [
        (Asked(), False, "--no-bias-swiglu-fusion"),
        (Asked(), True, ""),
        (Asked(model=GPT), False, "--no-bias-gelu-fusion"),
        (Asked(model=replace(GPT, qkv_bias=False, proj_bias=False, mlp_bias=False)), False, ""),
    ],
)
def test_the_activation_is_fused_unless_an_argument_says_no(
    asked: Asked, fused: bool, word: str
) -> None:
    """As Megatron-LM has it; GELU without biases has no fused function there."""
    text = MegatronCore(bias_activation_fusion=fused).flags(asked_problem(asked))
    assert ("--no-bias" in text) == bool(word)
    assert word in text


def test_shared_inputs_have_their_argument() -> None:
    asked = Asked("tp2-no-sp")
    _, answer = answered("full_recompute", {"inputs": "shared"}, "megatron_core", asked)
    assert (answer.missing, answer.flags.split()[-1]) == ((), "--distribute-saved-activations")


@pytest.mark.full
@pytest.mark.parametrize("method", MEGATRON)
def test_megatron_core_under_the_printed_arguments(method: str) -> None:
    """Gradients of the method's own execution; bytes of the named policy, executed and traced."""
    needs("megatron.core")
    _, answer = answered(method, MEGATRON[method], "megatron_core")
    records = ran("megatron_core")[method]
    same_as_the_plan(method, MEGATRON[method], records[0])
    peaks = [r.measured.ranks[0].activation_peak_bytes for r in records if r.measured is not None]
    assert len(peaks) == len(records)
    assert peaks[0] == peaks[1] == peaks[3] < peaks[2]
    held = said(answer.settings)
    again = answer.settings["recompute"] == "full"  # a group's rebuilt output is not replayed
    allowed = LEFT_OUT * held.device_peak if again else 0
    assert abs(peaks[0] - held.activation_peak - SCALARS) <= allowed
    assert peaks[2] - said({}).activation_peak == SCALARS


@pytest.mark.full
@pytest.mark.parametrize("method", DEEPSPEED)
def test_deepspeed_under_the_printed_configuration(method: str) -> None:
    """`deepspeed.initialize` takes the printed JSON itself; gradients are the plan's, and so is
    what checkpointing frees, executed and traced."""
    needs("deepspeed")
    _, answer = answered(method, {}, "deepspeed")
    assert ("activation_checkpointing" in answer.flags) == (method == "full_recompute")
    records = ran("deepspeed")[method]
    same_as_the_plan(method, {}, records[0])
    peaks = [r.measured.ranks[0].activation_peak_bytes for r in records if r.measured is not None]
    assert len(peaks) == len(records)
    assert peaks[0] == peaks[1] == peaks[3]
    assert (peaks[0] < peaks[2]) == (method == "full_recompute")


def test_what_a_baseline_cannot_say_is_named() -> None:
    _, answer = answered("balanced_checkpointing", {}, "megatron_core")
    assert any(line.startswith("fc2_in: recomputed") for line in answer.missing)
    _, answer = answered("full_recompute", {"num_layers": "2"}, "deepspeed")
    assert any("group" in line for line in answer.missing)
    _, answer = answered("full_recompute", {"num_layers": "3"}, "megatron_core")
    assert any("group" in line for line in answer.missing), "4 layers are no groups of 3"
    assert not answered("keep_all", {}, "megatron_core", Asked("pp2-vpp2"))[1].missing
    _, answer = answered("keep_all", {}, "megatron_core", Asked("pp2-vpp2-one-group"))
    assert answer.missing == ("the orders",)


UNSAID: list[tuple[str, Asked, str]] = [
    ("megatron_core", Asked("dp2-zero2"), "zero_stage 2 is Megatron-FSDP"),
    ("megatron_core", Asked("ulysses2"), "Ulysses needs TransformerEngine"),
    ("deepspeed", Asked("ulysses2"), "sequence_parallel_size alone exchanges nothing"),
    ("deepspeed", Asked("tp2"), "tensor parallelism"),
]


@pytest.mark.parametrize(("baseline", "asked", "words"), UNSAID)
def test_what_of_a_problem_no_option_says_is_named(baseline: str, asked: Asked, words: str) -> None:
    """The guards' own reasons; a baseline's plan refuses with them what its guards refuse."""
    _, answer = answered("keep_all", {}, baseline, asked)
    assert any(words in line for line in answer.missing)
    problem = asked_problem(asked)
    plan = policy(baseline).plan(problem)
    code = baseline == "deepspeed" and asked.layout == "ulysses2"  # runs, but is not printed
    assert isinstance(plan, Unsupported) != code
    assert "Ulysses" in words or any(
        words in r for r in baselines()[baseline].cls.inexpressible(problem)
    )


def test_attention_and_fusion_are_printed() -> None:
    """On a stack that fuses, the policy fuses; on one that does not, the argument says so."""
    made = asked_problem(Asked("one"))
    assert "--no-bias-swiglu-fusion" in flags_of(made, made.base_plan, "megatron_core").flags
    system = with_facts(made.system, fused_swiglu=True)
    fused = dataclasses.replace(made, system=system, attention="unfused")
    answer = flags_of(fused, fused.base_plan, "megatron_core")
    assert not answer.missing
    assert answer.settings["bias_activation_fusion"]
    assert "swiglu-fusion" not in answer.flags
    assert "--attention-backend unfused" in answer.flags


@pytest.mark.parametrize("options", [megatron_options, deepspeed_options])
def test_options_are_of_facts_that_change_numbers(options: Any) -> None:
    given = {*getattr(options, "OPTIONS", ()), *getattr(options, "KEYS", ()), *options.POLICY}
    assert given <= {*STACK_FACTS} - {*NO_FACTS, *Accepts.__struct_fields__}


@pytest.mark.parametrize(("facts", "words"), TABLES["facts"], ids=lambda value: str(value)[:24])
def test_a_fact_of_the_stack_is_printed_as_its_option(facts: dict[str, Any], words: str) -> None:
    """With its option; and without it where the stack says otherwise, as the default does."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
    system = with_facts(load_system("megatron-core"), **values)
    (fact, *_) = facts
    assert words in (megatron_options.OPTIONS[fact](system) or "") or "bucket" in words
    if "bucket" in words:
        assert megatron_options.OPTIONS["bucket_bytes"](system) == words


def printed(baseline: str = "megatron_core", whole: bool = False, **spec: Any) -> FlagsAnswer:
    layout = Layout(**{"global_batch": 4, "dp": 2, "tp": 2, "pp": 2, **spec.pop("layout", {})})
    known = {"model": "tiny-llama", "cluster": "h800-80gb", "system": "megatron-core"}
    made = make_problem(Job.at(layout, **known | {"seq_len": 64} | spec))
    plan = made.base_plan
    sizes = spec.get("sizes")
    return flags_of(made, replace(plan, partition=sizes) if sizes else plan, baseline, whole=whole)


@pytest.mark.parametrize("row", TABLES["printed"])
def test_a_job_has_its_options(row: dict[str, Any]) -> None:
    """Words that its options have and lack, and what the line says is not run."""
    answer = printed(**row["job"])
    assert all(word in answer.flags for word in row.get("flags", []))
    assert not [word for word in row.get("absent", []) if word in answer.flags]
    for word, said in row.get("not_run", {}).items():
        assert any(word in line for line in answer.not_run) == said
    assert not [line for line in answer.missing if "host" in line]


def test_graphs_of_a_stack_without_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="'layer': torchtitan captures no CUDA graphs"):
        printed(system="torchtitan", cuda_graphs="layer")


@pytest.mark.usefixtures("assuming")
def test_options_of_two_stacks_differ_where_their_facts_do() -> None:
    """The two stacks of one package, and what no option of them says."""
    plain, fused = printed(), printed(system="nemo-24.12")
    assert "--overlap-grad-reduce --overlap-param-gather" in plain.flags
    new = {"--tp-comm-overlap", "--cross-entropy-loss-fusion", "--grad-reduce-in-bf16"}
    assert not new & set(plain.flags.split())
    assert new < set(fused.flags.split())
    assert "loss_keeps_logits true" in plain.assumed
    assert not any(line.startswith(("reduce_overlap", "attention")) for line in plain.assumed)


def test_uneven_stages_are_printed_and_not_run() -> None:
    _, answer = answered(
        "keep_all", {}, "megatron_core", Asked("pp2", model=replace(TINY, num_layers=5))
    )
    assert "--decoder-first-pipeline-num-layers" in answer.flags
    assert not answer.missing
    assert any("5 layers in pp x vpp" in line for line in answer.not_run)


@pytest.mark.parametrize(("sizes", "layout", "words"), TABLES["partitions"])
def test_every_partition_has_options(
    sizes: list[int], layout: dict[str, int], words: list[str]
) -> None:
    """The layers of the ends where the others are equal, else the text of all stages."""
    pp = 4 // layout.get("vpp", 1)
    stages = stages_of(partition_of_sizes(sizes, pp), sum(sizes))
    assert partition_words(stages, Layout(pp=pp, **layout)) == [f"--{word}" for word in words]


def test_an_overlap_of_exchanges_is_printed_and_refused_beside_recomputed_experts() -> None:
    layout = {"tp": 1, "pp": 1, "dp": 4, "ep": 4, "global_batch": 8}
    asked: dict[str, Any] = {"model": "tiny-experts", "system": "megatron-core-0.16"}
    answer = printed(ep_overlap="delayed_wgrad", layout={**layout}, **asked)
    assert "--overlap-moe-expert-parallel-comm --delay-wgrad-compute" in answer.flags
    assert any("overlap-moe" in line for line in answer.not_run)
    assert "overlap-moe" not in printed(layout={**layout}, **asked).flags
    made = make_problem(
        Job(
            model="tiny-experts", cluster="h800-80gb", system="megatron-core-0.16", gpus=4,
            seq_len=64, global_batch=8, ep=4, ep_overlap="on",
        )
    )  # fmt: skip
    fused: dict[str, Any] = {"bias_activation_fusion": True, "recompute": "selective"}
    refused = MegatronCore(modules=("moe",), **fused).plan(made, made.base_plan)
    assert isinstance(refused, Unsupported)
    assert refused.reason.startswith("disable moe in recompute_modules")
    assert isinstance(MegatronCore(modules=("moe_act",), **fused).plan(made, made.base_plan), Plan)


def test_sinks_have_an_option() -> None:
    """As has a job with rotary positions on a part of the heads: neither is run here."""
    model = replace(TINY, attention_sinks=True, rotary_share=0.5)
    answer = printed(model=model, whole=True, attention="unfused")
    assert not answer.missing
    assert {"--softmax-type learnable", "--rotary-percent 0.5"} <= {
        f"--{words}".strip() for words in answer.flags.split("--")
    }
    assert any("attention sinks (not run here)" in line for line in answer.not_run)


@pytest.mark.usefixtures("assuming")
def test_deepspeed_says_overlap_and_buckets() -> None:
    """Of the stack, where the stage has them."""
    layout = {"tp": 1, "pp": 1, "zero_stage": 3}
    said = printed("deepspeed", system="deepspeed", layout=layout)
    zero = msgspec.json.decode(said.flags)["zero_optimization"]
    assert zero["overlap_comm"] is True
    assert zero["contiguous_gradients"] is True
    assert zero["stage3_prefetch_bucket_size"] == 50_000_000
    assert any(line.startswith("grad_bytes") for line in said.assumed)


DROPPED = ("mlp_norm_out", "expert_fc2_in")


@pytest.mark.parametrize("dense", [0, 1])
def test_the_norm_before_experts_is_recomputed_on_transformer_engine(dense: int) -> None:
    """Its norms are parts of linears but that one: dense layers, and attention, keep theirs.  The
    options of published jobs with an auxiliary loss under tp are printed, with a remark."""
    experts = Experts(count=8, active=2, ffn=48, aux_loss=0.001, dense_layers=tuple(range(dense)))
    made = make_problem(
        Job(
            model=replace(TINY, experts=experts), cluster="h100-80gb", system="megatron-core-0.16",
            gpus=8, seq_len=64, global_batch=16, tp=2, pp=2, ep=4, etp=1,
        )
    )  # fmt: skip
    plan = plan_of(made, "selective_recompute", modules="moe_act,layernorm")
    sites = {site for site, one in fates(made, plan).items() if one.changed}
    where = [{site[:-1] for site in sites if site[-1] == name} for name in DROPPED]
    assert {site[-1] for site in sites} == set(DROPPED)
    assert where[0] == where[1]
    answer = flags_of(made, plan, "megatron_core")
    assert not answer.missing
    assert "--recompute-modules layernorm moe_act" in answer.flags
    assert "calculate-per-token-loss" not in answer.flags
    assert any("--calculate-per-token-loss" in line for line in answer.not_run)


def test_norms_of_dense_layers_are_parts_of_linears() -> None:
    made = make_problem(
        Job(
            model=TINY, cluster="h100-80gb", system="megatron-core-0.16",
            gpus=2, seq_len=64, global_batch=16, tp=2,
        )
    )  # fmt: skip
    idle = MegatronCore(recompute="selective", modules=("layernorm",), bias_activation_fusion=True)
    refused = idle.plan(made, made.base_plan)
    assert isinstance(refused, Unsupported)
    assert refused.reason.startswith("norms recomputed or offloaded on TransformerEngine")
