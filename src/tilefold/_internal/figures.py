"""matplotlib figures that need no display."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold._internal.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(size: tuple[float, float]) -> Figure:
    """Create an empty matplotlib figure that is drawn without a display.

    It is not registered with pyplot, so it need not be closed.

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
    FigureCanvasAgg(figure)  # attaches itself to the figure
    return figure


def save_figure(figure: Figure, picture: str | os.PathLike[str]) -> Path:
    """Write a figure to a PNG file, atomically.

    Args:
        figure: the figure.
        picture: path of the file, whose folder is created if it is missing.

    Returns:
        The path of the file.
    """
    target = Path(picture)
    with atomic_file(target) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    return target
