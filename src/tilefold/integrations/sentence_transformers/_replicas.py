"""Why an accelerated model cannot be run by ``torch.nn.DataParallel``, said before it copies anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ASKED = "_replicate_for_data_parallel"  # what torch.nn.parallel.replicate calls on every module that it copies


class NoReplicas:
    """Replaces the method by which ``torch.nn.DataParallel`` copies a module: raises an error.

    A copy shares the forwards that were replaced on the instances, and those read the weights of the original, on its
    device.

    Args:
        name: of the model's class.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> nn.Module:
        """Raise a ``RuntimeError``."""
        gpus = max(2, torch.cuda.device_count())
        raise RuntimeError(
            f"an accelerated {self.name} must run in one process for each GPU, got torch.nn.DataParallel, which copies "
            f"it within one (transformers' Trainer does this where several GPUs are visible). For all GPUs, start the "
            f"training with `torchrun --nproc-per-node {gpus} SCRIPT` (or `accelerate launch`); for one, set "
            "CUDA_VISIBLE_DEVICES=0, or make the trainer's arguments with tilefold.integrations.transformers.one_gpu."
        )


def refuse_replicas(model: Any) -> None:
    """Let ``torch.nn.DataParallel`` around ``model``, or around a module that holds it, raise an error."""
    setattr(model, ASKED, NoReplicas(type(model).__name__))


def allow_replicas(model: nn.Module) -> None:
    """Undo :func:`refuse_replicas`; does nothing without one."""
    if isinstance(vars(model).get(ASKED), NoReplicas):
        delattr(model, ASKED)
