"""Committed records of measured cells, and what is made of them."""

import importlib.util

MEASURED = {
    name: sorted(str(path) for path in Path(f"results/measured/{name}").glob("*.json"))
    for name in ("executed", "traced", "convergence")
}
RETRACED = "llama-65b-figure7.keep_all.0"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def measured_targets():
    """The table and, with torch, the cell that is traced again."""
    again = [f"results/paper/retraced/{RETRACED}.json"] if HAS_TORCH else []
    return [
        "results/paper/tables/worlds.md",
        "results/paper/figures/convergence.pdf",
        *again,
    ]


def method_traces(wildcards):
    """One trace for each method named in workflow.yaml, from top to bottom."""
    return [
        f"results/paper/method_traces/{method}/{record}.json"
        for method, record in config["methods_timeline"].items()
    ]
