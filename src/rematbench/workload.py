"""The training work: a decoder-only transformer, a sequence length and a compute precision."""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

PositiveInt = Annotated[int, Meta(gt=0)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Width = Annotated[int, Meta(gt=0, le=1 << 24)]
"""A dimension of a matrix; the upper bound refuses typing errors, not models."""
Layers = Annotated[int, Meta(gt=0, le=1 << 12)]
Length = Annotated[int, Meta(ge=0, le=1 << 36)]
Cap = Annotated[float, Meta(ge=0.0, le=1e9)]
Probability = Annotated[float, Meta(ge=0.0, lt=1.0)]

MlpKind = Literal["swiglu", "geglu", "gelu"]
NormKind = Literal["rmsnorm", "layernorm"]
PositionKind = Literal["rope", "learned", "alibi"]
Precision = Literal["bf16", "fp16", "fp32", "fp64"]

BYTES_PER_ELEMENT: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer, with the terms of its published config.

    `attention_window` has one entry per layer (0: full causal attention), or is empty if every
    layer attends to the whole prefix.  `vocab` is the published vocabulary (a system may pad it:
    `System.padded_vocab`).  `qk_norm`: an RMSNorm over each head of queries and of keys (Qwen3);
    `norm_offset`: norms scale by 1 + weight (Gemma).  If `max_positions` is 0, a Workload sets the
    number of learned positions to its sequence length.
    """

    name: str
    num_layers: Layers
    hidden: Width
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    ffn: Width
    vocab: Width
    mlp: MlpKind
    norm: NormKind
    position: PositionKind
    tied_embeddings: bool
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    post_norm: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    dropout: Probability = 0.0
    max_positions: Length = 0
    attention_window: tuple[Length, ...] = ()
    attention_soft_cap: Cap = 0.0
    logit_soft_cap: Cap = 0.0
    source: str = ""

    @property
    def q_width(self) -> int:
        """Columns of the query projection: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection: KV heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate and an up projection (three matrices, not two)."""
        return self.mlp != "gelu"

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a weight, and for LayerNorm also a bias."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's linears, which tensor parallelism splits."""
        mlp_matrices = 3 if self.gated else 2
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + mlp_matrices * self.hidden * self.ffn

    @property
    def layer_vector_parameters(self) -> int:
        """Parameters of one layer's norms and biases (replicated over tensor-parallel ranks)."""
        norms = self.norm_parameters * (4 if self.post_norm else 2)
        qkv = (self.q_width + 2 * self.kv_width) if self.qkv_bias else 0
        proj = self.hidden if self.proj_bias else 0
        mlp = (self.ffn * (2 if self.gated else 1) + self.hidden) if self.mlp_bias else 0
        heads = 2 * self.head_dim if self.qk_norm else 0
        return norms + heads + qkv + proj + mlp

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        positions = self.max_positions if self.position == "learned" else 0
        return (self.vocab + positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, also where it is tied to the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All trainable parameters."""
        layer = self.layer_matrix_parameters + self.layer_vector_parameters
        head = 0 if self.tied_embeddings else self.head_parameters
        return self.num_layers * layer + self.embedding_parameters + head + self.norm_parameters


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model at a sequence length (tokens) in a compute precision.

    A model with `max_positions` 0 has `seq_len` learned positions.  `document_len`: mean length in
    tokens of the documents that are packed into a sequence (0: each sequence is one document).
    Attention stays inside a document; all other operators work on tokens.
    """

    model: Model
    seq_len: PositiveInt
    precision: Precision = "bf16"
    document_len: NonNegativeInt = 0

    def __post_init__(self) -> None:
        """Set a `max_positions` of 0 to `seq_len` if the model has learned positions."""
        if self.model.position == "learned" and self.model.max_positions == 0:
            force_setattr(self, "model", replace(self.model, max_positions=self.seq_len))

    @property
    def packed(self) -> bool:
        """Whether a sequence holds more than one document."""
        return 0 < self.document_len < self.seq_len

    @property
    def documents(self) -> int:
        """Documents of a sequence, a last shorter one included."""
        return -(-self.seq_len // self.document_len) if self.packed else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return BYTES_PER_ELEMENT[self.precision]
