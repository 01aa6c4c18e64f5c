"""The executor on torch's CUDA build: bytes, allocators and what it asks of NCCL."""

from pathlib import Path

import pytest

from rematbench.inputs.layout import Layout
from tests.stand_in import allocators, orders
from tests.stand_in.conftest import Run
from tests.worlds.torch import cases

pytestmark = pytest.mark.soak
RANKS = ("one", "tp2", "pp2", "cp2", "dp2", "ulysses2", "pp2-vpp2", "tp2-pp2", "pp4-vpp2")
RANKS += ("dp2-zero2", "dp2-zero3")


@pytest.mark.parametrize("layout", RANKS)
def test_live_bytes_are_the_ledgers_and_a_traces(layout: str, run: Run) -> None:
    *wrong, count = run("-m", "tests.stand_in.grid", layout)
    assert wrong == []
    assert int(count.split()[0]) > 30


@pytest.mark.parametrize("layout", sorted(set(cases.LAYOUTS) - set(RANKS)))
def test_other_layouts_too(layout: str, run: Run) -> None:
    *wrong, _ = run("-m", "tests.stand_in.grid", layout, "first")
    assert wrong == []


METHODS = ("keep_all", "full_recompute", "mst", "balanced_checkpointing")


@pytest.mark.parametrize(
    ("layout", "methods", "reserved"),
    [("one", (*METHODS, "memo"), 0.01), ("pp2", METHODS, 0.04), ("tp2", METHODS, 0.05)],
)
def test_torchs_allocator_holds_what_the_simulated_one_does(
    layout: str, methods: tuple[str, ...], reserved: float, run: Run
) -> None:
    """Blocks and segments.  More than one GPU has pools of streams that the simulated one has not;
    and the first method again, after all others, holds what it held at first."""
    lines = run("-m", "tests.stand_in.allocators", layout, *methods, methods[0])
    ranks = Layout(**allocators.LAYOUTS[layout]).gpus
    assert len(lines) == ranks * (len(methods) + 1)
    for line in lines:
        blocks, own_blocks, segments, own_segments = map(int, line.split()[1:])
        assert blocks == pytest.approx(own_blocks, rel=0.003), line
        assert segments == pytest.approx(own_segments, rel=reserved), line
    assert lines[:ranks] == lines[-ranks:]


@pytest.mark.parametrize("layout", ["pp4-vpp2", "tp2-pp2", "tp2-cp2", "pp2-ulysses2"])
def test_ranks_ask_nccl_for_the_same_in_the_same_order(
    layout: str, run: Run, tmp_path: Path
) -> None:
    run("-m", "tests.stand_in.grid", layout, "first", STAND_IN_LOG=str(tmp_path))
    asked = orders.read(tmp_path)
    assert orders.mismatches(asked) == []
    assert sum(len(every) for ranks in asked.values() for every in ranks.values()) > 100
    swapped = {name: {r: list(e) for r, e in ranks.items()} for name, ranks in asked.items()}
    longest = max(swapped.values(), key=lambda ranks: max(map(len, ranks.values())))
    every = next(iter(longest.values()))
    every[-2] = every[-2]._replace(count=every[-2].count + 1)
    assert orders.mismatches(swapped)


def test_a_gpu_that_is_too_small_is_out_of_memory(run: Run, tmp_path: Path) -> None:
    """By torch's own allocator; the record says so."""
    out = tmp_path / "record.json"
    words = ["keep_all", "--model", "llama-block-1024", "--cluster", "h200-141gb", "--gpus", "1"]
    words += ["--system", "rematbench", "--seq-len", "1024", "--global-batch", "1"]
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        run(
            *("-m", "rematbench", "execute", *words, "--device", "cuda", "--out", str(out)),
            STAND_IN_GPU_BYTES=str(64 << 20),
        )
    assert '"status": "oom"' in out.read_text(encoding="utf-8")
