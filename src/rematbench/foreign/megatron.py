"""Reads a Megatron-LM launch line or launch script."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rematbench.foreign.adapters import TARGETS, read_adapters
from rematbench.foreign.keys import declared, dialect, read_keys, read_sizes
from rematbench.foreign.megatron_experts import read_experts
from rematbench.foreign.reading import Options, Reading, first_value, inputs_at, number, whole
from rematbench.foreign.recipes import read_megatron_recipe
from rematbench.foreign.shell import Script, options_of
from rematbench.foreign.trainers import merge, merge_document, note_cap, read_trainer
from rematbench.solve.recompute_modules import MODULES

ABSENT = {"reduce_overlap": False, "gather_overlap": False}
"""Facts that hold where Megatron's switches are absent."""
ADAM_BYTES = 12
"""Bytes of a parameter's fp32 copy and fp32 moments."""
MOMENTS = ("exp-avg-dtype", "exp-avg-sq-dtype")
MOMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
LATENT = {"kv_rank": 32, "nope": 128, "rope": 64, "v": 128}
"""Columns of latent attention without options (megatron/training/arguments.py, _add_mla_args)."""
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary of tokenizers that come with their files: GPT-2's 50,257 tokens (Radford et al. 2019)
and Llama 2's 32,000 (Touvron et al. 2023, arXiv 2307.09288)."""
GRAPHS = ("none", "local", "transformer_engine", "full_iteration")
GRAPHED = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration")
"""The implementations of CUDA graphs, and the scopes that are modelled."""
POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none", "alibi": "alibi"}
OLD = {"activations-checkpoint-method", "checkpoint-activations", "checkpoint-num-layers"}
OLD |= {"model-parallel-size", "batch-size", "DDP-impl"}
"""Options of Megatron-LM before 2023, which has neither Transformer Engine nor flash attention
unless --use-flash-attn asks for it."""
NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
"""Variables whose value 0 forbids TransformerEngine a kernel: FlashAttention, and cuDNN's."""
TODAY = "megatron-core-0.16"
"""The stack of a launch line, which names no version."""
LAYERS = ("recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers")
"""Options with the number of layers of a recomputed group: today's, that of 2021, that of 2020."""
OTHERS = {
    "bert",
    "t5",
    "multimodal",
    "vlm",
    "mamba",
    "hybrid",
    "retro",
    "ict",
    "vision",
    "dino",
    "rl",
}
"""Words in names of programs that train something other than a language model of equal layers."""
ADAPTED = {"lora-rank", "lora-dropout", "tuner-type", "train-type", "target-modules"}
"""Options of adapters, which are read only for ms-swift's Megatron."""
GROUPS = ("microbatch-group-size-per-virtual-pipeline-stage", "microbatch-group-size-per-vp-stage")
"""Options with the number of micro-batches that a chunk runs in a row, which is pp by default."""
OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
"""The modules of --offload-modules whose tensors are modelled; those of experts are not."""
SHARED = ("distribute-saved-activations", "distribute-checkpointed-activations")
"""The switch that shares inputs of layers out over tensor-parallel ranks, and its name in 2021."""
SWIFT_TASKS = {("megatron", "sft"), ("megatron", "pt"), ("megatron", "rlhf")}
SIZED = {"num-layers", "hybrid-layer-pattern"}
"""Options of lines that state the model's sizes; other lines name their model."""
SLIME = "max-tokens-per-gpu"
ENGINE = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "use_mca"}
ENGINE |= {"expert_model_parallel_size", "virtual_pipeline_model_parallel_size"}
"""Keys of LLaMA-Factory that choose its Megatron."""
SWIFT_NAMES = {"max_length": "seq-length"}


def is_launch(words: list[str]) -> bool:
    """Whether a command is a launch line of Megatron-LM."""
    options = options_of(words)
    return bool(SIZED & options.keys()) and bool(
        {"seq-length", "micro-batch-size", SLIME} & set(options)
    )


def is_swift(words: list[str]) -> bool:
    """Whether a command starts the Megatron of ms-swift."""
    return any(pair in SWIFT_TASKS for pair in pairwise(words)) or any(
        "swift/cli/_megatron/" in word for word in words
    )


def read_megatron(script: Script, words: list[str]) -> Reading:
    """Read a launch line of a script into a Reading.  ConfigError for a wrong value."""
    options = options_of(words)
    reading = _read({**script.headers, **options}, script)
    for name in ADAPTED & options.keys():
        reading.refused.append(f"--{name}: adapters of this package are not read")
    for word in words:
        parts = {*re.split(r"[/_]", word.removesuffix(".py"))} & OTHERS
        if word.endswith(".py") and parts:
            reading.refused.append(f"{word}: it trains a model that is not a plain decoder")
    return reading


def read_swift(script: Script, words: list[str]) -> Reading:
    """Read `megatron sft` of ms-swift into a Reading: Megatron's options with underscores and
    values, and a model by name.  ConfigError for a wrong value."""
    options = {**script.headers, **declared("swift").defaults}
    for name, values in options_of(words).items():
        option = SWIFT_NAMES.get(name, name.replace("_", "-"))
        if values[:1] == ["false"]:
            options.pop(option, None)
        else:
            options[option] = [value for value in values if value != "true"]
    for name, option in (("NPROC_PER_NODE", "nproc-per-node"), ("NNODES", "nnodes")):
        if name in script.variables:
            options[option] = script.variables[name]
    reading = _read(options, script)
    plain = {name.replace("-", "_"): words for name, words in options.items()}
    single = {name: words[0] if words else True for name, words in plain.items()}
    targets = {name: plain[name] for name in TARGETS if name in plain}
    read_adapters(reading, {**single, **targets})
    preferred = ("megatron", "rlhf") in pairwise(words) or any("tron/rlhf" in one for one in words)
    if preferred and "rlhf-type" not in options:
        reading.refused.append("rlhf: there is another model beside the one that trains")
    if "packing" in options:
        text = "attention stays inside documents: give --document-len, or whole sequences count"
        reading.notes.append(f"--packing: {text}")
    else:
        note_cap(reading)
    return reading


def _read(options: Options, script: Script) -> Reading:
    reading = Reading(file=script.file, package="Megatron", command=True)
    reading.system = "megatron-lm" if OLD & options.keys() else TODAY
    if "deepspeed" in options:
        reading.system = "megatron-deepspeed"
    read_sizes(reading, options)
    if SLIME in options:  # slime sets two by default (backends/megatron_utils/arguments.py)
        options = {"bf16": [], "use-distributed-optimizer": [], **_supervised(options)}
    reading.facts |= ABSENT
    data = {name: values[0] if values else True for name, values in options.items()}
    read_keys(reading, data, "megatron", prefix="--")
    if SLIME in options:
        tokens = whole(first_value(options, SLIME), script.file, f"--{SLIME}")
        reading.put("seq_len", tokens * reading.get("cp", 1), f"--{SLIME}")
        reading.put("micro_batch", 1, f"--{SLIME}")
        reading.notes.append(f"--{SLIME}: a rank's micro-batch holds at most this many tokens")
    _layout(reading, options)
    _attention(reading, options, script)
    _model(reading, options)
    read_experts(reading, options)
    _graphs(reading, options)
    read_megatron_recipe(reading, options)
    _states(reading, options)
    reading.method = _offloaded(reading, options, *_method(reading, options))
    _named_model(reading, options)
    _deepspeed(reading, options, script)
    mask = reading.get("micro_batch", 1) * reading.get("seq_len", 0) ** 2 / 2**30
    own = any(one.endswith("pretrain_gpt.py") for words in script.commands for one in words)
    if own and mask > 0.5 and "no-create-attention-mask-in-dataloader" not in options:
        text = f"the data loader's mask of {mask:.1f} GiB is not counted"
        reading.notes.append(f"--no-create-attention-mask-in-dataloader is absent: {text}")
    if "rampup-batch-size" in options:
        reading.notes.append("--rampup-batch-size: the batch after the ramp is counted")
    return reading


def _graphs(reading: Reading, options: Options) -> None:
    """Set what CUDA graphs capture: modules of a layer, whole layers if none is named, or a whole
    iteration, which is a scope or, in later versions, an implementation (megatron-core 0.16.1,
    transformer_config.py)."""
    old = {"enable-cuda-graph", "external-cuda-graph"} & options.keys()
    kind = first_value(options, "cuda-graph-impl", "local" if old else "none")
    given = [*(options.get("cuda-graph-scope") or []), *(options.get("cuda-graph-modules") or [])]
    parts = [part for word in given for part in word.split(",") if part not in ("", "full")]
    option = "--cuda-graph-impl"
    if kind not in GRAPHS:
        reading.refused.append(f"{option}: {kind} (allowed: {', '.join(GRAPHS)})")
    elif unknown := [part for part in parts if part not in GRAPHED]:
        reading.refused.append(f"--cuda-graph-scope: {unknown[0]} (allowed: {', '.join(GRAPHED)})")
    elif kind != "none":
        whole = "full_iteration" in (kind, *parts)
        scope = "full_iteration" if whole else ",".join(parts) or "layer"
        reading.put("cuda_graphs", scope, option)


def _supervised(options: Options) -> Options:
    """The options.  If the line trains with the supervised loss alone, those of slime's rollout
    engine and reference model are left out (slime/utils/arguments.py)."""
    if first_value(options, "loss-type") != "sft_loss" or "debug-train-only" not in options:
        return options
    refused = dialect("megatron")[""].refused
    engine = refused["rollout_batch_size"]
    return {k: v for k, v in options.items() if refused.get(k.replace("-", "_")) != engine}


def _states(reading: Reading, options: Options) -> None:
    """The bytes and the home of the optimizer's states. The precision-aware optimizer keeps only
    the part of the fp32 copy that a bf16 parameter lacks (megatron-core 0.16.1,
    optimizer_config.py, store_param_remainders), and moments of any type."""
    wide = {"accumulate-allreduce-grads-in-fp32", "deepspeed"} & options.keys()
    if reading.get("precision") == "fp16" and not wide:  # only bf16 accumulates in fp32 by default
        reading.facts |= {"grad_bytes": 2, "reduce_bytes": 2}
    hosted = bool({"optimizer-cpu-offload", "cpu-optimizer"} & options.keys())
    if "use-precision-aware-optimizer" in options:
        moments = sum(MOMENT_BYTES.get(first_value(options, name), 4) for name in MOMENTS)
        copy = 2 if reading.get("precision") == "bf16" else 4
        if copy + moments != ADAM_BYTES and not hosted:  # the host keeps both in fp32
            reading.facts["optimizer_bytes"] = copy + moments
    elif "optimizer-cpu-offload" in options:  # its fp32 shard stays (distrib_optimizer.py)
        reading.facts["resident_bytes"] = 4
    if not hosted:
        return
    option = "optimizer-offload-fraction"
    share = number(first_value(options, option, "1"), reading.file, f"--{option}")
    if share == 1:
        reading.put("optimizer", "host", "--optimizer-cpu-offload")
    elif share:
        slots = 1 if "overlap-cpu-optimizer-d2h-h2d" in options else 0
        where = f"optimizer_offload:share={share:g},visiting=0,slots={slots}"
        reading.put("moved", where, f"--{option}")


def read_arguments(
    arguments: Mapping[str, Any], file: str, variables: Mapping[str, list[str]]
) -> Reading:
    """Read `MODEL_ARGS` in a configuration of Megatron-LM's own tests or of its Model Zoo into a
    Reading: options with their values, of which `${TP}` is a variable of the environment.
    ConfigError for a wrong value."""
    options: Options = {}
    unset: dict[str, str] = {}
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        option = str(name).lstrip("-")
        for match in re.finditer(r"\$\{?(\w+)(?::-([^}]*))?\}?", str(value)):
            text = " ".join(variables.get(match[1], [match[2] or ""]))
            if not text:
                unset[f"--{option}"] = match[1]
            value = str(value).replace(match[0], text)  # noqa: PLW2901
        if f"--{option}" not in unset:
            options[option] = [] if value is True else str(value).split()
    reading = _read(options, Script(file=file))
    reading.unknown += unset
    for option, name in unset.items():
        reading.notes.append(f"{option} is a variable of the environment: give --set {name}=VALUE")
    return reading


def read_factory(data: Mapping[str, Any], file: str) -> Reading:
    """Read a LLaMA-Factory file that trains with Megatron into a Reading.  ConfigError for a wrong
    value."""
    ours = dialect("trainers")[""].keys
    options: Options = {}
    for key, value in data.items():
        both = key in ("bf16", "fp16")
        if (both or key not in ours) and value not in (None, False):
            options[key.replace("_", "-")] = [] if value is True else [str(value)]
    trainer = {"finetuning_type": "full"} | {k: v for k, v in data.items() if k in ours}
    reading = _read(options, Script(file=file))
    more = read_trainer(trainer, file, "LLaMA-Factory")
    more.values.pop("trained_dtype", None)  # Megatron holds adapters in 16 bits
    more.facts, more.values = {}, more.values | reading.values
    reading.values |= more.values
    reading.keys |= more.keys
    merge(reading, more)
    return reading


def _named_model(reading: Reading, options: Options) -> None:
    """Set the model's name if the line does not state sizes (ms-swift)."""
    if SIZED & options.keys():
        return
    reading.model.clear()
    sizes = {*dialect("megatron")[""].shapes, "num_experts", "mtp_num_layers"}
    for option in sorted(option for option in options if option.replace("-", "_") in sizes):
        reading.refused.append(f"--{option}: not read, because the line also names its model")
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
        merge_document(reading, script, Path(config).name)
    elif config:
        reading.files.append(Path(config))
    if reading.get("precision") == "bf16" and not reading.get("zero_stage", 0):
        reading.put("zero_stage", 1, "--zero-stage")
        reading.notes.append("--zero-stage 0 with --bf16: DeepSpeed shards the states as stage 1")


def _layout(reading: Reading, options: Options) -> None:
    stage = "1" if "use-distributed-optimizer" in options else "0"
    if "deepspeed" in options:
        stage = first_value(options, "zero-stage", "")
    if stage:
        stage = stage.removesuffix(".0")
        reading.put("zero_stage", int(stage) if stage in "0123" else 0, "--zero-stage")
    reading.put("sp", "sequence-parallel" in options, "--sequence-parallel")
    if stages := first_value(options, name := "pipeline-model-parallel-layout"):
        reading.put("stages", stages, f"--{name}")
    for name in GROUPS:
        if options.get(name, [group := str(reading.get("pp", 1))]) != [group]:
            reading.refused.append(f"--{name}: only {group}, the value of pp, is modelled")
    for word in ("bf16", "fp16"):
        if word in options:
            reading.put("precision", word, f"--{word}")
    if "precision" not in reading.values:
        reading.put("precision", "fp32", "neither --bf16 nor --fp16")


def _attention(reading: Reading, options: Options, script: Script) -> None:
    backend = first_value(options, "attention-backend", "auto")
    no_flash, no_fused = (script.variables.get(name) == ["0"] for name in NVTE)
    if backend == "auto" and (no_flash or no_fused):
        backend = "unfused" if no_flash and no_fused else "fused" if no_flash else "flash"
    local = first_value(options, "transformer-impl") == "local" or "deepspeed" in options
    local = local or bool(OLD & options.keys()) or reading.get("precision") == "fp32"
    flash = {"use-flash-attn", "use-flash-attn-v2", "use-flash-attn-triton"} & options.keys()
    unfused = backend == "unfused" or (local and not flash and backend == "auto")
    reading.put("attention", "unfused" if unfused else "flash", "--attention-backend")
    if not unfused and not local:
        reading.put("kernel", backend, "--attention-backend")


def _model(reading: Reading, options: Options) -> None:
    """Set the fields of the model that switches determine, as Megatron's defaults have them."""
    model = reading.model
    gated = "swiglu" in options
    norm = first_value(options, "normalization", "LayerNorm").lower()
    position = first_value(options, "position-embedding-type", "learned_absolute")
    if "use-rotary-position-embeddings" in options:
        position = "rope"
    hidden, heads = model.get("hidden", 0), model.get("num_heads", 0)
    bias = "disable-bias-linear" not in options
    if hidden and "ffn" not in model:
        model["ffn"] = (int(4 * hidden * 2 / 3) // 64 * 64) if gated else 4 * hidden
    if hidden and heads:
        model.setdefault("head_dim", hidden // heads)
    grouped = "group-query-attention" in options or "num-key-value-heads" in options
    if not grouped and "num_kv_heads" in model:
        reading.notes.append("--num-query-groups has no effect without --group-query-attention")
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
    if depth := int(_number(reading, options, "mtp-num-layers", "0")):
        model["mtp_layers"] = depth
    if options.get("attention-dropout"):
        model["attention_dropout"] = _number(reading, options, "attention-dropout", "0.1")
        if model["attention_dropout"] == model["dropout"]:
            del model["attention_dropout"]
    _latent(reading, options)
    window = re.sub(r"[^\d,]", "", ",".join(options.get("window-size", []))).split(",")[0]
    if window and "num_layers" in model:
        model["attention_window"] = [int(window)] * model["num_layers"]
    _vocabulary(reading, options)


def _latent(reading: Reading, options: Options) -> None:
    """Set latent attention, if the line has it, and the sizes of heads that follow from it."""
    model = reading.model
    columns = {name: model.pop(name) for name in list(model) if name.startswith("latent.")}
    if "multi-latent-attention" not in options:
        return
    given = LATENT | {name.removeprefix("latent."): size for name, size in columns.items()}
    if "qk-layernorm" not in options:
        reading.refused.append("--multi-latent-attention: it is modelled only with --qk-layernorm")
    model |= {
        "latent": given,
        "head_dim": given["nope"] + given["rope"],
        "num_kv_heads": model.get("num_heads", 0),
        "qk_norm": False,
        "qkv_bias": False,
    }


def _vocabulary(reading: Reading, options: Options) -> None:
    """Set the vocabulary of a tokenizer whose size is known, and its padding."""
    if options.get(multiple := "make-vocab-size-divisible-by"):
        reading.facts["vocab_multiple"] = whole(options[multiple][0], reading.file, f"--{multiple}")
    tokenizer = first_value(options, "tokenizer-type")
    if {"vocab-file", "merge-file"} & options.keys() and not tokenizer:
        tokenizer = "GPT2BPETokenizer"  # pretrain_gpt.py has this default
    if "vocab" not in reading.values and tokenizer in VOCABULARIES:
        reading.put("vocab", VOCABULARIES[tokenizer], "--tokenizer-type")


def _number(reading: Reading, options: Options, name: str, default: str) -> float:
    return number(first_value(options, name, default), reading.file, f"--{name}")


def _method(reading: Reading, options: Options) -> tuple[str, dict[str, object]]:
    """The recomputation of the launch line as a method with settings."""
    granularity = first_value(options, "recompute-granularity")
    if "recompute-activations" in options:
        granularity = granularity or "selective"
    if "checkpoint-activations" in options or "activations-checkpoint-method" in options:
        granularity = "full"
    shared = [name for name in SHARED if name in options]
    if granularity == "full":
        old = first_value(options, "activations-checkpoint-method", "uniform")  # its name in 2021
        method = first_value(options, "recompute-method", old)
        name = next((name for name in LAYERS if options.get(name)), LAYERS[0])
        layers = whole(first_value(options, name, "1"), reading.file, f"--{name}")
        settings: dict[str, object] = {} if method == "uniform" else {"method": method}
        split = bool(shared) or ("partition-activations" in options and reading.get("tp", 1) > 1)
        if split or "checkpoint-in-cpu" in options:
            settings["inputs"] = inputs_at(split=split, host="checkpoint-in-cpu" in options)
        return "full_recompute", settings | ({"num_layers": layers} if layers > 1 else {})
    if shared:
        reading.refused.append(f"--{shared[0]}: Megatron has it for full recomputation only")
    if granularity == "selective":
        return "selective_recompute", _modules(reading, options)
    return "keep_all", {}


def _offloaded(
    reading: Reading, options: Options, name: str, settings: dict[str, object]
) -> tuple[str, dict[str, object]]:
    """The method and its settings, which are the baseline megatron_core's if modules offload their
    inputs to the host."""
    switch = "fine-grained-activation-offloading"
    if switch not in options:
        return name, settings
    modules = [name for text in options.get("offload-modules", []) for name in text.split(",")]
    if lacking := sorted({*modules} - {*OFFLOADED}) or ["no modules"] * (not modules):
        allowed = ", ".join(OFFLOADED)
        reading.refused.append(f"--{switch}: {' '.join(lacking)} (allowed: {allowed})")
        return name, settings
    moved: dict[str, object] = {"offload_modules": f"[{','.join(modules)}]"}
    if name == "full_recompute":
        reading.refused.append(
            "--offload-modules: no baseline offloads modules with full recomputation"
        )
    elif name == "selective_recompute":
        moved |= {"recompute": "selective", **settings}
    return "megatron_core", {"bias_activation_fusion": "true", **moved}


def _modules(reading: Reading, options: Options) -> dict[str, object]:
    """The modules of selective recomputation as a setting; empty for core attention alone, which is
    the default of Megatron and of the method."""
    modules = options.get("recompute-modules") or ["core_attn"]
    if lacking := sorted(set(modules) - MODULES.keys()):
        allowed = ", ".join(MODULES)
        reading.refused.append(f"--recompute-modules: {' '.join(lacking)} (allowed: {allowed})")
    if set(modules) <= {"core_attn", *lacking}:
        return {}
    return {"modules": f"[{','.join(sorted(set(modules) - set(lacking)))}]"}
