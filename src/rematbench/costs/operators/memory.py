"""Memory layers: a lookup in a table of values instead of the MLP (Berges et al. 2024, arXiv
2412.09764; product keys of Lample et al. 2019, arXiv 1907.05242).

Each head compares the two halves of its query with two sets of sub-keys.  The pairs of sub-keys
with the largest summed scores choose rows of one table, which all memory layers share; the weighted
sum of the rows is gated and projected.  Source: facebookresearch/memory @7f85280, memory.py.
Deviations: no norms of queries and keys, no dropout of values; the gate's activation is that of the
model's MLP.
"""

from rematbench.costs.operators.builder import Builder
from rematbench.costs.operators.kernels import Elementwise, Gemm
from rematbench.costs.operators.ops import memory_kernel
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import States
from rematbench.model import Memory
from rematbench.workload import Workload

INDEX_BYTES = 8


def add_memory(b: Builder, given: Memory, x: str, out: str, *, owns: bool) -> None:
    """Add a memory layer's operators from the tensor `x` to `out`. `owns`: this layer has the
    table's states, and other layers add to its gradients."""
    tokens, e, hidden, picked = b.s.tokens, b.e, b.model.hidden, given.picked
    b.column("memory_query", x, {"memory_query": given.heads * given.key_dim})
    b.add("memory_rows", tokens, picked * INDEX_BYTES, False)
    b.wide("memory_weights", picked)
    scores = 2 * tokens * given.heads * given.keys * e
    halves = 2 * given.heads
    chosen = memory_kernel(2 * tokens * picked * given.key_dim * e)
    b.op(
        name="memory_keys",
        inputs=("memory_query",),
        outputs=("memory_rows", "memory_weights"),
        saves=("memory_query", "memory_rows", "memory_weights"),
        forward=(Gemm(tokens, given.keys, given.key_dim // 2, halves), Elementwise(2 * scores, 4)),
        backward_input=chosen,
        backward_weight=chosen,
        parameters=given.heads * given.keys * given.key_dim,
        scratch_forward_bytes=scores,
    )
    b.wide("memory_bag", hidden)
    read = memory_kernel(tokens * (picked * (hidden * e + INDEX_BYTES + e) + hidden * e))
    width = b.system.states.grad_bytes
    b.op(
        name="lookup",
        inputs=("memory_weights", "memory_rows"),
        outputs=("memory_bag",),
        saves=("memory_weights", "memory_rows"),
        forward=read,
        backward_input=read,
        backward_weight=memory_kernel(tokens * (2 * picked * hidden * width + hidden * e)),
        parameters=given.rows * hidden if owns else 0,
    )
    b.column("memory_gate", x, {"memory_gate_out": hidden})
    b.wide("memory_in", hidden)
    one = b.nbytes("memory_in")
    b.op(
        name="memory_mul",
        inputs=("memory_gate_out", "memory_bag"),
        outputs=("memory_in",),
        saves=("memory_gate_out", "memory_bag"),
        forward=memory_kernel(3 * one),
        backward_input=memory_kernel(5 * one),
    )
    b.row("memory_proj", "memory_in", out, hidden, bias=False)


def table_on_host(work: Workload, layout: Layout, states: States) -> tuple[int, int, int]:
    """(device bytes that a table in host memory would free on its rank, bytes per step of rows
    copied to the device for forward and backward, bytes of their gradients copied back)."""
    given, hidden = work.model.memory, work.model.hidden
    assert given is not None
    each = states.param_bytes + states.grad_bytes + states.optimizer_bytes
    tokens = layout.num_micro_batches * layout.micro_batch * work.seq_len // layout.cp
    read = tokens * given.picked * len(given.layers) * hidden
    up, down = 2 * read * work.element_bytes, read * states.grad_bytes
    return given.rows * hidden * each, up, down


def table_traffic(work: Workload, layout: Layout, states: States) -> tuple[int, int]:
    """(bytes that a dense update of the table moves in a step, a lower bound of those for rows that
    no token reads); the bound assumes that no row is read twice."""
    given, hidden = work.model.memory, work.model.hidden
    assert given is not None
    each = states.grad_bytes + 2 * states.optimizer_bytes + states.param_bytes
    tokens = layout.global_batch * work.seq_len
    touched = min(given.rows, tokens * given.picked * len(given.layers))
    row = hidden * each
    return given.rows * row, (given.rows - touched) * row
