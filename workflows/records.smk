"""Committed records of measured cells, and the tables and figures made from them."""

import importlib.util

MEASURED = {
    name: sorted(str(path) for path in Path(f"results/measured/{name}").glob("*.json"))
    for name in ("executed", "traced", "convergence")
}
GPU_RUNS = [
    f"results/measured/{name}"
    for name in ("gpu", "gpu-mended", "gpu-searched", "gpu-h100", "gpu-expandable")
]
"""In the order of their measurement."""
ON_GPU = [
    str(path) for run in GPU_RUNS for path in sorted(Path(run).glob("**/*.json*"))
]
RETRACED = "llama-65b-figure7.keep_all.0"
RETRACED_METHOD = f"methods/{RETRACED.split('.')[1]}.py"
HAS_TORCH = importlib.util.find_spec("torch") is not None
TRACED_BASELINES = "results/measured/traced/baselines"
RETRACED_POINT = "k22b-selective"
RETRACED_WITH = sorted(
    str(path)
    for folder in ("common", "deepspeed", "megatron_core")
    for path in Path("baselines", folder).glob("*.py")
)
AGREEMENT = sorted(
    str(path) for path in Path("results/measured/executed/agreement").glob("*.json")
)
BASELINE_POINTS = sorted(path.stem for path in Path(TRACED_BASELINES).glob("*.json"))
HAS_BASELINES = bool(
    HAS_TORCH
    and importlib.util.find_spec("megatron")
    and importlib.util.find_spec("megatron.core")
)


def measured_targets():
    """The table of the worlds and the figure of loss curves."""
    return [
        "results/paper/tables/worlds.md",
        "results/paper/figures/convergence.pdf",
    ]


def baseline_targets():
    """The table of baselines, and one retraced point (or a line with the reason for none)."""
    return [
        "results/paper/tables/baselines_traced.md",
        f"results/paper/retraced/baselines/{RETRACED_POINT}.txt",
    ]


def method_traces(wildcards):
    """One timeline for each method named in workflow.yaml, from top to bottom."""
    return [
        f"results/paper/method_traces/{method}/{record}.json"
        for method, record in config["methods_timeline"].items()
    ]
