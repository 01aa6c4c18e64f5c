"""Published and predicted host memory of training steps with DeepSpeed's optimizer offload
(results/published/offloaded_states.csv)."""

from statistics import median
from typing import Any

from msgspec.structs import replace

from rematbench.costs.states import zero3_host_states
from rematbench.engine.lowering.states.host_states import rank_tensors
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.sheets import Cell, read_sheet, whole
from rematbench.host.table import GIB
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem

NODES = {
    "polaris-a100-40gb": "polaris-a100-40gb-bound",
    "polaris-a100-40gb-bound": "polaris-a100-40gb-bound",
    "h100-80gb-dos": "h100-80gb-dos",
}
"""The cluster file with the host memory of each cluster of the sheet.  Binding ranks to cores
changes seconds, not bytes."""


def host_rows() -> list[dict[str, Any]]:
    """The rows of DeepSpeed itself on a named node, with `pred_host_used_gib`: the states of the
    node's ranks and the `host_other_bytes` of the cluster file `pred_node`.  `fitted`: whether that
    constant was fitted to the row.  Rows of Deep Optimizer States, which holds further buffers, and
    of unnamed nodes are left out (SOURCES.md has the numbers)."""
    sheet = read_sheet(data_dir("published") / "offloaded_states.csv")
    rows = [row for row in sheet if row["cluster"] in NODES and row["variant"] != "dos"]
    smallest = {node: smallest_model(rows, node) for node in set(NODES.values())}
    found = []
    for row in rows:
        node = NODES[row["cluster"]]
        other = load_cluster(node).host_other_bytes or 0
        more = {
            "pred_node": node,
            "pred_host_used_gib": (states_bytes(row) + other) / GIB,
            "fitted": whole(row, "parameters") == smallest[node],
        }
        found.append({**row, **more})
    return found


def smallest_model(rows: list[Cell], node: str) -> int:
    """Parameters of the smallest model among a node's rows."""
    return min(whole(row, "parameters") for row in rows if NODES[row["cluster"]] == node)


def fitted_other_bytes(node: str) -> int:
    """The `host_other_bytes` of a node: the median, over the rows of its smallest model, of the
    bytes used beyond the states."""
    rows = [row for row in host_rows() if row["fitted"] and NODES[row["cluster"]] == node]
    return int(median(float(row["host_used_gib"]) * GIB - states_bytes(row) for row in rows))


def row_problem(row: Cell) -> Problem:
    """The problem of a row of the sheet."""
    sizes = {key: whole(row, key) for key in ("layers", "hidden", "heads", "kv_heads", "ffn")}
    model = replace(
        load_model("llama-7b"),
        name=row["model"],
        num_layers=sizes["layers"],
        hidden=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        ffn=sizes["ffn"],
        vocab=whole(row, "vocab"),
        tied_embeddings=False,
    )
    system = with_facts(  # Megatron's layers, whose linears are fused
        load_system("deepspeed"),
        fused_linears=True,
        model_parallel=("tp",),
        sub_group_parameters=whole(row, "subgroup_parameters"),
    )
    layout = Layout(
        tp=whole(row, "tp"),
        dp=whole(row, "dp"),
        zero_stage=3,
        micro_batch=whole(row, "micro_batch"),
        global_batch=whole(row, "global_batch"),
    )
    spec = Job.at(
        layout,
        model=model,
        cluster=NODES[row["cluster"]],
        system=system,
        seq_len=whole(row, "seq_len"),
    )
    return make_problem(spec)


def states_bytes(row: Cell) -> int:
    """Host bytes of the states of all ranks of a node, between two steps."""
    problem = row_problem(row)
    layout, system = problem.layout, problem.system
    tensors = rank_tensors(problem, problem.base_plan, 0)
    states = zero3_host_states(tensors, layout.dp, system, share=float(row["host_ratio"]))
    return states.held * layout.gpus // node_count(row)


def node_count(row: Cell) -> int:
    """The nodes on which a row ran."""
    return int(row["node"].rpartition(" x")[2])
