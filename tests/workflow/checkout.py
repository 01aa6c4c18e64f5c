"""A copy of the checkout to run the workflow in: tests write nothing into the real one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "compare",
            "search",
            "own_model_and_cluster",
            "calibrate",
            "own_method",
            "one_figure",
            "python",
            "run_for_real",
            "claims",
        )
    ),
)
"""The pages whose commands run as they stand, in the order in which a reader meets them."""
PARTS = (
    "Snakefile",
    "README.md",
    "environment.yml",
    "baselines",
    "config",
    "figures",
    "methods",
    "profiles",
    "results/published",
    "src",
    "workflows",
)


class Checkout:
    """A copied checkout; commands run in it with this interpreter and the copy's package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for part in PARTS:
            source, target = ROOT / part, path / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)  # with its bytecode, which every job loads
            else:
                shutil.copy2(source, target)
        (path / "slurm").symlink_to("profiles/slurm")  # as in the checkout

    def run(
        self, command: str | Sequence[str], path: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a text by the shell) with this or another PATH; keep what it prints."""
        bin_dir = str(Path(sys.executable).parent)
        environment = os.environ | {
            "PATH": os.pathsep.join([bin_dir, path or os.environ["PATH"]]),
            "PYTHONPATH": str(self.path / "src"),
        }
        return subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def snakemake(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the workflow on two cores."""
        return self.run(["snakemake", "--cores", "2", "--scheduler", "greedy", *words])
