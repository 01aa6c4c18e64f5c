"""full_recompute: keep the inputs of groups of layers and recompute whole layers in the backward.

Claim: activations shrink to one tensor per group, for one more forward pass.
Source: Chen et al. 2016 (arXiv 1604.06174); Megatron-LM's `--recompute-granularity full` with
`--recompute-method uniform|block` and `--recompute-num-layers N`. `every` is torchtitan's selective
checkpointing of whole layers (`selective_ac_option: N`). Inputs on the host are DeepSpeed's
`cpu_checkpointing` (Rasley et al. 2020), which is also used for long contexts. Shared inputs are
Megatron's `--distribute-saved-activations` (megatron-core 0.16.1, tensor_parallel/random.py) and
DeepSpeed's `partition_activations`.
Deviations: groups never cross a chunk (as in Megatron-LM); the random state of attention is not
counted.
"""

from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Offload, Plan, PositiveInt, Problem, Recompute, Transfers, Unsupported
from rematbench.solve.kept import (
    holding_inputs,
    kept_activations,
    no_offload,
    rule_of,
    sharing_inputs,
    with_live_rules,
)
from rematbench.solve.recompute_modules import (
    chosen_layers,
    chunks_of,
    rebuilding_groups,
    rebuilding_layers,
)


class FullRecompute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`method` uniform: each chunk is split into groups of `num_layers`, which are rebuilt from
    their first input. `method` block: only the first `num_layers` layers of each chunk are rebuilt,
    each as a group. `every` n: only every n-th layer of the model is rebuilt, as a group. `layers`:
    only these layers (`0-5,20`) are rebuilt, each as a group. `inputs` host: the inputs of groups
    leave the device after the next layer's forward, and return one layer before their backward.
    `inputs` shared: each tensor-parallel rank keeps a part of them (shared_host: on the host), and
    they are gathered before their group is rebuilt."""

    name: ClassVar[str] = "full_recompute"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: PositiveInt = 1
    every: PositiveInt = 1
    inputs: Literal["device", "host", "shared", "shared_host"] = "device"
    layers: str = ""

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """Drop the kept activations of each recomputed layer, except the groups' inputs."""
        chosen = self._chosen(base)
        if isinstance(chosen, str):
            return Unsupported(chosen)
        if self.inputs.endswith("host") and (refused := self._host_refusal(problem, base)):
            return Unsupported(refused)
        kept = kept_activations(problem, base)
        inner = tuple(sorted(kept - {"layer_input"}))
        base = holding_inputs(problem, base, inner, whole=True) if inner else base
        rules = rebuilding_groups(inner, base, self.num_layers)
        rules = [rebuilding_layers(inner, chosen)] if chosen else rules
        made = with_live_rules(problem, base, *rules) if inner else base
        if made == base:
            return base.noting(full_recompute="no-op: the base keeps nothing inside layers")
        if self.num_layers > 1 and self.method == "uniform" and _rebuilds_early(base):
            return Unsupported(
                "the base rebuilds tensors of some layers before their backward, when a group's "
                f"inputs do not exist yet: set num_layers=1, not {self.num_layers}"
            )
        return made if self.inputs == "device" else self._moved(problem, made, chosen)

    def _moved(self, problem: Problem, plan: Plan, chosen: tuple[int, ...]) -> Plan | Unsupported:
        host = self.inputs.endswith("host")
        if self.inputs == "host":
            moved: Plan | Unsupported = plan.with_rules(rule_of(("layer_input",), Offload()))
        else:
            moved = sharing_inputs(problem, plan, chosen, "host" if host else "device")
        if isinstance(moved, Unsupported) or not host:
            return moved
        return replace(moved, transfers=Transfers(granularity="layer"))

    def _host_refusal(self, problem: Problem, base: Plan) -> str:
        if refused := no_offload(problem):
            return refused
        if (self.every, self.method) != (1, "uniform") or self.layers:
            return "inputs on the host need method=uniform, every=1 and all layers"
        if base.transfers != Transfers():
            return "inputs on the host: the base already sets how tensors are copied"
        return ""

    def _chosen(self, base: Plan) -> tuple[int, ...] | str:
        """The layers that are rebuilt as groups of one layer; empty if every layer belongs to a
        group; or the reason why the settings contradict each other."""
        if (self.layers or self.every > 1) and (self.method, self.num_layers) != ("uniform", 1):
            word = "layers" if self.layers else "every"
            return f"`{word}` needs method=uniform and num_layers=1"
        if self.layers and self.every > 1:
            return "`layers` needs every=1"
        if self.layers:
            return chosen_layers(base, self.layers)
        chunks = chunks_of(base)
        if self.method == "block":
            return tuple(layer for chunk in chunks for layer in chunk[: self.num_layers])
        last = max(layer for chunk in chunks for layer in chunk)
        if self.every > last + 1:
            return f"every={self.every} selects none of the {last + 1} layers"
        return tuple(range(self.every - 1, last + 1, self.every)) if self.every > 1 else ()


def _rebuilds_early(base: Plan) -> bool:
    """Whether the base rebuilds some tensors before the backward of their own layer."""
    windows = (rule.fate.window for rule in base.rules if isinstance(rule.fate, Recompute))
    return any(w.direction != "backward" or w.layer_offset > 0 for w in windows if w)
