"""What is run without one of its edges: cases by name, and scenes of what no case shows."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import check
from rematbench.inputs.load import load_cluster
from rematbench.model import RecipeName
from rematbench.plan import Share
from rematbench.worlds.torch import exchanges, movers, single_rank, worker
from rematbench.worlds.torch.batch import MicroBatch
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.exchanges import used_channels
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.streams import CudaStreams, Mark
from tests.problems import rule, transfers
from tests.worlds.torch import (
    cases,
    test_in_backward,
    test_state_pieces,
)
from tests.worlds.torch.fake_cuda import DEVICE, OVERLAP, executor_of, first_fault
from tests.worlds.torch.recorder import Recorder, recording


def late_copies() -> Case:
    """A sound program that copies the second micro-batch out after the first one's backward, so
    into host memory that this backward gave back."""
    case = cases.case("pp2", "offload", precision="bf16")
    program = lower(case.plan, case.problem)
    first, *others = program.ranks
    labels = [(first.blocks[step.block].label, step.micro_batch) for step in first.steps]
    late = [(label, 1) for label in ("D2H", "free_d2h", "H2D")]
    order = [at for at in labels if at not in late]
    after = order.index(("B", 0)) + 1
    order[after:after] = late
    steps = tuple(first.steps[labels.index(at)] for at in order)
    program = Program(ranks=(replace(first, steps=steps), *others))
    check(program)
    return Case(**{**vars(case), "program": program})


def held() -> Case:
    """A copy ends before the next send of a forward starts."""
    case = cases.case("pp2", "offload", precision="bf16")
    plan = transfers(case.plan, before_send_phases=("warmup", "steady"))
    return dataclasses.replace(case, plan=plan)


def hosted(layout: str) -> Case:
    """The optimizer's states in host memory."""
    return test_state_pieces.pair("hosted", layout, "keep", "bf16")[1]


def in_pieces(mix: str) -> Case:
    """The optimizer's states in pieces."""
    return test_state_pieces.pair(mix, "one", "keep", "bf16")[1]


def early(layout: str, mix: str) -> Case:
    """Pieces that start as their gradients become ready."""
    return test_state_pieces.pair(f"early {mix}", layout, "keep", "bf16")[1]


def leaving(layout: str, *kinds: str) -> Case:
    """Kinds of states in host memory."""
    return cases.in_host_memory(cases.case(layout, "keep", precision="bf16"), *kinds)


def ordered(layout: str, schedule: str, **changes: object) -> Case:
    """Passes in an order of their own, with weight gradients apart."""
    case = cases.case(layout, "keep", precision="bf16", system_changes=changes)
    return dataclasses.replace(case, plan=replace(case.plan, schedule=schedule))


def narrow(layout: str, recipe: RecipeName) -> Case:
    """Linears in FP8 whose scales several ranks share."""
    case = cases.case(layout, "keep", precision="bf16")
    work = replace(case.problem.workload, recipe=recipe)
    hopper = load_cluster("h800-80gb")
    return dataclasses.replace(
        case, problem=dataclasses.replace(case.problem, workload=work, cluster=hopper)
    )


REFUSED: dict[str, Callable[[], Case]] = {
    "quantised linears with tensor or context parallelism": lambda: narrow("tp2", "fp8"),
    "scales of earlier steps over data-parallel ranks": lambda: narrow("dp2", "fp8-delayed"),
    "ring attention": lambda: cases.case(
        "cp2", "keep", precision="bf16", system_changes={"cp_kind": "ring"}
    ),
    "parameters on the host without an optimizer there": lambda: leaving("dp2-zero3", "parameter"),
    "pieces on the device with parameters on the host": lambda: test_state_pieces.pair(
        "k2", "dp2-zero3", "keep", "bf16", "parameter"
    )[1],
    "ZeRO stages 2 and 3, or gradients on the host, with pipeline stages": lambda: cases.case(
        "dp2-zero3", "keep", precision="bf16", pp=2
    ),
    "parameters gathered matrix by matrix": lambda: cases.case(
        "dp2-zero3",
        "keep",
        precision="bf16",
        system_changes={"prefetch_elements": 1, "live_elements": 1},
    ),
}
"""Cases by what the runtime refuses of them, in its own words."""


def shared() -> Case:
    """Layers run again from inputs that two tensor-parallel ranks share out."""
    full = cases.case("tp2-no-sp", "full", precision="bf16")
    plan = full.plan.with_rules(rule(Share(2, "device"), "layer_input"))
    return Case(**{**vars(full), "plan": plan})


MADE: dict[str, Callable[[], Case]] = {
    "tp2 shared": shared,
    "tp2 apart": lambda: ordered("tp2-pp2", "zb-h1"),
    "tp2 apart beside": lambda: ordered("tp2-pp2", "zb-h1", **OVERLAP),
    "pp2 tied": lambda: cases.case("pp2", "keep", precision="bf16", model=cases.TIED),
    "dp2 once": lambda: test_in_backward.case("dp2", "keep", "bf16")[1],
    "tp2 once": lambda: test_in_backward.case("tp2", "keep", "bf16")[1],
    "one hosted": lambda: hosted("one"),
    "dp2 hosted": lambda: hosted("dp2"),
    "one pieces": lambda: in_pieces("all three"),
    "one pieces k2": lambda: in_pieces("k2"),
    "one early host": lambda: early("one", "host"),
    "tp2 early visit": lambda: early("tp2", "visit"),
    "tp2-dp2-zero2 early host": lambda: early("tp2-dp2-zero2", "host"),
    "dp2-zero3 gradients leave": lambda: leaving("dp2-zero3", "optimizer", "gradient"),
    "dp2-zero3 all leave": lambda: leaving("dp2-zero3", "optimizer", "gradient", "parameter"),
    "pp2 held": held,
    "pp2 late copies": late_copies,
}
"""Cases that no two words name; `beside`: collectives beside kernels."""


@cache
def case_of(name: str) -> Case:
    if name in (made := MADE | REFUSED):
        return made[name]()
    layout, plan, *rest = name.split()
    changes = OVERLAP if rest else {}
    one = replace(cases.TINY, num_layers=1)
    return cases.case(layout, plan, precision="bf16", system_changes=changes, model=one)


def stages(case: Case) -> Iterator[int]:
    return iter(range(case.problem.layout.pp))


def fault_of(name: str) -> str:
    """The first fault of a case on any stage."""
    case = case_of(name)
    return next(filter(None, (first_fault(case, stage) for stage in stages(case))), "")


# -- scenes ---------------------------------------------------------------------------------------


class Message:
    """A message that has not arrived; what is read of it before is poison."""

    def __init__(self, data: Tensor | None) -> None:
        self.data, self.waited = data, False
        if data is not None:
            data.fill_(float("nan"))

    def wait(self) -> None:
        self.waited = True
        if self.data is not None:
            self.data.fill_(0.1)


def on_a_cpu() -> str:
    """The last of two stages on a CPU, its messages stand-ins (no process beside this one)."""
    case, sent = cases.case("pp2", "keep"), []

    def send(data: Tensor, *args: object, **kwargs: object) -> Message:
        sent.append(Message(None))
        return sent[-1]

    problem = case.problem
    rank = single_rank.stage_rank(problem.layout, problem.system.parallel.rank_order, 1)
    with single_rank.fake_job(rank, 2), pytest.MonkeyPatch.context() as patch:
        groups = Groups(problem.layout, problem.system.parallel.rank_order, rank)
        groups.buffered = True
        patch.setattr(dist, "isend", send)
        patch.setattr(dist, "irecv", lambda data, *args, **kwargs: Message(data))
        model = RankModel(problem, case.plan, groups.place, torch.device("cpu"), seed=0)
        ids = torch.zeros(model.shapes.tokens, dtype=torch.int64)
        model.batches = [MicroBatch(ids, ids, 1.0)] * problem.layout.num_micro_batches
        executor = Executor(lower(case.plan, problem).ranks[1], model, groups)
        loss = executor.run_step()
    if math.isnan(loss):
        return "a message is read before it has arrived"
    return "" if sent and all(message.waited for message in sent) else "a send is under way"


def sums_on_the_host() -> str:
    """Gradients that a slow host adds, as an observer of the update reads them."""
    case = cases.in_host_memory(cases.case("one", "keep"), "optimizer", "gradient")
    seen: list[Tensor] = []

    def slowly(total: Tensor, arrived: Tensor) -> None:
        time.sleep(0.02)
        total.add_(arrived)

    def look(every: list[Parameter]) -> None:
        seen.extend(parameter.own_grad.clone() for parameter in every)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(movers, "_add", slowly)
        groups = worker._groups(case, 0, {})
        model = RankModel(case.problem, case.plan, groups.place, torch.device("cpu"), case.seed)
        executor = Executor(lower(case.plan, case.problem).ranks[0], model, groups)
        executor.before_update = look
        worker._load(case, executor, 0)
        executor.run_step()
    sums = [parameter.own_grad for parameter in model.parameters.values()]
    complete = all(map(torch.equal, seen, sums))
    return "" if complete else "sums are read before every gradient is added"


def recorded(run: Callable[[Recorder], None]) -> str:
    """What the recorder finds in something else than a step."""
    with pytest.MonkeyPatch.context() as patch, recording(patch) as recorder:
        run(recorder)
        return (*recorder.faults, "")[0]


def waiting_from_elsewhere() -> str:
    """A stream waits for a message while another one is current."""

    def run(recorder: Recorder) -> None:
        streams, data = CudaStreams(DEVICE), torch.zeros(8, device=DEVICE)
        streams.begin()
        mark = Mark(None)
        mark.messages = [dist.irecv(data, 0, group=run, tag=0)]  # type: ignore[arg-type,list-item]
        with streams.on("d2h"):
            streams.wait("compute", mark)
        with streams.on("compute"):
            data.add_(1.0)

    return recorded(run)


def timed_steps() -> str:
    """Seconds of a step, by events that must have been recorded and reached."""
    case = case_of("one keep")
    with single_rank.fake_job(0, 1), pytest.MonkeyPatch.context() as patch, recording(patch):
        executor = executor_of(case, 0, 0)
        seconds = executor.streams.clock()
        executor.issue_step()
        try:
            return "" if seconds() > 0.0 else "no time has gone by"
        except AssertionError as error:
            return f"an event is not what its reader thinks: {error}"


def opened_channels() -> str:
    """What opens a communicator is let go of only when it is through."""
    case = case_of("pp2 keep")
    lay, order = case.problem.layout, case.problem.system.parallel.rank_order
    used = used_channels(lower(case.plan, case.problem), lay)
    with single_rank.fake_job(0, lay.gpus), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        with recording(patch) as recorder:
            Groups(lay, order, 0).connect(DEVICE, used)
            torch.zeros(1, device=DEVICE)
        return (*recorder.faults, "")[0]


def turning() -> str:
    """Messages to a rank's other chunk, whose copies the recorder sees here."""
    case = cases.case("pp2-vpp2", "zb-v", precision="bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "_disable_current_modes", nullcontext)
        return next(filter(None, (first_fault(case, stage) for stage in stages(case))), "")


SCENES: dict[str, Callable[[], str]] = {
    "on a CPU": on_a_cpu,
    "sums on the host": sums_on_the_host,
    "waiting from elsewhere": waiting_from_elsewhere,
    "timed steps": timed_steps,
    "opened channels": opened_channels,
    "turning": turning,
}
