"""Capture of CUDA graphs: a cache of graphs, and settings of torch.

It serves the graphs of encoding and those of training steps.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from tilefold.ops.implementations import tf32_allowed

Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


class GraphCache(OrderedDict[Key, Graph]):
    """LRU cache of captured graphs, ordered from the least to the most recently used.

    Args:
        max_graphs: the largest number of graphs that are cached.
    """

    def __init__(self, max_graphs: int) -> None:
        super().__init__()
        self.max_graphs = max_graphs

    def use(self, key: Key) -> Graph | None:
        """Return the graph of a key and mark it as the most recently used; None if it is missing.

        Raises:
            TypeError: if the key is not hashable.
        """
        graph = self.get(key)
        if graph is not None:
            self.move_to_end(key)
        return graph

    def make_space(self) -> None:
        """Drop the least recently used graph if the cache is full."""
        if len(self) >= self.max_graphs:
            self.popitem(last=False)


class NumericSettings(NamedTuple):
    """Global settings of torch that a captured graph cannot follow.

    Attributes:
        autocast: the dtype of autocast; ``None`` if it is off.
        allows_tf32: whether fp32 products may use TF32.
        deterministic: whether torch uses deterministic algorithms.
    """

    autocast: torch.dtype | None
    allows_tf32: bool
    deterministic: bool


def numeric_settings(device_type: str) -> NumericSettings:
    """Return the current settings of torch for a type of device, such as ``"cuda"``."""
    return NumericSettings(
        autocast=autocast_dtype(device_type),
        allows_tf32=tf32_allowed(torch.float32),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device, or None if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def uncached_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context that repeats the current autocast without its cache of converted weights.

    A captured graph would keep reading the cached copies after the weights have changed.

    Args:
        device_type: the type of the device, such as ``"cuda"``.
    """
    dtype = autocast_dtype(device_type)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype, cache_enabled=False)
