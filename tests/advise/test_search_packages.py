"""A search with a package as its engine: the package's own policies, none that it refuses."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.candidates.candidate import Candidate
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.candidates.trials import Trial
from rematbench.advise.search.job import with_engines
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, in_one_process
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_model
from rematbench.plan import Plan
from rematbench.plugins.registry import Composition, MethodError
from rematbench.worlds.packages.flags import flags_of
from tests.everything import ENDLESS, SHARES, Held, at_the_edge, bounds_at, trials_at

EDGES = SHARES[1:4]


def asked(engine: str, system: str, seq_len: int = 8192, **fixed: int) -> SearchRequest:
    """Eight layers of llama2-7b on two GPUs without an end."""
    model = replace(load_model("llama2-7b"), name="short", num_layers=8)
    spec = Job(
        model=model, cluster="a800-80gb", system=system, gpus=2, seq_len=seq_len,
        global_batch=8, hbm_bytes=ENDLESS,
    )  # fmt: skip
    made = Fixed(micro_batch=1, **fixed)  # type: ignore[arg-type]  # degrees
    return SearchRequest(spec=spec, engine=engine, fixed=made, within=0.0)


def texts(one: SearchRequest) -> set[str]:
    return {variant.text for variant in SearchJob(one).variants}


def test_the_candidates_are_the_policies_that_the_package_has_options_for() -> None:
    """`layernorm` alone does nothing where norms are in TransformerEngine's linears."""
    inside = texts(asked("megatron_core", "megatron-core-0.16", pp=2))
    assert {
        "megatron_core:recompute=selective,modules=[mlp]",
        "megatron_core:recompute=full",
        "megatron_core:recompute=full,num_layers=4",
        "megatron_core:recompute=full,method=block,num_layers={}",
        "megatron_core:offload_modules=[qkv_linear,core_attn]",
    } <= inside
    assert not any("norm" in text for text in inside)
    beside = texts(asked("megatron_core", "rematbench", pp=2))
    assert "megatron_core:recompute=selective,modules=[layernorm]" in beside
    assert texts(asked("deepspeed", "deepspeed")) == {
        "deepspeed:checkpointing=plain", "deepspeed:checkpointing=partitioned_cpu"
    }  # fmt: skip


def every_policy(one: SearchRequest) -> Iterator[Trial]:
    """Every policy of every layout, as the package lists them: those that fit."""
    made = SearchJob(one)
    package = made.package
    assert package is not None
    for choice in made.space.choices:
        problem = made.problem(choice)
        if choice.even and not choice.hosted and not package.cls.inexpressible(problem):
            for policy in package.cls.candidates(problem):
                text = Composition((policy,)).text
                trial = trials_at(made, choice).trial(text, made.registry)
                if trial.result.fits and trial.result.plan.states == problem.base_plan.states:
                    yield replace(trial, candidate=text)


@pytest.mark.parametrize(
    "one",
    [
        asked("megatron_core", "megatron-core-0.16", pp=2, vpp=1),
        pytest.param(asked("megatron_core", "rematbench", pp=1, tp=2), marks=pytest.mark.full),
        pytest.param(asked("deepspeed", "deepspeed", pp=1, zero_stage=3), marks=pytest.mark.full),
    ],
    ids=lambda one: f"{one.engine} {one.spec.system}",
)
def test_none_of_a_packages_policies_is_faster_than_the_answer(
    one: SearchRequest, short: bool, held: Held
) -> None:
    """Groups of layers and offloading among them; each answer has its options."""
    found = list(every_policy(one))
    for share in EDGES[2:] if short else EDGES:
        edge = at_the_edge(one, found, share)
        held(edge, found)
        results, _ = in_one_process(SearchJob(edge).search(), most_work=1 << 40)
        best = with_engines(SearchJob(edge).completed(results[:1])[0])
        assert one.engine in best.runs_on
        assert isinstance(best.plan, Plan)
        answer = flags_of(best.problem, best.plan, one.engine)
        assert answer.flags
        assert not answer.missing


@pytest.mark.parametrize("layers", [2, 4])
def test_groups_of_layers_have_bounds(layers: int) -> None:
    """Probes have whole groups; a chunk of twice as many layers as a group is on the line."""
    made = SearchJob(asked("megatron_core", "megatron-core-0.16", pp=1, tp=2))
    text = f"megatron_core:recompute=full,num_layers={layers}"
    (variant,) = (one for one in made.variants if one.text == text)
    choice = made.space.choices[0]
    bounds = bounds_at(made, choice)
    found = bounds.of(Candidate((variant,)))
    assert isinstance(found, Bounds)
    trial = trials_at(made, choice).trial(text, made.registry)
    peak = trial.result.evaluation.ranks[0].device_peak
    assert 0.97 * peak <= found.peak_bytes[0, 0] <= peak
    assert 0.97 * trial.result.fitting_s <= found.step_s[0, 0] <= trial.result.fitting_s


def test_a_search_with_a_package_takes_no_method_of_ours() -> None:
    one = asked("megatron_core", "megatron-core-0.16", pp=2)
    with pytest.raises(MethodError, match="engine megatron_core takes only its policies"):
        SearchJob(replace(one, only=("full_recompute",)))
    named = "megatron_core:recompute=full"
    assert texts(replace(one, only=(named,))) == {named}
    assert SearchJob(one).planners == ()
    with pytest.raises(MethodError, match=r"cannot run stack megatron-core-0\.16"):
        SearchJob(replace(asked("deepspeed", "megatron-core-0.16", pp=2))).ready()
