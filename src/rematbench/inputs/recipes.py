"""Recipes by which linears are quantised to FP8 and similar formats, from config/recipes.yaml."""

from functools import cache
from math import ceil
from typing import Literal

from msgspec import Struct

from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.constants import Number
from rematbench.inputs.facts import CPU
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import System, with_facts
from rematbench.workload import Work, Workload

Library = Literal["transformer_engine", "torchao"]
"""The library that quantises.  TransformerEngine's linears save their input quantised and keep
quantised weights for a step; torchao keeps both in 16 bits and casts at each use."""


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How linears are quantised.

    - `only`: the only library that has the recipe ("": both have it).
    - `bits`: bits per element; `block`: elements of a row that share a scale of `scale_bytes` bytes
      (0: one scale per tensor).  `rows`: pieces of a tensor get the same values as the whole if
      they have a multiple of this many rows (0: never, because their largest elements differ).
    - `amax_passes`: how often a tensor is read for its largest element before it is quantised.
    - `reduces`: the largest elements that ranks reduce: that of each `tensor` before tensor
      parallelism gathers it quantised, or the `history` of a pass over all ranks of a stage.
    - `keeps_original`: a linear saves its input in 16 bits if another operator saves it too
      (set_save_original_input of TransformerEngine; not with delayed scales).
    - `gathered_forms`: how many forms of an output gradient tensor parallelism gathers (by rows,
      and by columns too if their scales differ).
    - `copies`: bytes of a weight's quantised copies by GPU generation, with the transpose if
      products need it; other generations have no kernels.  `wide_gather`: quantised parameters are
      nevertheless gathered in 16 bits.
    - `gemm`: speed of products relative to 16 bits, by GPU generation (missing: not timed).
    """

    words: str
    only: Literal["", "transformer_engine", "torchao"] = ""
    bits: int = 8
    block: int = 0
    scale_bytes: int = 4
    rows: int = 0
    amax_passes: int = 0
    reduces: Literal["", "tensor", "history"] = ""
    keeps_original: bool = True
    gathered_forms: int = 1
    copies: dict[str, float]
    wide_gather: bool = False
    gemm: dict[str, Number] = {}

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of a quantised tensor, with the scales of its blocks."""
        scales = ceil(columns / self.block) * self.scale_bytes if self.block else 0
        return ceil(columns * self.bits / 8) + scales

    def forms(self, generation: str) -> int:
        """The number of quantised forms of a tensor that products read: one, or two (by rows and by
        columns)."""
        return max(1, round(8 * self.copies[generation] / self.bits))


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    libraries: dict[str, Library]
    recipes: dict[str, Recipe]


@cache
def recipe_file() -> _File:
    path = data_dir("config") / "recipes.yaml"
    return convert(read_mapping(path, "config/recipes.yaml"), _File, "config/recipes.yaml")


def recipe_of(work: Work) -> Recipe | None:
    """The recipe of a work; None if nothing is quantised."""
    return None if work.recipe == "none" else recipe_file().recipes[work.recipe]


def library_of(system: System) -> Library | None:
    """The library that quantises linears in a stack; None if it has none."""
    names = (system.name, *system.constants)
    return next((found for name in names if (found := recipe_file().libraries.get(name))), None)


def check_recipe(work: Workload, system: System, generation: str) -> None:
    """Raise RateError if the GPUs or the stack do not support the recipe, or if it contradicts the
    job."""
    recipe, named, layers = recipe_of(work), f"recipe {work.recipe}", work.model.num_layers
    if recipe is None:
        problems = {"fp8_params and bf16_ends need a recipe": work.fp8_params or work.bf16_ends}
    else:
        known = recipe_file().recipes.items()
        own = ", ".join(name for name, one in known if generation in one.copies) or "none"
        named = f"{named} ({recipe.words})"
        problems = {
            f"{named} has no kernels on {generation} (recipes there: {own})": (
                generation not in recipe.copies
            ),
            f"{named}: stack {system.name} is not known to quantise linears": (
                library_of(system) is None
            ),
            f"{named} is not a recipe of {library_of(system)}, which stack {system.name} uses": (
                recipe.only not in ("", library_of(system))
            ),
            f"{named} with precision {work.precision} is not modelled (only bf16)": (
                work.precision != "bf16"
            ),
            f"{named} with frozen weights is not modelled": not work.trains_all,
            f"{named} with bf16_ends {work.bf16_ends} quantises none of the {layers} layers": (
                not any(work.quantises(layer, layers) for layer in range(layers))
            ),
            "Delayed scaling does not support first / last layer in BF16": (
                bool(work.bf16_ends) and not recipe.keeps_original
            ),
        }
    for problem, holds in problems.items():
        if holds:
            raise RateError(problem)


def untimed(work: Work, generation: str) -> str:
    """Why products of a work's recipe cannot be timed; empty if they can."""
    recipe = recipe_of(work)
    if recipe is None or generation in (CPU, *recipe.gemm):
        return ""
    return f"no published rate of matrix products of recipe {work.recipe}"


def with_recipe(system: System, work: Work) -> System:
    """The stack with the bytes that gathers of quantised parameters send.  Deviation: embedding,
    head and norms, which stay in 16 bits, are counted in the width of the linears."""
    recipe = recipe_of(work)
    if recipe is None or not work.fp8_params or recipe.wide_gather:
        return system
    return with_facts(system, gather_bytes=1)


def holds_copies(work: Work, system: System, zero_stage: int) -> bool:
    """Whether a rank keeps quantised weights for a whole step. Weights that are gathered for each
    pass are quantised again for each pass."""
    return work.recipe != "none" and library_of(system) != "torchao" and zero_stage != 3


def resident_bytes(work: Work, system: System, generation: str, zero_stage: int) -> float:
    """Bytes per quantised weight that a rank holds in addition to the stack's parameters; negative
    if quantised parameters take fewer."""
    recipe = recipe_of(work)
    if recipe is None or not holds_copies(work, system, zero_stage):
        return 0.0
    return recipe.copies[generation] - (system.states.param_bytes if work.fp8_params else 0)
