"""rematbench: activation memory in large-model training, compared on the same work.

`from rematbench import Problem, simulate, compare, search, load_method` gives the Python interface
(`api`).
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
    """A public name of `rematbench.api`, imported on first use so that importing one submodule of
    rematbench stays cheap (`__init__.pyi` has the types); AttributeError for any other name."""
    if name in __all__:
        return getattr(importlib.import_module("rematbench.api"), name)
    raise AttributeError(f"module 'rematbench' has no attribute {name!r}")


class _Package(ModuleType):
    """The module type of the package.  `rematbench.simulate` and `rematbench.search` stay the
    functions of `api` even after the folders of these names are imported; the modules of a folder
    are attributes of its function (set in `api`)."""

    def __setattr__(self, name: str, value: object) -> None:
        """Bind an attribute, except where the import system would put a folder in place of a
        function of `api`."""
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
