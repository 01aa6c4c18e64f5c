"""rematbench: activation memory in large-model training, compared on the same work.

`from rematbench import Problem, simulate, compare, search, load_method` is the Python door (`api`).
"""

import importlib
import sys
from types import ModuleType

__version__ = "0.1.0"
__all__ = [
    "MethodError",
    "Problem",
    "Run",
    "__version__",
    "compare",
    "load_method",
    "search",
    "simulate",
]


def __getattr__(name: str) -> object:
    """The names of `api`, loaded when one is asked for: a module of rematbench alone loads little
    (`__init__.pyi` has their types)."""
    if name in __all__:
        return getattr(importlib.import_module("rematbench.api"), name)
    raise AttributeError(f"module 'rematbench' has no attribute {name!r}")


class _Package(ModuleType):
    """`rematbench.simulate` is the function of `api`, whatever was imported before; it has the
    modules of the folder of that name as attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        """Bind a name, unless the import system binds a folder to one of `api`."""
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
