"""The cache that all ranks of one lowering share: equal blocks, and fates of equal chunks."""

from typing import NamedTuple

from rematbench.engine.lowering.emit_forward import Fates
from rematbench.engine.lowering.step_blocks import Storages
from rematbench.engine.program.program import Block


class PassClass(NamedTuple):
    """The class of equal (chunk, micro-batch) pairs: a number, the fates, and the storages whose
    host copies outlive the forward."""

    number: int
    fates: Fates
    leaving: Storages


class BlockCache:
    """Blocks by chunk shape, fates and flags, and pass classes by the rules that cover a chunk:
    equal ranks and chunks share them."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[object, ...], Block] = {}
        self.classes: dict[tuple[object, ...], tuple[PassClass, frozenset[int]]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, content: tuple[object, ...]) -> int:
        """A number for a content; equal contents have equal numbers."""
        return self._numbers.setdefault(content, len(self._numbers))
