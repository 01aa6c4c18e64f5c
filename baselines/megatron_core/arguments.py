"""Arguments of Megatron-LM's pretraining script, as `flags` prints them, for megatron-core itself.

Megatron-LM names an argument after the configuration field it sets; what is not a field of
TransformerConfig has to say what the job says anyway.
"""

import dataclasses
import typing
from typing import Any

from msgspec.structs import replace

from baselines.common.contract import NotRunnable
from baselines.megatron_core.plan import MegatronCore
from rematbench.record import RunSpec

NOT_FUSED = ("no_bias_swiglu_fusion", "no_bias_gelu_fusion")


def parse(text: str) -> dict[str, list[str]]:
    """Words after each `--name`, by name with underscores."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in text.split():
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            found[name] = []
        elif name:
            found[name].append(word)
        else:
            raise NotRunnable(f"megatron_core: {word!r} stands before any argument")
    return found


def policy_of(text: str, policy: MegatronCore) -> MegatronCore:
    """The policy that the arguments say, for the guards."""
    given = parse(text)
    first = {name: words[0] for name, words in given.items() if words}
    return replace(
        policy,
        recompute=first.get("recompute_granularity", "none"),
        method=first.get("recompute_method", "uniform"),
        num_layers=_whole("recompute_num_layers", first.get("recompute_num_layers", "1")),
        modules=tuple(given.get("recompute_modules", ("core_attn",))),
        offload_modules=tuple(given.get("offload_modules", ())),
    )


def fields(text: str, run: RunSpec) -> dict[str, Any]:
    """Fields of TransformerConfig; NotRunnable for an argument that says another job."""
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415  # after the shim

    given = parse(text)
    hints = typing.get_type_hints(TransformerConfig)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fixed = _fixed(run)
    found: dict[str, Any] = {}
    for name, words in given.items():
        if name in fixed:
            if words != fixed[name]:
                said, wanted = " ".join(words), " ".join(fixed[name])
                raise NotRunnable(f"megatron_core: --{_dashed(name)} {said}, the job has {wanted}")
        elif name in NOT_FUSED:
            found["bias_activation_fusion"] = False
        elif name in known:
            found[name] = _value(name, words, hints[name])
        else:
            raise NotRunnable(f"megatron_core: --{_dashed(name)} is not known here")
    return found


def _fixed(run: RunSpec) -> dict[str, list[str]]:
    """What the job has fixed already."""
    lay = run.layout
    per_chunk = run.model.num_layers // (lay.pp * lay.vpp)
    return {
        "tensor_model_parallel_size": [str(lay.tp)],
        "pipeline_model_parallel_size": [str(lay.pp)],
        "context_parallel_size": [str(lay.cp)],
        "micro_batch_size": [str(lay.micro_batch)],
        "global_batch_size": [str(lay.global_batch)],
        "seq_length": [str(run.seq_len)],
        "num_layers_per_virtual_pipeline_stage": [str(per_chunk)],
        "use_distributed_optimizer": [] if lay.zero_stage == 1 else ["not at this zero_stage"],
    }


def _whole(name: str, word: str) -> int:
    if not word.isdecimal():
        raise NotRunnable(f"megatron_core: --{_dashed(name)} {word}: expected a whole number")
    return int(word)


def _value(name: str, words: list[str], hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    if not words:
        return True
    if any(typing.get_origin(kind) is list or kind is list for kind in (hint, *kinds)):
        return words
    return _whole(name, words[0]) if int in kinds else words[0]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
