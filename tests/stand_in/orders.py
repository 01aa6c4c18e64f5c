"""What ranks asked of NCCL, held against each other."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class SearchRequest(NamedTuple):
    """A line of a rank's log."""

    what: str
    count: int
    dtype: int
    peer: int


def read(folder: Path) -> dict[str, dict[int, list[SearchRequest]]]:
    """Communicator -> rank in it -> what that rank asked, in order."""
    found: dict[str, dict[int, list[SearchRequest]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.iterdir():
        for line in path.read_text(encoding="ascii").splitlines():
            name, rank, _, what, count, dtype, peer = line.split()
            found[name][int(rank)].append(SearchRequest(what, int(count), int(dtype), int(peer)))
    return found


def mismatches(asked: dict[str, dict[int, list[SearchRequest]]]) -> list[str]:
    """Communicators whose ranks would wait for ever or take each other's data for another's:
    collectives in another order, messages of other sizes than those that are awaited."""
    wrong = []
    for name, ranks in asked.items():
        collectives = {
            rank: [one for one in every if one.what not in ("send", "recv")]
            for rank, every in ranks.items()
        }
        first = next(iter(collectives.values()))
        wrong += [f"{name}: rank {r}" for r, every in collectives.items() if every != first]
        for rank, every in ranks.items():
            for peer in {one.peer for one in every if one.what == "send"}:
                sent = [one[1:3] for one in every if (one.what, one.peer) == ("send", peer)]
                others = ranks.get(peer, [])
                awaited = [one[1:3] for one in others if (one.what, one.peer) == ("recv", rank)]
                if sent != awaited:
                    wrong.append(f"{name}: rank {rank} to {peer}")
    return wrong
