"""Skips tests that need a GPU where there is none, and makes property tests repeatable."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("tilefold", deadline=None, derandomize=True, database=None, print_blob=True)
    settings.load_profile("tilefold")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter computes tiles whole, padding included, in numpy
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
