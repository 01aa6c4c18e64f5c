"""The model once more, plainly, with autograd and one process: what every layout must equal."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.problem import Problem
from rematbench.workload import Model
from rematbench.worlds.torch.arithmetic import IGNORED, NORM_EPS, ROPE_BASE, kept
from rematbench.worlds.torch.batch import Batch
from rematbench.worlds.torch.ends import PREDICTED
from rematbench.worlds.torch.packed import packed, widen
from rematbench.worlds.torch.parameters import ADAPTED, AdamW, full_weight, specs_by_name


class Run(NamedTuple):
    """Losses of the steps, and each step's gradients by parameter."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


class Reference:
    """A Llama- or GPT-like decoder over named parameters."""

    def __init__(self, model: Model, weights: dict[str, Tensor], dropout: float = 0.0) -> None:
        self.model, self.weights, self.dropout = model, weights, dropout

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.model.norm == "rmsnorm":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.weights[f"{name}.bias"], NORM_EPS)

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        prefix, _, local = name.rpartition(".")
        target = next((t for t, weight in ADAPTED.items() if weight == local), local)
        a, b = (self.weights.get(f"{prefix}.lora_{target}.{part}") for part in "ab")
        if a is None or b is None:
            return out
        keep = kept(torch.arange(x.shape[-2]), torch.arange(x.shape[-1]), self.dropout)
        return out + (x * keep / (1.0 - self.dropout)) @ a.T @ b.T

    def heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        y = self.linear(x, name).unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.model.qk_norm and not name.endswith("v"):
            y = self.norm(y, f"{name}_norm")
        if self.model.position != "rope" or name.endswith("v"):
            return y
        return self.turned(y)

    def turned(self, y: Tensor) -> Tensor:
        """All columns of each head after RoPE."""
        half = y.shape[-1] // 2
        power = torch.arange(half, dtype=torch.float64) * 2 / y.shape[-1]
        angle = torch.arange(y.shape[-2], dtype=torch.float64)[:, None] * ROPE_BASE**-power
        turn = torch.polar(torch.ones_like(angle), angle)
        turned = torch.complex(y[..., :half].double(), y[..., half:].double()) * turn
        return torch.cat([turned.real, turned.imag], -1).to(y.dtype)

    def latent(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of latent attention."""
        given, heads = self.model.latent, self.model.num_heads
        assert given is not None
        y = x
        if given.q_rank:
            y = self.norm(self.linear(x, f"{name}.q_latent"), f"{name}.q_latent_norm")
        q = self.linear(y, f"{name}.q").unflatten(-1, (heads, -1)).transpose(1, 2)
        q = torch.cat([q[..., : given.nope], self.turned(q[..., given.nope :])], -1)
        y = self.norm(self.linear(x, f"{name}.kv_latent"), f"{name}.kv_latent_norm")
        own, v = (
            self.linear(y, f"{name}.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("k_nope", "v")
        )
        shared = self.turned(self.linear(x, f"{name}.k_rope")[:, None])
        return q, torch.cat([own, shared.expand(-1, heads, -1, -1)], -1), v

    def grouped(self, y: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values once for each of their heads."""
        m = self.model
        q = self.heads(y, f"{name}.q", m.num_heads)
        k = self.heads(y, f"{name}.k", m.num_kv_heads).repeat_interleave(
            m.num_heads // m.num_kv_heads, 1
        )
        v = self.heads(y, f"{name}.v", m.num_kv_heads).repeat_interleave(
            m.num_heads // m.num_kv_heads, 1
        )
        return q, k, v

    def layer(self, x: Tensor, name: str) -> Tensor:
        m = self.model
        y = self.norm(x, f"{name}.attn_norm")
        q, k, v = (self.latent if m.latent else self.grouped)(y, name)
        scores = q @ k.transpose(-1, -2) / m.head_dim**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        y = self.linear(y.transpose(1, 2).flatten(2), f"{name}.proj")
        x = x + (self.norm(y, f"{name}.post_attn_norm") if m.post_norm else y)
        y = self.norm(x, f"{name}.mlp_norm")
        number = int(name.rpartition(".")[2])
        if m.memory_of(number):
            y = self.memory(y, name)
        else:
            y = self.mlp(y, f"{name}.") if m.is_dense(number) else self.mixture(y, name)
        return x + (self.norm(y, f"{name}.post_mlp_norm") if m.post_norm else y)

    def mlp(self, y: Tensor, name: str) -> Tensor:
        """An MLP whose parameters' names begin with `name`."""
        up = self.linear(y, f"{name}up_out")
        if self.model.gated:
            gate = self.linear(y, f"{name}gate_out")
            up = (F.silu(gate) if self.model.mlp == "swiglu" else F.gelu(gate)) * up
        else:
            up = F.gelu(up)
        return self.linear(up, f"{name}fc2")

    def memory(self, y: Tensor, name: str) -> Tensor:
        """A lookup by product keys, over all pairs of sub-keys, by torch's embedding_bag."""
        given = self.model.memory
        assert given is not None
        keys = self.weights[f"{name}.memory_keys.weight"].view(given.heads, 2, given.keys, -1)
        query = self.linear(y, f"{name}.memory_query").view(-1, given.heads, 2, keys.shape[-1])
        halves = torch.einsum("thsd,hsnd->thsn", query, keys)
        scores = (halves[:, :, 0, :, None] + halves[:, :, 1, None, :]).flatten(-2)
        best, rows = scores.topk(given.top)
        table = self.weights["memory_values.weight"]
        bag = F.embedding_bag(
            rows.flatten(1), table, per_sample_weights=best.softmax(-1).flatten(1), mode="sum"
        )
        gate = self.linear(y, f"{name}.memory_gate_out")
        kind = F.silu if self.model.mlp == "swiglu" else F.gelu
        return self.linear(kind(gate) * bag.view(gate.shape), f"{name}.memory_proj")

    def mixture(self, y: Tensor, name: str) -> Tensor:
        """Every token through every expert, weighed by 0 where the token is not sent: the token at
        position p goes to the experts from p x active on."""
        given = self.model.experts
        assert given is not None
        place = torch.arange(y.shape[1])[:, None] * given.active + torch.arange(given.active)
        sent = F.one_hot(place % given.count, given.count).sum(1).bool()
        logits = self.linear(y, f"{name}.router")
        if given.router == "softmax":
            probs = logits.masked_fill(~sent, float("-inf")).softmax(-1)
        else:
            probs = logits.sigmoid() * sent
            probs = probs / probs.sum(-1, keepdim=True)
        outs = [self.mlp(y, f"{name}.expert{e}.") for e in range(given.count)]
        y2 = torch.einsum("bse,ebsh->bsh", probs, torch.stack(outs))
        return y2 + self.mlp(y, f"{name}.shared_") if given.shared_ffn else y2

    def loss(self, batch: Batch) -> Tensor:
        x = self.weights["embedding.weight"][batch.ids]
        if self.model.position == "learned":
            x = x + self.weights["position.weight"][: x.shape[1]]
        for layer in range(self.model.num_layers):
            x = self.layer(x, f"layers.{self.model.owner(layer)}")
        x = self.norm(x, "final_norm")
        tied = self.model.tied_embeddings
        head = self.weights["embedding.weight" if tied else "lm_head.weight"].T
        logits = x @ head
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        return loss + self.predicted(x, head, batch) if self.model.mtp_layers else loss

    def predicted(self, x: Tensor, head: Tensor, batch: Batch) -> Tensor:
        """The loss of the token behind the next, weighed, over the labels that count."""
        name = f"layers.{self.model.num_layers}"
        ids, labels = batch.ids.roll(-1, 1), batch.labels.roll(-1, 1)
        ids[:, -1], labels[:, -1] = 0, IGNORED
        y = self.norm(self.weights["embedding.weight"][ids], f"{name}.next_norm")
        y = torch.cat([y, self.norm(x, f"{name}.hidden_norm")], -1)
        y = self.layer(self.linear(y, f"{name}.join"), name)
        logits = self.norm(y, f"{name}.predict_norm") @ head
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return PREDICTED * total / batch.counted


def weights_of(problem: Problem, seed: int) -> dict[str, Tensor]:
    """Every full parameter, float64, as leaves."""
    lay, model = problem.layout, problem.workload.model
    layers = tuple(range(model.num_layers + model.mtp_layers))
    first = ChunkOps(problem, 0, 0, layers)
    last = ChunkOps(problem, lay.pp - 1, lay.vpp - 1, layers)
    places = [(unit.table.part, unit.layer) for unit in (*first.units, *last.units)]
    specs = specs_by_name(model, places, model.vocab, work=problem.workload)
    whole = {name: full_weight(spec, seed) for name, spec in specs.items()}
    for name, spec in specs.items():
        if spec.packing:
            widen(packed(whole[name], spec.packing), spec.packing, whole[name])
    return {name: one.requires_grad_(specs[name].trained) for name, one in whole.items()}


def train(
    problem: Problem,
    batches: list[Batch],
    seed: int,
    rule: AdamW,
    along: list[dict[str, Tensor]] | None = None,
) -> Run:
    """AdamW steps on whole batches, with torch's own optimizer.  `along`: the gradients to step by,
    in place of the model's own; so each step's are those at the weights that another run has."""
    weights = weights_of(problem, seed)
    model = Reference(problem.workload.model, weights, problem.workload.lora_dropout)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        weight_decay=rule.weight_decay,
    )
    run = Run([], [])
    for batch in batches:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        run.losses.append(float(loss.detach()))
        gradients = {}
        for name, weight in trained.items():
            gradients[name] = weight.grad.clone()
        run.gradients.append(gradients)
        for name, given in (along[len(run.losses) - 1] if along else {}).items():
            weights[name].grad = given.double()
        optimizer.step()
    return run
