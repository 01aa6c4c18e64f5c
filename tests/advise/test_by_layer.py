"""Plans tuned layer by layer, held against every list and every partition of small jobs."""

from itertools import combinations, product

import pytest
from msgspec.structs import replace

from rematbench.advise.candidates.layouts import Fixed, LayoutChoice
from rematbench.advise.candidates.trials import LayoutTrials
from rematbench.advise.search.by_layer import ByLayer, LayerLists
from rematbench.advise.search.job import SearchSpace
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, in_one_process
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster, load_model
from rematbench.workload import Experts
from tests.everything import ENDLESS, WORK
from tests.tables import tables

ONLY = ("keep_all", "full_recompute", "selective_recompute:modules=[mlp]")
EXPERTS = Experts(count=8, active=2, ffn=1024, dense_layers=(0, 1))


def request(layers: int, **given: object) -> SearchRequest:
    """A job of a few layers, on devices without an end."""
    model = replace(load_model("llama-7b"), name="near", num_layers=layers, attention_window=())
    if given.pop("experts", False):
        model = replace(model, experts=EXPERTS)
    model = replace(model, mtp_layers=given.pop("mtp_layers", 0))
    cluster = replace(load_cluster("h100-80gb"), hbm_bytes=ENDLESS)
    usual = {"system": "megatron-core", "seq_len": 4096, "gpus": 2, "global_batch": 8}
    spec = Job(**{**usual, "model": model, "cluster": cluster, **given})
    fixed = Fixed(tp=1, cp=1, pp=spec.degrees.pp, vpp=spec.degrees.vpp, micro_batch=1)
    return SearchRequest(spec=spec, only=ONLY, within=0.0, fixed=fixed)


def choice_of(space: SearchSpace, sizes: tuple[int, ...]) -> LayoutChoice:
    return space.space.choices[0].of_sizes(sizes)


def at_share(one: SearchRequest, sizes: tuple[int, ...], share: float) -> SearchRequest:
    """The job on devices that hold so much between full recomputation and keeping everything."""
    space = SearchSpace(one)
    trials = LayoutTrials(space.job(choice_of(space, sizes)))
    ends = [
        trials.trial(text, space.registry).result.evaluation.reserved_bytes
        for text in ("full_recompute", "keep_all")
    ]
    need = ends[0] + share * (ends[1] - ends[0])
    first = trials.problem
    return replace(
        one,
        spec=one.spec.changed(hbm_bytes=int(need) + first.non_torch_bytes),
        reserve_gib=0.0,
    )


@pytest.mark.parametrize("text", ONLY[1:])
@pytest.mark.parametrize(("job", "sizes"), tables(__file__)["lists"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_lists_are_the_shortest_of_all(
    text: str, job: dict[str, object], sizes: tuple[int, ...], share: float
) -> None:
    """Every set of every rank's layers is weighed: none that fits has fewer."""
    space = SearchSpace(at_share(request(**job), sizes, share))
    trials = LayoutTrials(space.job(choice_of(space, sizes)))
    lists, problem = LayerLists(trials, text, space.registry), trials.problem
    room = problem.usable_bytes
    for rank, chunks in enumerate(trials.job.base.partition):
        own = [layer for chunk in chunks for layer in chunk]
        fewest = next(
            (
                count
                for count in range(len(own) + 1)
                if any(lists.fits(rank, layers, room) for layers in combinations(own, count))
            ),
            None,
        )
        found = lists.fewest_of(rank, room)
        assert (None if found is None else len(found)) == fewest


@pytest.mark.parametrize(("layers", "vpp", "share"), [(5, 1, 0.4), (5, 2, 0.6)])
def test_the_fastest_partition_is_found(layers: int, vpp: int, share: float) -> None:
    """Every partition of a small job is tried with every method and its lists."""
    even = {1: (2, 3), 2: (1, 2, 1, 1)}[vpp]
    one = at_share(request(layers, pp=2, vpp=vpp), even, share)
    job = SearchJob(one)
    results, _ = in_one_process(job.search(), most_work=WORK)
    tuned = ByLayer(job)
    found = tuned.fastest(results)
    best = min(results[0].fitting_s, found.fitting_s if found else results[0].fitting_s)
    every = [
        sizes
        for sizes in product(range(layers + 1), repeat=2 * vpp)
        if sum(sizes) == layers and all(sizes[1:-1])
    ]
    there = [tuned.at(choice_of(job, sizes)) for sizes in every]
    fits = [item.fitting_s for item in there if item is not None]
    assert best <= min(fits) * (1 + 1e-9)


def test_a_list_is_faster_than_every_method_on_all_layers_of_deepseek_v3() -> None:
    """On 256 GB200 at Et|(tt|)*30L, stages that no bound covers."""
    model = replace(load_model("deepseek-v3"), mtp_layers=0)
    degrees = {"tp": 1, "cp": 1, "pp": 8, "ep": 32, "etp": 1, "micro_batch": 1, "zero_stage": 1}
    spec = Job(
        model=model, cluster="gb200-nvl72", system="megatron-core-2026", gpus=256, seq_len=4096,
        global_batch=2048, stages="Et|(tt|)*30L",
    )  # fmt: skip
    only = ("full_recompute", "selective_recompute:mla_up_proj")
    one = SearchRequest(spec=spec, only=only, fixed=Fixed(**degrees))
    with pytest.raises(LayoutError, match="a chunk has no layers"):
        _ = SearchSpace(one).space
    space = SearchSpace(replace(one, by_layer=True))
    found = ByLayer(space).stated()
    assert not space.bounded
    assert {item.method for item in found} > {*only}
    assert "layers=" in found[0].method
    for text in only:
        (whole,) = (item for item in found if item.method == text)
        name = text.partition(":")[0]
        assert min(i.fitting_s for i in found if i.method.startswith(name)) < whole.fitting_s
