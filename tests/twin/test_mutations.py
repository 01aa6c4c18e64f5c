"""Named mutations of sound programs: each must be caught, by check or by bytes that are wrong."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rematbench.lowering.lower import lower
from rematbench.plan import Offload, Pass, Plan
from rematbench.problem import Problem
from rematbench.program.action import Action, Alloc, Kind
from rematbench.program.check import CheckError, check
from rematbench.program.program import Block, Program, parse_program
from rematbench.simulate.step import DeadlockError
from tests.problems import BALANCED, FULL, half, layers, problem, rule, transfers
from tests.twin.interpreter import EARLY, TwinError, interpret

Change = Callable[[Action], list[Action]]


def offloading(**changes: object) -> tuple[Problem, Plan]:
    """Two stages, interleaved, tensor parallel, half of the bytes to the host."""
    given = problem(model=layers(4), tp=2, pp=2, vpp=2, global_batch=4)
    return given, transfers(given.base_plan.with_rules(BALANCED, half()), **changes)


def mutate(program: Program, label: str, change: Change, rank: int = 0) -> Program:
    """Change the first action of a rank's blocks of a label for which `change` returns other."""
    blocks = list(program.ranks[rank].blocks)
    for number, block in enumerate(blocks):
        for position, action in enumerate(block.actions):
            changed = change(action)
            if block.label == label and changed != [action]:
                actions = (*block.actions[:position], *changed, *block.actions[position + 1 :])
                blocks[number] = Block(label, actions)
                changed_rank = replace(program.ranks[rank], blocks=tuple(blocks))
                ranks = list(program.ranks)
                ranks[rank] = changed_rank
                return Program(ranks=tuple(ranks))
    raise AssertionError(f"no action of {label} changes")


def without(wanted: Callable[[Action], bool]) -> Change:
    return lambda action: [] if wanted(action) else [action]


def wait_for(stream: str, event: str) -> Callable[[Action], bool]:
    return lambda a: a.kind is Kind.WAIT and a.stream == stream and a.wait == event


def frees(name: str) -> Change:
    """Forget one of a FREE's tensors."""

    def change(action: Action) -> list[Action]:
        left = tuple(n for n in action.frees if n != name)
        return [replace(action, frees=left)] if left != action.frees else [action]

    return change


MUTATIONS: dict[str, tuple[str, Change, str, str]] = {
    # name: block, change, what check says, what the twin says ("": not its business)
    "drop a FREE": ("B", frees("L0.attn_out"), "L0.attn_out of .* is never freed", "never freed"),
    "compute does not wait for H2D": (
        "B",
        without(wait_for("compute", "h2d")),
        "reads .*@?.* before h2d is known to have made it|while h2d may still use it",
        "freed while h2d has yet to use it",
    ),
    "a device copy is freed before D2H is done": (
        "free_d2h",
        without(wait_for("compute", "d2h")),
        "frees .* while d2h may still use it",
        "freed while d2h has yet to use it",
    ),
    "D2H does not wait for the forward": (
        "D2H",
        without(wait_for("d2h", "f_end")),
        "reads .* before compute is known to have made it",
        "",
    ),
    "H2D does not wait for compute, and so not for D2H": (
        "H2D",
        without(lambda a: a.kind is Kind.WAIT),
        "reads .*@host before d2h is known to have made it",
        "",
    ),
    "H2D may overwrite what compute still reads": (
        "H2D",
        lambda a: [replace(a, wait="d2h")] if a.kind is Kind.WAIT else [a],
        "allocates .* where compute may still use what it frees",
        "",
    ),
    "a gather does not wait for its input": (
        "F",
        without(lambda a: a.kind is Kind.WAIT and a.stream == "tp"),
        "reads E.embedding.part before compute is known to have made it",
        "",
    ),
    "compute does not wait for a reduction": (
        "F",
        without(lambda a: a.kind is Kind.WAIT and a.stream == "compute"),
        "reads L0.layer_input before tp is known to have made it|frees .* while tp may still use",
        "is corrupt|yet to use it",
    ),
    "compute does not wait for its input": (
        "F",
        without(wait_for("compute", "recv_f")),
        "reads L0.layer_input before pp_recv is known to have made it",
        "is corrupt",
    ),
    "the sender does not wait for its forward": (
        "send_f",
        without(wait_for("pp_send", "f_end")),
        "reads .*layer_input before compute is known to have made it",
        "",
    ),
    "drop an H2D": (
        "H2D",
        without(lambda a: a.kind is Kind.H2D),
        "reads .*, which is not alive",
        "is not alive",
    ),
    "drop a D2H": (
        "D2H",
        without(lambda a: a.kind is Kind.D2H),
        "reads .*@host, which is not alive",
        "is not alive",
    ),
    "drop a JOIN": (
        "B",
        without(lambda a: a.kind is Kind.JOIN),
        "reads .*, which is not alive",
        "is not alive",
    ),
    "drop a recompute": (
        "B",
        without(lambda a: a.kind is Kind.RECOMPUTE),
        "reads .*, which is not alive",
        "is not alive",
    ),
    "allocate twice": (
        "F",
        lambda a: [a, a] if a.op == "qkv" and a.kind is Kind.FORWARD else [a],
        "allocates L0.q, which is alive",
        "is allocated twice",
    ),
    "free twice": (
        "F",
        lambda a: [a, a] if a.kind is Kind.FREE else [a],
        "frees .*, which is not alive",
        "is not alive",
    ),
    "wait for what nobody records": (
        "F",
        lambda a: [replace(a, wait="nobody")] if a.kind is Kind.WAIT else [a],
        "waits for 'nobody', which nothing has recorded",
        "",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught_by_name(name: str) -> None:
    given, plan = offloading()
    program = lower(plan, given)
    check(program)
    label, change, checked, interpreted = MUTATIONS[name]
    broken = mutate(
        program, label, change, rank=1 if "its input" in name and "recv" in checked else 0
    )
    with pytest.raises(CheckError, match=checked):
        check(broken)
    if interpreted:
        with pytest.raises(TwinError, match=interpreted):
            interpret(broken)


def test_parameters_used_before_their_gather_is_done_are_caught() -> None:
    given = problem(model=layers(2), dp=2, zero_stage=3, global_batch=2)
    program = lower(given.base_plan, given)
    gathered = next(
        a.event
        for a in program.ranks[0].blocks[0].actions
        if a.part == "L0" and a.op == "parameters"
    )
    broken = mutate(program, "F", without(wait_for("compute", gathered)))
    with pytest.raises(CheckError, match=r"reads L0.parameters before dp is known to have made it"):
        check(broken)
    with pytest.raises(TwinError, match=r"is corrupt|yet to use it"):
        interpret(broken)


def test_offloading_one_byte_less_is_caught() -> None:
    given, plan = offloading()

    def shorten(action: Action) -> list[Action]:
        if action.kind is not Kind.D2H:
            return [action]
        (host,) = action.allocs
        short = Alloc(host.name, host.nbytes - 1)
        return [replace(action, allocs=(short,), nbytes=host.nbytes - 1)]

    with pytest.raises(TwinError, match=r"D2H .*: 1 bytes are lost"):
        interpret(mutate(lower(plan, given), "D2H", shorten))


def test_reloading_the_wrong_tensor_is_caught() -> None:
    """Same size, same life: only the content tells."""
    given = problem(model=layers(1), global_batch=1)
    program = lower(given.base_plan.with_rules(rule(Offload(), "gate_out", "up_out")), given)
    text = program.text()
    for label, other in (("L0.gate_out@host", "L0.up_out@host"),):
        swapped = text.replace(f"r={label}", "r=?").replace(f"r={other}", f"r={label}")
        broken = parse_program(swapped.replace("r=?", f"r={other}"))
    check(broken)
    keep_all = interpret(lower(given.base_plan, given))
    assert interpret(broken)[0].gradients != keep_all[0].gradients


def test_rebuilding_from_the_wrong_input_is_caught() -> None:
    given = problem(model=layers(1))
    program = lower(given.base_plan.with_rules(*FULL), given)
    line = "R0.0 compute L0.mlp_norm r=L0.attn_residual"
    assert line in program.text()
    broken = parse_program(
        program.text().replace(line, line.replace("attn_residual", "layer_input"))
    )
    check(broken)
    keep_all = interpret(lower(given.base_plan, given))
    assert interpret(broken)[0].gradients != keep_all[0].gradients


def test_a_split_that_drops_a_row_is_caught() -> None:
    given, plan = offloading()

    def shorten(action: Action) -> list[Action]:
        if action.kind is not Kind.SPLIT:
            return [action]
        first, *others = action.allocs
        return [replace(action, allocs=(Alloc(first.name, first.nbytes - 64), *others))]

    with pytest.raises(TwinError, match=r"JOIN .* bytes arrive"):
        interpret(mutate(lower(plan, given), "F", shorten))


def test_a_slot_that_still_holds_a_tensor_is_caught() -> None:
    given, plan = offloading(reload_slots=2)
    program = lower(plan, given)
    check(program)
    one = parse_program(program.text().replace("slot/reload1", "slot/reload0"))
    with pytest.raises(CheckError, match=r"slot slot/reload0 still holds L\d"):
        check(one)
    with pytest.raises(TwinError, match="is corrupt"):
        interpret(one, EARLY)


def test_swapped_passes_are_caught() -> None:
    """A backward before its own forward; two ranks that disagree about the order."""
    given = problem(model=layers(1), global_batch=2)
    early = (Pass(False, 0, 0), Pass(True, 0, 0), Pass(True, 1, 0), Pass(False, 1, 0))
    with pytest.raises(CheckError, match=r"reads H.loss_saved, which is not alive"):
        check(lower(replace(given.base_plan, orders=(early,)), given))

    given = problem(model=layers(4), pp=2, vpp=2, global_batch=2)
    rank = tuple(Pass(True, i, c) for c in (0, 1) for i in (0, 1))
    rank += tuple(Pass(False, i, c) for c in (1, 0) for i in (0, 1))
    swapped = (rank[2], rank[3], rank[0], rank[1], *rank[4:])
    check(lower(replace(given.base_plan, orders=(rank, rank)), given))
    with pytest.raises(DeadlockError, match="rank 0 waits for message"):
        check(lower(replace(given.base_plan, orders=(swapped, rank)), given))


@pytest.mark.parametrize(("label", "rank"), [("send_f", 0), ("send_b", 1)])
def test_a_missing_send_is_a_deadlock(label: str, rank: int) -> None:
    given = problem(model=layers(2), pp=2, global_batch=2)
    program = lower(given.base_plan, given)

    def silence(action: Action) -> list[Action]:
        if action.kind is not Kind.SEND:
            return [action]
        return [replace(action, kind=Kind.EVENT, reads=(), nbytes=0)]

    broken = mutate(program, label, silence, rank)
    message = {"send_f": "'f', 0, 1", "send_b": "'b', 0, 0"}[label]
    with pytest.raises(DeadlockError, match=rf"waits for message \({message}\)"):
        check(broken)
    with pytest.raises(TwinError, match="deadlock"):
        interpret(broken)
