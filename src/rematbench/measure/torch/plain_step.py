"""A training step as a person writes it in torch, for comparison with the executor's step.

Model, weights, sums and update are those of the executor. The step runs through autograd on one
stream. Weight gradients are added to their wide buffers inside the product, as in a loop written
for speed. Torch's own means to save activation memory can be switched on for each layer. The loop
runs only Llama blocks on one rank.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rematbench.measure.records import Means
from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.parameters import AdamW
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel

EXECUTOR_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The attention operators in the executor's order of preference. If the problem's kernel is
`cudnn`, cuDNN's operator comes first."""


class _Linear(torch.autograd.Function):
    """x @ weight.T; the weight's gradient is added to its buffer, not passed through autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        arithmetic.add_weight_gradient(ctx.total, grads[0], x)
        return grads[0] @ weight, None, None


class PlainLoop:
    def __init__(self, model: RankModel, rule: AdamW, means: Means = "nothing") -> None:
        kind, lay = model.kind, model.problem.layout
        if (kind.mlp, kind.norm, kind.position) != ("swiglu", "rmsnorm", "rope") or lay.gpus > 1:
            raise NotExecutable("the hand-written loop runs only Llama blocks on one rank")
        self.model, self.rule, self.means = model, rule, means
        self.steps = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=model.device)

    def issue_step(self) -> None:
        """Issue one optimizer step over the model's micro-batches; the summed loss stays a
        tensor."""
        self.steps += 1
        for parameter in self.model.parameters.values():
            parameter.grad_flat.zero_()
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for ids, labels, scale, _ in self.model.batches:
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
        self.loss = total

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, arithmetic.NORM_EPS)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        parameter = self.model.parameters[f"{name}.weight"]
        made: Tensor = _Linear.apply(x, parameter.value, parameter.grad)  # type: ignore[no-untyped-call]
        return made

    def _loss(self, weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        kind = self.model.kind
        x = F.embedding(ids, weights["embedding.weight"])
        for layer in range(kind.num_layers):
            with self._where_saved():
                x = self._kept(x, f"layers.{layer}", weights)
        head = "embedding" if kind.tied_embeddings else "lm_head"
        logits = self._linear(self._norm(x, weights["final_norm.weight"]), head)
        wide = logits.to(arithmetic.wide(logits.dtype))
        return F.cross_entropy(wide, labels, ignore_index=arithmetic.IGNORED, reduction="sum")

    def _where_saved(self) -> AbstractContextManager[object]:
        if "save_on_cpu" not in self.means:
            return nullcontext()
        return save_on_cpu(pin_memory=self.model.device.type == "cuda")

    def _kept(self, x: Tensor, at: str, weights: dict[str, Tensor]) -> Tensor:
        """A layer's output; under checkpointing only its input is saved. No state of a random
        generator is saved, because nothing is random."""
        if "checkpoint" not in self.means:
            return self._layer(x, at, weights)
        made: Tensor = checkpoint(
            self._layer, x, at, weights, use_reentrant=False, preserve_rng_state=False
        )
        return made

    def _layer(self, x: Tensor, at: str, weights: dict[str, Tensor]) -> Tensor:
        h = self._norm(x, weights[f"{at}.attn_norm.weight"])
        x = x + self._linear(self._attention(h, at), f"{at}.proj")
        h = self._norm(x, weights[f"{at}.mlp_norm.weight"])
        h = F.silu(self._linear(h, f"{at}.gate_out")) * self._linear(h, f"{at}.up_out")
        return x + self._linear(h, f"{at}.fc2")

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.model.cos[:, None], self.model.sin[:, None]
        a, b = x.view(len(x), -1, 2, cos.shape[-1]).unbind(2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).view(len(x), -1).to(x.dtype)

    def _attention(self, x: Tensor, at: str) -> Tensor:
        batch, rows, heads, kv_heads, head_dim, _ = self.model.attention
        q, k, v = (self._linear(x, f"{at}.{name}") for name in ("q", "k", "v"))
        q, k = (self._rotated(y) for y in (q, k))
        q = q.view(batch, rows, heads, head_dim).transpose(1, 2)
        k, v = (y.view(batch, rows, kv_heads, head_dim).transpose(1, 2) for y in (k, v))
        cudnn = [SDPBackend.CUDNN_ATTENTION] if self.model.problem.kernel == "cudnn" else []
        with sdpa_kernel([*cudnn, *EXECUTOR_KERNELS], set_priority=True):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=heads != kv_heads
            )
        return out.transpose(1, 2).reshape(batch * rows, -1)
