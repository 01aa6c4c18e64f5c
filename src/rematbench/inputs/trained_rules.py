"""The rules of jobs in which some weights are frozen."""

from collections.abc import Iterator

from rematbench.host.declared import facts
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.workload import PACKED_BYTES, Trained, Workload


def trained_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    """The messages of the rules that a job with frozen weights breaks."""
    model, mlp = work.model, {"gate", "up", "down"}
    pair = not model.gated or len({"gate", "up"} & {*work.targets}) != 1  # they share a linear
    whole = lay.expert_tp == 1 and not work.dora and pair
    experts = model.experts is not None and bool(mlp & {*work.targets}) and not whole
    if not work.partly and work.base_dtype != "stack":
        yield (
            f"base_dtype {work.base_dtype} needs frozen weights, but all weights train (give "
            "lora_rank, trained_parts or frozen_layers)"
        )
    if work.fp32_norms and (work.base_dtype not in PACKED_BYTES or work.trains("norms")):
        yield "fp32_norms needs frozen norms, and linears with fewer than 16 bits (base_dtype)"
    if not work.lora_rank:
        for name in ("dora", "lora_targets", "lora_train", "lora_dropout"):
            if getattr(work, name) != facts(Trained)[name].default:
                yield f"{name} needs adapters (lora_rank)"
    if experts:
        known = _bytes_of_adapters(work, system)
        words = "adapters of experts need etp 1, no dora, gate with up (ms-swift, tuners/lora.py)"
        yield f"{words}; {known}"
    if model.latent is not None and not {"q", "k", "v"}.isdisjoint(work.targets):
        known = _bytes_of_adapters(work, system)
        words = "adapters of latent attention are not modelled (lora_targets: o,gate,up,down)"
        yield f"{words}; {known}"
    if lay.tp > 1 and (work.dora or (work.partly and not work.lora_rank)):
        words = f"tp = {lay.tp} with frozen weights is modelled only for adapters without dora"
        known = f"; {_bytes_of_adapters(work, system)}, over {lay.tp} ranks"
        yield words + known * (work.lora_rank > 0)
    if work.lora_rank % lay.tp > 0:
        yield f"lora_rank {work.lora_rank} must be a multiple of tp = {lay.tp}, which splits it"
    yield from _frozen_rules(lay, work)


def _frozen_rules(lay: Layout, work: Workload) -> Iterator[str]:
    if work.frozen_layers > 0 and lay.pp > 1:
        yield f"frozen_layers with pp = {lay.pp} is not modelled"
    if work.frozen_layers >= work.model.num_layers:
        layers = f"the model's {work.model.num_layers} layers"
        yield f"frozen_layers {work.frozen_layers} must be below {layers}"
    if work.trained_parts == "head" and lay.pp > 1:
        yield f"pp = {lay.pp} is not modelled if no layer trains"


def _bytes_of_adapters(work: Workload, system: System) -> str:
    """The number and the bytes of low-rank adapters' weights, in words.  DoRA's magnitudes, one for
    each row of a linear, are left out."""
    layers = range(work.frozen_layers, work.model.num_layers)
    count = work.lora_rank * sum(work.adapted_widths(layer) for layer in layers)
    states = system.states
    each = states.param_bytes + states.grad_bytes + states.optimizer_bytes
    return f"they have {count:,} weights, {count * each / 2**30:.2f} GiB with gradients and states"
