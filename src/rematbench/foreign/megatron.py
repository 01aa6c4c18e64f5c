"""Reads a Megatron-LM launch line or launch script."""

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rematbench.foreign.deepspeed import read_deepspeed
from rematbench.foreign.megatron_experts import READ as OF_EXPERTS
from rematbench.foreign.megatron_experts import read_experts
from rematbench.foreign.reading import (
    Options,
    Reading,
    first_value,
    number,
    put_numbers,
    whole,
    without_effect,
)
from rematbench.foreign.shell import Script, options_of
from rematbench.foreign.trainers import merge
from rematbench.inputs.configfile import ConfigError

NUMBERS = {
    "model-parallel-size": "tp",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "num-layers-per-virtual-pipeline-stage": "layers_per_chunk",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "batch-size": "micro_batch",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "seq-length": "seq_len",
    "ds-sequence-parallel-size": "ulysses",
    "vocab-size": "vocab",
    "pad-vocab-size-to": "vocab",
}
"""Options with a positive whole number, each with the value of a job."""
LAUNCHER = {
    "ntasks-per-node": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "num_gpus": "gpus_per_node",
    "nproc-per-node": "gpus_per_node",
    "nproc_per_node": "gpus_per_node",
    "nodes": "nodes",
    "num_nodes": "nodes",
    "nnodes": "nodes",
}
"""Options of launchers and of Slurm, each with the value of a job; later ones count."""
SHAPES = {
    "num-layers": "num_layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "num_heads",
    "num-query-groups": "num_kv_heads",
    "num-key-value-heads": "num_kv_heads",
    "kv-channels": "head_dim",
    "max-position-embeddings": "max_positions",
}
"""Options with a dimension of the model, each with the field of Model."""
FACTS: dict[str, tuple[str, object]] = {
    "overlap-grad-reduce": ("reduce_overlap", True),
    "overlap-param-gather": ("gather_overlap", True),
    "cross-entropy-loss-fusion": ("fused_loss", True),
    "grad-reduce-in-bf16": ("reduce_bytes", 2),
    "tp-comm-overlap": ("tp_overlap", "gemm"),
    "no-rope-fusion": ("rope", "eager"),
    "cuda-graph-impl": ("cuda_graphs", True),
    "enable-cuda-graph": ("cuda_graphs", True),
}
"""Options that state a fact of the stack."""
ABSENT: dict[str, tuple[str, object]] = {
    "overlap-grad-reduce": ("reduce_overlap", False),
    "overlap-param-gather": ("gather_overlap", False),
}
"""Facts that hold where Megatron's switch is absent."""
REFUSED = {
    "multi-latent-attention": "latent attention is not modelled",
    "mtp-num-layers": "multi-token prediction is not modelled",
    "fp8-format": "FP8 is not modelled",
    "fp8-hybrid": "FP8 is not modelled",
    "fp4-format": "FP4 is not modelled",
    "hybrid-override-pattern": "state-space layers are not modelled",
    "optimizer-offload-fraction": "only the whole optimizer can be on the host",
    "memory-centric-tiled-linear": "tiled linears are not modelled",
    "pipeline-model-parallel-layout": "give the layers of each stage with --partition",
}
"""Options that turn on a feature which is not modelled, each with the reason."""
SETTLED = {
    *("DDP-impl", "account", "account-for-embedding-in-pipeline-split"),
    *("account-for-loss-in-pipeline-split", "activations-checkpoint-method"),
    *("activations-checkpoint-num-layers", "add-qkv-bias", "apply-layernorm-1p"),
    *("attention-backend", "attention-dropout", "attention-softmax-in-fp32", "bf16"),
    *("checkpoint-activations", "checkpoint-in-cpu", "checkpoint-num-layers", "constraint"),
    *("cp-comm-type", "cpu-optimizer", "cpus-per-task", "cross-entropy-fusion-impl"),
    *("ddp-bucket-size", "decoder-first-pipeline-num-layers"),
    *("decoder-last-pipeline-num-layers", "deepspeed", "deepspeed-activation-checkpointing"),
    *("deepspeed_config", "disable-bias-linear", "embed-layernorm", "eod-mask-loss"),
    *("exclusive", "finetune", "force_multi", "fp16", "gres", "group-query-attention"),
    *("hidden-dropout", "hostfile", "jobid", "load", "log-memory-to-tensorboard"),
    *("make-vocab-size-divisible-by", "manual-gc", "mem", "model", "mpi"),
    *("no-async-tensor-model-parallel-allreduce", "no-bias-dropout-fusion"),
    *("no-bias-gelu-fusion", "no-bias-swiglu-fusion"),
    *("no-create-attention-mask-in-dataloader", "no-gradient-accumulation-fusion"),
    *("no-masked-softmax-fusion", "no-persist-layer-norm", "no-pipeline-parallel"),
    *("no-position-embedding", "norm-epsilon", "normalization", "optimizer"),
    *("optimizer-cpu-offload", "overlap-p2p-communication", "packing", "partition"),
    *("partition-activations", "position-embedding-type", "pp-partition-method"),
    *("qk-layernorm", "qos", "rampup-batch-size", "recompute-activations"),
    *("recompute-granularity", "recompute-method", "recompute-modules"),
    *("recompute-num-layers", "reservation", "reset-position-ids", "rope-scaling-factor"),
    *("rotary-base", "rotary-percent", "rotary-seq-len-interpolation-factor"),
    *("sequence-parallel", "squared-relu", "swiglu", "te-rng-tracker", "tile-factor"),
    *("tokenizer-library", "tokenizer-type", "torch-dtype", "train-type", "transformer-impl"),
    *("tuner-type", "untie-embeddings-and-output-weights", "use-cpu-initialization"),
    *("use-distributed-optimizer", "use-flash-attn", "use-legacy-models", "use-mcore-models"),
    *("use-precision-aware-optimizer", "use-rope-scaling", "use-rotary-position-embeddings"),
    *("use-torch-fsdp2", "wait", "window-size", "zero-allgather-bucket-size"),
    *("zero-contigious-gradients", "zero-reduce-bucket-size", "zero-reduce-scatter"),
    *("zero-stage",),
}
"""Options that `_read` uses or that change nothing which is modelled."""
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""Megatron's modules that a plan can recompute."""
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary of tokenizers that come with their files: GPT-2's 50,257 tokens (Radford et al. 2019)
and Llama 2's 32,000 (Touvron et al. 2023, arXiv 2307.09288)."""
POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none", "alibi": "alibi"}
SWIFT: Options = {
    **{name: [] for name in ("bf16", "use-distributed-optimizer", "use-flash-attn")},
    "recompute-granularity": ["selective"],
    "micro-batch-size": ["1"],
    "global-batch-size": ["16"],
}
"""The defaults of ms-swift 4.6.0, swift/megatron/arguments/megatron_args.py."""
OLD = {"activations-checkpoint-method", "checkpoint-activations", "checkpoint-num-layers"}
OLD |= {"model-parallel-size", "batch-size", "DDP-impl"}
"""Options of Megatron-LM before 2023, which has neither Transformer Engine nor flash attention
unless --use-flash-attn asks for it."""
LAYERS = ("recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers")
"""The layers of a recomputed group: today's name, that of 2021 and that of 2020."""
SWIFT_TASKS = {("megatron", "sft"), ("megatron", "pt")}
SWIFT_NAMES = {"max_length": "seq-length"}
BACKENDS = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "unfused"}


def is_launch(words: list[str]) -> bool:
    """Whether a command starts a Megatron."""
    options = options_of(words)
    return "num-layers" in options and ("seq-length" in options or "micro-batch-size" in options)


def is_swift(words: list[str]) -> bool:
    """Whether a command starts the Megatron of ms-swift."""
    return any(pair in SWIFT_TASKS for pair in pairwise(words))


def read_megatron(script: Script, words: list[str]) -> Reading:
    """The reading of a launch line of a script.  ConfigError for a wrong value."""
    return _read({**script.headers, **options_of(words)}, script)


def read_swift(script: Script, words: list[str]) -> Reading:
    """The reading of `megatron sft` of ms-swift: Megatron's options with underscores and values,
    and a model by name.  ConfigError for a wrong value."""
    options = {**script.headers, **SWIFT}
    for name, values in options_of(words).items():
        option = SWIFT_NAMES.get(name, name.replace("_", "-"))
        if values[:1] == ["false"]:
            options.pop(option, None)
        else:
            options[option] = [value for value in values if value != "true"]
    for name, option in (("NPROC_PER_NODE", "nproc-per-node"), ("NNODES", "nnodes")):
        if script.variables.get(name):
            options[option] = script.variables[name]
    tuner = first_value(options, "tuner-type", first_value(options, "train-type", "full"))
    reading = _read(options, script)
    if tuner != "full":
        reading.refused.append(f"--tuner_type: {tuner} (adapters are not modelled)")
    if "packing" in options:
        text = "attention stays inside documents: --document-len, else whole sequences"
        reading.notes.append(f"--packing: {text}")
    return reading


def _read(options: Options, script: Script) -> Reading:
    file = script.file
    reading = Reading(file=file, package="Megatron", system="megatron-core", command=True)
    reading.system = "megatron-lm" if OLD & options.keys() else "megatron-core"
    if "deepspeed" in options:
        reading.system = "megatron-deepspeed"
    done = set(SETTLED)
    for option, name in LAUNCHER.items():
        if first_value(options, option).isdigit():
            reading.put(name, int(first_value(options, option)), f"--{option}")
    put_numbers(reading, options, NUMBERS)
    for option, name in SHAPES.items():
        if options.get(option):
            reading.model[name] = whole(options[option][0], file, f"--{option}")
    done |= {*NUMBERS, *LAUNCHER, *SHAPES, *FACTS, *REFUSED, *OF_EXPERTS}
    _refuse(reading, options)
    _layout(reading, options)
    _model(reading, options)
    read_experts(reading, options)
    _facts(reading, options)
    reading.method = _method(reading, options)
    _named_model(reading, options)
    _deepspeed(reading, options, script)
    if "partition-activations" in options and reading.get("tp", 1) > 1:
        text = "inputs of layers are sharded by rows only with --sequence-parallel"
        reading.notes.append(f"--partition-activations: {text}")
    if "rampup-batch-size" in options:
        reading.notes.append("--rampup-batch-size: the batch after the ramp is counted")
    for option in sorted(set(options) - done):
        (reading.ignored if without_effect(option) else reading.unknown).append(f"--{option}")
    return reading


def _refuse(reading: Reading, options: Options) -> None:
    for option, reason in REFUSED.items():
        all_of_it = option == "optimizer-offload-fraction"
        off = {"1", "1.0"} if all_of_it else {"0", "null", "none"}
        if option in options and first_value(options, option) not in off:
            reading.refused.append(f"--{option}: {reason}")


def read_arguments(arguments: Mapping[str, Any], file: str) -> Reading:
    """The reading of `MODEL_ARGS` in a configuration of Megatron-LM's own tests: options with their
    values.  ConfigError for a wrong value."""
    options: Options = {}
    for name, value in arguments.items():
        if value is not False and value is not None:
            options[str(name).lstrip("-")] = [] if value is True else str(value).split()
    return _read(options, Script(file=file))


def _named_model(reading: Reading, options: Options) -> None:
    """The model of a line that has a name in place of the sizes (ms-swift)."""
    if "num-layers" in options:
        return
    reading.model.clear()
    for option in ("model", "load"):
        name = first_value(options, option)
        if name and "model" not in reading.values:
            reading.put("model", name.removesuffix("-mcore"), f"--{option}")


def _deepspeed(reading: Reading, options: Options, script: Script) -> None:
    """Read the DeepSpeed configuration that the script writes, or name its file.  With bf16 and
    stage 0 DeepSpeed's BF16_Optimizer shards the optimizer's states all the same
    (deepspeed/runtime/bf16_optimizer.py)."""
    config = first_value(options, "deepspeed_config")
    if "deepspeed" not in options:
        return
    if Path(config).name in script.documents:
        name = Path(config).name
        try:
            data = json.loads(script.documents[name])
        except json.JSONDecodeError as error:
            raise ConfigError(script.file, name, f"not JSON ({error})") from error
        merge(reading, read_deepspeed(data, f"{script.file}: {name}"))
    elif config:
        reading.files.append(Path(config))
    if reading.get("precision") == "bf16" and not reading.get("zero_stage", 0):
        reading.put("zero_stage", 1, "--zero-stage")
        reading.notes.append("--zero-stage 0 with --bf16: DeepSpeed shards the states as stage 1")


def _layout(reading: Reading, options: Options) -> None:
    stage = "1" if "use-distributed-optimizer" in options else "0"
    if "deepspeed" in options:
        stage = first_value(options, "zero-stage", "")
    if "use-torch-fsdp2" in options:
        stage = "3"
    if stage:
        stage = stage.removesuffix(".0")
        reading.put("zero_stage", int(stage) if stage in "0123" else 0, "--zero-stage")
    reading.put("sp", "sequence-parallel" in options, "--sequence-parallel")
    for word in ("bf16", "fp16"):
        if word in options:
            reading.put("precision", word, f"--{word}")
    if "precision" not in reading.values:
        reading.put("precision", "fp32", "neither --bf16 nor --fp16")
    backend = first_value(options, "attention-backend", "auto")
    if backend not in BACKENDS:
        reading.refused.append(f"--attention-backend: {backend} (allowed: {', '.join(BACKENDS)})")
    local = first_value(options, "transformer-impl") == "local" or "deepspeed" in options
    local = local or bool(OLD & options.keys()) or reading.get("precision") == "fp32"
    unfused = local and "use-flash-attn" not in options and backend == "auto"
    attention = "unfused" if unfused else BACKENDS.get(backend, "flash")
    reading.put("attention", attention, "--attention-backend")
    if {"optimizer-cpu-offload", "cpu-optimizer"} & options.keys():
        reading.put("optimizer", "host", "--optimizer-cpu-offload")
    if first_value(options, "optimizer", "adam") != "adam":
        reading.refused.append(f"--optimizer: {first_value(options, 'optimizer')} (only adam)")
    _stages(reading, options)


def _stages(reading: Reading, options: Options) -> None:
    """The layers of each stage where first and last stages differ from the others."""
    names = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    layers, pp = reading.model.get("num_layers", 0), reading.get("pp", 1)
    first, last = (int(first_value(options, name, "0") or 0) for name in names)
    ends = [count for count in (first, last) if count]
    if not ends or pp <= len(ends):
        return
    middle = (layers - sum(ends)) // (pp - len(ends))
    sizes = [middle] * (pp - len(ends))
    sizes = ([first] if first else []) + sizes + ([last] if last else [])
    reading.put("partition", ",".join(map(str, sizes)), f"--{names[0]}")


def _model(reading: Reading, options: Options) -> None:
    """Set the fields of the model that switches determine, as Megatron's defaults have them."""
    model = reading.model
    gated = "swiglu" in options
    norm = first_value(options, "normalization", "LayerNorm").lower()
    position = first_value(options, "position-embedding-type", "learned_absolute")
    if "use-rotary-position-embeddings" in options:
        position = "rope"
    if position not in POSITIONS:
        reading.refused.append(f"--position-embedding-type: {position}")
    hidden, heads = model.get("hidden", 0), model.get("num_heads", 0)
    bias = "disable-bias-linear" not in options
    if hidden and "ffn" not in model:
        model["ffn"] = (int(4 * hidden * 2 / 3) // 64 * 64) if gated else 4 * hidden
    if hidden and heads:
        model.setdefault("head_dim", hidden // heads)
    grouped = "group-query-attention" in options or "num-key-value-heads" in options
    model["num_kv_heads"] = model.get("num_kv_heads", 1) if grouped else heads
    model |= {
        "mlp": "swiglu" if gated else "relu2" if "squared-relu" in options else "gelu",
        "rotary_share": _number(reading, options, "rotary-percent", "1"),
        "norm": "rmsnorm" if norm == "rmsnorm" else "layernorm",
        "position": POSITIONS.get(position, "rope"),
        "tied_embeddings": "untie-embeddings-and-output-weights" not in options,
        "qkv_bias": bias or "add-qkv-bias" in options,
        "proj_bias": bias,
        "mlp_bias": bias,
        "qk_norm": "qk-layernorm" in options,
        "embedding_norm": "embed-layernorm" in options,
        "dropout": _number(reading, options, "hidden-dropout", "0.1"),
    }
    if options.get("window-size"):
        window = re.sub(r"[^\d,]", "", "".join(options["window-size"])).split(",")[0]
        if window and "num_layers" in model:
            model["attention_window"] = [int(window)] * model["num_layers"]
    tokenizer = first_value(options, "tokenizer-type")
    if {"vocab-file", "merge-file"} & options.keys() and not tokenizer:
        tokenizer = "GPT2BPETokenizer"  # the default of pretrain_gpt.py
    if "vocab" not in reading.values and tokenizer in VOCABULARIES:
        reading.put("vocab", VOCABULARIES[tokenizer], "--tokenizer-type")


def _number(reading: Reading, options: Options, name: str, default: str) -> float:
    return number(first_value(options, name, default), reading.file, f"--{name}")


def _facts(reading: Reading, options: Options) -> None:
    for option, (fact, value) in ABSENT.items():
        if option not in options:
            reading.facts[fact] = value
    for option, (fact, value) in FACTS.items():
        if option in options and first_value(options, option) != "none":
            reading.facts[fact] = value
    kind = first_value(options, "cp-comm-type")
    if kind:
        kinds = {"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses"}
        if kind not in kinds:
            reading.refused.append(f"--cp-comm-type: {kind} (allowed: {', '.join(kinds)})")
        else:
            reading.facts["cp_kind"] = kinds[kind]


def _method(reading: Reading, options: Options) -> tuple[str, dict[str, object]]:
    """The recomputation of the launch line as a method with settings."""
    granularity = first_value(options, "recompute-granularity")
    if "recompute-activations" in options:
        granularity = granularity or "selective"
    if "checkpoint-activations" in options or "activations-checkpoint-method" in options:
        granularity = "full"
    if granularity == "full":
        old = first_value(options, "activations-checkpoint-method", "uniform")  # of 2021
        method = first_value(options, "recompute-method", old)
        name = next((name for name in LAYERS if options.get(name)), LAYERS[0])
        layers = whole(first_value(options, name, "1"), reading.file, f"--{name}")
        settings: dict[str, object] = {} if method == "uniform" else {"method": method}
        if "checkpoint-in-cpu" in options:
            settings["inputs"] = "host"
        return "full_recompute", settings | ({"num_layers": layers} if layers > 1 else {})
    if granularity == "selective":
        return "selective_recompute", _modules(reading, options)
    return "keep_all", {}


def _modules(reading: Reading, options: Options) -> dict[str, object]:
    """The modules of selective recomputation as a setting; none for core attention alone, which is
    the default of both."""
    modules = options.get("recompute-modules") or ["core_attn"]
    lacking = sorted(set(modules) - set(RECOMPUTE_MODULES))
    if lacking:
        allowed = ", ".join(RECOMPUTE_MODULES)
        reading.refused.append(f"--recompute-modules: {' '.join(lacking)} (allowed: {allowed})")
    if set(modules) <= {"core_attn", *lacking}:
        return {}
    return {"modules": f"[{','.join(sorted(set(modules) - set(lacking)))}]"}
