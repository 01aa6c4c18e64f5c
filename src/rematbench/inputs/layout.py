"""The layout: parallel degrees, micro-batch and batch."""

from functools import cache
from typing import Annotated

from rematbench.host.declared import Fact, Part
from rematbench.host.errors import UserError
from rematbench.inputs.configfile import wrong_field
from rematbench.inputs.system import ZeroStage
from rematbench.workload import NonNegativeInt, PositiveInt

Partition = tuple[tuple[tuple[int, ...], ...], ...]
"""The layers of each chunk of each rank: `partition[rank][chunk]` lists global indices, in which
prediction layers count on behind the decoder's."""


GATHERED_CHUNKS = 3
"""Chunks of a rank that torch keeps gathered in a pipeline: a further one is resharded and gathered
again (torch 2.13, distributed/pipelining/schedules.py, _add_unshard_reshard: max_active_stages)."""


class LayoutError(UserError):
    """A layout breaks a rule; the message names the rule and the numbers."""


class Degrees(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallel degrees and batch sizes, as a person chooses them for a number of GPUs."""

    tp: Annotated[PositiveInt, Fact(column="always")] = 1
    """So many ranks share each matrix (tensor parallelism)."""
    tp_columns: PositiveInt = 1
    """So many ranks also split the other dimension of each matrix (AxoNN)."""
    cp: Annotated[PositiveInt, Fact(column="always")] = 1
    """So many ranks share each sequence (context parallelism)."""
    pp: Annotated[PositiveInt, Fact(column="always")] = 1
    """So many ranks share the layers (pipeline parallelism)."""
    vpp: Annotated[PositiveInt, Fact(column="always")] = 1
    """A rank of the pipeline holds so many model chunks."""
    stages: Annotated[str, Fact(option="--layout", metavar="TEXT")] = ""
    """The stages of the pipeline hold E the embedding, t a layer, m a prediction layer, L the loss,
    as in Et*3|(tt|)*29,m|L (none: equal numbers of layers)."""
    ulysses: Annotated[PositiveInt, Fact(column="always")] = 1
    """So many ranks of dp share each sequence by exchanges of heads (Ulysses)."""
    shard_degree: NonNegativeInt = 0
    """So many ranks share sharded states, with replicas between (HSDP; 0: all peers share)."""
    micro_batch: Annotated[PositiveInt, Fact(metavar="b", column="always")] = 1
    """A micro-batch has so many sequences."""
    zero_stage: Annotated[ZeroStage, Fact(option="--zero", column="always")] = 1
    """ZeRO shards the states of this stage (3: as FSDP full shard)."""
    sp: Annotated[bool | None, Fact(option="--no-sp", column="own")] = None
    """With --no-sp, tp runs without sequence parallelism, which it uses by default."""
    ep: Annotated[PositiveInt, Fact(column="always")] = 1
    """So many of tp x cp x dp ranks share the experts."""
    etp: Annotated[PositiveInt | None, Fact(column="always")] = None
    """So many ranks share each matrix of an expert (none: tp)."""
    global_batch: Annotated[PositiveInt, Fact(metavar="B", column="always")]
    """An optimizer step has so many sequences, over all GPUs."""


class Layout(Degrees, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The degrees of all ranks.  `dp` excludes `cp`; with `cp`, each of its ranks is a group of
    `ulysses` neighbours, which share a slice's heads; the replicas of shards all-reduce their
    gradients; `sp` is Megatron's sequence parallelism (no effect at tp = 1).  Experts fold onto the
    ranks of a pipeline stage: tp x cp x dp ranks are etp x ep x `expert_dp`."""

    dp: Annotated[PositiveInt, Fact(column="always")] = 1
    sp: Annotated[bool, Fact(column="own")] = True
    global_batch: Annotated[PositiveInt, Fact(column="always")] = 1

    def __post_init__(self) -> None:
        """Raise LayoutError for a field of a wrong type, such as a degree below 1."""
        wrong = wrong_field(self, Layout)
        if wrong is not None:
            raise LayoutError(": ".join(wrong))

    @property
    def gpus(self) -> int:
        """The number of GPUs (ranks): tp x tp_columns x cp x pp x dp."""
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """The ranks of a pipeline stage."""
        return self.tp * self.tp_columns * self.cp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are sharded by rows (`sp` has no effect at tp = 1)."""
        return self.sp and self.tp > 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one pipeline per optimizer step."""
        return self.global_batch // (self.replicas * self.micro_batch)

    @property
    def replicas(self) -> int:
        """Data-parallel copies of the model that see different sequences."""
        return self.dp // self.ulysses

    @property
    def state_shards(self) -> int:
        """Ranks over which ZeRO shards states: data- and context-parallel peers together, or
        `shard_degree` of them."""
        return self.shard_degree or self.dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks over which the matrices of an expert are split."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def state_replicas(self) -> int:
        """Groups of ranks that hold the same shards of states."""
        return self.dp * self.cp // self.state_shards

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards the states of experts: their peers inside a replica of
        sharded states (torchtitan, distributed/parallel_dims.py, efsdp)."""
        return self.expert_dp // self.state_replicas

    @property
    def has_peers(self) -> bool:
        """Whether other ranks have gradients of the same parameters, or of the same experts."""
        return self.state_shards > 1 or self.expert_dp > 1

    @property
    def gathers_again(self) -> bool:
        """Whether a rank has more chunks than torch keeps gathered."""
        return self.pp > 1 and self.vpp > GATHERED_CHUNKS

    @property
    def num_chunks(self) -> int:
        """Model chunks of all pipeline ranks together."""
        return self.pp * self.vpp


def even_partition(num_layers: int, layout: Layout) -> Partition:
    """The partition[rank][chunk] of contiguous layers over virtual stages.  Sizes differ by at most
    one; the middle stages take the remainder, because the ends also hold embedding and head."""
    return _even(num_layers, layout.pp, layout.vpp)


@cache
def _even(num_layers: int, pp: int, vpp: int) -> Partition:
    stages = pp * vpp
    base, extra = divmod(num_layers, stages)
    sizes = [base] * stages
    start = (stages - extra) // 2
    for i in range(start, start + extra):
        sizes[i] += 1
    bounds = [sum(sizes[:i]) for i in range(stages + 1)]
    virtual = [tuple(range(bounds[i], bounds[i + 1])) for i in range(stages)]
    return tuple(tuple(virtual[chunk * pp + rank] for chunk in range(vpp)) for rank in range(pp))
