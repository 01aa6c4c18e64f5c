"""The layout: parallel degrees, micro-batch and batch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

from rematbench.host.declared import Fact, Part
from rematbench.host.errors import UserError
from rematbench.inputs.configfile import wrong_field
from rematbench.inputs.system import ZeroStage
from rematbench.workload import NonNegativeInt, PositiveInt

Partition = tuple[tuple[tuple[int, ...], ...], ...]
"""The layers of each chunk of each rank: `partition[rank][chunk]` lists global indices; prediction
layers are numbered after the decoder's."""
GATHERED_CHUNKS = 3
"""The most chunks of a rank that torch keeps gathered in a pipeline; others are resharded and
gathered again (torch 2.13, distributed/pipelining/schedules.py, _add_unshard_reshard:
max_active_stages)."""


class LayoutError(UserError):
    """A layout breaks a rule; the message states the rule with the job's numbers."""


class Degrees(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parallel degrees and batch sizes, as a user chooses them for a number of GPUs."""

    tp: Annotated[PositiveInt, Fact(column="always")] = 1
    """Tensor parallelism splits each matrix over this many ranks."""
    tp_columns: PositiveInt = 1
    """The other dimension of each matrix is split over this many ranks too (AxoNN)."""
    cp: Annotated[PositiveInt, Fact(column="always")] = 1
    """Context parallelism splits each sequence over this many ranks."""
    pp: Annotated[PositiveInt, Fact(column="always")] = 1
    """Pipeline parallelism splits the layers over this many ranks."""
    vpp: Annotated[PositiveInt, Fact(column="always")] = 1
    """Each pipeline rank holds this many model chunks."""
    stages: Annotated[str, Fact(option="--layout", metavar="TEXT")] = ""
    """Pipeline stages hold what the letters say: E the embedding, t a layer, m a prediction layer,
    L the loss, as in Et*3|(tt|)*29,m|L (none: equal numbers of layers)."""
    ulysses: Annotated[PositiveInt, Fact(column="always")] = 1
    """This many ranks of dp share each sequence and exchange attention heads (Ulysses)."""
    shard_degree: NonNegativeInt = 0
    """Each replica of the sharded states is spread over this many ranks (HSDP; 0: over all)."""
    micro_batch: Annotated[PositiveInt, Fact(metavar="b", column="always")] = 1
    """A micro-batch has this many sequences."""
    zero_stage: Annotated[ZeroStage, Fact(option="--zero", column="always")] = 1
    """ZeRO shards states up to this stage (3: as FSDP full shard)."""
    sp: Annotated[bool | None, Fact(option="--no-sp", column="own")] = None
    """With --no-sp, tp runs without sequence parallelism, which it uses by default."""
    ep: Annotated[PositiveInt, Fact(column="always")] = 1
    """The experts are spread over this many of the tp x cp x dp ranks."""
    etp: Annotated[PositiveInt | None, Fact(column="always")] = None
    """Each matrix of an expert is split over this many ranks (none: tp)."""
    global_batch: Annotated[PositiveInt, Fact(metavar="B", column="always")]
    """An optimizer step processes this many sequences, over all GPUs."""


class Layout(Degrees, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The degrees of a job with `dp` worked out.  `dp` excludes `cp` and includes `ulysses`; inside
    `cp`, each slice of a sequence belongs to a group of `ulysses` neighbours, which share its
    heads.  Replicas of sharded states all-reduce their gradients.  `sp` is Megatron's sequence
    parallelism (no effect at tp = 1).  Experts use the same ranks of a pipeline stage: tp x cp x dp
    = etp x ep x `expert_dp`."""

    dp: Annotated[PositiveInt, Fact(column="always")] = 1
    sp: Annotated[bool, Fact(column="own")] = True
    global_batch: Annotated[PositiveInt, Fact(column="always")] = 1

    def __post_init__(self) -> None:
        """Raise LayoutError for a field of a wrong type or range, such as a degree below 1."""
        wrong = wrong_field(self, Layout)
        if wrong is not None:
            raise LayoutError(": ".join(wrong))

    @property
    def gpus(self) -> int:
        """The number of GPUs (ranks): tp x tp_columns x cp x pp x dp."""
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """The number of ranks in a pipeline stage."""
        return self.tp * self.tp_columns * self.cp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequence parallelism shards the rows of norms and residuals."""
        return self.sp and self.tp > 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each pipeline runs per optimizer step."""
        return self.global_batch // (self.replicas * self.micro_batch)

    @property
    def replicas(self) -> int:
        """Data-parallel copies of the model, which process different sequences."""
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
        """Expert data parallelism: ranks that hold the same part of the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def state_replicas(self) -> int:
        """The number of replicas of the sharded states."""
        return self.dp * self.cp // self.state_shards

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards states of experts: their peers inside a replica of the
        sharded states (torchtitan, distributed/parallel_dims.py, efsdp)."""
        return self.expert_dp // self.state_replicas

    @property
    def has_peers(self) -> bool:
        """Whether other ranks have gradients of the same parameters or of the same experts."""
        return self.state_shards > 1 or self.expert_dp > 1

    @property
    def gathers_again(self) -> bool:
        """Whether a pipeline rank has more chunks than torch keeps gathered."""
        return self.pp > 1 and self.vpp > GATHERED_CHUNKS

    @property
    def num_chunks(self) -> int:
        """The number of model chunks on all pipeline ranks together."""
        return self.pp * self.vpp


def even_sizes(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """The numbers of layers of the virtual stages, as equal as possible.  The middle stages take
    the remainder, because the ends also hold embedding and head."""
    stages = layout.num_chunks
    base, extra = divmod(num_layers, stages)
    start = (stages - extra) // 2
    return tuple(base + (start <= i < start + extra) for i in range(stages))


def partition_of_sizes(sizes: Sequence[int], pp: int, more: int = 0) -> Partition:
    """The partition over `pp` ranks whose chunks, in pipeline order, have `sizes` decoder layers;
    the last chunk has `more` prediction layers besides."""
    ends = [*accumulate(sizes, initial=0)]
    ends[-1] += more
    chunks = [tuple(range(a, b)) for a, b in pairwise(ends)]
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))
