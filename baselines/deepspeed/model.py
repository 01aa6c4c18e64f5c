"""The project's decoder in plain torch modules, with the DeepSpeed functions that a policy needs.

It computes the same as the project's executor.
"""

from functools import partial
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch import Tensor, nn

from baselines.common.norm import rms_norm
from baselines.common.weights import model_specs, weight
from baselines.deepspeed.plan import DeepSpeed
from rematbench.workload import Model
from rematbench.worlds.torch.arithmetic import IGNORED, NORM_EPS, rope, rope_tables


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm; on a CPU it saves the tensors of its GPU kernel (part *norm* of the
    shim)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.is_cuda else rms_norm(x, self.weight, NORM_EPS)


def _norm(model: Model) -> nn.Module:
    if model.norm == "rmsnorm":
        return RmsNorm(model.hidden, eps=NORM_EPS)
    return nn.LayerNorm(model.hidden, eps=NORM_EPS)


class Attention(nn.Module):
    """Causal attention by torch's scaled_dot_product_attention: batch x seq x heads x head_dim."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Layer(nn.Module):
    """One pre-norm decoder layer; parameters have the project's names."""

    def __init__(self, model: Model, tiles: int) -> None:
        super().__init__()
        self.model, self.tiles = model, tiles
        h, q, kv, ffn = model.hidden, model.q_width, model.kv_width, model.ffn
        self.attn_norm, self.mlp_norm = _norm(model), _norm(model)
        if model.post_norm:
            self.post_attn_norm, self.post_mlp_norm = _norm(model), _norm(model)
        self.q = nn.Linear(h, q, bias=model.qkv_bias)
        self.k = nn.Linear(h, kv, bias=model.qkv_bias)
        self.v = nn.Linear(h, kv, bias=model.qkv_bias)
        self.proj = nn.Linear(q, h, bias=model.proj_bias)
        self.up_out = nn.Linear(h, ffn, bias=model.mlp_bias)
        if model.gated:
            self.gate_out = nn.Linear(h, ffn, bias=model.mlp_bias)
        self.fc2 = nn.Linear(ffn, h, bias=model.mlp_bias)
        self.attend: nn.Module = Attention()
        self.exchanged = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer to this rank's rows: batch x seq x hidden -> batch x seq x hidden."""
        mixed = self.proj(self._attention(self.attn_norm(x), cos, sin))
        x = x + (self.post_attn_norm(mixed) if self.model.post_norm else mixed)
        y = self.mlp_norm(x)
        mixed = self._tiled(y) if self.tiles > 1 else self.mlp(y)
        return x + (self.post_mlp_norm(mixed) if self.model.post_norm else mixed)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.model.head_dim)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.model.position == "rope":
            q, k = (rope(t.flatten(0, 1), cos, sin) for t in (q, k))
        q, k, v = (t.reshape(heads) for t in (q, k, v))
        out: Tensor = self.attend(q, k, v, 0) if self.exchanged else self.attend(q, k, v)
        return out.flatten(2)

    def mlp(self, y: Tensor) -> Tensor:
        up = self.up_out(y)
        if not self.model.gated:
            return self.fc2(F.gelu(up))  # type: ignore[no-any-return]
        gate = self.gate_out(y)
        act = F.silu(gate) if self.model.mlp == "swiglu" else F.gelu(gate)
        return self.fc2(act * up)  # type: ignore[no-any-return]

    def _tiled(self, y: Tensor) -> Tensor:
        linears = [self.up_out, self.fc2, *([self.gate_out] if self.model.gated else [])]
        engaged = [p for linear in linears for p in linear.parameters()]
        return TiledMLP.apply(Layer.mlp, self, y, self.tiles, engaged)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers, head and loss. The forward returns the scaled sum of its rank's losses."""

    def __init__(self, model: Model, policy: DeepSpeed, *, checkpointed: bool) -> None:
        super().__init__()
        self.model, self.policy, self.checkpointed = model, policy, checkpointed
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        if model.position == "learned":
            self.position = nn.Embedding(model.max_positions, model.hidden)
        self.layers = nn.ModuleList(
            [Layer(model, policy.mlp_tiles) for _ in range(model.num_layers)]
        )
        self.final_norm = _norm(model)
        self.lm_head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied_embeddings:
            self.lm_head.weight = self.embedding.weight

    @property
    def decoder_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def fill(self, seed: int) -> None:
        specs = model_specs(self.model, self.model.vocab)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weight(specs[name], seed))

    def forward(self, ids: Tensor, labels: Tensor, where: Tensor, scale: float) -> Tensor:
        """The scaled sum of this rank's losses. ids, labels: batch x seq; where: the positions of
        this rank's rows of one sequence."""
        x = self.embedding(ids)
        if self.model.position == "learned":
            x = x + self.position(where)
        rows = where.repeat(ids.shape[0])
        cos, sin = rope_tables(rows, self.model.head_dim, x.dtype)
        for layer in self.layers:
            if self.checkpointed:
                # cos and sin are no arguments, because partitioning splits every tensor argument
                x = deepspeed.checkpointing.checkpoint(partial(layer, cos=cos, sin=sin), x)
            else:
                x = layer(x, cos, sin)
        x = self.final_norm(x)
        if self.policy.loss_tiles > 1:
            return TiledFusedLogitsLoss.apply(  # type: ignore[no-any-return]
                _scaled_loss(scale), self, x, labels, None, self.policy.loss_tiles,
                [self.lm_head.weight], "sum",
            )  # fmt: skip
        return _scaled_loss(scale)(self, x, labels)  # type: ignore[no-any-return]


def _scaled_loss(scale: float) -> Any:
    """The loss function with the scale. The tiled loss computes its gradients together with the
    loss, so the loss itself must contain the scale."""

    def loss(self: Decoder, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(x).flatten(0, -2)
        total = F.cross_entropy(
            logits.float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total * scale

    return loss
