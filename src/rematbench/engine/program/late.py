"""Tensors made between activations: an allocator places them where it finds room."""

from msgspec import Struct


class LateUnit(Struct, frozen=True, kw_only=True, gc=False):
    """The late tensors of one unit, each in bytes.  `states`: optimizer states, made by the unit's
    first update and never freed; `gradients`: by operator, made by a step's first backward of the
    operator's weights (of weights without such a kernel: of the unit) and freed after the step;
    `scratch`: alive only during an update of the unit."""

    states: tuple[int, ...] = ()
    gradients: dict[str, tuple[int, ...]] = {}
    scratch: tuple[int, ...] = ()


class Late(Struct, frozen=True, kw_only=True):
    """The late tensors of one rank by (chunk, unit); a unit is E, L<i> or H."""

    units: dict[tuple[int, str], LateUnit]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that the first updates make."""
        return sum(sum(unit.states) for unit in self.units.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that each step makes."""
        kept = (unit.gradients.values() for unit in self.units.values())
        return sum(sum(tensors) for unit in kept for tensors in unit)
