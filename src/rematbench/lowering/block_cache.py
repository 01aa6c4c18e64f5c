"""What the ranks of one lowering share: blocks and fates of chunks that are alike."""

from typing import NamedTuple

from rematbench.lowering.emit_forward import Fates
from rematbench.lowering.step_blocks import Storages
from rematbench.program.program import Block


class PassClass(NamedTuple):
    """What equal (chunk, micro-batch) pairs share: fates, and the storages that leave."""

    number: int
    fates: Fates
    leaving: Storages


class BlockCache:
    """Blocks by shape of chunk, fates and flags, and fates by what rules cover: ranks and chunks
    that are alike share them."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[object, ...], Block] = {}
        self.classes: dict[tuple[object, ...], tuple[PassClass, frozenset[int]]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, content: tuple[object, ...]) -> int:
        """A short name of a content (equal contents, equal numbers)."""
        return self._numbers.setdefault(content, len(self._numbers))
