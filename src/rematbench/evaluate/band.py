"""The band of a predicted speed, as data; `rematbench.evidence.bands` learns its width."""

import math

from msgspec import Struct


class Band(Struct, frozen=True, kw_only=True):
    """The band of a predicted speed.  `half_width` is a logarithm.  `outside` has the properties of
    the job that no published row covers, each with its description.  `sources` is the number of
    sources behind the width; it is 0 for a stack that its user calibrated, whose width is
    `evidence.user_fit.band_of_rows`."""

    half_width: float
    outside: dict[str, str]
    sources: int

    def low(self, value: float) -> float:
        """The lower end of the band around a predicted value."""
        return value * math.exp(-self.half_width)

    def high(self, value: float) -> float:
        """The upper end of the band around a predicted value."""
        return value * math.exp(self.half_width)

    @property
    def evidence(self) -> str:
        """The kind of evidence in words."""
        if not self.outside:
            return "inside what was published"
        return f"outside what was published: {', '.join(self.outside.values())}"
