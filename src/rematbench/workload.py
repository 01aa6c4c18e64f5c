"""The training work: a decoder-only transformer, a sequence length and a compute precision."""

from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, get_args

from msgspec.structs import force_setattr, replace

from rematbench.host.declared import Fact, Part
from rematbench.model import (
    BYTES_PER_ELEMENT,
    AdapterTarget,
    AdapterTargets,
    BaseDtype,
    Capacity,
    ExpertPadding,
    Experts,
    Imbalance,
    Latent,
    Model,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Probability,
    RecipeName,
    TrainedParts,
)

__all__ = [
    "Experts",
    "Latent",
    "Model",
    "NonNegativeInt",
    "PositiveInt",
    "Precision",
    "Quantised",
    "Trained",
    "Work",
    "Workload",
]


class Packing(NamedTuple):
    """A format of packed weights: codes of `bits` bits.  Each `block` of codes (0: scales are not
    counted) has a scale of `scale_bytes` bytes and, with `zeros`, a zero point of `bits` bits.
    `nested` scales share an fp32 scale (0: scales are not quantised)."""

    bits: int
    block: int = 0
    scale_bytes: int = 0
    nested: int = 0
    zeros: bool = False

    @property
    def bytes(self) -> Fraction:
        """Bytes per weight, with its part of scales and zero points."""
        code, shared = Fraction(self.bits, 8), Fraction(4, self.nested) if self.nested else 0
        beside = self.scale_bytes + shared + code * self.zeros
        return code + beside / self.block if self.block else code


PACKINGS = {
    "nf4": Packing(4, 64, 4),
    "nf4_double": Packing(4, 64, 1, nested=256),
    "int4": Packing(4, 128, 2, zeros=True),
    "int4_ungrouped": Packing(4),
    "marlin": Packing(4, 128, 2),
    "int8": Packing(8, 128, 2, zeros=True),
}
"""Scales are fp32 in nf4 and 8 bits in nf4_double (bitsandbytes, functional.py: quantize_4bit), and
fp16 in int4 and int8 (AutoGPTQ @058fd80a, qlinear_cuda_old.py).  int4_ungrouped has one scale per
column, which is not counted; marlin has no zero points (IST-DASLab/marlin @0f102e1)."""
PACKED_BYTES = {name: packing.bytes for name, packing in PACKINGS.items()}


class Trained(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights train, and in which formats weights are held; by default every weight
    trains."""

    lora_rank: Annotated[NonNegativeInt, Fact(metavar="R")] = 0
    """Low-rank adapters of this rank train instead of the model's weights (0: no adapters)."""
    lora_targets: Annotated[AdapterTargets, Fact(metavar="T")] = "all"
    """These linears have adapters: all, or some of q,k,v,o,gate,up,down."""
    lora_train: Literal["ab", "b"] = "ab"
    """Both matrices of an adapter train (ab), or only B (b, LoRA-FA)."""
    lora_dropout: Annotated[Probability, Fact(metavar="P")] = 0.0
    """Adapters drop this share of their input."""
    dora: bool = False
    """Adapters also train a magnitude for each output column of a weight (DoRA)."""
    bottleneck: Annotated[NonNegativeInt, Fact(metavar="W")] = 0
    """Bottleneck adapters with this many columns after attention and after the MLP train instead of
    the model's weights (Houlsby et al. 2019; 0: no such adapters)."""
    trained_parts: Annotated[TrainedParts, Fact(metavar="T")] = ""
    """These of embedding,norms,head train in addition to adapters, or alone without adapters."""
    frozen_layers: Annotated[NonNegativeInt, Fact(metavar="N")] = 0
    """The embedding and this many of the first layers are frozen."""
    trained_dtype: Literal["stack", "fp32", "autocast"] = "stack"
    """Trained weights are held in this precision: fp32 (as PEFT holds adapters), or autocast (fp32,
    computed in 16 bits)."""
    base_dtype: BaseDtype = "stack"
    """Frozen weights are held in this format; linears with fewer than 16 bits are dequantised at
    each use (nf4_double: with quantised scales; int4: GPTQ and AWQ)."""
    fp32_norms: bool = False
    """Frozen norms are fp32, and so are the outputs of 4-bit linears and of layers (PEFT's
    prepare_model_for_kbit_training)."""

    @property
    def trains_all(self) -> bool:
        """Whether every weight trains, in the stack's formats."""
        return self.trained == Trained()

    @property
    def trained(self) -> "Trained":
        return Trained(**{name: getattr(self, name) for name in Trained.__struct_fields__})

    @property
    def partly(self) -> bool:
        """Whether some weights are frozen."""
        return bool(self.adapted or self.trained_parts or self.frozen_layers)

    @property
    def adapted(self) -> bool:
        return bool(self.lora_rank or self.bottleneck)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the adapted linears; none without adapters."""
        every = get_args(AdapterTarget)
        named = every if self.lora_targets == "all" else self.lora_targets.split(",")
        return tuple(name for name in every if name in named and self.lora_rank)

    def trains(self, part: str) -> bool:
        """Whether `trained_parts` has a part (embedding, norms, head)."""
        return part in self.trained_parts.split(",")


class Quantised(Trained, Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which linears multiply in fewer bits than the precision, and how their weights are held."""

    recipe: RecipeName = "none"
    """This recipe of config/recipes.yaml quantises the linears of layers (none: no linear is)."""
    fp8_params: bool = False
    """Parameters are held and gathered in quantised form (Megatron's --fp8-param-gather,
    torchao's FP8 all-gather); otherwise quantised weights are copies of the parameters."""
    bf16_ends: Annotated[NonNegativeInt, Fact(metavar="N")] = 0
    """This many layers at each end of the model are not quantised."""

    def quantises(self, layer: int, count: int) -> bool:
        """Whether a layer (global index) of a model with `count` layers has quantised linears."""
        end = layer < self.bf16_ends or count - self.bf16_ends <= layer < count
        return self.recipe != "none" and not end


class Work(Quantised, Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step computes and trains, apart from the model: sequence length, compute precision,
    documents, and the tokens that experts receive."""

    seq_len: Annotated[PositiveInt, Fact(metavar="S", column="always")]
    """A sequence has this many tokens."""
    precision: Annotated[Precision, Fact(column="own")] = "bf16"
    """Kernels compute in this precision."""
    document_len: Annotated[NonNegativeInt, Fact(metavar="D")] = 0
    """Documents packed into a sequence have this many tokens on average, and attention does not
    cross their borders (0: no packing)."""
    sample_len: Annotated[NonNegativeInt, Fact(metavar="S")] = 0
    """Samples have this many tokens on average; samples longer than `seq_len` are left out, and a
    micro-batch is as long as its longest sample (0: every sample has `seq_len` tokens)."""
    sample_spread: Annotated[NonNegativeInt, Fact(metavar="S")] = 0
    """Sample lengths have this standard deviation in tokens (0: as many tokens as `sample_len`)."""
    imbalance: Annotated[Imbalance, Fact(metavar="F")] = 1.0
    """The experts of the busiest rank receive this many times the balanced number of tokens."""
    capacity_factor: Annotated[Capacity, Fact(metavar="F")] = 0.0
    """An expert takes at most this many times the balanced number of tokens from each rank, and
    drops the others (0: no limit)."""
    expert_padding: ExpertPadding = "none"
    """With `capacity`, every expert is padded up to its capacity, so no token counts are sent."""

    @property
    def packed(self) -> bool:
        """Whether a sequence holds more than one document."""
        return 0 < self.document_len < self.seq_len

    @property
    def packing(self) -> str:
        """The length of packed documents in words, for a heading; empty without packing."""
        return f" in documents of {self.document_len:,}" if self.packed else ""

    @property
    def numbers(self) -> str:
        """The precision and the recipe in words, for a heading."""
        given = (self.recipe, "fp8_params" * self.fp8_params)
        more = " ".join(word for word in given if word not in ("none", ""))
        return f"{self.precision} with {more}" if more else self.precision

    @property
    def documents(self) -> int:
        """Documents per sequence, including a shorter last document."""
        return -(-self.seq_len // self.document_len) if self.packed else 1

    # Why: docs/decisions/costs.md, Is an expert capacity modelled as an imbalance?
    @property
    def drops_tokens(self) -> bool:
        """Whether experts drop tokens above their capacity and are not padded up to it."""
        return self.capacity_factor > 0 and self.expert_padding == "none"

    @property
    def element_bytes(self) -> int:
        return BYTES_PER_ELEMENT[self.precision]


class Workload(Work, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work and its model.  With `max_positions` 0, learned positions number `seq_len`."""

    model: Annotated[Model, Fact(column="own")]

    def __post_init__(self) -> None:
        """Replace `max_positions` 0 by `seq_len` if the model has learned positions."""
        if self.model.position == "learned" and self.model.max_positions == 0:
            force_setattr(self, "model", replace(self.model, max_positions=self.seq_len))

    def adapted_widths(self, layer: int, *, active: bool = False) -> int:
        """The summed rows and columns of a layer's adapted linears, of every expert or of those
        that are `active` for a token; their gate and up projections are one linear.  With latent
        attention, `q` means both query projections, `k` the down-projection of keys and values, and
        `v` their up-projection."""
        model, experts, found = self.model, self.model.experts, 0
        sizes: dict[str, tuple[int, ...]]
        h, q, kv = model.hidden, model.q_width, model.kv_width
        sizes = {"q": (h + q,), "k": (h + kv,), "v": (h + kv,), "o": (h + model.out_width,)}
        if latent := model.latent:
            down = latent.q_rank
            sizes["q"] = (h + down, down + q) if down else (h + q,)
            sizes["k"] = (h + latent.kv_rank + latent.rope,)
            sizes["v"] = (latent.kv_rank + model.num_heads * (latent.nope + latent.v),)
        mlp = [(1, model.ffn)]
        if experts is not None and not model.is_dense(layer):
            shared, number = experts.shared_ffn, experts.active if active else experts.count
            mlp = [(number, experts.ffn), *([(1, shared)] if shared else [])]
            found -= number * h * ({"gate", "up"} <= {*self.targets})
        for target in self.targets:
            found += sum(sizes.get(target) or [count * (h + f) for count, f in mlp])
        return found

    @property
    def balance(self) -> str:
        """The assumed balance of tokens among experts, in words; empty without experts."""
        if self.model.experts is None:
            return ""
        if self.expert_padding == "capacity":
            return f"every expert gets {self.capacity_factor:g} times its balanced share of tokens"
        most = f", {self.capacity_factor:g} times at most" if self.capacity_factor else ""
        if self.imbalance == 1.0:
            return f"experts balanced{most}"
        factor = f"{self.imbalance:g} times their balanced share of tokens"
        return f"experts of the worst rank receive {factor}{most}"
