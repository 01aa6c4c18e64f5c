"""Leave out each wait that the lowering writes, one at a time: the recorder finds it missing, or it
is said why not.

The tables name every one that the sources have (edges.py finds them), so a new one is not
forgotten.  A reason is held to its word too: what is said to change nothing must not be found.
"""

import pytest

from rematbench.evaluate.proof import CheckError, check
from rematbench.worlds.records.refusals import refusals
from tests.worlds.torch import edges
from tests.worlds.torch.edge_cases import case_of, stages
from tests.worlds.torch.fake_cuda import first_fault

PROGRAM: dict[str, tuple[str, ...]] = {
    "tp2 keep": (
        "emit_op.emit_op: w.collective on tp",
        "emit_op.emit_op: w.wait (1) on compute",
        "emit_op.emit_op: w.collective (1) on tp",
        "emit_op.emit_op: w.wait (3) on compute",
        "emit_backward.BackwardEmitter._backward_op: w.collective on tp",
        "emit_backward.BackwardEmitter._backward_op: w.wait (1) on compute",
        "emit_backward.BackwardEmitter._regather: self.w.collective on tp",
        "emit_backward.BackwardEmitter._input_gradient: w.collective on tp",
        "emit_backward.BackwardEmitter._input_gradient: w.wait (1) on compute",
        "step_blocks.norm_block: w.wait on compute",
    ),
    "tp2 windows beside": (
        "emit_op.emit_op: w.wait on compute",
        "emit_backward.BackwardEmitter._backward_op: w.wait on compute",
        "emit_backward.BackwardEmitter._input_gradient: w.wait on compute",
        "emit_backward.BackwardEmitter._kernels: w.wait on compute",
    ),
    "cp2 rows": (
        "emit_op.emit_op: w.collective on cp",
        "emit_backward.BackwardEmitter._regather: self.w.collective on cp",
        "emit_backward.BackwardEmitter._regather: self.w.wait (1) on compute",
        "emit_backward.BackwardEmitter._input_gradient: w.collective on cp",
        "step_blocks.reduce_block: w.collective on dp",
        "step_blocks.wait_block: w.wait on compute",
        "step_blocks.gather_block: w.collective on dp",
    ),
    "tp2-ulysses2 offload": (
        "emit_op._exchange: w.collective on cp",
        "emit_op._exchange: w.wait on compute",
        "emit_backward.BackwardEmitter._exchange: self.w.collective on cp",
        "emit_backward.BackwardEmitter._exchange: self.w.wait on compute",
        "step_blocks.norm_block: w.collective on tp",
    ),
    "dp2 windows beside": (
        "emit_states.ParameterGatherer.ready: w.wait on compute",
        "emit_states.GradReducer._exchange: w.wait on dp",
    ),
    "dp2 hosted": (
        "state_pieces._Writer._gradients: self.w.state_copy on d2h",
        "state_pieces._Writer._hosted: self.w.wait on host_update",
        "state_pieces._Writer._weights_up: self.w.state_copy on h2d",
        "state_pieces._Writer._weights_up: self.w.wait (1) on compute",
    ),
    "one pieces": (
        "state_pieces._Writer._weights_up: self.w.state_copy on h2d",
        "state_pieces._Writer._visit: self.w.state_copy on h2d",
        "state_pieces._Writer._visit: self.w.wait on compute",
        "state_pieces._Writer._visit: self.w.state_copy (1) on d2h",
    ),
    "one pieces master": (
        "state_pieces._Writer._end_visits: self.w.wait on compute",
        "state_pieces._Writer._weights_up: self.w.wait (1) on compute",
        "state_pieces._Writer._weights_up: self.w.wait on h2d",
    ),
    "one early host": (
        "ready_pieces.ReadyWriter._hosted: self.w.state_copy on d2h",
        "ready_pieces.ReadyWriter._hosted: self.w.wait on host_update",
        "ready_pieces.ready_end_block: w.state_copy on h2d",
    ),
    "tp2 early visit": (
        "emit_states.GradReducer._sum_norms: w.collective on tp",
        "ready_pieces.ReadyWriter._visit: self.w.state_copy on h2d",
        "ready_pieces.ReadyWriter._land: self.w.wait on compute",
        "ready_pieces.ReadyWriter._land: self.w.state_copy on d2h",
        "ready_pieces._end_visit: w.wait on compute",
    ),
    "tp2-dp2-zero2 early host": ("emit_states.GradReducer._exchange: w.wait (1) on dp",),
    "dp2 once": (
        "emit_states.GradReducer._apply: w.collective on dp",
        "emit_states.GradReducer._apply: w.wait on compute",
    ),
    "tp2 once": (
        "emit_states.GradReducer._apply: w.collective (1) on tp",
        "emit_states.GradReducer._apply: w.wait (1) on compute",
    ),
    "dp2-zero2 keep beside": ("emit_states.GradReducer._drain: w.wait on compute",),
    "dp2-zero3 gradients leave": ("emit_states.GradReducer._reduce_storages: w.state_copy on d2h",),
    "dp2-zero3 all leave": (
        "emit_states.ParameterGatherer._issue: w.wait (2) on dp",
        "emit_states.ParameterGatherer._shard_up: w.state_copy on h2d",
    ),
    "one offload": (
        "step_blocks.d2h_block: w.wait on d2h",
        "step_blocks.h2d_block: w.wait on h2d",
        "step_blocks.release_block: w.wait on compute",
        "emit_reload.Reloader.start: self.w.wait on compute",
    ),
    "one offload-layers": (
        "emit_forward.ForwardEmitter._copy_out: self.w.wait on d2h",
        "emit_forward.ForwardEmitter._drain: self.w.wait on compute",
        "emit_reload.Reloader._fetch: self.w.wait on h2d",
        "emit_reload.Reloader.wait_for: self.w.wait on compute",
    ),
    "pp2 offload": (
        "emit_forward.ForwardEmitter.block: w.wait on compute",
        "emit_backward.BackwardEmitter._arrive: w.wait on compute",
        "step_blocks.send_block: w.wait on pp_send",
    ),
    "tp2 apart": (
        "emit_backward.WeightEmitter._kernel: w.collective on tp",
        "emit_backward.WeightEmitter._kernel: w.wait on compute",
    ),
    "tp2 apart beside": ("emit_backward.BackwardEmitter._backward_op: w.wait (2) on compute",),
    "pp2 vocab-1": (
        "shared_vocabulary.SharedVocabulary._s: w.wait on compute",
        "shared_vocabulary.SharedVocabulary._t: w.wait on compute",
        "shared_vocabulary.SharedVocabulary._sum: w.wait on dp",
        "shared_vocabulary.SharedVocabulary._sum: w.wait (1) on compute",
        "shared_vocabulary.SharedVocabulary._arrive: w.wait on dp",
        "shared_vocabulary.SharedVocabulary._send_output: w.wait on pp_send",
        "emit_backward.BackwardEmitter._arrive: w.wait (1) on compute",
        "emit_backward.BackwardEmitter._arrive: w.wait (2) on compute",
    ),
    "pp2 tied": (
        "step_blocks.tied_send_block: w.wait on pp_send",
        "step_blocks.tied_recv_block: w.wait on compute",
        "step_blocks.tied_recv_block: w.wait (1) on compute",
    ),
}
"""Edges by the case in which the recorder finds that one is missing."""
CHANGES_NOTHING = {
    ("one pieces", "state_pieces._Writer.run: self.w.wait on compute"): (
        "updated weights are read in the next step, and a step ends for every stream"
    ),
    ("tp2 windows beside", "emit_op.emit_op: w.wait (2) on compute"): (
        "the end of a gather beside its kernel: the runtime's kernel has waited for all of it"
    ),
    ("dp2 windows beside", "emit_states.GradReducer._record_end: w.wait on dp"): (
        "the last reduction, just before, waits for the same; only its event is needed"
    ),
    ("one early host", "ready_pieces.ready_end_block: w.wait on compute"): (
        "updated weights are read in the next step, and a step ends for every stream"
    ),
    ("dp2-zero2 keep", "emit_states.GradReducer._exchange: w.wait (2) on compute"): (
        "a stack reduces without overlap; before the buffer is freed, compute waits again"
    ),
    ("dp2-zero3 keep", "emit_states.ParameterGatherer._issue: w.wait on dp"): (
        "a stack gathers without overlap; the runtime's gather waits for more, because its memory "
        "is compute's"
    ),
    ("dp2-zero3 keep beside", "emit_states.ParameterGatherer._issue: w.wait (1) on dp"): (
        "it bounds how many gathered units are alive; the runtime's gather waits for more, because "
        "its memory is compute's"
    ),
    ("cp2 rows", "step_blocks.gather_block: w.wait on compute"): (
        "gathered parameters are read in the next step, and a step ends for every stream"
    ),
    ("pp2 held", "step_blocks.wait_block: w.wait on pp_send"): (
        "a promise of the plan about time (the copy ends before the send), not about bytes"
    ),
}
NO_OPTIMIZER_THERE = "parameters on the host without an optimizer there"
NO_VISITS_THERE = "pieces on the device with parameters on the host"
HELD_THERE = "ZeRO stages 2 and 3, or gradients on the host, with pipeline stages"
NOT_EXECUTED = {
    "held_states.sums_block: w.collective on dp": HELD_THERE,
    "held_states.sums_block: w.wait on compute": HELD_THERE,
    "step_blocks.optimizer_block: w.wait on compute": NO_OPTIMIZER_THERE,
    "step_blocks.optimizer_block: w.state_copy on d2h": NO_OPTIMIZER_THERE,
    "state_pieces._Writer._on_device: self.w.state_copy on d2h": NO_VISITS_THERE,
    "emit_fetches.MatrixGatherer.read: w.wait on compute": "parameters gathered matrix by matrix",
    "emit_backward.BackwardEmitter._regather: self.w.wait on compute": "ring attention",
}
"""Edges by what the runtime refuses to execute (edge_cases.REFUSED)."""


OUTSIDE_CHECK = {
    "step_blocks.optimizer_block: w.wait on compute": (
        "updated weights are on the host before the next step, which `check` does not see"
    ),
    "shared_vocabulary.SharedVocabulary._t: w.wait on compute": (
        "the sums over stages scale what each stage has saved, and are no storage of their own"
    ),
    "shared_vocabulary.SharedVocabulary._sum: w.wait on dp": (
        "the parts of other stages are on other ranks, which `check` does not see"
    ),
}
"""Edges that `check` does not find missing."""


def test_every_wait_of_the_lowering_is_in_a_table() -> None:
    named = [name for every in PROGRAM.values() for name in every]
    named += [name for _, name in CHANGES_NOTHING]
    places = {name.rpartition(" on ")[0] for name in (*named, *NOT_EXECUTED)}
    assert places == {str(edge) for edge in edges.of_programs()}
    written = {name for case in PROGRAM for name in edges.written(case_of(case))}
    written |= {name for case, _ in CHANGES_NOTHING for name in edges.written(case_of(case))}
    assert written == set(named)


@pytest.mark.parametrize(("case", "name"), [(c, n) for c, names in PROGRAM.items() for n in names])
def test_a_program_without_one_of_its_waits_is_found(case: str, name: str) -> None:
    broken = edges.without(case_of(case), name)
    assert any(first_fault(broken, stage) for stage in stages(broken))


@pytest.mark.soak
@pytest.mark.parametrize(("case", "name"), CHANGES_NOTHING)
def test_a_wait_that_is_said_to_change_nothing_does_not(case: str, name: str) -> None:
    broken = edges.without(case_of(case), name)
    assert not any(first_fault(broken, stage) for stage in stages(broken))


def found_by_check(case: str, name: str) -> bool:
    program = edges.without(case_of(case), name).program
    assert program is not None
    try:
        check(program)
    except CheckError:
        return True
    return False


def test_check_finds_all_of_them_too() -> None:
    """Also those that only order gradients and parameters that stay where they are."""
    every = [(case, name) for case, names in PROGRAM.items() for name in names]
    assert [each for each in every if found_by_check(*each) == (each[1] in OUTSIDE_CHECK)] == []


@pytest.mark.parametrize("name", NOT_EXECUTED)
def test_a_wait_that_is_not_executed_is_refused_and_held_by_check(name: str) -> None:
    case = case_of(NOT_EXECUTED[name])
    words = refusals(case.problem, case.plan)
    assert any(refusal.startswith(NOT_EXECUTED[name]) for refusal in words)
    assert name in edges.written(case)
    assert found_by_check(NOT_EXECUTED[name], name) != (name in OUTSIDE_CHECK)
