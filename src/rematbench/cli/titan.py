"""A plan as a torchtitan configuration (TOML), for the command `flags`.

Its keys come from torchtitan/config/job_config.py of 2025-10. The command `read` knows those in
config/foreign/torchtitan.yaml.
"""

import json  # its texts of words, numbers and lists are those of TOML
from collections.abc import Iterator
from typing import Any

from rematbench.cli.options import Request
from rematbench.evidence.published.row_cases import recompute_method
from rematbench.foreign.recipes import GATHER, SCALES
from rematbench.inputs.recipes import library_of
from rematbench.plan import Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem
from rematbench.worlds.packages.flags import FlagsAnswer, alike

TITAN = "torchtitan"
Section = dict[str, Any]
RECIPES: dict[str, tuple[str, Section]] = {
    "fp8": ("float8", {}),
    "fp8-rows": ("float8", {"recipe_name": "rowwise"}),
    "mxfp8": ("mx", {"recipe_name": "mxfp8_cublas"}),
}
"""The converter and the section of each recipe of torchao."""
SCHEDULES = {1: "1F1B", 2: "Interleaved1F1B"}


def titan_answer(asked: Request) -> FlagsAnswer:
    """The configuration whose activation checkpointing gives a request's plan; `missing` lists the
    facts that no key can express."""
    problem, registry = asked.problem, discover([])
    plan, missing = asked.method.plan(problem, asked.base), list(_inexpressible(problem))
    assert not isinstance(plan, Unsupported)
    sections = _sections(problem)
    for (name, settings), section in _modes(problem.workload.model.num_layers, registry):
        made = registry.resolve(name, settings).plan(problem, problem.base_plan)
        if not isinstance(made, Unsupported) and alike(problem, plan, made):
            sections["activation_checkpoint"] = section
            break
    else:
        missing.append("this plan (activation_checkpoint: none, full, every n-th layer, op)")
    text = "\n".join(
        line
        for name, values in sections.items()
        for line in (
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
        )
    )
    said = ("the model's name and flavor are left out",)
    return FlagsAnswer(baseline=TITAN, flags=text, missing=tuple(missing), remarks=said)


def _modes(layers: int, registry: Registry) -> Iterator[tuple[tuple[str, Any], Section]]:
    """Methods with their settings, each with the section that stands for it."""
    yield ("keep_all", {}), {"mode": "none"}
    yield ("full_recompute", {}), {"mode": "full"}
    selective = {"mode": "selective", "selective_ac_option": "op"}
    yield recompute_method("selective(op)", registry), selective
    for every in range(2, layers + 1):
        yield ("full_recompute", {"every": every}), {**selective, "selective_ac_option": str(every)}


def _inexpressible(problem: Problem) -> Iterator[str]:
    lay, work, system = problem.layout, problem.workload, problem.system
    facts = {
        f"stack {system.name} (keys exist for torchtitan and stacks based on it)": (
            TITAN not in (system.name, *system.constants)
        ),
        f"zero_stage {lay.zero_stage} (FSDP2 shards as 2 or 3)": lay.zero_stage not in (2, 3),
        f"vpp {lay.vpp} (Interleaved1F1B has two chunks)": lay.vpp not in SCHEDULES,
        "experts": work.model.experts is not None,
        "bf16_ends (filter_fqns names linears, not layers)": work.bf16_ends > 0,
        f"precision {work.precision}": work.precision not in ("bf16", "fp32"),
        f"recipe {work.recipe}": work.recipe not in ("none", *RECIPES),
    }
    return (words for words, holds in facts.items() if holds)


def _sections(problem: Problem) -> dict[str, Section]:
    lay, work, system = problem.layout, problem.workload, problem.system
    components = ["model", *(["loss"] if system.loss.fused_loss else [])]
    local = lay.micro_batch * (lay.num_micro_batches if lay.pp > 1 else 1)
    param = {"bf16": "bfloat16", "fp32": "float32"}.get(work.precision, work.precision)
    sections: dict[str, Section] = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": lay.global_batch,
            "seq_len": work.seq_len,
            "mixed_precision_param": param,
        },
        "parallelism": {
            "data_parallel_replicate_degree": lay.state_replicas,
            "data_parallel_shard_degree": -1,
            "fsdp_reshard_after_forward": "never" if lay.zero_stage == 2 else "default",
            "tensor_parallel_degree": lay.tp,
            "context_parallel_degree": lay.cp,
            "pipeline_parallel_degree": lay.pp,
        },
        "compile": {"enable": system.kernels.compiled, "components": components},
    }
    if lay.pp > 1:
        sections["parallelism"] |= {
            "pipeline_parallel_schedule": SCHEDULES.get(lay.vpp, ""),
            "pipeline_parallel_microbatch_size": lay.micro_batch,
        }
    if library_of(problem.system) == "torchao" and work.recipe in RECIPES:
        name, section = RECIPES[work.recipe]
        gathers = {GATHER: True, SCALES: True} if work.fp8_params else {}
        sections["model"] = {"converters": [name]}
        sections[name] = {**section, **gathers, "filter_fqns": ["output"]}
    return sections
