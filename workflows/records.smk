"""Committed records of measured cells, and the tables and figures made from them."""

import importlib.util

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
BASELINE_POINTS = sorted(path.stem for path in Path(TRACED_BASELINES).glob("*.json"))
HAS_BASELINES = bool(
    HAS_TORCH
    and importlib.util.find_spec("megatron")
    and importlib.util.find_spec("megatron.core")
)


def method_traces(wildcards):
    """One timeline for each method named in workflow.yaml, from top to bottom."""
    return [
        f"results/paper/method_traces/{method}/{record}.json"
        for method, record in config["methods_timeline"].items()
    ]
