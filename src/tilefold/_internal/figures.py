"""Figures of matplotlib without a display."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold._internal.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(size: tuple[float, float]) -> Figure:
    """Create an empty figure of matplotlib, which is drawn without a display.

    It is not registered with pyplot, so that it needs no closing.

    Args:
        size: width and height in inches.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib; install it with: pip install 'tilefold[plot]'",
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, picture: str | os.PathLike[str]) -> Path:
    """Write ``figure`` as a PNG, atomically.

    The folder is created.
    """
    target = Path(picture)
    with atomic_file(target) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return target
