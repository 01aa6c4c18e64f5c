"""Optimizer states in pieces in a search: bounds below every plan, nothing faster missed, words."""

from random import Random

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.limits import not_searched, space_words
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model
from rematbench.plugins.registry import MethodError
from tests.advise.test_search_everything import LENGTHS
from tests.everything import (
    ENDLESS,
    SHARES,
    Held,
    at_the_edge,
    bounds_at,
    every_plan,
    some,
    trials_at,
)

OURS = "optimizer_offload"
CLUSTERS = ("h100-80gb-dos", "polaris-a100-40gb-bound", "h100-80gb")
SYSTEMS = ("megatron-core", "rematbench", "megatron-kwai", "torchtitan")
METHODS = ("keep_all", "balanced_checkpointing", "pp_offload", "memo", "full_recompute")
MOST = 300


def drawn(seed: int) -> SearchRequest:
    """A job of a few layers and layouts, with and without states on the host."""
    draw = Random(f"states {seed}")
    model = load_model(draw.choice(("llama-7b", "gpt-1.3b", "qwen2-7b")))
    pp, dp = draw.choice((1, 2, 4)), draw.choice((1, 2))
    layers = pp * draw.choice((1, 2, 3))
    spec = Job(
        model=replace(model, name="drawn", num_layers=layers, attention_window=()),
        cluster=replace(load_cluster(draw.choice(CLUSTERS)), hbm_bytes=ENDLESS),
        system=draw.choice(SYSTEMS),
        seq_len=draw.choice(LENGTHS[:4]),
        gpus=pp * dp,
        global_batch=dp * pp * draw.choice((1, 2)),
    )
    only = (f"{OURS}:size=20000000", *draw.sample(METHODS, 2))
    fixed = Fixed(tp=1, cp=1, pp=pp, vpp=1, micro_batch=1)
    return SearchRequest(spec=spec, only=only, within=0.0, fixed=fixed)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40)),
    ],
)
def test_nothing_faster_is_missed(seed: int, short: bool, held: Held) -> None:
    one = drawn(seed)
    found = some(one, MOST)
    assert any(OURS in trial.result.method for trial in found)
    for share in SHARES[:1] if short else SHARES:
        held(at_the_edge(one, found, share), found)


@pytest.mark.parametrize("seed", [6, *(pytest.param(s, marks=pytest.mark.full) for s in (2, 5, 7))])
def test_bounds_are_below_every_plan(seed: int) -> None:
    """Bytes of the fullest device, and seconds: in closed form, and by the schedule."""
    made = SearchJob(drawn(seed))
    tight = []
    for choice, candidate, text in list(every_plan(made))[:MOST]:
        if not choice.states or candidate.share:
            continue
        result = trials_at(made, choice).trial(text, made.registry).result
        own = bounds_at(made, choice)
        bounds = own.of(candidate)
        if result.evaluation is None or not isinstance(bounds, Bounds) or candidate.pieces:
            continue
        step_s = result.fitting_s
        assert bounds.peak_bytes[0, 0] <= max(result.evaluation.peak_device_bytes)
        assert bounds.step_s[0, 0] <= step_s
        tight.append(own.tight_s(candidate, 1, 1, 0) / step_s)
    assert len(tight) > 3
    assert max(tight) <= 1.0
    assert min(tight) > 0.9


def job(*only: str, cluster: str = "h100-80gb-dos", **others: object) -> SearchJob:
    spec = Job(
        model="gpt-1.3b", cluster=cluster, system="rematbench", seq_len=2048, gpus=2,
        global_batch=4,
    )  # fmt: skip
    return SearchJob(SearchRequest(spec=spec.changed(**others), only=only))


def test_states_are_searched_only_where_they_are_asked_for() -> None:
    plain, both = job(), job(OURS)
    assert not any(choice.states for choice in plain.space.choices)
    assert len(both.states) == 4
    assert len([c for c in both.space.choices if c.states]) == 4 * len(
        [c for c in plain.space.choices if not c.hosted]
    )
    assert both.variants == plain.variants
    assert both.keeps
    assert any("name optimizer_offload with --method" in text for text in not_searched(plain))
    assert not any("name optimizer_offload" in text for text in not_searched(both))
    assert "with states placed by optimizer_offload:share=0.25" in space_words(both)
    only = job(f"{OURS}:share=0.5", "memo")
    assert only.states == (f"{OURS}:share=0.5",)
    assert {variant.method for variant in only.variants} == {"memo"}
    assert not only.keeps


@pytest.mark.parametrize(
    ("only", "others", "words"),
    [
        (("zero_offload",), {}, "gradients that leave in the backward"),
        (("memo+optimizer_offload",), {}, "name single methods only"),
        ((OURS,), {"optimizer": "host"}, "already places the optimizer's states"),
        ((f"{OURS}:order=stale",), {}, "not lossless"),
        ((f"{OURS}:start=ready",), {}, "nothing can be clipped by it; clip must be false"),
        ((f"{OURS}:start=ready,clip=false",), {"tp": 1}, "updates in the backward"),
    ],
)
def test_what_is_not_bounded_is_refused_by_name(
    only: tuple[str, ...], others: dict[str, object], words: str
) -> None:
    with pytest.raises(MethodError, match=words) as told:
        job(*only, **others).ready()
    assert "\n" not in str(told.value)
