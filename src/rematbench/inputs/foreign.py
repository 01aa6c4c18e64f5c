"""Recognises the configuration files of training packages by their keys."""

from collections.abc import Mapping
from typing import Any, Literal

Package = Literal[
    "Megatron",
    "DeepSpeed",
    "accelerate",
    "TRL",
    "LLaMA-Factory",
    "axolotl",
    "torchtitan",
    "Transformers",
    "ms-swift",
    "nanotron",
    "GPT-NeoX",
    "NeMo",
    "NeMo-RL",
    "Automodel",
    "torchtune",
    "verl",
    "PEFT",
]

SIGNS: tuple[tuple[Package, tuple[frozenset[str], ...]], ...] = (
    (
        "GPT-NeoX",
        (
            frozenset({"pipe_parallel_size"}),
            frozenset({"pipe-parallel-size"}),
            frozenset({"model_parallel_size", "hidden_size"}),
            frozenset({"model-parallel-size", "hidden-size"}),
        ),
    ),
    ("PEFT", (frozenset({"peft_type"}),)),
    ("Megatron", (frozenset({"MODEL_ARGS"}),)),
    (
        "NeMo",
        (
            frozenset({"trainer", "exp_manager"}),
            frozenset({"trainer", "model", "restore_from_path"}),
        ),
    ),
    ("NeMo-RL", (frozenset({"policy", "loss_fn"}), frozenset({"policy", "cluster", "data"}))),
    ("Automodel", (frozenset({"step_scheduler", "model"}),)),
    ("torchtune", (frozenset({"tokenizer", "checkpointer"}),)),
    ("verl", (frozenset({"actor_rollout_ref"}),)),
    (
        "axolotl",
        (
            frozenset({"base_model", "sequence_len"}),
            frozenset({"base_model", "datasets"}),
            frozenset({"base_model", "micro_batch_size"}),
        ),
    ),
    (
        "LLaMA-Factory",
        (
            frozenset({"model_name_or_path", "cutoff_len"}),
            frozenset({"model_name_or_path", "finetuning_type"}),
            frozenset({"model_name_or_path", "stage", "template"}),
        ),
    ),
    (
        "TRL",
        (
            frozenset({"model_name_or_path", "per_device_train_batch_size"}),
            frozenset({"model_name_or_path", "max_length"}),
            frozenset({"model_name_or_path", "max_seq_length"}),
            frozenset({"model_name_or_path", "dataset_name"}),
        ),
    ),
    (
        "accelerate",
        (
            frozenset({"distributed_type"}),
            frozenset({"compute_environment"}),
            frozenset({"num_processes", "mixed_precision"}),
            frozenset({"fsdp_config", "mixed_precision"}),
        ),
    ),
    (
        "DeepSpeed",
        (
            frozenset({"zero_optimization"}),
            frozenset({"train_micro_batch_size_per_gpu"}),
            frozenset({"train_batch_size", "fp16"}),
            frozenset({"train_batch_size", "bf16"}),
        ),
    ),
    (
        "nanotron",
        (
            frozenset({"parallelism", "tokens", "model"}),
            frozenset({"parallelism", "tokens", "optimizer"}),
        ),
    ),
    (
        "torchtitan",
        (
            frozenset({"parallelism", "training"}),
            frozenset({"activation_checkpoint", "training"}),
            frozenset({"experimental", "training", "model"}),
            frozenset({"model", "training", "optimizer"}),
            frozenset({"job", "training"}),
        ),
    ),
)
"""Sets of keys, each of which identifies the files of a package; earlier packages go first, because
their files also have keys of later ones."""


REFUSED = ("GPT-NeoX", "NeMo", "NeMo-RL", "Automodel", "verl")
"""Packages whose files are recognised and not read."""


def package_of(data: Mapping[str, Any]) -> Package | None:
    """The package whose configuration file a mapping is; None for every other mapping."""
    keys = set(data)
    for package, signs in SIGNS:
        if any(sign <= keys for sign in signs):
            return package
    return None


def pointer(package: Package, file: str) -> str:
    """A sentence that names the package and the command that reads the file."""
    if package in REFUSED:
        return f"a {package} configuration, which is not read: give its values as options"
    article = "an" if package[0] in "aA" else "a"
    return f"{article} {package} configuration; read it with: rematbench read {file}"
