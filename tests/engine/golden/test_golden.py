"""Lowered plans as text: a refactoring changes none of them, a change of lowering shows as a diff.

Each file lists every rank's steps, then each distinct block once (written for its first step).
`pytest tests/golden --update-golden` rewrites the files; git shows what that changed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import to_text
from rematbench.engine.program.program import Block, Program
from rematbench.evaluate.proof import check
from rematbench.plan import Offload, Plan, Split
from rematbench.problem import Problem
from rematbench.workload import Experts
from tests.cost_constants import ROUND
from tests.problems import (
    BALANCED,
    FULL,
    by_layer,
    half,
    layers,
    on,
    plan_of,
    problem,
    remade,
    rule,
    tight,
    transfers,
)

HERE = Path(__file__).parent


def one_f_one_b() -> tuple[Problem, Plan]:
    """keep_all on two stages."""
    given = problem(model=layers(2), pp=2, global_batch=2)
    return given, given.base_plan


def interleaved_offload() -> tuple[Problem, Plan]:
    """The ATC'24 system: balanced checkpointing, half of the rest offloaded, ping-pong slots."""
    links = {"gemm_overlap_links": "all"}  # the problem's nodes have one GPU
    given = problem(
        model=layers(4), system="megatron-kwai", system_changes=links,
        tp=2, pp=2, vpp=2, dp=2, global_batch=4,
    )  # fmt: skip
    plan = given.base_plan.with_rules(BALANCED, half())
    return given, transfers(plan, reload_slots=2, before_send_phases=("warmup", "cooldown"))


def full_recompute() -> tuple[Problem, Plan]:
    """Every layer from its input, with sequence parallelism."""
    given = problem(model=layers(1), tp=2, global_batch=2)
    return given, given.base_plan.with_rules(*FULL)


def zero_3() -> tuple[Problem, Plan]:
    """Parameters gathered layer by layer, gradients scattered as they come."""
    given = problem(model=layers(2), system="torchtitan", dp=2, zero_stage=3, global_batch=2)
    return given, given.base_plan


def zero_3_tied() -> tuple[Problem, Plan]:
    """The head's weight is the embedding's, gathered again; both parts of its gradient are there
    until the embedding's backward."""
    model = replace(layers(1), tied_embeddings=True)
    beside = {"reduce_overlap": True, "gather_overlap": True}
    given = problem(model=model, dp=2, zero_stage=3, global_batch=2, system_changes=beside)
    return given, given.base_plan


def mixed_split_by_layer() -> tuple[Problem, Plan]:
    """Rows kept, offloaded and rebuilt; copies layer by layer."""
    given = problem(model=layers(2), global_batch=2)
    split = Split(offload=0.25, recompute=0.5, scope="layer")
    rules = (rule(split, "mlp_norm_out", "fc2_in"), rule(Offload(), "layer_input", "attn_out"))
    return given, by_layer(given.base_plan.with_rules(*rules))


def memo() -> tuple[Problem, Plan]:
    """Half of the tokens to the host through rounding buffers, the others rebuilt; two layers of
    four are exempt."""
    return by_method(problem(model=layers(4)), "memo", alpha=0.5)


def mst() -> tuple[Problem, Plan]:
    """Full recomputation, the MLP in two pieces and the head in two, updates in the backward."""
    settings: dict[str, Any] = {"mlp_chunks": 2, "head_chunks": 2, "optimizer_in_backward": True}
    return by_method(problem(model=layers(1)), "full_recompute+mst", **settings)


def lynx() -> tuple[Problem, Plan]:
    """The heuristic at round costs, on a device with half the room that keeping needs: rebuilding
    beside collectives of the backward."""
    given = problem(model=layers(4), tp=2, pp=2, global_batch=2)
    return by_method(tight(remade(given, calibration=ROUND), 0.5), "lynx_heu")


def experts() -> tuple[Problem, Plan]:
    """A dense layer and one with experts on two stages, whose modules are recomputed as Megatron
    does: tokens are exchanged again, and gradients of experts have their own peers."""
    mixture = Experts(count=4, active=2, ffn=32, shared_ffn=32, dense_layers=(0,))
    model = replace(layers(2), experts=mixture)
    given = problem(model=model, tp=2, dp=2, pp=2, ep=2, etp=1, global_batch=4)
    return by_method(given, "selective_recompute", modules=("moe", "layernorm"))


def early_pieces() -> tuple[Problem, Plan]:
    """All optimizer states on the host; the CPU and visits update from the last backward on."""
    given = on(problem(model=layers(1), global_batch=2), host_update_parameters_per_s=1e9)
    settings: dict[str, Any] = {"share": 1.0, "visiting": 0.5, "slots": 1}
    early: dict[str, Any] = {"start": "ready", "clip": False, "size": 3500}
    return by_method(given, "full_recompute+optimizer_offload", **settings, **early)


def by_method(given: Problem, spec: str, **settings: Any) -> tuple[Problem, Plan]:
    """The plan of a file of methods/."""
    return given, plan_of(given, spec, **settings)


CASES: dict[str, Callable[[], tuple[Problem, Plan]]] = {
    "one_f_one_b": one_f_one_b,
    "interleaved_offload": interleaved_offload,
    "full_recompute": full_recompute,
    "zero_3": zero_3,
    "zero_3_tied": zero_3_tied,
    "mixed_split_by_layer": mixed_split_by_layer,
    "memo": memo,
    "mst": mst,
    "lynx": lynx,
    "experts": experts,
    "early_pieces": early_pieces,
}


def golden_text(program: Program) -> str:
    """Steps of every rank, then the blocks."""
    lines: list[str] = []
    first: dict[Block, tuple[int, int]] = {}
    for rank in program.ranks:
        lines.append(f"rank {rank.rank}")
        for step in rank.steps:
            block = rank.blocks[step.block]
            first.setdefault(block, (step.micro_batch, step.chunk))
            number = list(first).index(block)
            lines.append(f"  {number}:{block.label}{step.micro_batch}.{step.chunk}")
    for number, (block, where) in enumerate(first.items()):
        lines.append(f"block {number}:{block.label}")
        lines += [f"  {to_text(action, *where)}" for action in block.actions]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_lowered_plan(name: str, update_golden: bool) -> None:
    given, plan = CASES[name]()
    program = lower(plan, given)
    check(program)
    path = HERE / f"{name}.txt"
    text = golden_text(program)
    if update_golden:
        path.write_text(text, encoding="ascii")
    assert text == path.read_text(encoding="ascii")


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(CASES)
