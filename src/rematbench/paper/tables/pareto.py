"""The Pareto front of recomputation seconds against kept bytes, for one layer of each model."""

from pathlib import Path

from rematbench.evaluate.problems import make_problem
from rematbench.paper.matrix.spec import MatrixSpec, load_matrix
from rematbench.paper.sheet.table import Table, table_of
from rematbench.problem import Problem
from rematbench.solve.layer_costs import backward_s, forward_s
from rematbench.solve.pareto import Point, front, point

INPUTS = {"suite": "config/paper.yaml"}

TP = 8
SEQ_LEN = 8192
RUNGS: dict[str, tuple[str, ...]] = {
    "keep all": (),
    "balanced": ("attn_norm_out", "mlp_norm_out", "act_out", "fc2_in"),
    "balanced + FC1": ("attn_norm_out", "mlp_norm_out", "act_out", "fc2_in", "gate_out", "up_out"),
}
"""Published points (Yuan et al., USENIX ATC 2024) that the computed front should contain."""


def build(suite: Path) -> Table:
    return pareto_table(load_matrix(suite))


def pareto_table(spec: MatrixSpec) -> Table:
    """Every point of the front of every model, and the published points, with tensor parallelism
    over a node of the first cluster."""
    node = {"cluster": spec.clusters[0], "gpus": TP, "tp": TP, "global_batch": 1, "micro_batch": 1}
    rows = []
    for work in spec.works:
        problem = make_problem(spec.problem(SEQ_LEN, model=work.model, **node))
        table = problem.layer_kinds[0]
        base_s = forward_s(problem, table) + backward_s(problem, table)
        points = [("front", one) for one in front(problem, table)]
        for name, dropped in RUNGS.items():
            known = tuple(sorted(set(dropped) & set(table.saved)))
            points.append((name, point(problem, table, known)))
        points.append(("full", _full(problem)))
        rows += [
            {
                "model": work.model,
                "point": name,
                "kept_bytes": one.kept_bytes,
                "kept_share": one.kept_bytes / table.saved_bytes,
                "recompute_s": one.recompute_s,
                "recompute_share": one.recompute_s / base_s,
                "dropped": " ".join(one.dropped),
            }
            for name, one in points
        ]
    return table_of("pareto", rows, tp=TP, seq_len=SEQ_LEN)


def _full(problem: Problem) -> Point:
    """The point of full recomputation: only the layer's input is kept."""
    table = problem.layer_kinds[0]
    kept = table.activations["layer_input"].nbytes
    dropped = tuple(name for name in table.saved if name != "layer_input")
    return Point(kept_bytes=kept, recompute_s=forward_s(problem, table), dropped=dropped)
