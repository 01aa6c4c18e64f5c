"""Reads recipes of quantised linears: the options of Megatron-LM, torchtitan's converters, and FP8
of accelerate and of trainers that start it.

Sources: megatron-core 0.16.1, core/enums.py; torchtitan 0.2, components/quantization/float8.py;
torchao 0.9, float8/config.py; accelerate 1.11, utils/ao.py, utils/transformer_engine.py and
accelerator.py; LLaMA-Factory 0.9.5, train/fp8_utils.py; axolotl 0.13,
monkeypatch/trainer_accelerator_args.py.
"""

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
"""Words of --fp8-recipe and --fp4-recipe."""
SWITCHES = ("fp8-format", "fp8", "fp8-hybrid", "fp8-e4m3")
ENDS = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
REUSE = "reuse-grad-buf-for-mxfp8-param-ag"
CONVERTERS = {"float8": "fp8", "quantize.linear.float8": "fp8"}
CONVERTERS |= {"mx": "mxfp8", "quantize.linear.mx": "mxfp8"}
"""torchtitan's converters of linears, each with its recipe where a section names no other."""
TORCHAO = {"": "", "tensorwise": "fp8", "rowwise": "fp8-rows"}
TORCHAO |= {"mxfp8": "mxfp8", "mxfp8_cublas": "mxfp8", "mxfp8_cublas_rceil": "mxfp8"}
GATHER = "enable_fsdp_float8_all_gather"
SCALES = "precompute_float8_dynamic_scale_for_fsdp"
BACKENDS = {
    "ao": "",
    "torchao": "",
    "te": "it quantises the output projection too, which is not modelled",
    "msamp": "gradients and states in FP8 are not modelled",
}
"""The backends of accelerate's FP8, each with the reason why it is refused (empty: it is read)."""
ROWWISE = ("LLaMA-Factory",)
"""Trainers that choose torchao's recipe with a scale per row."""
LEFT_OUT = {"output", "router.gate"}
"""Linears that recipes always leave in 16 bits."""


def read_megatron_recipe(reading: Reading, options: Options) -> None:
    """Read the recipe of a launch line, which is `delayed` without --fp8-recipe.  Parameters in
    MXFP8 without REUSE stay in a 16-bit buffer beside their quantised copies."""
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
        reading.refused.append(f"--{switch}: it needs --transformer-impl transformer_engine")
    if "no-fp8-wgrad" in options:
        reading.refused.append("--no-fp8-wgrad: weight gradients in 16 bits are not modelled")
    reading.put("recipe", MEGATRON[word], f"--{switch}")
    gathered = next((name for name in ("fp8-param-gather", "fp8-param") if name in options), "")
    if gathered and word == "mxfp8" and REUSE not in options:
        reading.notes.append(f"--{gathered} without --{REUSE}: the 16-bit buffer stays")
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
        _read_torchao(reading, section, at, CONVERTERS[name])
        listed = section.get("filter_fqns") or (["output"] if at == "mx" or not names else [])
        filtered = {*([listed] if isinstance(listed, str) else listed)}
        if kept := filtered - LEFT_OUT:
            linears = ", ".join(sorted(kept))
            reading.refused.append(f"{at}.filter_fqns: {linears} in 16 bits are not modelled")
        if "output" not in filtered:
            text = "without `output`, that projection is quantised, which is not modelled"
            reading.refused.append(f"{at}.filter_fqns: {text}")


def _read_torchao(reading: Reading, section: Mapping[str, Any], at: str, usual: str) -> None:
    word = str(section.get("recipe_name") or "")
    if word not in TORCHAO:
        reading.refused.append(f"{at}.recipe_name: {word} is not modelled")
    reading.put("recipe", TORCHAO.get(word) or usual, f"{at}.recipe_name")
    _read_gather(reading, section.get(GATHER), f"{at}.{GATHER}", word)
    if at == "float8" and "fp8_params" in reading.values and is_off(section.get(SCALES)):
        text = f"without {at}.{SCALES} the scale of each weight is reduced at its gather"
        reading.notes.append(f"{text}, which is not counted")


def _read_gather(reading: Reading, value: Any, key: str, named: str) -> None:
    """Read the gather of quantised weights, which torchao has only with its default recipe."""
    if is_off(value):
        return
    if named:
        reading.refused.append(f"{key}: torchao has no such gather with recipe {named}")
    else:
        reading.put("fp8_params", True, key)


def read_accelerate_recipe(reading: Reading, data: Mapping[str, Any], at: str) -> None:
    """Read FP8 of accelerate (fp8_backend, fp8_enable_fsdp_float8_all_gather; keys of a section
    may lack fp8_).  torchao quantises all linears but the first (the projection of queries) and the
    last (that of the output).  `at`: the text before a key in messages."""
    rows, plain = reading.package in ROWWISE, {key.removeprefix("fp8_"): data[key] for key in data}
    word = str(plain.get("backend") or "").lower()
    usual = {"": "torchao", "auto": "torchao"} if rows or reading.package == "axolotl" else {}
    word = usual.get(word, word)
    if word not in BACKENDS:
        text = f"{word or 'accelerate takes what is installed'} (allowed: {', '.join(BACKENDS)})"
        reading.refused.append(f"{at}backend: {text}")
    elif BACKENDS[word]:
        reading.refused.append(f"{at}backend: {word.upper()}: {BACKENDS[word]}")
    else:
        reading.put("precision", "bf16", f"{at}backend")
        reading.put("recipe", "fp8-rows" if rows else "fp8", f"{at}backend")
        _read_gather(reading, plain.get(GATHER), f"{at}{GATHER}", "rowwise" * rows)
        if not rows:
            reading.notes.append(
                "the first linear, which torchao leaves in 16 bits, is counted in FP8"
            )
