"""Baseline policies by name: settings of a method that a stack ships (config/compare.yaml)."""

from functools import cache
from typing import Any, Literal

from msgspec import Struct

from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import System
from rematbench.problem import Problem
from rematbench.workload import Model

LABEL = "config/compare.yaml"

Setting = str | int | float | bool | list[str]


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method with settings.  `smallest`: the parameter that `compare` raises from 1 until the
    plan fits, and whose value a user writes after the policy's name (`full_recompute:block 3`);
    empty if the policy has none.  `needs`: the feature of a model (experts, shared experts, latent
    attention) or of a stack (inputs of layers on the host with ZeRO 3, offload of Megatron-core's
    modules, FSDP) without which the policy is not tried.  `keys`: the keys that select the policy
    in a trainer's file."""

    name: str
    method: str
    why: str
    settings: dict[str, Setting] = {}
    smallest: str = ""
    needs: Literal[
        "", "experts", "shared_experts", "latent", "latent_experts", "inputs_on_host", "fsdp",
        "offload_modules",
    ] = ""  # fmt: skip
    keys: str = ""

    def applies(self, model: Model, system: System | None = None) -> bool:
        """Whether the policy is tried for a model on a stack (None: on any)."""
        experts = model.experts
        features = system.accepts.features if system else ()
        megatron = system is not None and "megatron-core" in {system.name, *system.constants}
        moves = megatron and "activation_offload" in features and model.latent is None
        sharded = system is not None and 3 in system.accepts.zero_stages
        return {
            "": True,
            "experts": experts is not None,
            "shared_experts": bool(experts and experts.shared_ffn),
            "latent": model.latent is not None,
            "latent_experts": bool(experts and model.latent),
            "offload_modules": moves,
            "inputs_on_host": sharded and "activation_offload" in features,
            "fsdp": system is not None and system.zero.data_parallel == "fsdp",
        }[self.needs]


class _Policies(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policies: tuple[Policy, ...]


@cache
def shipped_policies() -> dict[str, Policy]:
    """The committed policies by name."""
    data = read_mapping(data_dir("config") / "compare.yaml", LABEL)
    found = convert({"policies": data.get("policies")}, _Policies, LABEL).policies
    return {policy.name: policy for policy in found}


def applicable_settings(settings: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """A policy's settings, minus the operators (`ops`) that no layer of the problem has."""
    ops = settings.get("ops")
    if not isinstance(ops, list):
        return settings
    applicable_settings = {op.name for table in problem.layer_kinds for op in table.ops}
    return {**settings, "ops": [name for name in ops if name in applicable_settings]}
