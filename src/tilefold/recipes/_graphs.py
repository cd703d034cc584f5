"""Training steps as CUDA graphs: what a recipe's ``graphs`` needs, and the messages where it did not work."""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported by the functions that need them

from __future__ import annotations

from typing import Any

__all__ = ["check_graphs", "collate", "graphs_warnings"]


def check_graphs(graphs: bool) -> None:
    """Raise a ``ValueError`` where graphs are asked for and there is no GPU of CUDA."""
    import torch

    if graphs and (torch.version.cuda is None or not torch.cuda.is_available()):
        raise ValueError("graphs must be False without a GPU of CUDA, got True; leave --graphs out on this machine.")


def collate(trainer: Any, graphs: bool) -> None:
    """Make the trainer's batches ahead, and with `graphs` repeat the launches of its encoder.

    Raises:
        ValueError: graphs of a model that has several encoders, or one whose batches stay padded.
    """
    from tilefold.integrations.sentence_transformers import collate_ahead

    try:
        collate_ahead(trainer, graphs=graphs)
    except ValueError as error:
        if not graphs:
            raise
        raise ValueError(
            "graphs must be False for a model of several encoders, or of one whose batches stay padded, got True; "
            "leave --graphs out."
        ) from error


def graphs_warnings(trainer: Any, graphs: bool) -> tuple[str, ...]:
    """What to say of a training whose graphs could not be captured."""
    if not graphs or not trainer.model[0].forward.graphs.failed:
        return ()
    return ("the training ran without CUDA graphs, which could not be captured; leave --graphs out.",)
