"""Steps and peaks in the log of a trainer: Megatron, torchtitan, Hugging Face."""

import re
from statistics import median

from rematbench.inputs.configfile import ConfigError

NUMBER = r"([\d,]+(?:\.\d+)?(?:e[-+]?\d+)?)"
MIB, GIB = 2**20, 2**30
WARMUP = 2
"""The number of first steps that are ignored, because they choose kernels and map memory."""
PRINTS: tuple[tuple[str, str, float], ...] = (
    ("step_s", rf"elapsed time per iteration \(ms\): {NUMBER}", 1e-3),
    ("step_s", rf"train_steps_per_second'?\"?: '?{NUMBER}", -1.0),
    ("tokens_per_s_per_gpu", rf"\btps: {NUMBER}", 1.0),
    ("allocated", rf"max allocated: {NUMBER}", MIB),
    ("reserved", rf"max reserved: {NUMBER}", MIB),
    ("reserved", rf"\bmemory: *{NUMBER}GiB", GIB),
)
"""What a trainer prints: a column or a kind of peak, the words before its number, and the factor to
base units (-1: the number is a rate).  Megatron-LM training.py and utils.py (`MB` are MiB),
Transformers' trainer_utils.py, torchtitan's metrics.py (its memory is what torch reserved)."""


def read_log(text: str, label: str) -> dict[str, str | float]:
    """The cells of a row that a log gives: the median of steps (`step_s` or tokens/s/GPU) and the
    largest peak, in base SI units, with its kind.  ConfigError for a log without a step."""
    seen: dict[str, list[float]] = {}
    for name, words, factor in PRINTS:
        found = [float(number.replace(",", "")) for number in re.findall(words, text)]
        seen.setdefault(name, []).extend(
            factor * number if factor > 0 else 1.0 / number for number in found if number
        )
    cells: dict[str, str | float] = {
        name: median(values[WARMUP:] or values)
        for name, values in seen.items()
        if values and name in ("step_s", "tokens_per_s_per_gpu")
    }
    if not cells:
        known = "Megatron's `elapsed time per iteration`, torchtitan's `tps`, or Transformers'"
        raise ConfigError(
            label, "steps", f"the log prints none of {known} `train_steps_per_second`"
        )
    for kind in ("allocated", "reserved"):
        if values := seen[kind]:
            return cells | {"peak_device_bytes": round(max(values)), "peak_kind": kind}
    return cells
