"""The former name of `rematbench.inputs`: a user's method may import its modules from here."""

import sys
from importlib import import_module

__path__: list[str] = []
"""Empty, because this package has no files: the modules below are already in `sys.modules`."""

for _name in ("cluster", "configfile", "constants", "layout", "load", "paths", "precision"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"rematbench.inputs.{_name}")
for _name in ("job", "shapes", "system"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"rematbench.inputs.{_name}")
