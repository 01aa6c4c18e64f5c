"""vocabulary_parallel: the embedding and the output projection split over all stages of a pipeline.

Claim: a large vocabulary on the last stage makes this stage the slowest, with the most weights; if
it is split over all stages, throughput grows by 5 to 51 % and every stage has the same bytes.
Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv 2411.05288,
and its artifact sail-sg/VocabularyParallelism. vocab-1 is Algorithm 1 with two barriers in a
micro-batch (rank r keeps pp - r + 2 micro-batches), vocab-2 Algorithm 2 with one (pp - r + 1);
interlaced is nnScaler's pipeline, in which all stages wait for each other in every pass of the
vocabulary (1.5 pp).
Deviations: the passes of a vocabulary have fixed places in the order; the artifact derives them
from estimated times. The input lookup and its sum are part of the softmax's pass.
"""

from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Plan, Problem, Settings, Unsupported, vocabulary_refusal


class VocabularyParallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`schedule`: vocab-1, vocab-2 or interlaced."""

    name: ClassVar[str] = "vocabulary_parallel"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = ({"schedule": "vocab-2"}, {"schedule": "vocab-1"})
    schedule: Literal["vocab-1", "vocab-2", "interlaced"] = "vocab-2"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        if base.schedule != "1f1b" or base.orders or base.slices:
            words = "the base's passes" if base.orders or base.slices else base.schedule
            return Unsupported(f"needs passes in the order of 1F1B, not {words}")
        made = replace(base, schedule=self.schedule)
        refused = vocabulary_refusal(made, problem.layout, problem.workload)
        return Unsupported(refused) if refused else made
