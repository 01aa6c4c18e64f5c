"""Live bytes of activations as DeepSpeed holds them, where a plan says otherwise.

TiledMLP rebuilds its tiles in its backward, one at a time, also in a layer that is recomputed.
"""

from rematbench.packages.deepspeed.sizes import Sizes
from rematbench.program.action import HOST, Action, Kind

Key = tuple[int, int, str]
"""The micro-batch, chunk and name of a tensor."""
OWN = (".parameters", ".gradients")
"""Suffixes of a plan's own gathers and gradient buffers, which this walk leaves out."""
TILED, LAST = ("up_out", "gate_out", "act_out", "fc2_in"), "fc2"
"""The tensors that TiledMLP rebuilds, and the operator that ends a tile."""


def direction(action: Action) -> bool | None:
    """Whether an action is of a forward or recomputation (True), a backward (False), or neither."""
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return True
    kind = Kind.BACKWARD_WEIGHT if action.part == "E" else Kind.BACKWARD_INPUT
    return False if action.kind == kind else None


class Alive:
    """Live bytes of the device in issue order."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.nbytes = 0
        self._known: dict[Key, int] = {}
        self._remade: dict[Key, int] = {}
        self._tile: list[Key] = []
        self._tile_ends = False

    def born(self, key: Key, nbytes: int, kind: Kind) -> None:
        """Count a tensor that an action makes or reloads."""
        if not key[2].endswith((HOST, *OWN)):
            self._known[key] = nbytes
            self.nbytes += nbytes
            tiled = self.sizes.remade and kind == Kind.RECOMPUTE and "%" in key[2]
            if tiled and _variable(key[2]) in TILED:
                self._tile.append(key)

    def before(self, action: Action) -> None:
        """Account for tiles before an action runs. A tile that has ended is freed, and the tile
        that the action needs is rebuilt."""
        if direction(action) is not None:
            if self._tile_ends:
                kept = [key for key in self._tile if key in self._known]
                self._remade |= {key: self._known[key] for key in kept}
                self._tile = []
                self.gone(kept)
            self._tile_ends = action.op == LAST
        if action.kind == Kind.BACKWARD_INPUT and action.op == LAST:
            tile = {alloc.name.partition("%")[2] for alloc in action.allocs}
            for key in [key for key in self._remade if key[2].partition("%")[2] in tile]:
                self.born(key, self._remade.pop(key), action.kind)

    def gone(self, keys: list[Key]) -> None:
        """Free the tensors with these keys."""
        self.nbytes -= sum(self._known.pop(key, 0) for key in keys)


def _variable(tensor: str) -> str:
    return tensor.partition(".")[2].partition("%")[0]
