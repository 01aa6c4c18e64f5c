"""A decoder-only transformer, and the types of its numbers and words."""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(gt=0)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Width = Annotated[int, Meta(gt=0, le=1 << 24)]
"""A dimension of a matrix; the upper bound catches typing errors, and no model exceeds it."""
Layers = Annotated[int, Meta(gt=0, le=1 << 12)]
Length = Annotated[int, Meta(ge=0, le=1 << 36)]
Cap = Annotated[float, Meta(ge=0.0, le=1e9)]
Probability = Annotated[float, Meta(ge=0.0, lt=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Imbalance = Annotated[float, Meta(ge=1.0, le=1e6)]
Capacity = Annotated[float, Meta(ge=0.0, le=1e6)]
ExpertPadding = Literal["none", "capacity"]

GATED = ("swiglu", "geglu")
MlpKind = Literal["swiglu", "geglu", "gelu", "relu", "relu2", "xielu"]
NormKind = Literal["rmsnorm", "layernorm"]
PositionKind = Literal["rope", "learned", "alibi", "none"]
BlockKind = Literal["sequential", "parallel", "parallel_shared_norm"]
HeadNormWeights = Literal["head", "each_head", "width", "none"]
RouterKind = Literal["softmax", "sigmoid"]
Precision = Literal["bf16", "fp16", "fp32", "fp64"]
RecipeName = Literal["none", "fp8", "fp8-delayed", "fp8-block", "fp8-rows", "mxfp8", "nvfp4"]
BaseDtype = Literal[
    "stack", "bf16", "fp32", "nf4", "nf4_double", "int4", "int4_ungrouped", "marlin", "int8"
]
AdapterTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
_WORDS = "|".join(get_args(AdapterTarget))
AdapterTargets = Annotated[str, Meta(pattern=rf"^(all|({_WORDS})(,({_WORDS}))*)$")]
"""Adapted linears: `all`, or some of q, k, v, o, gate, up, down, separated by commas."""
TrainedParts = Annotated[
    str, Meta(pattern=r"^((embedding|norms|head)(,(embedding|norms|head))*)?$")
]
"""Parts that train: some of embedding, norms, head, separated by commas."""

BYTES_PER_ELEMENT: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class Experts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mixture of experts that replaces the MLP in all layers except `dense_layers`.

    - `count`: experts per layer; `active`: experts per token (top-k); `ffn`: columns of an expert,
      which is an MLP with the model's activation and biases.
    - `shared_ffn`: columns of the shared expert, an MLP that every token passes (0: none);
      `shared_gate`: whether a linear to one column scales the shared expert's output.
    - `router`: the function that turns the router's logits into probabilities; `router_bias`:
      whether the router's linear has a bias; `groups`: experts are divided into this many groups,
      and a token's experts come from a few of them.
    - `aux_loss`: the coefficient of the router's load-balancing loss (0: none).
    """

    count: Width
    active: Width
    ffn: Width
    shared_ffn: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    shared_gate: bool = False
    dense_layers: tuple[NonNegativeInt, ...] = ()
    router: RouterKind = "softmax"
    router_bias: bool = False
    groups: Width = 1
    aux_loss: Cap = 0.0


class Latent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latent attention: queries, and keys together with values, are projected down to few columns,
    normed, and projected up to heads (DeepSeek-V2, arXiv 2405.04434).

    - `q_rank`: columns of the compressed queries (0: queries are not compressed); `kv_rank`:
      columns of the compressed keys and values.
    - `nope`, `rope`: columns of a query or key head without and with rotary positions; all key
      heads share the `rope` columns.  `v`: columns of a value head.
    - `index_heads`, `index_dim`, `index_top`: heads and head columns of the indexer of sparse
      attention, and the tokens that it selects per query (DeepSeek-V3.2; 0: no indexer).
    """

    q_rank: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    kv_rank: Width
    nope: Width
    rope: Width
    v: Width
    index_heads: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    index_dim: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    index_top: Annotated[int, Meta(ge=0, le=1 << 24)] = 0

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    def matrix_parameters(self, hidden: int, heads: int) -> int:
        """Parameters of the projections to queries, keys and values, and of the indexer."""
        q = self.q_rank * (hidden + heads * self.qk) if self.q_rank else hidden * heads * self.qk
        kv = hidden * (self.kv_rank + self.rope) + self.kv_rank * heads * (self.nope + self.v)
        index = hidden * (self.index_dim + self.index_heads)
        return q + kv + index + (self.q_rank or hidden) * self.index_heads * self.index_dim


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Memory layers: their MLP is a lookup in one shared table of keys x keys rows, each as wide as
    the hidden states.  `layers`: global indices, ascending; the first layer holds the table.
    `heads`: queries per token, with `key_dim` columns each; `keys`: sub-keys for each half of a
    query; `top`: rows that a query reads.  `home`: where the table and its optimizer states are; a
    table on the host is refused, with its bytes."""

    layers: Annotated[tuple[NonNegativeInt, ...], Meta(min_length=1)]
    heads: Width
    keys: Width
    key_dim: Width
    top: Width
    home: Literal["device", "host"] = "device"

    @property
    def rows(self) -> int:
        return self.keys * self.keys

    @property
    def picked(self) -> int:
        """Rows of the table that a token reads in one layer."""
        return self.heads * self.top

    def matrix_parameters(self, hidden: int) -> int:
        """Parameters of a layer's projections and keys, without the table."""
        return self.heads * self.key_dim * (hidden + self.keys) + 2 * hidden * hidden


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer, in the terms of its published config.

    - `attention_window`: the window of each layer in tokens (0: full causal attention), or empty if
      every layer attends to the whole prefix.
    - `vocab`: the published vocabulary (a stack may pad it: `System.padded_vocab`).
    - `mlp`: gated (`swiglu`, `geglu`) or two matrices; `relu2` is the square of ReLU, `xielu` has
      two trainable scalars.  `activation_steps`: how many tensors of `ffn` columns the activation
      saves besides its input if eager operators compute it (tanh approximations of GELU).
      `glu_clamp`: experts clamp both halves of the input of their gated activation.
    - `block`: in `parallel` blocks attention and MLP read the same residual stream, each through a
      norm or both through a shared norm.  `pre_norm`, `post_norm`: norms at the input and at the
      output of attention and MLP.  `embedding_norm`: a norm after the embedding.
    - `norm_bias`: whether a LayerNorm has a bias; `norm_weight`: whether norms have a weight;
      `norm_offset`: norms scale by 1 + weight (Gemma); `norm_in_fp32`: eager norms apply their
      weight before the cast to 16 bits.
    - `qk_norm`: a norm over each query and key head.  `qk_norm_weights`: all heads share a weight
      (`head`), each head has a weight and no bias (`each_head`), one norm covers the whole width
      (`width`), or the norm has no weight (`none`).
    - `rotary_share`: the share of query and key elements to which rotary positions apply, averaged
      over layers.
    - `dropout` applies to the outputs of attention and MLP.  `attention_dropout` (on attention
      probabilities) and `embedding_dropout` equal `dropout` by default.
    - `attention_chunked`: a layer's window is a chunk, and a token attends only to earlier tokens
      of its chunk.  `attention_sinks`: each head has a trainable logit beside its scores.
    - `experts`: a mixture of experts replaces the MLP; `ffn` is then the width of dense layers.
    - `latent`: latent attention; `head_dim` is then the width of a query or key head, and every
      head has its own keys and values.
    - `mtp_layers`: layers after the last one that each predict one more token (multi-token
      prediction, DeepSeek-V3, arXiv 2412.19437).  Each joins the hidden states with the embedding
      of the next token by a linear, and uses the model's embedding and output projection.
    - `layer_groups`: number of equal runs of layers that share their weights (0: no sharing).
      `embedding_width`: columns of a narrow embedding, which a linear widens to the hidden columns;
      the head narrows its input to them (0: not narrow).  `attends_all`: tokens attend to later
      tokens.  ALBERT has all three (arXiv 1909.11942).
    - `max_positions`: 0 with learned positions means the sequence length of the Workload.
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
    attention_dropout: Probability | None = None
    embedding_dropout: Probability | None = None
    max_positions: Length = 0
    attention_window: tuple[Length, ...] = ()
    attention_soft_cap: Cap = 0.0
    logit_soft_cap: Cap = 0.0
    block: BlockKind = "sequential"
    pre_norm: bool = True
    embedding_norm: bool = False
    norm_bias: bool = True
    norm_weight: bool = True
    norm_in_fp32: bool = False
    qk_norm_weights: HeadNormWeights = "head"
    rotary_share: Share = 1.0
    activation_steps: Annotated[float, Meta(ge=0.0, le=16.0)] = 0.0
    head_bias: bool = False
    attention_chunked: bool = False
    attention_sinks: bool = False
    glu_clamp: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    mtp_layers: Annotated[int, Meta(ge=0, le=64)] = 0
    memory: Memory | None = None
    layer_groups: Annotated[int, Meta(ge=0, le=1 << 12)] = 0
    embedding_width: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    attends_all: bool = False
    left_out: str = ""
    source: str = ""

    @property
    def q_width(self) -> int:
        """Columns of the query projection: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys, KV heads x head_dim; those of the values too, unless attention is
        latent."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Columns of a value head."""
        return self.latent.v if self.latent else self.head_dim

    @property
    def sparse_attention(self) -> bool:
        """Whether an indexer selects the tokens to which a query attends."""
        return self.latent is not None and self.latent.index_top > 0

    def memory_of(self, layer: int) -> str:
        """`owns` for the memory layer that holds the table, `borrows` for the other memory layers,
        empty for all other layers."""
        if self.memory is None or layer not in self.memory.layers:
            return ""
        return "owns" if layer == self.memory.layers[0] else "borrows"

    def owner(self, layer: int) -> int:
        """The first layer of the run of layers with which a layer shares its weights."""
        if not self.layer_groups or layer >= self.num_layers:
            return layer
        run = self.num_layers // self.layer_groups
        return layer // run * run

    @property
    def narrow(self) -> int:
        """Columns of the embedding and of the output projection."""
        return self.embedding_width or self.hidden

    @property
    def untimed(self) -> str:
        """Why no rates exist for the model's operators; empty if they do."""
        words = "sparse attention (an indexer chooses the tokens of each query)"
        return words * self.sparse_attention

    @property
    def out_width(self) -> int:
        """Columns of attention's output: heads x columns of a value head."""
        return self.num_heads * self.v_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate and an up projection (three matrices, not two)."""
        return self.mlp in GATED

    @property
    def drops_attention(self) -> bool:
        given = self.attention_dropout
        return (self.dropout if given is None else given) > 0

    @property
    def drops_embedding(self) -> bool:
        given = self.embedding_dropout
        return (self.dropout if given is None else given) > 0

    @property
    def drops(self) -> bool:
        return self.dropout > 0 or self.drops_attention or self.drops_embedding

    @property
    def special_features(self) -> tuple[str, ...]:
        """The model's features, in words, that the blocks of Llama, GPT and Gemma lack.  Code that
        builds only such blocks refuses the model and names these features."""
        features = {
            "attention and MLP in parallel": self.block != "sequential",
            "blocks without norms at their input": not self.pre_norm,
            "a norm after the embedding": self.embedding_norm,
            "LayerNorm without a bias": self.norm == "layernorm" and not self.norm_bias,
            "norms without a weight": not self.norm_weight,
            "norms over the width of queries and keys": self.qk_norm
            and self.qk_norm_weights == "width",
            "norms with a weight for each head": self.qk_norm
            and self.qk_norm_weights == "each_head",
            "rotary positions on a part of the heads": self.position == "rope"
            and self.rotary_share < 1.0,
            "no positions": self.position == "none",
            f"the activation {self.mlp}": self.mlp in ("relu", "relu2", "xielu"),
            "a bias of the output projection": self.head_bias,
            "attention in chunks": self.attention_chunked,
            "attention sinks": self.attention_sinks,
            "experts": self.experts is not None,
            "a clamped activation": self.glu_clamp,
            "norms of queries and keys without a weight": self.qk_norm
            and self.qk_norm_weights == "none",
            "latent attention": self.latent is not None,
            "sparse attention": self.sparse_attention,
            "layers that predict more tokens": self.mtp_layers > 0,
            "memory layers": self.memory is not None,
            "layers that share weights": self.layer_groups > 0,
            "an embedding of fewer columns": self.embedding_width > 0,
            "attention to later tokens": self.attends_all,
            "different rates of dropout": self.drops_attention != (self.dropout > 0)
            or self.drops_embedding != (self.dropout > 0),
        }
        return tuple(words for words, there in features.items() if there)

    def norm_parameters_of(self, width: int) -> int:
        """Parameters of a norm over `width` columns: a weight, and for LayerNorm also a bias."""
        bias = self.norm == "layernorm" and self.norm_bias
        return width * (self.norm_weight + (self.norm_weight and bias))

    @property
    def norm_parameters(self) -> int:
        return self.norm_parameters_of(self.hidden)

    @property
    def layer_norms(self) -> int:
        """The number of norms over the hidden columns in a layer."""
        before = {"sequential": 2, "parallel": 2, "parallel_shared_norm": 1}[self.block]
        return before * self.pre_norm + 2 * self.post_norm

    def head_norm_parameters(self, width: int) -> int:
        """Parameters of the norm of queries or keys with `width` columns (0 without `qk_norm`)."""
        if not self.qk_norm or self.qk_norm_weights == "none":
            return 0
        if self.qk_norm_weights == "each_head":
            return width * self.norm_weight
        return self.norm_parameters_of(self.head_dim if self.qk_norm_weights == "head" else width)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer (global index) has an MLP instead of experts."""
        return self.experts is None or layer in self.experts.dense_layers

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def first_dense(self) -> int:
        """The number of dense layers before the layers with experts; 0 without experts."""
        return self.num_layers - self.expert_layers if self.experts else 0

    def mlp_matrix_parameters(self, ffn: int) -> int:
        """Parameters of the linears of an MLP with `ffn` columns."""
        return (3 if self.gated else 2) * self.hidden * ffn

    def mlp_vector_parameters(self, ffn: int) -> int:
        """Parameters of the biases and the activation of an MLP with `ffn` columns."""
        bias = ffn * (2 if self.gated else 1) + self.hidden if self.mlp_bias else 0
        return bias + (2 if self.mlp == "xielu" else 0)

    def mlp_parameters(self, ffn: int) -> int:
        return self.mlp_matrix_parameters(ffn) + self.mlp_vector_parameters(ffn)

    @property
    def attention_matrix_parameters(self) -> int:
        """Parameters of one layer's attention linears.  Tensor parallelism splits them, except the
        down-projections of latent attention."""
        if self.latent is not None:
            inside = self.latent.matrix_parameters(self.hidden, self.num_heads)
            return inside + self.hidden * self.out_width
        return self.hidden * (2 * self.q_width + 2 * self.kv_width)

    @property
    def attention_vector_parameters(self) -> int:
        """Parameters of one layer's norms, attention biases and sinks."""
        norms = self.norm_parameters * self.layer_norms
        columns = self.q_width + 2 * self.kv_width
        if self.latent is not None:
            ranks = (self.latent.q_rank, self.latent.kv_rank)
            norms += sum(map(self.norm_parameters_of, ranks)) + 2 * self.latent.index_dim
            columns = sum(ranks) + self.latent.rope
        qkv = columns if self.qkv_bias else 0
        proj = self.hidden if self.proj_bias else 0
        heads = self.head_norm_parameters(self.q_width) + self.head_norm_parameters(self.kv_width)
        return norms + heads + qkv + proj + self.num_heads * self.attention_sinks

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router and of its shared expert's gate."""
        given = self.experts
        if given is None:
            return 0
        return given.count * (self.hidden + given.router_bias) + self.hidden * given.shared_gate

    @property
    def active_layer_matrices(self) -> int:
        """Parameters of the matrices that one token passes in all layers, prediction layers
        included."""
        every, sparse = self.num_layers + self.mtp_layers, 0
        total = every * self.attention_matrix_parameters + self.mtp_layers * self.join_parameters
        if self.experts is not None:
            width = self.experts.active * self.experts.ffn + self.experts.shared_ffn
            router = self.hidden * (self.experts.count + self.experts.shared_gate)
            sparse = self.expert_layers + self.mtp_layers
            total += sparse * (self.mlp_matrix_parameters(width) + router)
        if self.memory is not None:
            total += len(self.memory.layers) * self.memory.matrix_parameters(self.hidden)
            every -= len(self.memory.layers)
        return total + (every - sparse) * self.mlp_matrix_parameters(self.ffn)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, of learned positions and of the embedding's norm."""
        positions = self.max_positions if self.position == "learned" else 0
        norm = self.norm_parameters_of(self.narrow) if self.embedding_norm else 0
        widened = (self.narrow + 1) * self.hidden if self.embedding_width else 0
        return (self.vocab + positions) * self.narrow + norm + widened

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, counted even if it is tied to the embedding."""
        return self.vocab * self.narrow

    @property
    def parameters(self) -> int:
        """All parameters, without those of prediction layers (`prediction_parameters`)."""
        return self._with_experts(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token passes: all but those of inactive experts."""
        return self._with_experts(self.experts.active if self.experts else 0)

    @property
    def prediction_parameters(self) -> int:
        """Parameters of the prediction layers.  Each has norms of the hidden states and of the
        embedding, a linear that joins both, a decoder layer, and a final norm."""
        count = self.experts.count if self.experts else 0
        layer = self._layer_parameters(count, dense=self.experts is None)
        return self.mtp_layers * (layer + self.join_parameters + 3 * self.norm_parameters)

    @property
    def join_parameters(self) -> int:
        """Parameters of a prediction layer's linear that joins hidden states and embedding."""
        return 2 * self.hidden * self.hidden

    def _layer_parameters(self, count: int, *, dense: bool) -> int:
        """Parameters of a layer with an MLP (`dense`) or with `count` experts."""
        attention = self.attention_matrix_parameters + self.attention_vector_parameters
        if dense or self.experts is None:
            return attention + self.mlp_parameters(self.ffn)
        shared = self.experts.shared_ffn
        experts = count * self.mlp_parameters(self.experts.ffn) + self.router_parameters
        return attention + experts + (self.mlp_parameters(shared) if shared else 0)

    def _with_experts(self, count: int) -> int:
        dense = (self.layer_groups or self.num_layers) - self.expert_layers
        layers = dense * self._layer_parameters(count, dense=True)
        if self.experts is not None:
            layers += self.expert_layers * self._layer_parameters(count, dense=False)
        head = 0 if self.tied_embeddings else self.head_parameters
        head += self.vocab if self.head_bias else 0
        if self.memory is not None:
            less = self.memory.matrix_parameters(self.hidden) - self.mlp_parameters(self.ffn)
            layers += len(self.memory.layers) * less + self.memory.rows * self.hidden
        if self.embedding_width:
            head += (self.hidden + 1) * self.narrow
        return layers + self.embedding_parameters + head + self.norm_parameters_of(self.narrow)
