"""Pipeline stages written as text in the letters of Megatron-core, which say what each holds."""

import re
from itertools import groupby
from typing import NamedTuple

from rematbench.inputs.layout import (
    Layout,
    LayoutError,
    Partition,
    even_sizes,
    partition_of_sizes,
)
from rematbench.workload import Model

MOST_LETTERS = 1 << 16
"""Longer texts are typing errors, because no layout has that many passes."""
SHORTEST = 5
"""The shortest run of equal letters that is printed with a factor."""


class Stage(NamedTuple):
    """What a virtual stage holds: decoder layers and prediction layers (global indices; prediction
    layers are numbered after the decoder's), the embedding, and the head with the loss."""

    layers: tuple[int, ...]
    prediction: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False

    @property
    def letters(self) -> str:
        """The stage in the letters that `read_stages` takes."""
        text = "t" * len(self.layers) + "m" * len(self.prediction)
        return "E" * self.embedding + text + "L" * self.head


def read_stages(text: str) -> tuple[Stage, ...]:
    """The stages of a text such as `Et*3|(tt|)*29,m|L`, in pipeline order: E is the embedding, t a
    layer, m a prediction layer, L the loss, and `|` begins the next stage; commas are ignored.
    LayoutError for other letters or another order.

    Source: megatron-core 0.16.1, transformer/pipeline_parallel_layer_layout.py (parse_str_to_list,
    validate_layer_layout).
    """
    letters = _unrolled(text)
    order = letters.replace("|", "")
    if not re.fullmatch("Et+m*L", order):
        other = next((one for one in order if one not in "EtmL"), "")
        reason = f"{other!r} is none of E, t, m, L" if other else "expected E, t, m, and L last"
        raise LayoutError(f"layout {text!r}: {reason}")
    found, layer, of_decoder = [], 0, order.count("t")
    for number, stage in enumerate(letters.split("|"), start=1):
        if not stage:
            raise LayoutError(f"layout {text!r}: stage {number} holds nothing")
        held = range(layer, layer := layer + stage.count("t") + stage.count("m"))
        decoder = tuple(one for one in held if one < of_decoder)
        prediction = tuple(held[len(decoder) :])
        found.append(Stage(decoder, prediction, "E" in stage, "L" in stage))
    return tuple(found)


def _unrolled(text: str) -> str:
    """The letters of a text with its factors multiplied out, without commas and spaces."""
    letters = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        longest = sum(len(one[1]) * int(one[2][:9]) for one in re.finditer(pattern, letters))
        if longest > MOST_LETTERS:
            raise LayoutError(f"layout {text!r}: more than {MOST_LETTERS:,} letters")
        letters = re.sub(pattern, lambda one: one[1] * int(one[2]), letters)
    return letters


def stages_text(stages: tuple[Stage, ...]) -> str:
    """The text that `read_stages` reads as these stages; runs of equal stages get a factor."""
    *rest, last = (_short(stage.letters) for stage in stages)
    runs = [(stage, len([*equal])) for stage, equal in groupby(rest)]
    return "".join(f"({s}|)*{n}" if n > 1 else f"{s}|" for s, n in runs) + last


def _short(letters: str) -> str:
    runs = [(one, len([*equal])) for one, equal in groupby(letters)]
    return "".join(f"{one}*{n}" if n >= SHORTEST else one * n for one, n in runs)


def stages_of(partition: Partition, num_layers: int) -> tuple[Stage, ...]:
    """The stages of a partition in pipeline order, for a decoder of `num_layers` layers."""
    chunks = [rank[c] for c in range(len(partition[0])) for rank in partition]
    last = len(chunks) - 1
    return tuple(
        Stage(
            tuple(one for one in chunk if one < num_layers),
            tuple(one for one in chunk if one >= num_layers),
            at == 0,
            at == last,
        )
        for at, chunk in enumerate(chunks)
    )


def base_partition(model: Model, layout: Layout) -> Partition:
    """The partition that a layout states, or the even one with the prediction layers in the last
    stage. LayoutError if the stated numbers of stages or layers do not match layout and model."""
    if not layout.stages:
        sizes = even_sizes(model.num_layers, layout)
        return partition_of_sizes(sizes, layout.pp, model.mtp_layers)
    stages = read_stages(layout.stages)
    counts = tuple(sum(map(len, held)) for held in zip(*(one[:2] for one in stages), strict=True))
    wanted = (model.num_layers, model.mtp_layers)
    if counts != wanted or len(stages) != layout.num_chunks:
        raise LayoutError(
            f"layout {layout.stages!r} has {_words(*counts)} in {len(stages)} stages; "
            f"{_words(*wanted)} in pp x vpp = {layout.num_chunks} are needed"
        )
    return partition_of_sizes([sum(map(len, stage[:2])) for stage in stages], layout.pp)


def prediction_rank(model: Model, layout: Layout) -> int | None:
    """The pipeline rank that holds the prediction layers; None without such layers."""
    for rank, chunks in enumerate(base_partition(model, layout)):
        if any(layer >= model.num_layers for chunk in chunks for layer in chunk):
            return rank
    return None


def _words(layers: int, prediction: int) -> str:
    layer = f" and {prediction} prediction layer{'s' * (prediction > 1)}" * bool(prediction)
    return f"{layers} layers{layer}"
