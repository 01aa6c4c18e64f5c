"""The layouts of a cut, and what no plan changes there: messages, a step's end, states, room."""

from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import cached_property
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.search.bounds import step_bound
from rematbench.advise.search.columns import Array, Columns
from rematbench.advise.search.contention import sent_bytes
from rematbench.advise.search.end import after_passes, host_update_s
from rematbench.advise.search.highs import no_cost
from rematbench.advise.search.kernels import layer_cost
from rematbench.advise.search.probe import Facts, Line
from rematbench.advise.search.shared import Shared
from rematbench.advise.search.site import Site
from rematbench.advise.search.space import Choice
from rematbench.problem import Problem
from rematbench.spec.layout import Layout


class Key(NamedTuple):
    """What the layouts of one cut share.  `zero`: (stage, dp) of ZeRO 2 and 3, whose passes
    gather or reduce among data-parallel ranks; (0, 0) of other layouts."""

    tp: int
    sp: bool
    cp: int
    ulysses: int
    micro_batch: int
    single: bool
    hosted: bool
    zero: tuple[int, int]


def key(choice: Choice) -> Key:
    """The key of a choice's cut."""
    lay = choice.layout
    zero = (lay.zero_stage, lay.dp) if lay.zero_stage > 1 else (0, 0)
    alike = (lay.tp, lay.sp, lay.cp, lay.ulysses, lay.micro_batch)
    return Key(*alike, lay.pp == 1, choice.hosted, zero)


class Cut:
    """All layouts that cut a layer's tensors and the micro-batches alike.  `problem` has one of
    them; `shared`: what other cuts, and searches on other clusters, have lowered; `reserving`:
    gives a problem the reserve of its layout (None: that of `problem`)."""

    def __init__(
        self,
        choices: Sequence[Choice],
        problem: Problem,
        shared: Shared | None = None,
        reserving: Callable[[Problem], Problem] | None = None,
    ) -> None:
        self.problem, self._reserving = problem, reserving or _same
        self.choices, self.shared = choices, shared or Shared({})
        self.columns = Columns(choices, problem)
        self._ends_s: dict[tuple[int, int, int, int], float] = {}
        self._sites: dict[int, Site] = {}

    def _at(self, layout: Layout) -> Problem:
        """The problem at one of the layouts, without its reserve."""
        return replaced(self.problem, layout=layout, _memo={}, _weights={})

    @cached_property
    def send_s(self) -> Array:
        """Seconds of a message between neighbouring stages, on the fastest link of any layout."""
        cost, lay = self.problem.cost, self.problem.layout
        nbytes = self.problem.layer_kinds[0].activations["layer_input"].nbytes
        nbytes = nbytes if lay.sp or lay.tp == 1 else nbytes // lay.tp
        rate = max(cost.nvlink_bytes_per_s, cost.nic_bytes_per_s)
        seconds = nbytes / rate * self.problem.system.scales.communication
        return np.full(len(self.choices), seconds)

    @cached_property
    def end_s(self) -> Array:
        """Least seconds after a rank's last pass: one gradient reduction and one parameter gather,
        where nothing hides them, and the update of states in host memory."""
        layer = min(table.parameters for table in self.problem.layer_kinds)
        counts = layer * np.minimum(self.columns.first, self.columns.last)
        found = [self._end_s(c.layout, int(n)) for c, n in zip(self.choices, counts, strict=True)]
        return np.array(found)

    def _end_s(self, layout: Layout, count: int) -> float:
        key = (layout.dp, layout.pp, layout.zero_stage, count)
        if key not in self._ends_s:
            problem = self._at(layout)
            comms_s = (problem.cost.comm_s(comm, 0) for comm in after_passes(problem, count))
            self._ends_s[key] = fsum((*comms_s, host_update_s(problem, count)))
        return self._ends_s[key]

    @cached_property
    def sent_bytes(self) -> Array:
        """Bytes of each layout's messages to other nodes in a micro-batch."""
        known: dict[tuple[int, int, int], float] = {}
        for lay in (choice.layout for choice in self.choices):
            if (lay.pp, lay.dp, lay.vpp) not in known:
                known[lay.pp, lay.dp, lay.vpp] = sent_bytes(self._at(lay))
        return np.array([known[c.layout.pp, c.layout.dp, c.layout.vpp] for c in self.choices])

    @cached_property
    def usable_bytes(self) -> NDArray[np.int64]:
        """Device bytes that each layout may reserve: without its communicators and the reserve."""
        known: dict[tuple[int, int], int] = {}
        for lay in (choice.layout for choice in self.choices):
            if (lay.pp, lay.dp) not in known:
                at = self._reserving(replaced(self.problem, layout=lay))
                known[lay.pp, lay.dp] = at.usable_bytes - at.reserve_bytes
        return np.array([known[choice.layout.pp, choice.layout.dp] for choice in self.choices])

    def site(self, index: int) -> Site:
        """What all searches know of the layout at `index`."""
        if index not in self._sites:
            choice = self.choices[index]
            problem = self._reserving(self._at(choice.layout))
            self._sites[index] = Site(choice, problem, self.shared.programs)
        return self._sites[index]

    @cached_property
    def kernels_s(self) -> Array:
        """A first bound of the arm that keeps everything, in seconds, from the operator tables."""
        kinds = [layer_cost(self.problem, table) for table in self.problem.layer_kinds]
        layer = min(kinds, key=lambda cost: cost.forward.compute_s + cost.backward.compute_s)
        line = Line(0, no_cost(), layer)
        return step_bound(self.columns, Facts(line, line, line), 0 * self.send_s)

    @cached_property
    def states_over_bytes(self) -> Array:
        """Bytes by which the states of the fullest device exceed what the device may hold."""
        return np.asarray(np.maximum.reduce(self.columns.state_bytes) - self.usable_bytes)

    @property
    def has_room(self) -> bool:
        """Whether the states of any layout fit."""
        return bool((self.states_over_bytes <= 0).any())


def _same(problem: Problem) -> Problem:
    return problem
