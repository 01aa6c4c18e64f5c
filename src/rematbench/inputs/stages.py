"""The stages of a pipeline as text, in the letters of Megatron-core: what each stage holds."""

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from rematbench.inputs.layout import Layout, LayoutError, Partition, even_partition
from rematbench.workload import Model

MOST_LETTERS = 1 << 16
"""More letters than the passes of any layout allow; longer texts are typing errors."""
SHORTEST = 5
"""So many equal letters are printed with a factor."""


class Stage(NamedTuple):
    """What a virtual stage of a pipeline holds: its decoder layers and its prediction layers
    (global indices; prediction layers count on behind the decoder's), the embedding, the loss with
    the head."""

    layers: tuple[int, ...]
    prediction: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False

    @property
    def letters(self) -> str:
        """The stage in the letters of `read_stages`."""
        text = "t" * len(self.layers) + "m" * len(self.prediction)
        return "E" * self.embedding + text + "L" * self.head


def read_stages(text: str) -> tuple[Stage, ...]:
    """The stages of a text such as `Et*3|(tt|)*29,m|L`, in pipeline order: E the embedding, t a
    layer, m a prediction layer, L the loss, `|` the next stage; commas have no meaning.
    LayoutError for another letter, or for another order of the letters.

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
    """The letters of a text without factors and commas."""
    letters = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        longest = sum(len(one[1]) * int(one[2][:9]) for one in re.finditer(pattern, letters))
        if longest > MOST_LETTERS:
            raise LayoutError(f"layout {text!r}: more than {MOST_LETTERS:,} letters")
        letters = re.sub(pattern, lambda one: one[1] * int(one[2]), letters)
    return letters


def stages_text(stages: tuple[Stage, ...]) -> str:
    """The text that `read_stages` reads as these stages; equal stages have a factor."""
    *rest, last = (_short(stage.letters) for stage in stages)
    runs = [(stage, len([*equal])) for stage, equal in groupby(rest)]
    return "".join(f"({s}|)*{n}" if n > 1 else f"{s}|" for s, n in runs) + last


def _short(letters: str) -> str:
    runs = [(one, len([*equal])) for one, equal in groupby(letters)]
    return "".join(f"{one}*{n}" if n >= SHORTEST else one * n for one, n in runs)


def stages_of(partition: Partition, num_layers: int) -> tuple[Stage, ...]:
    """The stages of a partition in pipeline order, for a decoder with so many layers."""
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
    """The partition that a layout states, or the even one with the prediction layers at the end of
    the last stage.  LayoutError for a text of other stages or layers."""
    if not layout.stages:
        ranks = [list(rank) for rank in even_partition(model.num_layers, layout)]
        ranks[-1][-1] += tuple(range(model.num_layers, model.num_layers + model.mtp_layers))
        return tuple(tuple(rank) for rank in ranks)
    stages = read_stages(layout.stages)
    counts = tuple(sum(map(len, held)) for held in zip(*(one[:2] for one in stages), strict=True))
    wanted = (model.num_layers, model.mtp_layers)
    if counts != wanted or len(stages) != layout.num_chunks:
        raise LayoutError(
            f"layout {layout.stages!r} has {_words(*counts)} in {len(stages)} stages; "
            f"{_words(*wanted)} in pp x vpp = {layout.num_chunks} are needed"
        )
    sizes = [sum(map(len, stage[:2])) for stage in stages]
    return partition_of_sizes(sizes, layout.pp)


def prediction_rank(model: Model, layout: Layout) -> int | None:
    """The pipeline rank of the layers that predict more tokens; None without any."""
    for rank, chunks in enumerate(base_partition(model, layout)):
        if any(layer >= model.num_layers for chunk in chunks for layer in chunk):
            return rank
    return None


def _words(layers: int, prediction: int) -> str:
    layer = f" and {prediction} prediction layer{'s' * (prediction > 1)}" * bool(prediction)
    return f"{layers} layers{layer}"


def partition_of_sizes(sizes: Sequence[int], pp: int, more: int = 0) -> Partition:
    """The partition over `pp` ranks whose chunks, in pipeline order, have so many layers of the
    decoder; the last has `more` that predict more tokens."""
    ends = [*accumulate(sizes, initial=0)]
    ends[-1] += more
    chunks = [tuple(range(a, b)) for a, b in pairwise(ends)]
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))
