"""Skips where a package is not installed, without importing it: its tests start processes of their
own, and Megatron-core alone takes every worker of pytest eight CPU seconds."""

import importlib.util

import pytest


def needs(package: str) -> None:
    """Skip the calling test, or the module that is being read."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package}: installed by ./bench test", allow_module_level=True)
