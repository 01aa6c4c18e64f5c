"""The command that simulates a cell of the matrix."""

import shlex
from collections.abc import Mapping

from rematbench.matrix.spec import MatrixSpec
from rematbench.plugins.registry import Registry
from rematbench.spec.problemspec import ProblemSpec


class Commands:
    """The commands of the cells of a matrix, and the names of its arms on the command line."""

    def __init__(self, spec: MatrixSpec, registry: Registry) -> None:
        self.spec = spec
        self.names = {arm.name: arm.resolved(registry).text for arm in spec.all_arms(registry)}
        self.gpus = {work.model: work.gpus for work in spec.works}

    def of(self, row: Mapping[str, str]) -> str:
        """`rematbench simulate METHOD JOB` for a row of the matrix's tables; empty where the row
        has no layout, or has an arm or model that this matrix does not declare."""
        if not row["layout"] or row["arm"] not in self.names or row["model"] not in self.gpus:
            return ""
        name = self.names[row["arm"]]
        return shlex.join(["rematbench", "simulate", name, *self.problem(row).to_arguments()])

    def problem(self, row: Mapping[str, str]) -> ProblemSpec:
        """The problem of a row; the row must have a layout."""
        model, layout = row["model"], row["layout"]
        words = [] if layout == "one rank" else layout.split()
        degrees = {key: int(value) for key, value in zip(words[::2], words[1::2], strict=True)}
        degrees.pop("dp", None)  # dp follows from gpus and the other degrees
        return self.spec.problem(
            int(row["seq_len"]),
            model=model,
            cluster=row["cluster"],
            gpus=self.gpus[model],
            **degrees,
        )
