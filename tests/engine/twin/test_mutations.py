"""Named mutations of sound programs: each must be caught, by check or by bytes that are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.program import Block, Program
from rematbench.engine.program.storage import COPIED_OUT, Event, part_of
from rematbench.engine.simulate.op_level import DeadlockError
from rematbench.evaluate.proof import CheckError, check
from rematbench.plan import Offload, Pass, Plan
from rematbench.problem import Problem
from tests.engine.twin.interpreter import EARLY, TwinError, interpret
from tests.problems import BALANCED, FULL, half, layers, problem, rule, transfers
from tests.program_text import parse_program

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


def wait_for(stream: str, event: str | Event) -> Callable[[Action], bool]:
    return lambda a: a.kind is Kind.WAIT and a.stream == stream and str(a.wait) == str(event)


def frees(name: str) -> Change:
    """Forget one of a FREE's tensors."""

    def change(action: Action) -> list[Action]:
        left = tuple(freed for freed in action.frees if str(freed) != name)
        return [replace(action, frees=left)] if left != action.frees else [action]

    return change


MUTATIONS: dict[str, tuple[str, Change, str, str]] = {
    # name: block, change, what check says, what the twin says ("": not its business)
    "drop a FREE": ("B", frees("L0.attn_out"), "L0.attn_out of .* is never freed", "never freed"),
    "compute does not wait for H2D": (
        "B",
        without(wait_for("compute", "h2d")),
        "reads .*@?.* without waiting until h2d has written it|while h2d may still use it",
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
        "reads .* without waiting until compute has written it",
        "",
    ),
    "H2D does not wait for compute, and so not for D2H": (
        "H2D",
        without(lambda a: a.kind is Kind.WAIT),
        "reads .*@host without waiting until d2h has written it",
        "",
    ),
    "H2D may overwrite what compute still reads": (
        "H2D",
        lambda a: [replace(a, wait=COPIED_OUT)] if a.kind is Kind.WAIT else [a],
        "allocates .* in memory that compute may still use",
        "",
    ),
    "a gather does not wait for its input": (
        "F",
        without(lambda a: a.kind is Kind.WAIT and a.stream == "tp"),
        "reads E.embedding.part without waiting until compute has written it",
        "",
    ),
    "compute does not wait for a reduction": (
        "F",
        without(lambda a: a.kind is Kind.WAIT and a.stream == "compute"),
        "reads L0.layer_input without waiting until tp has written it|"
        "frees .* while tp may still use",
        "is corrupt|yet to use it",
    ),
    "compute does not wait for its input": (
        "F",
        without(wait_for("compute", "recv_f")),
        "reads L0.layer_input without waiting until pp_recv has written it",
        "is corrupt",
    ),
    "the sender does not wait for its forward": (
        "send_f",
        without(wait_for("pp_send", "f_end")),
        "reads .*layer_input without waiting until compute has written it",
        "",
    ),
    "drop an H2D": (
        "H2D",
        without(lambda a: a.kind is Kind.H2D),
        "reads .*, which is not allocated",
        "is not alive",
    ),
    "drop a D2H": (
        "D2H",
        without(lambda a: a.kind is Kind.D2H),
        "reads .*@host, which is not allocated",
        "is not alive",
    ),
    "drop a JOIN": (
        "B",
        without(lambda a: a.kind is Kind.JOIN),
        "reads .*, which is not allocated",
        "is not alive",
    ),
    "drop a recompute": (
        "B",
        without(lambda a: a.kind is Kind.RECOMPUTE),
        "reads .*, which is not allocated",
        "is not alive",
    ),
    "allocate twice": (
        "F",
        lambda a: [a, a] if a.op == "qkv" and a.kind is Kind.FORWARD else [a],
        "allocates L0.q, which is already allocated",
        "is allocated twice",
    ),
    "free twice": (
        "F",
        lambda a: [a, a] if a.kind is Kind.FREE else [a],
        "frees .*, which is not allocated",
        "is not alive",
    ),
    "wait for what nobody records": (
        "F",
        lambda a: [replace(a, wait="nobody")] if a.kind is Kind.WAIT else [a],
        "waits for 'nobody', but no action records it",
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
    with pytest.raises(
        CheckError, match=r"reads L0.parameters without waiting until dp has written it"
    ):
        check(broken)
    with pytest.raises(TwinError, match=r"is corrupt|yet to use it"):
        interpret(broken)


def test_weights_that_a_pipeline_holds_are_used_while_they_are_there() -> None:
    """A kernel waits for the gather of its chunk's first forward, and no kernel comes after the
    release, whichever micro-batch it works on."""
    given = problem(model=layers(4), system="torchtitan", pp=2, dp=2, zero_stage=3, global_batch=8)
    program = lower(given.base_plan, given)
    check(program)
    first, rank = program.ranks[0].blocks[0], program.ranks[0]
    event = next(a.event for a in first.actions if a.part == "L0" and a.op == "parameters")
    broken = mutate(program, "F", without(wait_for("compute", event)))
    with pytest.raises(CheckError, match=r"reads L0.parameters\^ without waiting"):
        check(broken)
    steps = list(rank.steps)
    release = next(i for i, s in enumerate(steps) if rank.blocks[s.block].label == "release")
    steps.insert(release - 4, steps.pop(release))
    early = replace(rank, steps=tuple(steps))
    broken = replace(program, ranks=(early, *program.ranks[1:]))
    with pytest.raises(CheckError, match=r"reads L\d.parameters\^, which is not allocated"):
        check(broken)
    with pytest.raises(TwinError, match=r"parameters\^.* is not alive"):
        interpret(broken)


def states(zero_stage: int, system: str, *, update: bool = False, **changes: Any) -> Program:
    """Two layers on two data-parallel ranks; `update`: in the backward."""
    layout = {"dp": 2, "global_batch": 2 if update else 4, **changes}
    given = problem(model=layers(2), system=system, zero_stage=zero_stage, **layout)
    kept = tuple(fate for fate in given.base_plan.states if fate.kind != "optimizer")
    fate = given.base_plan.state("optimizer")
    fate = replace(fate, update="backward") if update else fate
    return lower(replace(given.base_plan, states=(*kept, fate)), given)


def own(kind: Kind, op: str, part: str = "") -> Callable[[Action], bool]:
    return lambda a: a.kind is kind and a.op == op and part in ("", a.part)


def before(label: str, wanted: Callable[[Action], bool], stream: str, program: Program) -> Change:
    """Drop the stream's last wait in front of an action."""
    blocks = (block.actions for block in program.ranks[0].blocks if block.label == label)
    actions = next(actions for actions in blocks if any(map(wanted, actions)))
    at = next(i for i, action in enumerate(actions) if wanted(action))
    waits = [a for a in actions[:at] if a.kind is Kind.WAIT and a.stream == stream]
    return without(lambda a: a is waits[-1])


REDUCES, UPDATES = own(Kind.REDUCE_SCATTER, "gradients"), own(Kind.OPTIMIZER, "optimizer")
FIRST = own(Kind.FORWARD, "embedding")
OF_L1 = own(Kind.REDUCE_SCATTER, "gradients", "L1")
GATHERED = own(Kind.ALL_GATHER, "parameters")

WAITS: dict[str, tuple[Program, str, Callable[[Action], bool], str, str]] = {
    # name: program, block, the action in front of which a stream's wait is left out, what is said
    "a kernel for its gather": (
        *(states(1, "megatron-core"), "F", FIRST, "compute"),
        "uses weights of E without waiting until dp has gathered them",
    ),
    "a reduction in a bucket for the backward": (
        *(states(1, "megatron-core"), "B", REDUCES, "dp"),
        "exchanges gradients of H while compute may still use them",
    ),
    "a reduction of a chunk for its backward": (
        *(states(1, "megatron-kwai"), "reduce", REDUCES, "dp"),
        "exchanges gradients of H while compute may still use them",
    ),
    "a reduction of norms for the backward": (
        *(states(1, "megatron-kwai", tp=2), "norms", lambda a: a.op == "norm_gradients", "tp"),
        "exchanges gradients of H while (compute|dp) may still use them",
    ),
    "an update in the backward for its reduction": (
        *(states(1, "megatron-core", update=True), "B", UPDATES, "compute"),
        "updates H while dp may still use its weights or gradients",
    ),
    "a gather for the update": (
        *(states(1, "megatron-kwai"), "gather", GATHERED, "dp"),
        "gathers weights of . while compute may still use them",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_who_does_not_wait_for_parameters_or_gradients_is_caught(name: str) -> None:
    program, label, wanted, stream, words = WAITS[name]
    check(program)
    with pytest.raises(CheckError, match=words):
        check(mutate(program, label, before(label, wanted, stream, program)))


def test_an_update_that_does_not_wait_for_the_last_reduction_is_caught() -> None:
    program = states(1, "megatron-core")
    broken = mutate(program, "reduced", without(wait_for("compute", "reduced")))
    with pytest.raises(CheckError, match="updates E while dp may still use its weights or grad"):
        check(broken)


def test_tied_ends_that_do_not_wait_are_caught() -> None:
    tied = replace(layers(2), tied_embeddings=True)
    given = problem(model=tied, pp=2, dp=2, zero_stage=1, global_batch=4, system="megatron-kwai")
    program = lower(given.base_plan, given)
    check(program)
    wait = without(lambda a: a.kind is Kind.WAIT and a.stream == "pp_send")
    with pytest.raises(CheckError, match=r"exchanges gradients of E while .* may still use them"):
        check(mutate(program, "tied_send", wait))
    for event in ("sent_e", "recv_e"):
        deaf = mutate(program, "tied_recv", without(wait_for("compute", event)))
        with pytest.raises(CheckError, match=r"updates E while pp_(send|recv) may still use its"):
            check(deaf)


LATE = Action(kind=Kind.BACKWARD_WEIGHT, stream="compute", part=part_of("L", 1), op="late")
EARLY_UPDATE = Action(kind=Kind.OPTIMIZER, stream="compute", part=part_of("L", 1), op="optimizer")
ORDERS: dict[str, tuple[Program, Change, str]] = {
    # name: program, what one action of a backward becomes, what is said
    "a gradient is added to after its reduction": (
        states(1, "torchtitan"),
        lambda a: [a, LATE] if OF_L1(a) else [a],
        "adds to gradients of L1 after their reduction",
    ),
    "a gradient is added to when its buffer is gone": (
        states(3, "torchtitan"),
        lambda a: [a, LATE] if "L1.gradients" in map(str, a.frees) else [a],
        "adds to L1.gradients, which is not allocated",
    ),
    "weights are used after their update": (
        states(1, "megatron-core", update=True),
        lambda a: [a, replace(LATE, kind=Kind.RECOMPUTE)] if UPDATES(a) and a.part == "L1" else [a],
        "uses weights of L1 after their update",
    ),
    "an update comes before its reduction": (
        states(1, "torchtitan", update=True),
        lambda a: [EARLY_UPDATE, a] if OF_L1(a) else [a],
        "updates L1 with gradients that are not reduced",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_parameters_and_gradients_out_of_order_are_caught(name: str) -> None:
    program, change, words = ORDERS[name]
    check(program)
    with pytest.raises(CheckError, match=words):
        check(mutate(program, "B", change))


@pytest.mark.parametrize("label", ["F", "B"])
def test_a_kernel_that_knows_of_no_gather_is_caught(label: str) -> None:
    def forget(action: Action) -> list[Action]:
        left = tuple(each for each in action.reads if str(each) != "L1.parameters")
        kernel = action.op == "fc1" and left != action.reads
        return [replace(action, reads=left)] if kernel else [action]

    program = states(3, "torchtitan")
    check(program)
    with pytest.raises(CheckError, match="uses weights of L1, which are not gathered"):
        check(mutate(program, label, forget))


def test_offloading_one_byte_less_is_caught() -> None:
    given, plan = offloading()

    def shorten(action: Action) -> list[Action]:
        if action.kind is not Kind.D2H:
            return [action]
        (host,) = action.allocs
        short = Alloc(host.storage, host.nbytes - 1)
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
        return [replace(action, allocs=(Alloc(first.storage, first.nbytes - 64), *others))]

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
    with pytest.raises(CheckError, match=r"reads H.loss_saved, which is not allocated"):
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
