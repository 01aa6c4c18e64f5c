"""The limits of a search's space in words: what only `simulate` takes, and what is not modelled."""

from collections.abc import Iterator

from rematbench.advise.candidates.layouts import (
    MOST_MICRO_BATCH,
    other_dispatcher,
    switches_overlap,
)
from rematbench.advise.candidates.methods import LARGEST_UNIT
from rematbench.advise.search.job import SearchSpace
from rematbench.inputs.layout import GATHERED_CHUNKS, Layout


def space_words(job: SearchSpace) -> str:
    """The space of a search in words; the proof covers only this space."""
    layouts, methods = len(job.space.choices), len(job.variants)
    placed = len([choice for choice in job.space.choices if choice.states])
    many = "s" if layouts > 1 else ""
    each = f"{methods} methods and their compositions"
    if job.package:
        each = f"{methods} policies that {job.package.name} has options for"
    by = " to ".join(dict.fromkeys((*job.states[:1], *job.states[-1:])))
    states = f", {placed:,} of them with states placed by {by}" if placed else ""
    return f"{layouts:,} layout{many}{states}, each with {each}"


def not_searched(job: SearchSpace) -> list[str]:
    """What the search leaves out although `simulate` supports it, then what is not modelled."""
    layouts = [choice.layout for choice in job.space.choices]
    units = f"groups of more than {LARGEST_UNIT} layers"
    methods = [units] if job.package else _of_methods(job)
    return [*_of_layouts(job, layouts), *methods, *_not_modelled(job, layouts)]


def _of_layouts(job: SearchSpace, layouts: list[Layout]) -> Iterator[str]:
    fixed, spec, features = job.request.fixed, job.request.spec, job.system.accepts.features
    if fixed.micro_batch is None and spec.degrees.global_batch > MOST_MICRO_BATCH:
        yield f"micro-batches of more than {MOST_MICRO_BATCH} sequences"
    if any(layout.pp > 1 for layout in layouts):
        yield "partitions other than the even one with a layer more or less at the ends"
        yield "schedules other than 1F1B and its interleaving (--method zero_bubble or seq1f1b)"
    if any(layout.ep > 1 for layout in layouts):
        yield from _of_exchanges(job)
    if "hybrid_sharding" in features and not fixed.shard_degree:
        yield "shard_degree (replicas of shards)"
    if "param_offload" in features:
        yield "parameters in host memory"
    if "cuda_graphs" in features and spec.stack.cuda_graphs is None:
        yield "CUDA graphs (--cuda-graphs)"


def _of_exchanges(job: SearchSpace) -> Iterator[str]:
    spec, system = job.request.spec, job.system
    tried = [system.experts.dispatcher, other_dispatcher(spec, job.cluster, system)]
    yield f"dispatchers other than {' and '.join(filter(None, tried))} (--dispatcher)"
    if "ep_overlap" not in system.accepts.features:
        yield "exchanges during another micro-batch (the stack has none)"
    elif switches_overlap(spec, system):
        yield "delayed weight gradients (--ep-overlap delayed_wgrad)"


def _of_methods(job: SearchSpace) -> Iterator[str]:
    for variant in job.variants:
        if variant.scalar is not None and variant.scalar.scale == "pieces":
            yield f"more pieces than {variant.scalar.values[-1]}"
    yield "settings of methods that are not in their grids"
    if not job.states and job.model.experts is None:
        yield "optimizer states on the host in pieces (name optimizer_offload with --method)"
    yield "gradients that leave the device in the backward (compare takes such methods)"


def _not_modelled(job: SearchSpace, layouts: list[Layout]) -> Iterator[str]:
    system = job.system
    if any(layout.pp > 1 for layout in layouts):
        if {2, 3} & set(system.accepts.pipeline_zero_stages):
            yield f"ZeRO 2 and 3 with more than {GATHERED_CHUNKS} chunks of a rank"
        yield "interleaving with micro-batches that are not a multiple of pp (not modelled)"
