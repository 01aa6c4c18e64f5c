"""Tensors made between activations: an allocator places them where it finds room."""

from msgspec import Struct


class LateUnit(Struct, frozen=True, kw_only=True, gc=False):
    """The late tensors of one unit, each in bytes.  `states`: optimizer states, made by the unit's
    first update and never freed; `gradients`: made by a step's first backward of the unit and freed
    after the step; `scratch`: alive only during an update of the unit."""

    states: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
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
        return sum(sum(unit.gradients) for unit in self.units.values())
