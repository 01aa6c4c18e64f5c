"""A training step as a person writes it in torch: the same model, weights, sums and update as the
executor's, through autograd, on one stream.  What the executor's own step is timed against.

For one rank and Llama blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rematbench.torch import kernels
from rematbench.torch.model import NotExecutable, RankModel
from rematbench.torch.parameters import AdamW

SAME_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention by the operators that the executor calls, not by cuDNN's."""


class PlainLoop:
    """Steps over a rank's model; gradients are summed into the parameters' own wide buffers."""

    def __init__(self, model: RankModel, rule: AdamW) -> None:
        kind, lay = model.kind, model.problem.layout
        if (kind.mlp, kind.norm, kind.position) != ("swiglu", "rmsnorm", "rope") or lay.gpus > 1:
            raise NotExecutable("the hand-written loop is one rank's, of Llama blocks")
        self.model, self.rule = model, rule
        self.steps = 0

    def step(self) -> Tensor:
        """One optimizer step over the model's micro-batches; the sum of its losses."""
        self.steps += 1
        for parameter in self.model.parameters.values():
            parameter.grad_flat.zero_()
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for ids, labels, scale in self.model.batches:
            leaves = {
                name: parameter.value.detach().requires_grad_()
                for name, parameter in self.model.parameters.items()
            }
            loss = self._loss(leaves, ids, labels)
            loss.backward(torch.full_like(loss, scale))  # type: ignore[no-untyped-call]
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    self.model.parameters[name].grad.add_(leaf.grad)
            total += loss.detach()
        for parameter in self.model.parameters.values():
            parameter.update(self.rule, self.steps)
        return total

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, kernels.NORM_EPS)

    def _loss(self, weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        kind = self.model.kind
        x = F.embedding(ids, weights["embedding.weight"])
        for layer in range(kind.num_layers):
            own = {
                name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): weight
                for name, weight in weights.items()
                if name.startswith(f"layers.{layer}.")
            }
            x = x + F.linear(self._attention(self._norm(x, own["attn_norm"]), own), own["proj"])
            h = self._norm(x, own["mlp_norm"])
            h = F.silu(F.linear(h, own["gate_out"])) * F.linear(h, own["up_out"])
            x = x + F.linear(h, own["fc2"])
        head = "embedding.weight" if kind.tied_embeddings else "lm_head.weight"
        logits = F.linear(self._norm(x, weights["final_norm.weight"]), weights[head])
        wide = logits.to(kernels.wide(logits.dtype))
        return F.cross_entropy(wide, labels, ignore_index=kernels.IGNORED, reduction="sum")

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.model.cos[:, None], self.model.sin[:, None]
        a, b = x.view(len(x), -1, 2, cos.shape[-1]).unbind(2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(len(x), -1).to(x.dtype)

    def _attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        batch, rows, heads, kv_heads, head_dim = self.model.attention
        q, k, v = (F.linear(x, own[name]) for name in ("q", "k", "v"))
        q, k = (self._rotated(y) for y in (q, k))
        q = q.view(batch, rows, heads, head_dim).transpose(1, 2)
        k, v = (y.view(batch, rows, kv_heads, head_dim).transpose(1, 2) for y in (k, v))
        with sdpa_kernel(SAME_KERNELS):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
        return out.transpose(1, 2).reshape(batch * rows, -1)
