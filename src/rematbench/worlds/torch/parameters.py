"""Weights from one seed, the same for every layout; gradient buffers; AdamW, sharded by ZeRO.

Each parameter is drawn whole in float64 by its own generator (from seed and name), and the rank
keeps its shard. Storages are flat. Under ZeRO-1 they are padded to a multiple of the state shards,
so that a ZeRO shard is a contiguous range of every parameter; for ZeRO 2 and 3 see `unit_states`.

One draw cannot be split: a generator takes 20 ns per element, 19 CPU seconds for 0.9 billion
parameters. So several threads draw parameters before they are used. Each parameter has its own
generator, so concurrent draws give the same bits.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.costs.operators.ops import Part
from rematbench.inputs.layout import Layout
from rematbench.model import Memory
from rematbench.workload import PACKINGS, Experts, Latent, Model, Trained
from rematbench.worlds.torch.arithmetic import fused, wide
from rematbench.worlds.torch.packed import packed, widen

INIT_STD = 0.05
HEAD_NORMS = ("q_norm", "k_norm")
PIECE = 1 << 22
"""Elements of a gradient that are converted to float64 at one time."""


class ParameterSpec(NamedTuple):
    """A whole parameter. `split`: the dimension that tensor parallelism splits (None: replicated).
    `rows`: the number of rows after padding (of a vocabulary; 0: no padding). `own_rows`: a
    tensor-parallel rank has only the gradient of its own tokens (norms and routers). `mean`: the
    mean of its initial values. `expert`: it belongs to an expert, which only some ranks hold.
    `trained`: it has a gradient and states. `columns`: the second dimension that ranks split (None:
    none). `packing`: the format of its bytes (empty: compute precision)."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    rows: int = 0
    own_rows: bool = False
    mean: float = 0.0
    expert: bool = False
    trained: bool = True
    columns: int | None = None
    packing: str = ""

    def parts(self, layout: Layout) -> int:
        if self.split is None:
            return 1
        return layout.expert_tp if self.expert else layout.tp


class AdamW(NamedTuple):
    """The hyperparameters of torch.optim.AdamW."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


LINEAR = AdamW(lr=1.0, eps=1.0)
"""AdamW with an epsilon above every gradient, so that an update is linear in the gradient. With a
small epsilon the first update is the gradient's sign, so the rounding of a gradient near zero
changes its weight by a whole step."""


ALL = Trained()


def unit_specs(
    model: Model,
    part: Part,
    layer: int,
    vocab: int,
    experts: range | None = None,
    work: Trained = ALL,
) -> dict[str, ParameterSpec]:
    """The parameters of the embedding, the head or a layer, by local name. `vocab`: the padded
    vocabulary. `experts`: the experts whose parameters are listed (None: all). With adapters, which
    only layers have, nothing else trains."""
    specs = _model_specs(model, part, layer, vocab, experts)
    if not work.lora_rank:
        return specs
    packing = work.base_dtype if part == "layer" and work.base_dtype in PACKINGS else ""
    frozen = {
        local: spec._replace(
            trained=False, packing=packing * (spec.split is not None and len(spec.shape) > 1)
        )
        for local, spec in specs.items()
    }
    name = f"layers.{model.owner(layer)}"
    return frozen | (_adapter_specs(work, name, specs) if part == "layer" else {})


def _adapter_specs(
    work: Trained, prefix: str, specs: dict[str, ParameterSpec]
) -> dict[str, ParameterSpec]:
    """The two matrices of each adapter of a layer's linears: A (rank x columns) and B (rows x
    rank) of a weight with rows x columns."""
    found: dict[str, ParameterSpec] = {}
    for target in work.targets:
        local, rank = f"lora_{target}", work.lora_rank
        weight = specs.get(ADAPTED.get(target, target))
        if weight is None:  # the MLP has no gate
            continue
        rows, columns = weight.shape
        found[local] = ParameterSpec(
            f"{prefix}.{local}.a", (rank, columns), trained=work.lora_train == "ab"
        )
        found[f"{local}.b"] = ParameterSpec(f"{prefix}.{local}.b", (rows, rank))
    return found


ADAPTED = {"o": "proj", "gate": "gate_out", "up": "up_out", "down": "fc2"}
"""The local names of linears by the names of their adapters."""


def _model_specs(
    model: Model, part: Part, layer: int, vocab: int, experts: range | None
) -> dict[str, ParameterSpec]:
    match part:
        case "embedding":
            return _embedding_specs(model, vocab)
        case "head":
            local = f"local.{-2 - layer}." if layer < -1 else ""
            tied = model.tied_embeddings and not local
            head = "embedding.weight" if tied else f"{local}lm_head.weight"
            norm = _norm_specs(model, "final_norm", f"{local}final_norm")
            norm = {} if model.mtp_layers else norm
            return norm | {"lm_head": ParameterSpec(head, (model.vocab, model.hidden), 0, vocab)}
    prefix = f"layers.{model.owner(layer)}"
    specs = _attention_specs(model, prefix)
    if layer >= model.num_layers:
        specs |= _prediction_specs(model, prefix, vocab)
    if model.memory is not None and model.memory_of(layer):
        return specs | _memory_specs(model, model.memory, prefix)
    if model.experts is None or model.is_dense(layer):
        return specs | _mlp_specs(model, prefix, model.ffn)
    held = range(model.experts.count) if experts is None else experts
    return specs | _expert_specs(model, model.experts, prefix, held)


def specs_by_name(
    model: Model,
    places: Iterable[tuple[Part, int]],
    vocab: int,
    experts: range | None = None,
    work: Trained = ALL,
) -> dict[str, ParameterSpec]:
    """The parameters of (part, layer) pairs, each once, in the order of creation."""
    found: dict[str, ParameterSpec] = {}
    for part, layer in places:
        for spec in unit_specs(model, part, layer, vocab, experts, work).values():
            found.setdefault(spec.name, spec)
    return found


def _embedding_specs(model: Model, vocab: int) -> dict[str, ParameterSpec]:
    shape: tuple[int, ...] = (model.vocab, model.hidden)
    specs = {"embedding": ParameterSpec("embedding.weight", shape, 0, vocab)}
    if model.position == "learned":
        shape = (model.max_positions, model.hidden)
        specs["position"] = ParameterSpec("position.weight", shape)
    return specs


def _prediction_specs(model: Model, prefix: str, vocab: int) -> dict[str, ParameterSpec]:
    """The parameters that a layer which predicts one more token has besides those of a decoder
    layer: the final norm, the norms of its inputs and of its output, the linear that joins the
    inputs, and the model's embedding."""
    specs = _norm_specs(model, "final_norm", "final_norm")
    for norm in ("next_norm", "hidden_norm", "predict_norm"):
        specs |= _norm_specs(model, norm, f"{prefix}.{norm}")
    specs |= _linear_specs(prefix, "join", (model.hidden, 2 * model.hidden), 0, bias=False)
    return specs | {"embedding": _embedding_specs(model, vocab)["embedding"]}


def _norm_specs(model: Model, local: str, name: str, width: int = 0) -> dict[str, ParameterSpec]:
    """A norm over `width` columns (0: head_dim for the norms of heads, else the hidden size)."""
    width = width or (model.head_dim if local in HEAD_NORMS else model.hidden)
    specs = {local: ParameterSpec(f"{name}.weight", (width,), own_rows=True, mean=1.0)}
    if model.norm == "layernorm":
        specs[f"{local}.bias"] = ParameterSpec(f"{name}.bias", (width,), own_rows=True)
    return specs


def _attention_specs(model: Model, prefix: str) -> dict[str, ParameterSpec]:
    specs: dict[str, ParameterSpec] = {}
    norms = ["attn_norm", "mlp_norm"]
    if model.post_norm:
        norms += ["post_attn_norm", "post_mlp_norm"]
    if model.qk_norm:
        norms += HEAD_NORMS
    for norm in norms:
        specs |= _norm_specs(model, norm, f"{prefix}.{norm}")
    if model.latent is not None:
        specs |= _latent_specs(model, model.latent, prefix)
    else:
        for local, width in (("q", model.q_width), ("k", model.kv_width), ("v", model.kv_width)):
            specs |= _linear_specs(prefix, local, (width, model.hidden), 0, bias=model.qkv_bias)
    return specs | _linear_specs(
        prefix, "proj", (model.hidden, model.out_width), 1, bias=model.proj_bias
    )


def _latent_specs(model: Model, given: Latent, prefix: str) -> dict[str, ParameterSpec]:
    specs: dict[str, ParameterSpec] = {}
    down = {"q_latent": given.q_rank} if given.q_rank else {}
    for local, width in (down | {"kv_latent": given.kv_rank, "k_rope": given.rope}).items():
        shape = (width, model.hidden)
        specs[local] = ParameterSpec(f"{prefix}.{local}.weight", shape, own_rows=True)
        if model.qkv_bias:
            bias = ParameterSpec(f"{prefix}.{local}.bias", shape[:1], own_rows=True)
            specs[f"{local}.bias"] = bias
    norms = {"q_latent_norm": given.q_rank} if given.q_rank else {}
    for local, width in (norms | {"kv_latent_norm": given.kv_rank}).items():
        specs |= _norm_specs(model, local, f"{prefix}.{local}", width)
    heads, source = model.num_heads, given.q_rank or model.hidden
    specs |= _linear_specs(prefix, "q", (model.q_width, source), 0, bias=False)
    for local, width in (("k_nope", heads * given.nope), ("v", heads * given.v)):
        specs |= _linear_specs(prefix, local, (width, given.kv_rank), 0, bias=False)
    return specs


def _linear_specs(
    prefix: str, local: str, shape: tuple[int, int], split: int, *, bias: bool, expert: bool = False
) -> dict[str, ParameterSpec]:
    """The weight and bias of a linear. Tensor parallelism splits outputs (`split` 0) or inputs
    (1)."""
    specs = {local: ParameterSpec(f"{prefix}.{local}.weight", shape, split, expert=expert)}
    if bias:
        whole = None if split else 0
        specs[f"{local}.bias"] = ParameterSpec(f"{prefix}.{local}.bias", shape[:1], whole)
    return specs


def _mlp_specs(
    model: Model, prefix: str, ffn: int, kind: str = "", *, expert: bool = False
) -> dict[str, ParameterSpec]:
    """The linears of an MLP with `ffn` columns; their local names begin with `kind`."""
    linears = {"up_out": 0, **({"gate_out": 0} if model.gated else {}), "fc2": 1}
    specs: dict[str, ParameterSpec] = {}
    for local, split in linears.items():
        shape = (model.hidden, ffn) if split else (ffn, model.hidden)
        name = f"{kind}{local}"
        specs |= _linear_specs(prefix, name, shape, split, bias=model.mlp_bias, expert=expert)
    return specs


def _memory_specs(model: Model, given: Memory, prefix: str) -> dict[str, ParameterSpec]:
    """The linears and keys of a memory layer, and the table of values that all of them share."""
    hidden, half = model.hidden, given.key_dim // 2
    shapes = {
        "memory_query": (given.heads * given.key_dim, hidden),
        "memory_keys": (2 * given.heads * given.keys, half),
        "memory_gate_out": (hidden, hidden),
        "memory_proj": (hidden, hidden),
    }
    specs = {n: ParameterSpec(f"{prefix}.{n}.weight", shape) for n, shape in shapes.items()}
    table = ParameterSpec("memory_values.weight", (given.rows, hidden))
    return {**specs, "memory_values": table}


def _expert_specs(
    model: Model, experts: Experts, prefix: str, held: range
) -> dict[str, ParameterSpec]:
    """The router, the experts `held`, and the shared MLP, through which every token passes."""
    shape = (experts.count, model.hidden)
    specs = {"router": ParameterSpec(f"{prefix}.router.weight", shape, own_rows=True)}
    if experts.router_bias:
        bias = ParameterSpec(f"{prefix}.router.bias", shape[:1], own_rows=True)
        specs["router.bias"] = bias
    for number in held:
        specs |= _mlp_specs(model, prefix, experts.ffn, f"expert{number}.", expert=True)
    if experts.shared_ffn:
        specs |= _mlp_specs(model, prefix, experts.shared_ffn, "shared_")
    return specs


def square_sum(values: Tensor) -> float:
    """The sum of squares in float64, by pieces, because a whole copy would raise the peak."""
    pieces = [piece.double().square().sum() for piece in torch.split(values.view(-1), PIECE)]
    return float(torch.stack(pieces).sum())


def full_weight(spec: ParameterSpec, seed: int, device: str | torch.device = "cpu") -> Tensor:
    """The whole parameter in float64. Its generator depends on seed and name only, so that all
    layouts have the same weights. CPU and GPU give different bits."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64, device=device)
    noise.mul_(INIT_STD)
    return noise.add_(spec.mean) if spec.mean else noise


def padded(full: Tensor, spec: ParameterSpec) -> Tensor:
    """The tensor with zero rows up to the padded vocabulary."""
    extra = spec.rows - full.shape[0] if spec.rows else 0
    return torch.cat([full, full.new_zeros(extra, *full.shape[1:])]) if extra > 0 else full


def local_size(spec: ParameterSpec, layout: Layout) -> int:
    rows, *columns = spec.shape
    return prod([max(rows, spec.rows), *columns]) // spec.parts(layout)


def shard(full: Tensor, spec: ParameterSpec, rank: int, degree: int) -> Tensor:
    if spec.split is None or degree == 1:
        return full
    return full.chunk(degree, spec.split)[rank]


class Owner(NamedTuple):
    tp_rank: int
    tp: int
    state_rank: int
    state_shards: int
    """The number of ranks that share optimizer states: 1 without ZeRO."""
    span: tuple[int, int] | None = None
    """The ZeRO shard of the parameter, if it is not an equal part of the parameter."""
    column: int = 0
    columns: int = 1
    """The index of the rank's part along the second split dimension; the number of parts."""


class HostShard(NamedTuple):
    """Gradient and weights of this rank's shard in host memory, for an update on the host."""

    grad: Tensor
    value: Tensor


@dataclass
class Parameter:
    """One rank's part of a parameter, its gradient, and AdamW's state of its ZeRO shard [start,
    stop). `host`: gradient and weights in host memory, if the state is there. `flat` and
    `grad_flat` may be empty between uses; then `value_shard` and `grad_shard` keep the shard."""

    spec: ParameterSpec
    owner: Owner
    flat: Tensor
    grad_flat: Tensor
    shape: torch.Size
    start: int
    stop: int
    master: Tensor
    moment1: Tensor
    moment2: Tensor
    size: int
    """Elements of `flat` while it is allocated."""
    host: HostShard | None = None
    value_shard: Tensor | None = None
    grad_shard: Tensor | None = None

    def lend(self, flat: Tensor) -> None:
        self.flat = flat
        self.__dict__.pop("value", None)

    @property
    def own_value(self) -> Tensor:
        own = self.value_shard
        return self.flat[self.start : self.stop] if own is None else own

    @property
    def own_grad(self) -> Tensor:
        own = self.grad_shard
        return self.grad_flat[self.start : self.stop] if own is None else own

    @cached_property
    def value(self) -> Tensor:
        return self.flat[: self.shape.numel()].view(self.shape)

    @property
    def grad(self) -> Tensor:
        return self.grad_flat[: self.shape.numel()].view(self.shape)

    def widened(self, out: Tensor) -> Tensor:
        """Write the packed weights' values into `out`; return it in the weights' shape."""
        return widen(self.flat, self.spec.packing, out).view(self.shape)

    def tensors(self) -> list[Tensor]:
        return [self.flat, self.grad_flat, *([] if self.host else self._state())]

    def host_tensors(self) -> list[Tensor]:
        return [*self._state(), *self.host] if self.host else []

    def _state(self) -> list[Tensor]:
        return [self.master, self.moment1, self.moment2]

    def update(self, rule: AdamW, step: int) -> None:
        """One AdamW step (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shard."""
        if self.start == self.stop or not self.spec.trained:
            return
        grad, value = self.host or HostShard(self.own_grad, self.own_value)
        adamw(self.master, self.moment1, self.moment2, grad, rule, step)
        value.copy_(self.master)

    def give_states_away(self) -> None:
        """Drop AdamW's state, because pieces of states hold it from now on."""
        empty = self.master.new_empty(0)
        self.master, self.moment1, self.moment2, self.host = empty, empty, empty, None


def adamw(
    master: Tensor, moment1: Tensor, moment2: Tensor, grad: Tensor, rule: AdamW, step: int
) -> None:
    """One AdamW step (Loshchilov and Hutter, arXiv 1711.05101) on a range of parameters, in place.
    On a GPU torch's kernel reads and writes each state once; on a CPU the step is written out."""
    g = grad.to(master.dtype)
    if fused(g):
        count = torch.full((), float(step), device=g.device)
        torch._fused_adamw_(
            [master], [g], [moment1], [moment2], [], [count],
            lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2,
            weight_decay=rule.weight_decay, eps=rule.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    master.mul_(1.0 - rule.lr * rule.weight_decay)
    moment1.lerp_(g, 1.0 - rule.beta1)
    moment2.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
    root = (moment2 / (1.0 - rule.beta2**step)).sqrt_().add_(rule.eps)
    master.addcdiv_(moment1, root, value=-rule.lr / (1.0 - rule.beta1**step))


def build(
    spec: ParameterSpec,
    owner: Owner,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gradients: bool = True,
    full: Tensor | None = None,
    on_host: bool = False,
) -> Parameter:
    """This rank's part of a parameter, with zero gradients and AdamW's state. `full`: the whole
    parameter, if it is drawn already. Without `gradients` the gradient buffer is empty. The state
    is on the device, or in host memory with `on_host`."""
    if full is None and device.type == "meta":  # a trace has no values
        full = torch.empty(spec.shape, dtype=torch.float64, device="meta")
    full = full_weight(spec, seed) if full is None else full
    own = shard(padded(full, spec), spec, owner.tp_rank, owner.tp)
    if spec.columns is not None:
        own = own.chunk(owner.columns, spec.columns)[owner.column]
    size, (start, stop) = own.numel(), owner.span or (0, 0)
    if owner.span is None and spec.trained:
        part = -(-size // owner.state_shards)
        size, start = part * owner.state_shards, part * owner.state_rank
        stop = start + part
    if spec.packing:
        flat, size = packed(own, spec.packing).to(device), 0
        master = flat.new_empty(0, dtype=wide(dtype))
    else:
        flat = torch.zeros(size, dtype=dtype, device=device)
        flat[: own.numel()].copy_(own.reshape(-1))
        master = torch.zeros_like(flat, dtype=wide(dtype))
        master[: own.numel()].copy_(own.reshape(-1))
        master = master[start : stop if spec.trained else start].clone()
    host = None
    if on_host:
        master = host_memory(master)
        host = HostShard(host_memory(master), host_memory(flat[start:stop]))
    count = flat.numel() if gradients and spec.trained else 0
    return Parameter(
        spec=spec,
        owner=owner,
        flat=flat,
        grad_flat=torch.zeros(count, dtype=wide(dtype), device=device),
        shape=own.shape,
        start=start,
        stop=stop,
        master=master,
        moment1=torch.zeros_like(master),
        moment2=torch.zeros_like(master),
        size=size,
        host=host,
    )


def host_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy in host memory, pinned if `device` (None: the tensor's device) is a GPU. A meta tensor
    gives a meta tensor."""
    if tensor.device.type == "meta":
        return tensor.clone()
    pinned = (device or tensor.device).type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
