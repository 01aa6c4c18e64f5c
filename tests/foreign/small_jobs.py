"""Small jobs of other packages for the tests of their readers."""

from pathlib import Path

import yaml

from rematbench.foreign.job import FileJob, file_job
from rematbench.foreign.packages import read_files
from rematbench.foreign.reading import Reading

TRL = "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\nmax_length: 2048\nbf16: true\n"
TRL += "per_device_train_batch_size: 1\ngradient_checkpointing: true\nloss_type: nll\n"
FACTORY = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
FACTORY += "per_device_train_batch_size: 1\n"
AXOLOTL = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\nbf16: auto\n"
AXOLOTL += "gradient_checkpointing: true\n"
TITAN = '[activation_checkpoint]\nmode = "full"\n[model]\nname = "llama3"\nflavor = "8B"\n'
TITAN += "[training]\nlocal_batch_size = 1\nseq_len = 8192\n"
SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512"
SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Base --max_length 8192 "
SWIFT += "--global_batch_size 16 --packing true "


def small(base: str, more: str | dict[str, str]) -> str:
    """A small job by its name above, with more lines or with words in place of others."""
    text: str = globals()[base]
    if isinstance(more, str):
        return text + more
    for old, new in more.items():
        text = text.replace(old, new)
    return text


def job(folder: Path, text: str, name: str = "run.sh", **given: object) -> tuple[FileJob, Reading]:
    (folder / name).write_text(text)
    reading = read_files([folder / name])
    return file_job(reading, dict(given), "", "run"), reading


def facts(made: FileJob) -> dict[str, object]:
    """The facts of the written stack, without their sources, and its words."""
    stack = yaml.safe_load(made.files.get("run-stack.yaml", "{}"))
    return {key: one["value"] if isinstance(one, dict) else one for key, one in stack.items()}
