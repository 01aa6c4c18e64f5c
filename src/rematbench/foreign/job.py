"""A job as options of `simulate`, from the values that files give."""

import re
from math import lcm
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, convert

from rematbench.foreign.reading import Reading, inputs_at, named_file
from rematbench.host.declared import facts, flat
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import flag
from rematbench.inputs.load import load_cluster, load_model, load_system, names
from rematbench.inputs.stages import read_stages
from rematbench.inputs.system import CUDNN, StackChoice, System
from rematbench.workload import Experts, Work

LEADING = ("model", "cluster", "system", "gpus", "seq_len", "global_batch")
"""The options that every command needs, in the order in which they are printed."""
DEGREES = ("tp", "cp", "pp", "vpp", "ulysses", "ep", "shard_degree", "micro_batch")
WIDE = {"param_bytes": 4, "grad_bytes": 4, "reduce_bytes": 4}
WIDE |= {"optimizer_bytes": 8, "late_state_bytes": 8}
"""The bytes of states of fp32 weights under autocast.  DeepSpeed converts the weights to 16 bits,
and FSDP's stack has these bytes already."""
FLAT_UNITS = {"waiting_frees": 2}
"""Facts of torch's first FSDP (torch 2.11, distributed/fsdp/_limiter_utils.py; accelerate 1.15,
utils/dataclasses.py, sets limit_all_gathers).  FSDP2 does not delay its frees."""
SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn")
UNSHARDED = "huggingface-flash"
"""The stack of a trainer without DeepSpeed and FSDP, where every rank holds all states."""
COMPILED = {"compiled": True, "fused_swiglu": True}
COMPILED_LOSS: dict[str, Any] = {"fused_loss": True, "logits_fp32": False, "loss_in_place": True}
COMPILED_LOSS |= {"held_logit_bytes": 2, "expandable_segments": True}
ROTATING: dict[str, dict[str, Any]] = {
    "huggingface-fsdp2": {},
    "torchtitan": {},
    "torchtitan-compiled": COMPILED,
    "torchtitan-2025-06": COMPILED | COMPILED_LOSS,
}
"""Stacks without context parallelism, each with the facts that a job with context parallelism
carries over to the later stack that has it."""
SUFFIXES = re.compile(r"-(instruct|thinking|chat|base|hf|it|\d{4})(?=-|$)")
ALIKE = [("llama-2", "llama2"), ("llama-3-", "llama3-"), ("llama-3.3", "llama-3.1")]
ALIKE += [("-a22b", ""), ("_", "-"), ("qwen2.5-7b", "qwen2-7b")]
"""Parts of a hub's model names, with what shipped names have in their place.  Llama 3.3 has the
shape of 3.1, and Qwen2.5-7B that of Qwen2-7B."""
VERSION = re.compile(r"-v\d[\d.]*(?=-|$)")


class FileJob(Struct, frozen=True, kw_only=True):
    """A job from files: the words of `simulate`, the texts of the files that the words name
    (by file name), and the options that no file gives."""

    method: str
    settings: tuple[str, ...]
    options: dict[str, str]
    files: dict[str, str]
    missing: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The arguments of `rematbench simulate`; a missing value is its option's name in capitals
        (`--cluster CLUSTER`)."""
        words = [self.method]
        shown = {**dict.fromkeys(LEADING), **self.options}
        for name, value in shown.items():
            words += [flag(name)] if value == "" else [flag(name), value or name.upper()]
        for text in self.settings:
            words += ["--set", text]
        return words


def file_job(reading: Reading, overrides: dict[str, Any], method: str, prefix: str) -> FileJob:
    """The job of a reading.  `overrides`: the user's options, which replace the files' values;
    `method`: the user's method (empty: the file's); `prefix`: the start of the names of files that
    describe the model and the stack if no shipped file does."""
    values = {**reading.values, **{name: v for name, v in overrides.items() if v is not None}}
    for named in reading.files if "zero_stage" not in values else ():
        text = f"give it as a further FILE after {reading.file}, or --zero"
        reading.refused.append(f"{named} is not here, and may say how states are sharded: {text}")
    if reading.system == UNSHARDED:
        values.setdefault("zero_stage", 0)
    files: dict[str, str] = {}
    values["model"] = _model(values, reading, files, prefix, overrides)
    _of_model(values, reading)
    if reading.package == "torchtitan" and values.get("recipe"):
        _narrow_experts(values, reading)
    _degrees(values, reading)
    # Derive the sharding degree if sharded states have replicas, given as a number or as one per
    # node.
    gpus, replicas = values.get("gpus"), values.get("replicas", 1)
    if values.get("inside_node"):
        replicas = values.get("nodes", 1)
    if gpus and replicas > 1:
        values["shard_degree"] = gpus // (values.get("tp", 1) * values.get("pp", 1) * replicas)
    if gpus and values.get("shard_degree", 0) >= gpus:  # verl: over all ranks
        del values["shard_degree"]
    _batches(values)
    _partitioned(values, reading)
    values["system"] = _system(values, reading, files, prefix, {**overrides, "method": method})
    name, settings = _method(values, reading, method)
    options = {key: str(values[key]) for key in LEADING if values.get(key) is not None}
    options |= {key: str(values[key]) for key in DEGREES if values.get(key, 1) != 1}
    options |= _rest(values)
    missing = tuple(key for key in LEADING if key not in options)
    return FileJob(method=name, settings=settings, options=options, files=files, missing=missing)


def _method(values: dict[str, Any], reading: Reading, method: str) -> tuple[str, tuple[str, ...]]:
    """The method and its settings, with the methods that divide the head or move a share of the
    optimizer's states."""
    if method:
        return method, ()
    if reading.method is None:
        reading.notes.append("no file says what is recomputed: keep_all is assumed (--method NAME)")
    name, settings = reading.method or ("keep_all", {})
    words = tuple(f"{key}={value}" for key, value in settings.items())
    if values.get("tiles"):
        tiles = {"mlp_chunks": values.get("tile_count"), "head_chunks": not values.get("pieces")}
        pieces = [f"{name}={count:d}" for name, count in tiles.items() if count]
        values["pieces"] = f"mst:{','.join(pieces)}" if pieces else "mst"
    added = [values[part] for part in ("pieces", "moved") if values.get(part)]
    if not added:
        return name, words
    base = f"{name}:{','.join(words)}" if words else name
    return "+".join(added if base == "keep_all" else [base, *added]), ()


def _of_model(values: dict[str, Any], reading: Reading) -> None:
    """Derive values that depend on the model, even if only its name is given: chunks, the layers of
    each stage (as numbers where every stage has some), and whether there is a shared expert."""
    if "stages" in values:
        stages = read_stages(values["stages"])
        values["vpp"] = max(1, len(stages) // values.get("pp", 1))
        if all(stage.layers and not stage.prediction for stage in stages):
            values["partition"] = ",".join(str(len(stage.layers)) for stage in stages)
            del values["stages"]
    needed = {"layers_per_chunk", "first_layers", "last_layers", "first_less", "last_less"}
    present = (needed | {"shared_overlap"}) & values.keys()
    if not present:
        return
    layers, experts = reading.model.get("num_layers"), reading.model.get("experts") or {}
    shared = experts.get("shared_ffn", 0)
    if not layers and values.get("model"):
        model = load_model(str(values["model"]))
        layers, shared = model.num_layers, model.experts.shared_ffn if model.experts else 0
    if values.get("shared_overlap") and shared:
        _shared_overlap(values, reading)
    if not layers:
        keys = ", ".join(reading.keys[name] for name in sorted(present))
        reading.refused.append(f"{keys}: the number of the model's layers is not known (--model)")
        return
    _chunks(values, reading, layers)
    _partition(values, reading, layers)


def _narrow_experts(values: dict[str, Any], reading: Reading) -> None:
    """Refuse FP8 with experts, which torchao's conversion of linears leaves in 16 bits."""
    named = not reading.model and values.get("model")
    experts = load_model(str(values["model"])).experts if named else reading.model.get("experts")
    if experts or values.get("ep", 1) > 1:
        text = "experts that stay in 16 bits beside linears in FP8 are not modelled"
        reading.refused.append(f"{reading.keys.get('recipe', 'converters')}: {text}")


def _partitioned(values: dict[str, Any], reading: Reading) -> None:
    """Set the place of recomputed layers' inputs that a DeepSpeed file gives. Parts for the
    tensor-parallel ranks have no effect, which is noted, without tensor parallelism.  Trainers that
    say themselves what is recomputed use torch's checkpoints, which do not read the file."""
    if reading.method is not None and reading.package not in ("Megatron", "DeepSpeed"):
        return
    split, host = (name in reading.values for name in ("partitioned", "inputs_on_host"))
    if split and values.get("tp", 1) == 1:
        reading.notes.append(f"{reading.keys['partitioned']}: without effect at tp 1")
        split = False
    name, settings = reading.method or ("full_recompute", {})
    if name == "full_recompute" and (split or host):
        reading.method = (name, {**settings, "inputs": inputs_at(split=split, host=host)})


def _shared_overlap(values: dict[str, Any], reading: Reading) -> None:
    """Note or refuse a shared expert on a second stream (megatron-core 0.16.1, shared_experts.py:
    its linears do not gather, so with TP they save the gathered input; transformer_config.py)."""
    key = reading.keys["shared_overlap"]
    if values.get("tp", 1) > 1:
        text = "with tp, the gathered input that the shared expert then saves is not modelled"
        reading.refused.append(f"{key}: {text}")
    elif reading.facts.get("dispatcher", "alltoall") != "alltoall":
        reading.refused.append(f"{key}: Megatron-core allows it with the dispatcher alltoall alone")
    elif values.get("ep_overlap"):
        reading.refused.append(f"{key}: Megatron-core refuses it with {reading.keys['ep_overlap']}")
    elif "shared_experts" in str((reading.method or ("", {}))[1].get("modules", "")):
        reading.refused.append(f"{key}: Megatron-core refuses it with recomputed shared_experts")
    else:
        text = "the shared expert and the exchanges are timed one after the other, an upper bound"
        reading.notes.append(f"{key}: {text} of the step; their memory is one stream's pool")


def _chunks(values: dict[str, Any], reading: Reading, layers: int) -> None:
    if "layers_per_chunk" not in values:
        return
    stages = values.get("pp", 1) * values["layers_per_chunk"]
    layers += values.get("first_less", 0) + values.get("last_less", 0)
    if layers % stages:
        key = reading.keys.get("layers_per_chunk", "")
        problem = f"{layers} layers are not a multiple of pp x layers of a chunk = {stages}"
        raise ConfigError(reading.file, key, problem)
    values["vpp"] = layers // stages


def _partition(values: dict[str, Any], reading: Reading, layers: int) -> None:
    """Set the layers of each chunk if the first or last rank has another number than the others, or
    if the embedding and the loss count as layers of the first and the last chunk (megatron-core
    0.16.1, transformer_block.py, get_num_layers_to_build)."""
    pp, vpp = values.get("pp", 1), values.get("vpp", 1)
    less = [values.get(f"{name}_less", 0) for name in ("first", "last")]
    ends = {0: values.get("first_layers"), pp - 1: values.get("last_layers")}
    counts = {rank: count for rank, count in ends.items() if count is not None}
    if not (counts or sum(less)) or pp == 1 or "stages" in values:
        return
    rest, others = layers + sum(less) - sum(counts.values()), pp - len(counts)
    ranks = [counts.get(rank, rest // max(1, others)) for rank in range(pp)]
    sizes = [count // vpp for _ in range(vpp) for count in ranks]
    sizes[0], sizes[-1] = sizes[0] - less[0], sizes[-1] - less[1]
    if sum(sizes) != layers or min(sizes) < 0 or not all(sizes[1:-1]):
        key = next(reading.keys[key] for key in reading.keys if key.startswith(("first", "last")))
        stages = f"{pp} stages" + f" of {vpp} chunks" * (vpp > 1)
        raise ConfigError(
            reading.file, key, f"{layers} layers do not divide over {stages} with such ends"
        )
    if not all(sizes):  # the embedding or the loss has a stage to itself
        values["stages"] = f"E{'|'.join('t' * size for size in sizes)}L"
    elif len(set(sizes)) > 1:
        values["partition"] = ",".join(map(str, sizes))


def _degrees(values: dict[str, Any], reading: Reading) -> None:
    """Derive `gpus` from nodes or from shards."""
    if values.get("gpus") is None and "gpus_per_node" in values:
        values["gpus"] = values["gpus_per_node"] * values.get("nodes", 1)
    if values.get("gpus") is None and "shards" in values:
        ranks = values["shards"] * values.get("replicas", 1)
        model_ranks = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
        values["gpus"] = ranks * model_ranks
    one = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    if values.get("gpus") and values["gpus"] % one:
        reading.notes.append(f"{values['gpus']} GPUs are not a multiple of tp x cp x pp = {one}")
    experts = values.get("ep", 1) * values.get("etp", values.get("tp", 1)) * values.get("pp", 1)
    need = lcm(one, experts) if values.get("ep", 1) > 1 else 1
    if values.get("gpus") and values["gpus"] % need:
        why = f"tp x cp x pp = {one} and etp x ep x pp = {experts} need (--gpus)"
        reading.notes.append(f"{values['gpus']} GPUs are not a multiple of {need}, which {why}")


def _batches(values: dict[str, Any]) -> None:
    """Derive the micro-batch or the global batch from the other one, accumulation and replicas."""
    gpus = values.get("gpus")
    if not gpus:
        return
    ranks = values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
    replicas = max(1, gpus // ranks // values.get("ulysses", 1))
    micro, steps = values.get("micro_batch"), values.get("accumulation")
    if values.get("global_batch") is None and micro is not None:
        values["global_batch"] = micro * (steps or 1) * replicas
    elif micro is None and steps is not None and values.get("global_batch"):
        values["micro_batch"] = max(1, values["global_batch"] // (steps * replicas))


def _model(
    values: dict[str, Any],
    reading: Reading,
    files: dict[str, str],
    prefix: str,
    overrides: dict[str, Any],
) -> str | None:
    """The model's name or file: the user's, the shipped model of this name or shape, or a new file
    with the shape."""
    if overrides.get("model") is not None:
        return str(overrides["model"])
    if not reading.model:
        return shipped_model(str(values["model"]), reading) if values.get("model") else None
    shape = dict(reading.model)
    if values.get("vocab") is not None:
        shape["vocab"] = values["vocab"]
    required = ("num_layers", "hidden", "num_heads", "vocab")
    lacking = [name for name in required if not shape.get(name)]
    alike = _model_of_sizes(shape) if lacking == ["vocab"] else ""
    if alike:
        reading.notes.append(f"the vocabulary of {alike} is assumed (--vocab N)")
        shape["vocab"] = load_model(alike).vocab
    elif lacking:
        text = ", ".join(lacking)
        reading.notes.append(f"the model is incomplete: {text} (--vocab N, or --model FILE)")
        return None
    if name := _equal_model(shape):
        return name
    file = f"{prefix}-model.yaml"
    files[file] = _yaml({"name": prefix, **shape, "source": f"{reading.package}: {reading.file}"})
    return file


def _model_of_sizes(shape: dict[str, Any]) -> str:
    """The shipped model with these sizes, whose vocabulary is assumed; empty if there is none."""
    count = (shape.get("experts") or {}).get("count", 0)
    for name in names("model"):
        model = load_model(name)
        equal = all(getattr(model, key) == shape.get(key) for key in SIZES)
        if equal and count == (model.experts.count if model.experts else 0):
            return name
    return ""


def _equal_model(shape: dict[str, Any]) -> str:
    """The shipped model with all these fields, and without experts unless `shape` has them.  The
    number of learned positions may differ."""
    compared: dict[str, Any] = {"experts": None, "mtp_layers": 0} | {
        k: v for k, v in shape.items() if k != "max_positions"
    }
    if shape.get("experts"):
        compared["experts"] = convert(shape["experts"], Experts, strict=False)
    for name in names("model"):
        model = load_model(name)
        if all(_plain(getattr(model, key)) == _plain(value) for key, value in compared.items()):
            return name
    return ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def shipped_model(text: str, reading: Reading) -> str | None:
    """The shipped model of a hub's name (`meta-llama/Llama-3.1-8B-Instruct`), or the path of an
    existing config.json; None with a note for every other name."""
    path = Path(text)
    if path.is_file() or (path / "config.json").is_file():
        return text
    beside = named_file(reading.file, path / "config.json")
    if beside.is_file() and beside.parent.name == path.name:
        return str(beside.parent)
    text = re.sub(r".*/models--[^/]+--([^/]+)/.*", r"\1", text)  # the hub's cache
    stem = SUFFIXES.sub("", text.rsplit("/", 1)[-1].lower()).replace("meta-", "")
    known = names("model")
    others = (stem.replace(*pair) for pair in ALIKE)
    for name in (stem, VERSION.sub("", stem), *others):
        if name in known:
            return name
    key = reading.keys.get("model", "")
    reading.notes.append(f"{key}: {text} is not shipped: give its config.json as a further FILE")
    return None


def _system(
    values: dict[str, Any],
    reading: Reading,
    files: dict[str, str],
    prefix: str,
    overrides: dict[str, Any],
) -> str:
    """The stack's name, or a new file based on the package's stack with the facts that differ."""
    base = str(overrides.get("system") or reading.system or "huggingface-flash")
    facts = dict(reading.facts)
    if values.get("cp", 1) > 1 and not overrides.get("system") and base in ROTATING:
        facts |= ROTATING[base]
        base = "torchtitan-2026" if reading.package == "torchtitan" else "trl"
    if values.get("flat_units") and values.get("cp", 1) == 1:  # a ring needs FSDP2
        facts |= FLAT_UNITS | {"reentrant": bool(values.get("reentrant"))}
    if values.get("wide_weights") and base == UNSHARDED:
        facts |= WIDE
        reading.notes.append(
            "weights are fp32, and autocast converts them to 16 bits in each operator"
        )
    whole = (overrides["method"] or (reading.method or [""])[0]).startswith("full_recompute")
    overlaps = values.get("ep_overlap") and not overrides.get("system")
    if whole and overlaps and base == "megatron-core-0.16":
        base = "megatron-core-dev"
        words = "releases refuse it with full recomputation, so the stack is megatron-core-dev"
        reading.notes.append(f"{reading.keys.get('ep_overlap')}: {words}")
    system = load_system(base)
    if values.get("foreach") and not system.states.flat_step:
        # torch/optim/adam.py, _multi_tensor_adam: the roots of all second moments are new tensors.
        facts["step_scratch_bytes"] = facts.get("param_bytes", system.states.param_bytes)
    facts |= _kernel(values, system)
    overlaps = facts.get("reduce_overlap", system.zero.reduce_overlap)
    if values.get("bucket_elements") and (overlaps or system.zero.whole_buckets):
        width = facts.get("reduce_bytes", system.states.reduce_bytes)
        facts["bucket_bytes"] = values["bucket_elements"] * width
    shipped = flat(system)
    changed = {key: value for key, value in facts.items() if shipped[key] != value}
    used = {
        "activation_offload": str((reading.method or ("", {}))[1].get("inputs")).endswith("host"),
        "ulysses": reading.get("ulysses", 1) > 1 and not overrides.get("system"),
    }
    if more := [name for name in used if used[name] and name not in shipped["features"]]:
        changed["features"] = [*shipped["features"], *more]
    if not changed:
        return base
    file = f"{prefix}-stack.yaml"
    source = f"{reading.package} file {reading.file}"
    sourced = {key: {"value": value, "source": source} for key, value in changed.items()}
    version = f"{system.version}, as {reading.file} sets it"
    files[file] = _yaml({"name": f"{prefix}-stack", "version": version, "base": base, **sourced})
    return file


def _kernel(values: dict[str, Any], system: System) -> dict[str, Any]:
    """The facts of the kernel that TransformerEngine's attention runs: cuDNN's if the files choose
    it, or by default from Hopper on; FlashAttention if the files choose that."""
    kernel, cluster = values.get("kernel"), values.get("cluster")
    generation = load_cluster(str(cluster)).generation if kernel and cluster else ""
    if kernel == "flash" and system.kernels.cudnn_first:
        return {"cudnn_first": False}
    unknown = kernel == "fused" and not generation
    taken = kernel in ("fused", "auto") and generation in CUDNN
    return {"attention": "cudnn"} if unknown or taken else {}


def _rest(values: dict[str, Any]) -> dict[str, str]:
    """The options besides LEADING and DEGREES that differ from their defaults: the experts' TP,
    ZeRO stage, sequence parallelism, kernel, precision, homes of states, and facts of work and
    stack."""
    options = {}
    if values.get("ep", 1) > 1 and values.get("etp", values.get("tp", 1)) != values.get("tp", 1):
        options["etp"] = str(values["etp"])
    if values.get("zero_stage", 1) != 1:
        options["zero_stage"] = str(values["zero_stage"])
    if values.get("sp") is False and values.get("tp", 1) > 1:
        options["sp"] = ""
    defaults = {"attention": "flash", "precision": "bf16"}
    defaults |= {"optimizer": "device", "parameters": "device"}
    for name, default in defaults.items():
        if values.get(name, default) != default:
            options[name] = str(values[name])
    for name in (*facts(Work), *facts(StackChoice), "partition", "stages"):
        if values.get(name) and name not in (*LEADING, *defaults):
            options[name] = "" if values[name] is True else str(values[name])
    return options


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
