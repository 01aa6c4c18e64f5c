"""Steps that are written by hand in torch, to compare with an executor's steps."""

from typing import Literal

Means = Literal["nothing", "checkpoint", "save_on_cpu", "checkpoint+save_on_cpu"]
"""What torch itself offers against the memory of activations, used around each layer:
torch.utils.checkpoint (not reentrant), and torch.autograd.graph.save_on_cpu with pinned memory."""
