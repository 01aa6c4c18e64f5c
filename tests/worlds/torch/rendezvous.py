"""Messages as NCCL does them: a send ends only when its receiver has taken it, and what shares a
communicator runs in the order of its issue.  Streams of all ranks are walked until nothing moves.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from rematbench.engine.program.action import Kind
from rematbench.engine.program.program import Program
from rematbench.inputs.layout import Layout
from rematbench.worlds.torch.exchanges import message
from rematbench.worlds.torch.groups import Channel

Comm = Callable[[Channel], Hashable]
Place = tuple[int, Hashable]
"""A rank's stream: one of the executor's, or a communicator's own."""


@dataclass
class Item:
    """One piece of work: it starts when what it needs is done, a message when its peer's does."""

    needs: list["Item"] = field(default_factory=list)
    meets: tuple[Channel, int, bool] | None = None
    done: bool = False


class Walk:
    """Puts every rank's actions on streams, as the executor issues them, and runs them."""

    def __init__(self, program: Program, layout: Layout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm
        self.streams: dict[Place, list[Item]] = {}
        for stage in range(layout.pp):
            self._issue(program, stage)

    def _put(self, place: Place, item: Item) -> Item:
        self.streams.setdefault(place, []).append(item)
        return item

    def _issue(self, program: Program, stage: int) -> None:
        rank, marks = program.ranks[stage], {}
        for index, micro_batch, chunk in rank.steps:
            for action in rank.blocks[index].actions:
                here, where = (stage, action.stream), (micro_batch, chunk)
                wait = marks.get((index, action.wait)) or marks.get((where, action.wait))
                item = self._put(here, Item([wait] if action.wait and wait else []))
                if action.kind in (Kind.SEND, Kind.RECV):
                    channel, tag = message(self.layout, stage, action, where)
                    meets = (channel, tag, action.kind is Kind.SEND)
                    item = self._put((stage, self.comm(channel)), Item([item], meets))
                for event in filter(None, (action.exchange.begin, action.event)):
                    marks[index if event.is_local else where, event] = item

    def stuck(self) -> list[Place]:
        """Streams that never end."""
        moved = True
        while moved:
            heads = {place: items[0] for place, items in self.streams.items() if items}
            ready = {p: i for p, i in heads.items() if all(need.done for need in i.needs)}
            meeting = {item.meets for item in ready.values()}
            moved = False
            for place, item in ready.items():
                if item.meets is None or (*item.meets[:2], not item.meets[2]) in meeting:
                    item.done = moved = True
                    self.streams[place].pop(0)
        return [place for place, items in self.streams.items() if items]
