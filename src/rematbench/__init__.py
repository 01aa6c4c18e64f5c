"""rematbench: activation memory in large-model training, compared on the same work.

`from rematbench import Problem, simulate, compare, search, load_method` gives the Python interface
(`api`).
"""

import importlib

__version__ = "0.1.0"
__all__ = [
    "Estimate",
    "MethodError",
    "Problem",
    "Result",
    "__version__",
    "compare",
    "estimate",
    "load_method",
    "search",
    "simulate",
]


def __getattr__(name: str) -> object:
    """A public name of `rematbench.api`, imported on first use so that importing one submodule of
    rematbench stays cheap (`__init__.pyi` has the types); AttributeError for any other name."""
    if name in __all__:
        return getattr(importlib.import_module("rematbench.api"), name)
    raise AttributeError(f"module 'rematbench' has no attribute {name!r}")
