"""Rules of layouts for a model of which only a part trains."""

from rematbench.inputs.layout import Layout
from rematbench.workload import PACKED_BYTES, Workload


def trained_rules(lay: Layout, work: Workload) -> list[tuple[bool, str]]:
    """The rules of a model of which only a part trains."""
    model, mlp = work.model, {"gate", "up", "down"}
    experts = model.experts is not None and bool(mlp & {*work.targets})
    return [
        (
            not work.partly and work.base_dtype != "stack",
            f"base_dtype {work.base_dtype} holds weights that do not train, but all train (give "
            "lora_rank, trained_parts or frozen_layers)",
        ),
        (
            work.fp32_norms and (work.base_dtype not in PACKED_BYTES or work.trains("norms")),
            "fp32_norms needs frozen norms and linears of less than 16 bits (base_dtype)",
        ),
        (work.dora and not work.lora_rank, "dora needs adapters (lora_rank)"),
        (experts, "adapters of experts are not modelled (lora_targets: q,k,v,o)"),
        (
            model.latent is not None and not {"q", "k", "v"}.isdisjoint(work.targets),
            "adapters of latent attention are not modelled (lora_targets: o,gate,up,down)",
        ),
        (
            lay.tp > 1 and (work.dora or (work.partly and not work.lora_rank)),
            f"tp = {lay.tp} with frozen weights is modelled only for adapters without dora",
        ),
        (
            work.lora_rank % lay.tp > 0,
            f"lora_rank {work.lora_rank} must be a multiple of tp = {lay.tp}, whose ranks share it",
        ),
        (
            work.frozen_layers > 0 and lay.pp > 1,
            f"pp = {lay.pp} with frozen_layers: not modelled",
        ),
        (
            work.frozen_layers >= model.num_layers,
            f"frozen_layers {work.frozen_layers} must be below the {model.num_layers} layers",
        ),
        (
            work.trained_parts == "head" and lay.pp > 1,
            f"pp = {lay.pp} where no layer trains: not modelled",
        ),
    ]
