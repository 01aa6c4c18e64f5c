"""The rules of layers that share weights, of memory layers, and of matrices that are split in both
dimensions.  The refusal of an unmodelled job still states its number of parameters."""

from collections.abc import Iterator

from rematbench.inputs.layout import Layout
from rematbench.workload import Workload


def part_rules(lay: Layout, work: Workload) -> Iterator[str]:
    yield from _shared_rules(lay, work)
    yield from _memory_rules(lay, work)
    yield from _column_rules(lay, work)


def _memory_rules(lay: Layout, work: Workload) -> Iterator[str]:
    """The rules of memory layers, whose table is not split."""
    model, given = work.model, work.model.memory
    if given is None:
        return
    others = {
        "tp or pp above 1": max(lay.tp * lay.tp_columns, lay.pp) > 1,
        "ZeRO 2 and 3": lay.zero_stage > 1,
        "experts": model.experts is not None,
        "layers that share weights": model.layer_groups > 0,
        "layers that predict more tokens": model.mtp_layers > 0,
        "weights that do not train": work.partly,
        "attention and MLP in parallel": model.block != "sequential",
    }
    found = [name for name, is_so in others.items() if is_so]
    size = f"the table has {given.rows * model.hidden / 1e9:.2f} billion values"
    wrong = given.key_dim % 2 or given.top > given.keys or given.layers[-1] >= model.num_layers
    if found:
        yield f"memory layers are not modelled with {', '.join(found)}; {size}"
    if wrong or list(given.layers) != sorted({*given.layers}):
        yield (
            f"memory: key_dim {given.key_dim} must be even, top {given.top} at most keys = "
            f"{given.keys}, and layers {given.layers} ascending and below {model.num_layers}"
        )


def _column_rules(lay: Layout, work: Workload) -> Iterator[str]:
    """The rules of matrices that are split in both dimensions (`tp_columns`)."""
    model, count = work.model, lay.tp_columns
    if count == 1:
        return
    others = {
        "sequence parallelism (--no-sp)": lay.sequence_parallel,
        "cp, pp or ulysses above 1": max(lay.cp, lay.pp, lay.ulysses) > 1,
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "weights that do not train": work.partly,
        "a narrow embedding": model.embedding_width > 0,
        "norms over the width of queries": model.qk_norm and model.qk_norm_weights == "width",
    }
    if found := [name for name, is_so in others.items() if is_so]:
        words = f"tp_columns = {count} is not modelled with {', '.join(found)}; a rank would hold "
        yield f"{words}{model.parameters / (lay.tp * count) / 1e6:,.1f} M parameters"
    if model.hidden % count != 0:
        yield f"hidden {model.hidden} must be a multiple of tp_columns = {count}"


def _shared_rules(lay: Layout, work: Workload) -> Iterator[str]:
    """The rules of layers that share weights and of narrow embeddings, which are modelled only
    without a split over ranks."""
    model = work.model
    name, shares = model.name, model.layer_groups > 0
    whole = max(lay.tp, lay.pp) == 1
    if not shares and not model.embedding_width:
        return
    size = f"{name} has {model.parameters / 1e6:.1f} M parameters"
    if shares and model.num_layers % max(1, model.layer_groups) != 0:
        yield f"{model.num_layers} layers must be a multiple of layer_groups {model.layer_groups}"
    if shares and (lay.pp > 1 or lay.zero_stage > 1 or work.frozen_layers > 0):
        others = "pp above 1, ZeRO 2 and 3 or frozen layers"
        yield f"layers that share weights are not modelled with {others}; {size}"
    if shares and (model.experts is not None or bool(model.attention_window)):
        others = "experts or attention windows"
        yield f"layers that share weights are not modelled with {others}; {size}"
    if model.embedding_width > 0 and not whole:
        yield f"an embedding of fewer columns is not modelled with tp or pp above 1; {size}"
