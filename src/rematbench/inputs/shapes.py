"""Sizes of tensors on one rank: tokens, shards, widths and element bytes."""

from msgspec import Struct

from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.workload import Workload


class Shapes(Struct, frozen=True, kw_only=True):
    """Sizes on one rank, for one micro-batch.  `tokens`: rows after context parallelism and
    Ulysses; `shard_tokens`: rows of a tensor that sequence parallelism shards; `q_width`,
    `kv_width`, `out_width` (of attention's output), `heads`, `kv_heads`, `ffn` and
    `vocab`: the rank's tensor-parallel share; `hidden`: the rank's hidden columns, split over
    `columns` ranks; `document_len`: tokens per document (seq_len without packing); `documents`:
    documents per sequence."""

    tokens: int
    shard_tokens: int
    tp: int
    columns: int
    hidden: int
    cp: int
    sp: bool
    micro_batch: int
    seq_len: int
    document_len: int
    documents: int
    element_bytes: int
    q_width: int
    kv_width: int
    out_width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


def shapes(work: Workload, layout: Layout, system: System) -> Shapes:
    """The sizes on one rank; if tp exceeds the number of KV heads, KV heads are replicated."""
    model, tp = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len // (layout.cp * layout.ulysses)
    sequence_parallel = layout.sequence_parallel
    kv_heads = max(1, model.num_kv_heads // tp)
    return Shapes(
        tokens=tokens,
        shard_tokens=tokens // tp if sequence_parallel else tokens,
        tp=tp,
        columns=layout.tp_columns,
        hidden=model.hidden // layout.tp_columns,
        cp=layout.cp,
        sp=sequence_parallel,
        micro_batch=layout.micro_batch,
        seq_len=work.seq_len,
        document_len=work.document_len if work.packed else work.seq_len,
        documents=work.documents,
        element_bytes=work.element_bytes,
        q_width=model.num_heads // tp * model.head_dim,
        kv_width=kv_heads * model.head_dim,
        out_width=model.num_heads // tp * model.v_dim,
        heads=model.num_heads // tp,
        kv_heads=kv_heads,
        ffn=model.ffn // tp,
        vocab=system.padded_vocab(model.vocab, tp) // tp,
    )


def causal_pairs(seq_len: int, window: int) -> int:
    """The number of causal (query, key) pairs of one sequence and one head, within an attention
    window in tokens (0: no window)."""
    if window == 0 or window >= seq_len:
        return seq_len * (seq_len + 1) // 2
    return window * (window + 1) // 2 + (seq_len - window) * window


def packed_pairs(seq_len: int, document_len: int, window: int) -> int:
    """The number of causal pairs of one head in a sequence of packed documents of equal length (the
    last may be shorter), within documents and within the window."""
    whole, rest = divmod(seq_len, document_len)
    return whole * causal_pairs(document_len, window) + causal_pairs(rest, window)


def reached_share(places: int, copies: int) -> float:
    """The expected number of ranks (or nodes) that receive at least one of a token's `copies`,
    divided by `copies`, if each copy goes to any of `places` with equal probability."""
    return places * (1.0 - (1.0 - 1.0 / places) ** copies) / max(copies, 1)
