"""Arguments of Megatron-LM's pretraining script, as `flags` prints them, for megatron-core itself.

Megatron-LM names an argument after the configuration field that it sets. An argument that is not a
field of TransformerConfig must agree with the job, and so must an argument that the job has fixed.
"""

import dataclasses
import types
import typing
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.megatron_core.modules import OffloadModule, RecomputeModule
from baselines.megatron_core.options import NAMES
from baselines.megatron_core.plan import MegatronCore, fusion_argument
from rematbench.inputs.layout import Layout
from rematbench.worlds.records.record import RunSpec

NOT_FUSED = ("no_bias_swiglu_fusion", "no_bias_gelu_fusion")
SETTINGS = (
    "recompute", "method", "num_layers", "modules", "offload_modules", "bias_activation_fusion",
)  # fmt: skip
"""The settings of a policy that arguments say; arguments cannot say its other settings."""
CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "recompute_modules": get_args(RecomputeModule),
    "offload_modules": get_args(OffloadModule),
}
NEEDED = {
    "recompute_method": "recompute_granularity full",
    "recompute_num_layers": "recompute_granularity full",
    "recompute_modules": "recompute_granularity selective",
    "offload_modules": "fine_grained_activation_offloading",
}
"""Arguments that have no effect without another argument."""


def parse(text: str) -> dict[str, list[str]]:
    """The words after each `--name` (or `--name=word`), by name with underscores. If a name is
    repeated, the last argument counts. Lines of comments and backslashes at line ends are not
    read."""
    found: dict[str, list[str]] = {}
    name = ""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for word in " ".join(lines).replace("\\", " ").split():
        if word.startswith("--"):
            argument, equals, value = word.partition("=")
            name = _underscored(argument)
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            raise NotRunnable(f"megatron_core: {word!r} stands before any argument")
    return found


def policy_of(text: str, policy: MegatronCore, run: RunSpec) -> MegatronCore:
    """The policy given by the arguments, for the guards. NotRunnable for arguments that have no
    meaning here or contradict the job."""
    arguments = parse(text)
    _agree(arguments, run)
    for name, allowed in CHOICES.items():
        wrong = [word for word in arguments.get(name, ()) if word not in allowed]
        if wrong:
            listing = ", ".join(allowed)
            raise NotRunnable(
                f"megatron_core: --{_dashed(name)} {wrong[0]} is not run here (allowed: {listing})"
            )
    for name, other in NEEDED.items():
        switch, *value = other.split()
        if name in arguments and (
            switch not in arguments or (value and arguments[switch] != value)
        ):
            raise NotRunnable(
                f"megatron_core: --{_dashed(name)} does nothing without --{_dashed(other)}"
            )
    first = {name: words[0] for name, words in arguments.items() if words}
    fusion = fusion_argument(run.model)
    return replace(
        policy,
        recompute=first.get("recompute_granularity", "none"),
        method=first.get("recompute_method", "uniform"),
        num_layers=_whole("recompute_num_layers", first.get("recompute_num_layers", "1")),
        modules=tuple(arguments.get("recompute_modules", ("core_attn",))),
        offload_modules=tuple(arguments.get("offload_modules", ())),
        bias_activation_fusion=bool(fusion) and _underscored(fusion) not in arguments,
    )


def fields(text: str, run: RunSpec, job_fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of TransformerConfig that the arguments set. NotRunnable for an argument that
    contradicts the job, which decides `job_fields`."""
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415  # after the shim

    hints = typing.get_type_hints(TransformerConfig)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fixed = {*_fixed(run), *NOT_FUSED, *NAMES}
    found: dict[str, Any] = {}
    for name, words in parse(text).items():
        if name in fixed:
            continue
        if name not in known:
            raise NotRunnable(f"megatron_core: --{_dashed(name)} is not known here")
        value = _value(name, words, hints[name])
        if name in job_fields and value != job_fields[name]:
            said = " ".join(("--" + _dashed(name), *words))
            raise NotRunnable(f"megatron_core: {said}, the job has {job_fields[name]}")
        found[name] = value
    return found


class Fixed(NamedTuple):
    """The value of an argument that the job has fixed. `value`: the job's value (None: not given;
    a switch: the empty word). `default`: Megatron-LM's value without the argument. `why`: the
    reason for the job's value. `also`: other words with the same meaning."""

    value: str | None
    default: str | None = None
    why: str = ""
    also: tuple[str, ...] = ()


def _fixed(run: RunSpec) -> dict[str, Fixed]:
    lay = run.layout
    chunk = str(run.model.num_layers // lay.num_chunks) if lay.vpp > 1 else None
    backend = Fixed("unfused", "auto", "unfused attention")
    if run.stack.attention == "flash":
        backend = Fixed("auto", "auto", "flash attention", ("flash", "fused"))
    return {
        "tensor_model_parallel_size": Fixed(str(lay.tp), "1"),
        "pipeline_model_parallel_size": Fixed(str(lay.pp), "1"),
        "context_parallel_size": Fixed(str(lay.cp), "1"),
        "micro_batch_size": Fixed(str(lay.micro_batch)),
        "global_batch_size": Fixed(str(lay.global_batch), str(lay.micro_batch * lay.replicas)),
        "seq_length": Fixed(str(run.seq_len)),
        "num_layers_per_virtual_pipeline_stage": Fixed(chunk, None, f"vpp {lay.vpp}"),
        "use_distributed_optimizer": _switch(lay.zero_stage == 1, f"zero_stage {lay.zero_stage}"),
        "sequence_parallel": _switch(lay.sequence_parallel, _shared(lay)),
        "bf16": _switch(run.precision == "bf16", f"precision {run.precision}"),
        "fp16": _switch(run.precision == "fp16", f"precision {run.precision}"),
        "attention_backend": backend,
    }


def _switch(on: bool, why: str) -> Fixed:
    return Fixed("" if on else None, None, why)


def _shared(lay: Layout) -> str:
    return f"tp {lay.tp} with{'' if lay.sequence_parallel else 'out'} sequence parallelism"


def _agree(arguments: dict[str, list[str]], run: RunSpec) -> None:
    """Raise NotRunnable for the first argument, given or missing, that says another job."""
    fixed = _fixed(run)
    for name in sorted(fixed, key=lambda name: name not in arguments):
        argument, one = f"--{_dashed(name)}", fixed[name]
        said = " ".join(arguments[name]) if name in arguments else one.default
        if said == one.value or said in one.also:
            continue
        words = f"{argument} {said}".rstrip() if name in arguments else f"{argument} is missing"
        raise NotRunnable(f"megatron_core: {words}, the job has {one.why or one.value}")


def _whole(name: str, word: str) -> int:
    if not word.isdecimal():
        raise NotRunnable(f"megatron_core: --{_dashed(name)} {word}: expected a whole number")
    return int(word)


def _value(name: str, words: list[str], hint: Any) -> Any:
    """An argument's words as a value of its field's type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {typing.get_origin(kind) or kind for kind in (get_args(hint) if union else (hint,))}
    if list in kinds:
        return words
    if bool in kinds and not words:
        return True
    if len(words) != 1 or not kinds & {int, float, str, typing.Literal}:
        said = " ".join(("--" + _dashed(name), *words))
        raise NotRunnable(f"megatron_core: {said} is not known here")
    if float in kinds:
        try:
            return float(words[0])
        except ValueError as error:
            raise NotRunnable(
                f"megatron_core: --{_dashed(name)} {words[0]}: expected a number"
            ) from error
    return _whole(name, words[0]) if int in kinds else words[0]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _underscored(argument: str) -> str:
    return argument.removeprefix("--").replace("-", "_")
