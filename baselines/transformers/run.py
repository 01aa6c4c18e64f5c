"""Jobs of Hugging Face Transformers: traced only, in one process."""

from importlib.metadata import version
from typing import Literal, cast

import msgspec
from transformers import PreTrainedConfig

from baselines.common.interface import NotRunnable, Rank, RankAnswer
from baselines.transformers.families import Transformers, config_of_model, model_class
from baselines.transformers.traced_step import DTYPES, Kernel, Setup, StepTrace, run
from rematbench.inputs.system import AttentionChoice
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec

MOMENTS = 2
"""The moments of AdamW; each has the size and dtype of its parameter."""


def stack() -> dict[str, str]:
    return {name: version(name) for name in ("transformers", "torch")}


def refuse(job: PackageJob) -> None:
    asked = job.run
    if asked.world != "traced":
        raise NotRunnable("transformers is traced only: nothing of it is executed here")
    if job.options:
        raise NotRunnable("transformers takes settings, no options")
    if asked.layout.gpus != 1:
        raise NotRunnable(f"transformers is traced on one GPU, not on {asked.layout.gpus}")
    if asked.document_len:
        raise NotRunnable("packed documents (transformers is traced on whole sequences)")
    if not asked.trains_all:
        raise NotRunnable("weights that do not train (transformers is traced in full training)")
    if asked.precision not in DTYPES:
        known = ", ".join(DTYPES)
        raise NotRunnable(f"precision {asked.precision} (transformers is traced in {known})")
    config_of_model(asked.model, _policy(asked).family)


def _policy(spec: RunSpec) -> Transformers:
    return msgspec.convert(spec.parameters["transformers"], Transformers)


def environment(job: PackageJob) -> dict[str, str]:
    """No variables, because nothing is executed."""
    return {}


def execute(job: PackageJob, rank: Rank) -> RankAnswer:
    """Raise NotRunnable; `refuse` normally raises it earlier."""
    raise NotRunnable("transformers is traced only: nothing of it is executed here")


def trace(job: PackageJob) -> RankAnswer:
    asked, policy = job.run, _policy(job.run)
    config = config_of_model(asked.model, policy.family)
    setup = Setup(
        seq_len=asked.seq_len,
        batch=asked.layout.micro_batch,
        precision=cast(Literal["bf16", "fp16", "fp32"], asked.precision),
        attention=_kernel(config, asked.stack.attention),
        checkpointing=policy.checkpointing,
        holds_output=policy.holds_output,
    )
    seen = run(config, setup)
    return RankAnswer(
        label="transformers (fake tensors)",
        shim=seen.shim,
        kernels={"core_attention": setup.attention, "optimizer": "its bytes are computed"},
        activation_peak_bytes=seen.activation_peak_bytes,
        state_bytes=_states(seen),
    )


def _kernel(config: PreTrainedConfig, attention: AttentionChoice) -> Kernel:
    """Transformers' name of the project's attention kernel; flash_attn for a model without SDPA."""
    if attention == "unfused":
        return "eager"
    return "sdpa" if model_class(config)._supports_sdpa else "flash_attention_2"


def _states(traced: StepTrace) -> int:
    return (1 + MOMENTS) * traced.parameter_bytes + traced.gradient_bytes
