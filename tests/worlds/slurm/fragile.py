"""A method that keeps everything and fails on its second rank as told: raises, is killed, hangs."""

from pathlib import Path

from tests.campaigns import suite_text, tiny
from tests.method_files import method_file

HEAD = """import os
import signal
import time


def fail(how: str) -> None:
    if how == "raises":
        raise ValueError("a fragile rank broke")
    if how == "oom":
        import torch

        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


"""
BODY = """if self.how and os.environ.get("RANK") == "1":
    from rematbench.worlds.torch.executor import Executor

    Executor.run_step = lambda executor: fail(self.how)
return base"""
SIZES = {"seq_len": 32, "global_batch": 2, "tp": 2, "precision": "fp32"}
"""Tensor parallel inside each node and, over two, a pipeline between them."""


def write_suite(checkout: Path, shapes: dict[str, int], hows: list[str], minutes: int = 5) -> None:
    """A measurement of problems (name -> nodes); the first one also fails in every way told."""
    text = method_file("fragile", BODY, head=HEAD, fields='how: str = ""')
    (checkout / "methods/fragile.py").write_text(text)
    problems = [tiny(name, gpus=2 * nodes, pp=nodes, **SIZES) for name, nodes in shapes.items()]
    first = next(iter(shapes))
    variants = [
        {"method": "fragile", "settings": {"how": how}, "problems": [first]} for how in hows
    ]
    top = {"steps": 2, "cell_minutes": minutes, "methods": ["fragile"], "variants": variants}
    (checkout / "config/measure.yaml").write_text(suite_text(problems, **top))
