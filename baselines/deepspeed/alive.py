"""Activations that are alive where a plan says otherwise: rules of DeepSpeed and of model.py.

- A function of the model keeps what it has a name for until it returns, saved or not.
- CPU checkpointing brings a layer's input back when the layer runs again, and never moves the two
  newest (keep_last_count and max_fwd_stash_count of offload_activations.py).
- TiledMLP makes its tiles again in its backward, one at a time, also in a layer that runs again.
"""

from typing import TYPE_CHECKING

from rematbench.program.action import HOST, Action, Kind
from rematbench.workload import Model

if TYPE_CHECKING:
    from baselines.deepspeed.sizes import Sizes

Key = tuple[int, int, str]
"""Micro-batch, chunk and name of a tensor."""
OWN = (".parameters", ".gradients")
"""Of a plan's own gathers and gradient buffers: others take their place."""
LAYER = (
    *("attn_norm", "qkv", "attention", "proj", "post_attn_norm", "attn_add"),
    *("mlp_norm", "fc1", "act", "mul", "fc2", "post_mlp_norm", "mlp_add"),
)
ORDER = {op: place for place, op in enumerate(LAYER)}
"""Operators of a layer in the order of its forward."""
NAMED = {
    "attn_norm_out": "attention",  # _attention's x
    "proj_out": "fc2",  # forward's mixed
    "mlp_norm_out": "mlp_add",  # forward's y
    "up_out": "fc2",  # mlp's up, gate and act
    "gate_out": "fc2",
    "act_out": "fc2",
}
"""Of what a layer's functions (model.py) have a name for: the operator until which that lasts."""
NEWEST = 2
TILED, LAST = ("up_out", "gate_out", "act_out", "fc2_in"), "fc2"
"""What TiledMLP makes again, and the operator that ends a tile."""


def direction(action: Action) -> bool | None:
    """Whether an action is a forward's (also of one that runs again: True), a backward's (False)
    or neither's."""
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return True
    kind = Kind.BACKWARD_WEIGHT if action.part == "E" else Kind.BACKWARD_INPUT
    return False if action.kind == kind else None


class Alive:
    """Live bytes of the device in issue order."""

    def __init__(self, model: Model, sizes: "Sizes") -> None:
        self.model, self.sizes = model, sizes
        self.nbytes = 0
        self._known: dict[Key, int] = {}
        self._coming: dict[Key, int] = {}
        self._remade: dict[Key, int] = {}
        self._tile: list[Key] = []
        self._running = ""
        self._named: list[Key] = []
        self.start()

    def start(self) -> None:
        """A micro-batch starts."""
        layers = range(self.model.num_layers)[-NEWEST:] if self.sizes.newest else ()
        self._newest = {f"L{layer}.layer_input" for layer in layers}

    def born(self, key: Key, nbytes: int, kind: Kind) -> None:
        """A tensor that an action makes; of what comes back from the host only that it may."""
        if kind == Kind.H2D:
            self._coming.update({} if key in self._known else {key: nbytes})
        elif not key[2].endswith((HOST, *OWN)):
            self._known[key] = nbytes
            self.nbytes += nbytes
            tiled = self.sizes.remade and kind == Kind.RECOMPUTE and "%" in key[2]
            if tiled and _variable(key[2]) in TILED:
                self._tile.append(key)

    def before(self, action: Action) -> None:
        """An action is about to run: what has returned is gone, what it wants is there."""
        forward = direction(action)
        if forward is not None:
            self._returned(action.op, forward=forward)
        if action.kind == Kind.RECOMPUTE:
            self._newest.discard(f"{action.part}.layer_input")
            for key in [key for key in self._coming if key[2].startswith(f"{action.part}.")]:
                self.born(key, self._coming.pop(key), action.kind)
        if action.kind == Kind.BACKWARD_INPUT and action.op == LAST:
            tile = {alloc.name.partition("%")[2] for alloc in action.allocs}
            for key in [key for key in self._remade if key[2].partition("%")[2] in tile]:
                self.born(key, self._remade.pop(key), action.kind)

    def _returned(self, op: str, *, forward: bool) -> None:
        before, self._running = self._running, op
        on = forward and ORDER.get(before, 0) < ORDER.get(op, 0)
        over = [key for key in self._named if not (on and _named(key[2], op))]
        self._named = [key for key in self._named if key not in over]
        self.gone(over)
        if before == LAST:
            kept = [key for key in self._tile if key in self._known]
            self._remade |= {key: self._known[key] for key in kept}
            self._tile = []
            self.gone(kept)

    def ending(self, keys: list[Key], *, forward: bool) -> list[Key]:
        """Those of freed tensors that nothing keeps."""
        keys = [key for key in keys if key[2] not in self._newest]
        if not forward:
            return keys
        self._named += [key for key in keys if _named(key[2], self._running)]
        return [key for key in keys if key not in self._named]

    def gone(self, keys: list[Key]) -> dict[str, int]:
        """They are freed: their bytes by name."""
        freed = {key[2]: self._known.pop(key, 0) for key in keys}
        self.nbytes -= sum(freed.values())
        return freed


def _named(tensor: str, op: str) -> bool:
    """Whether a function of the model still has a name for a tensor while an operator runs."""
    last = NAMED.get(_variable(tensor))
    return last is not None and ORDER.get(op, len(ORDER)) <= ORDER[last]


def _variable(tensor: str) -> str:
    return tensor.partition(".")[2].partition("%")[0]
