"""What a step dispatches, counted where torch hands it to a device."""

from collections import Counter
from typing import Any

import torch

from rematbench.worlds.torch.dispatch import DispatchMode

NO_KERNEL = {
    *("view", "_unsafe_view", "transpose", "t", "permute", "expand", "detach", "slice", "select"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "as_strided", "alias", "unbind"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device"),
}
"""Views, room without values, and a question."""


class Launches(DispatchMode):
    """Counts by phase, kernels and collectives apart.  What runs inside an autograd graph is
    backward (so is what Megatron's own backward of a linear asks for), all else is `phase`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        phase = "backward" if torch._C._current_graph_task_id() != -1 else self.phase
        if func.namespace == "c10d":
            self.found[f"{phase} collectives"] += 1
        elif func.overloadpacket.__name__ not in NO_KERNEL:
            self.found[phase] += 1
        return func(*args, **(kwargs or {}))


def of_more_layers(more: Counter[str], less: Counter[str], layers: int = 1) -> dict[str, float]:
    """A layer's share of what a model of so many more layers dispatches more of."""
    return {key: (more[key] - less[key]) / layers for key in sorted(more | less)}
