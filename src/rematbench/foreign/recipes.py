"""Reads recipes of quantised linears: the options of Megatron-LM, and torchtitan's converters."""

from collections.abc import Mapping
from typing import Any

from rematbench.foreign.keys import is_off
from rematbench.foreign.reading import Options, Reading, first_value, number

MEGATRON = {
    "delayed": "fp8-delayed",
    "tensorwise": "fp8",
    "blockwise": "fp8-block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Words of --fp8-recipe and --fp4-recipe (megatron-core 0.16.1, core/enums.py)."""
SWITCHES = ("fp8-format", "fp8", "fp8-hybrid", "fp8-e4m3")
ENDS = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
REUSE = "reuse-grad-buf-for-mxfp8-param-ag"
CONVERTERS = {"float8": "fp8", "quantize.linear.float8": "fp8"}
CONVERTERS |= {"mx": "mxfp8", "quantize.linear.mx": "mxfp8"}
"""torchtitan's converters of linears, each with its recipe where a section names no other."""
TORCHAO = {"": "", "tensorwise": "fp8", "mxfp8": "mxfp8", "mxfp8_cublas": "mxfp8"}
TORCHAO |= {"mxfp8_emulated": "mxfp8"}
LEFT_OUT = {"output", "router.gate"}
"""Linears that recipes leave in 16 bits, also without a filter."""


def read_megatron_recipe(reading: Reading, options: Options) -> None:
    """Read the recipe of a launch line.  Without --fp8-recipe it is delayed.  Parameters in MXFP8
    whose gather has a buffer of its own are held in 16 bits beside their copies."""
    four = first_value(options, "fp4-format") and "fp4-format"
    switch = four or next((name for name in SWITCHES if name in options), "")
    if not switch or is_off(first_value(options, switch, "e4m3")):
        return
    named = ("fp4-recipe", "nvfp4") if four else ("fp8-recipe", "delayed")
    word = first_value(options, *named)
    if word not in MEGATRON:
        reading.refused.append(f"--fp8-recipe: {word} (allowed: {', '.join(MEGATRON)})")
        return
    if first_value(options, "transformer-impl") == "local":
        reading.refused.append(f"--{switch}: needs --transformer-impl transformer_engine")
    if "no-fp8-wgrad" in options:
        reading.refused.append("--no-fp8-wgrad: weight gradients in 16 bits are not modelled")
    reading.put("recipe", MEGATRON[word], f"--{switch}")
    gathered = next((name for name in ("fp8-param-gather", "fp8-param") if name in options), "")
    if gathered and word == "mxfp8" and REUSE not in options:
        reading.notes.append(f"--{gathered} without --{REUSE}: a buffer in 16 bits stays")
    elif gathered:
        reading.put("fp8_params", True, f"--{gathered}")
    if "first-last-layers-bf16" in options:
        first, last = (
            int(number(first_value(options, name, "1"), reading.file, f"--{name}")) for name in ENDS
        )
        reading.put("bf16_ends", first, f"--{ENDS[0]}")
        if first != last:
            reading.refused.append(f"--{ENDS[1]}: {last}, but {first} at the start (not modelled)")


def read_converters(reading: Reading, data: Mapping[str, Any]) -> None:
    """Read the recipe of a torchtitan configuration."""
    names = (data.get("model") or {}).get("converters") or []
    names = [names] if isinstance(names, str) else list(names)
    old = data.get("float8") or {}
    switched = any(not is_off(old.get(key)) for key in ("enable_float8_linear", "enable"))
    training = data.get("training") or {}
    switched |= any(not is_off(training.get(key)) for key in ("fp8_linear", "enable_fp8_linear"))
    for name in names or ["float8"] * switched:
        if name not in CONVERTERS:
            reading.refused.append(f"model.converters: {name} (this converter is not modelled)")
            continue
        at = name.removeprefix("quantize.linear.")
        section = data.get(at) or ((data.get("quantize") or {}).get("linear") or {}).get(at) or {}
        word = str(section.get("recipe_name") or "")
        if word not in TORCHAO:
            reading.refused.append(f"{at}.recipe_name: {word} is not modelled")
        reading.put("recipe", TORCHAO.get(word) or CONVERTERS[name], f"{at}.recipe_name")
        if not is_off(section.get("enable_fsdp_float8_all_gather")):
            reading.put("fp8_params", True, f"{at}.enable_fsdp_float8_all_gather")
        listed = section.get("filter_fqns") or []
        kept = {*([listed] if isinstance(listed, str) else listed)} - LEFT_OUT
        if kept:
            linears = ", ".join(sorted(kept))
            reading.refused.append(f"{at}.filter_fqns: {linears} in 16 bits are not modelled")
