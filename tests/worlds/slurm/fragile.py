"""A method that keeps everything and fails on its second rank as told: raises, is killed, hangs."""

from pathlib import Path

from tests.campaigns import suite_text, tiny

METHOD = '''
"""fragile: keeps everything; one rank fails in the middle of a step.

Claim: fails as told.
Source: ours, for tests.
"""

import os
import signal
import time
from typing import ClassVar

from msgspec import Struct

from rematbench.plan import Plan
from rematbench.problem import Problem


def fail(how: str) -> None:
    """End this process's work."""
    if how == "raises":
        raise ValueError("a fragile rank broke")
    if how == "oom":
        import torch

        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


class Fragile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it fails; not at all by default."""

    name: ClassVar[str] = "fragile"
    how: str = ""

    def plan(self, problem: Problem, base: Plan) -> Plan:
        """The base plan; in rank 1 of a launch its first step will fail."""
        if self.how and os.environ.get("RANK") == "1":
            from rematbench.worlds.torch.executor import Executor

            Executor.run_step = lambda executor: fail(self.how)
        return base
'''
SIZES = {"seq_len": 32, "global_batch": 2, "tp": 2, "precision": "fp32"}
"""Tensor parallel inside each node and, over two, a pipeline between them."""


def write_suite(checkout: Path, shapes: dict[str, int], hows: list[str], minutes: int = 5) -> None:
    """A measurement of problems (name -> nodes); the first one also fails in every way told."""
    (checkout / "methods/fragile.py").write_text(METHOD)
    problems = [tiny(name, gpus=2 * nodes, pp=nodes, **SIZES) for name, nodes in shapes.items()]
    first = next(iter(shapes))
    variants = [
        {"method": "fragile", "settings": {"how": how}, "problems": [first]} for how in hows
    ]
    top = {"steps": 2, "cell_minutes": minutes, "methods": ["fragile"], "variants": variants}
    (checkout / "config/measure.yaml").write_text(suite_text(problems, **top))
