"""Leaves out the plots of trainings, which take longer than the training of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from tilefold.recipes._run import plot_history

PLOT_HISTORY = "tilefold.recipes._run.plot_history"


@pytest.fixture(scope="package", autouse=True)
def trainings_without_plots() -> Iterator[None]:
    """Leave out the plots of this package's trainings, except in :func:`with_plots`."""
    with mock.patch(PLOT_HISTORY):
        yield


def with_plots() -> AbstractContextManager[Any]:
    """Return a context in which trainings make their plots."""
    return mock.patch(PLOT_HISTORY, plot_history)
