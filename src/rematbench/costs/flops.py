"""Model FLOPs per token (causal and dense), MFU and HFU."""

from math import fsum

from rematbench.inputs.shapes import packed_pairs
from rematbench.workload import Model, Workload

FORWARD_AND_BACKWARD = 3
"""The number of GEMMs per weight matrix: one in the forward, two in the backward."""


def matrix_flop_per_token(model: Model) -> int:
    """FLOPs per token, forward and backward, of the weight matrices that a token passes, except the
    input embedding: 6 (L P_layer + h V), with only the active experts of a layer, and another h V
    for each prediction layer. With a narrow embedding, h are its columns, and the linears that
    widen and narrow count too.

    Source: Yuan et al., USENIX ATC 2024 (MFU as counted there); Narayanan et al. 2021, eq. 3.
    """
    heads = 1 + model.mtp_layers
    weights = model.active_layer_matrices + heads * model.narrow * model.vocab
    weights += 2 * model.hidden * model.embedding_width
    return 2 * FORWARD_AND_BACKWARD * weights


def attention_flop_per_token(work: Workload, *, causal: bool) -> float:
    """FLOPs per token, forward and backward, of attention scores and weighted sums: 12 s h L dense,
    half of it causal.

    In general, each layer has 6 x heads x (key columns + value columns) x (mean keys per query).
    The causal mean is s / 2, as the sources count it, not (s + 1) / 2.  With packed documents only
    pairs inside a document count.
    """
    model = work.model
    causal = causal and not model.attends_all
    windows = model.attention_window or (0,) * model.num_layers
    windows += (0,) * model.mtp_layers
    length = work.document_len or work.seq_len
    chunked = model.attention_chunked
    keys = fsum(_mean_keys(work.seq_len, length, window, causal, chunked) for window in windows)
    return _attended_flop(model, keys)


def _attended_flop(model: Model, keys: float) -> float:
    """FLOPs, forward and backward, of a token's scores and weighted sums over `keys` keys per head:
    three products over the columns of keys and three over those of values."""
    return 2 * FORWARD_AND_BACKWARD * (model.q_width + model.out_width) * keys


def _mean_keys(
    seq_len: int, document_len: int, window: int, causal: bool, chunked: bool = False
) -> float:
    """Mean keys per query over a sequence's documents; exact with a window, else halved if
    causal."""
    if 0 < window < document_len:
        if chunked:
            return _mean_keys(seq_len, window, 0, causal)
        return packed_pairs(seq_len, document_len, window) / seq_len
    whole, rest = divmod(seq_len, document_len)
    keys = (whole * document_len * document_len + rest * rest) / seq_len
    return keys / 2 if causal else keys


def model_flop_per_token(work: Workload, *, causal: bool = True) -> float:
    """Model FLOPs of a token's forward and backward, without recomputation and padding."""
    matrices = matrix_flop_per_token(work.model) - frozen_flop_per_token(work)
    return matrices + attention_flop_per_token(work, causal=causal)


def frozen_flop_per_token(work: Workload) -> int:
    """FLOPs per token that frozen weights save, minus those that adapters add. Frozen matrices need
    no weight gradients, and layers below the first trained one need no backward."""
    model = work.model
    if not work.partly:
        return 0
    layer = model.active_layer_matrices // model.num_layers
    if not (work.adapted or work.trained_parts):
        return 4 * layer * work.frozen_layers
    head = model.hidden * model.vocab * (not work.trains("head"))
    layers = range(work.frozen_layers, model.num_layers)
    adapters = work.lora_rank * sum(work.adapted_widths(layer, active=True) for layer in layers)
    adapters += 4 * work.bottleneck * model.hidden * len(layers)
    return 2 * (model.active_layer_matrices + head) - 2 * FORWARD_AND_BACKWARD * adapters


def megatron_flop_per_token(
    model: Model, seq_len: int, padded_vocab: int, *, causal: bool = True
) -> float:
    """FLOPs per token as Megatron-LM's throughput line counts them: every layer attends to the
    whole prefix, and the vocabulary is padded.  Newer versions count half of the attention matrix
    (`causal`), older versions all of it.

    Source: num_floating_point_operations of Megatron-LM's training.py.
    """
    layers = model.num_layers + model.mtp_layers
    keys = layers * (seq_len / 2 if causal else float(seq_len))
    heads = 1 + model.mtp_layers
    head = 2 * FORWARD_AND_BACKWARD * heads * model.hidden * (padded_vocab - model.vocab)
    return matrix_flop_per_token(model) + head + _attended_flop(model, keys)


def mfu(
    tokens_per_s_per_gpu: float, work: Workload, peak_flop_per_s: float, *, causal: bool = True
) -> float:
    """Model FLOPs utilisation, a fraction of the dense peak."""
    return tokens_per_s_per_gpu * model_flop_per_token(work, causal=causal) / peak_flop_per_s


def hfu(
    tokens_per_s_per_gpu: float,
    work: Workload,
    peak_flop_per_s: float,
    recompute_flop_per_token: float,
) -> float:
    """Hardware FLOPs utilisation, a fraction of the dense peak: MFU with recomputation counted."""
    flop = model_flop_per_token(work) + recompute_flop_per_token
    return tokens_per_s_per_gpu * flop / peak_flop_per_s


def over_peak(causal: float, dense: float) -> str:
    """Why an MFU, counted `causal` or `dense`, exceeds 100 %; empty if neither does."""
    if causal > 1.0:
        return "over 100 %: it is divided by a peak that is not the peak of these kernels"
    if dense > 1.0:
        return "over 100 %: the dense count includes the half of attention that causal kernels skip"
    return ""
