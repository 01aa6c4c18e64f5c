"""Flash attention alone and behind matrix products, in two orders of memory, on one GPU.

A product takes a GPU to its power limit, and a kernel behind it runs at a lower clock: attention in
a training step is slower than in a benchmark of attention alone.  A row for each measurement;
results/measured/gpu-mended/attention.jsonl has those of an H200.  `./bench run python -m
benchmarks.attention_clock` needs torch and a GPU; `--small` runs on the CPU, whose seconds mean
nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rematbench.host.gpu_state import GpuState, gpu_state
from rematbench.measure.torch.action_seconds import Stamp, between
from rematbench.worlds.torch import attention_backends
from rematbench.worlds.torch.streams import stamp

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama-3.1-8B (arXiv 2407.21783, table 3)."""
ROWS, WIDTH, FFN = 32768, 4096, 28672
"""Of the products before: gate and up projections of that model, as one product."""
PRODUCTS = 3
CALLS = {8192: 60, 32768: 12}
"""Calls at each length; the first two warm up."""
SMALL = {64: 3}
Pass = Callable[[], object]


def passes(length: int, order: str, device: torch.device) -> dict[str, Pass]:
    """The forward and the backward on normal numbers, batch x heads x rows x head_dim, with each
    head's rows together (`heads`), or each row's heads (`rows`, as a projection writes them)."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32

    def made(heads: int) -> Tensor:
        if order == "heads":
            return torch.randn(1, heads, length, HEAD_DIM, device=device, dtype=kind)
        x = torch.randn(1, length, heads, HEAD_DIM, device=device, dtype=kind)
        return x.transpose(1, 2)

    q, k, v, grad = made(HEADS), made(KV_HEADS), made(KV_HEADS), made(HEADS)
    out, lse = attention_backends.flash(q, k, v, True)
    return {
        "forward": lambda: attention_backends.flash(q, k, v, True),
        "backward": lambda: attention_backends.flash_backward(grad, q, k, v, out, lse, True),
    }


def timed(
    call: Pass, before: Pass, calls: int, device: torch.device
) -> tuple[list[float], GpuState]:
    """Seconds of each call but the first two, all of them issued without a wait between, and the
    GPU's state while it works."""
    marks = []
    for _ in range(calls):
        before()
        start = now(device)
        call()
        marks.append((start, now(device)))
    state = GpuState()
    if device.type == "cuda":
        state = gpu_state("0")
        torch.cuda.synchronize(device)
    return [between(*pair) for pair in marks][2:], state


def now(device: torch.device) -> Stamp:
    """The time of the device's current stream."""
    if device.type == "cuda":
        return stamp(torch.cuda.current_stream(device))
    return time.perf_counter()


def rows(device: torch.device) -> Iterator[list[object]]:
    """A row for each length, order, pass and number of products before a call."""
    cuda = device.type == "cuda"
    kind = torch.bfloat16 if cuda else torch.float32
    x = torch.randn(ROWS if cuda else 64, WIDTH, device=device, dtype=kind)
    weight = torch.randn(FFN if cuda else 64, WIDTH, device=device, dtype=kind)
    for length, calls in (CALLS if cuda else SMALL).items():
        for order in ("heads", "rows"):
            for name, call in passes(length, order, device).items():
                for products in (0, PRODUCTS):

                    def before(products: int = products) -> None:
                        for _ in range(products):
                            x @ weight.T

                    found, state = timed(call, before, calls, device)
                    numbers = (statistics.median(found), min(found), max(found))
                    clock = (state.sm_clock_mhz, state.power_w)
                    yield [length, order, name, products, *(f"{s:.4g}" for s in numbers), *clock]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny case on the CPU")
    device = torch.device("cpu" if parser.parse_args().small else "cuda")
    sys.stdout.write("length order pass products median_s least_s most_s sm_mhz watts\n")
    for row in rows(device):
        sys.stdout.write(" ".join(map(str, row)) + "\n")


if __name__ == "__main__":
    main()
