"""One GPU for a Trainer that sees several, where it would choose ``torch.nn.DataParallel``."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["one_gpu"]


@functools.cache
def one_gpu(arguments_class: Any) -> Any:
    """Training arguments with which a Trainer that no launcher started uses one GPU, however many are visible.

    With several visible GPUs and no launcher (``torchrun``, ``accelerate launch``), transformers' Trainer wraps the
    model in ``torch.nn.DataParallel``. That cuts every tensor of a batch along its first dimension, which packed
    batches do not survive, and an accelerated model refuses it. With these arguments the Trainer uses ``cuda:0`` alone;
    under a launcher, on one GPU and on the CPU they change nothing::

        arguments = one_gpu(SparseEncoderTrainingArguments)(output_dir="model", per_device_train_batch_size=32)

    Args:
        arguments_class: ``transformers.TrainingArguments``, or a class derived from it, such as those of
            sentence-transformers.

    Returns:
        A class derived from it, whose ``n_gpu`` is at most 1. What is pickled of its instances (``training_args.bin``)
        is an instance of ``arguments_class``, and loads without tilefold.

    Raises:
        TypeError: for anything else.
    """
    from transformers import TrainingArguments

    if not (isinstance(arguments_class, type) and issubclass(arguments_class, TrainingArguments)):
        raise TypeError(
            f"arguments_class must be transformers.TrainingArguments or derived from it, got {arguments_class!r}."
        )

    class OneGpu(arguments_class):
        @property
        def n_gpu(self) -> int:
            return min(1, int(super().n_gpu))

        def __reduce__(self) -> Any:
            stock = object.__new__(arguments_class)
            vars(stock).update(vars(self))
            return stock.__reduce_ex__(1)  # from protocol 2 on pickle wants the class of the object itself

    OneGpu.__name__ = OneGpu.__qualname__ = f"OneGpu{arguments_class.__name__}"
    OneGpu.__doc__ = f"``{arguments_class.__name__}`` whose ``n_gpu`` is at most 1; see :func:`one_gpu`."
    return OneGpu
