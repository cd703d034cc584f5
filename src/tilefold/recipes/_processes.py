"""A recipe trains in one process on one device: the note where several GPUs are visible, the error under a launcher."""

from __future__ import annotations

import logging
import os

_logger = logging.getLogger(__name__)


def check_one_process() -> None:
    """Raise a ``RuntimeError`` in one of several processes of a launcher, which would share a run and its folder."""
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        raise RuntimeError(
            f"recipes train in one process, got WORLD_SIZE={processes}; start this without torchrun or accelerate "
            "launch. For several GPUs, write the training with accelerate(model) and a trainer of "
            "sentence-transformers, as docs/scale-out.md shows, and start that with the launcher."
        )


def say_unused_gpus() -> None:
    """Log one line if more GPUs are visible than the one that a recipe uses."""
    import torch  # noqa: PLC0415 - heavy

    gpus = torch.cuda.device_count()
    if gpus > 1:
        _logger.warning(
            "%d GPUs are visible and one is used, cuda:0: recipes train in one process. For all of them, write the "
            "training with accelerate(model) and a trainer of sentence-transformers (docs/scale-out.md), and start it "
            "with: torchrun --nproc-per-node %d SCRIPT",
            gpus,
            gpus,
        )
