"""Training arguments that let transformers' Trainer use one of several GPUs."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def one_gpu(arguments_class: Any) -> Any:
    """Derive a class of training arguments that let a Trainer in a single process use one GPU.

    If several GPUs are visible, transformers' Trainer wraps the model in
    ``torch.nn.DataParallel``, which an accelerated model refuses. The derived arguments prevent
    this. They change nothing with a launcher (``torchrun``, ``accelerate launch``), on one GPU or
    on the CPU::

        arguments = one_gpu(SparseEncoderTrainingArguments)(
            output_dir="model",
            per_device_train_batch_size=32,
        )

    Args:
        arguments_class: ``transformers.TrainingArguments``, or a class derived from it.

    Returns:
        A class derived from ``arguments_class``, whose ``n_gpu`` is at most 1. Its instances are
        pickled (``training_args.bin``) as instances of ``arguments_class``, which load without
        tilefold.

    Raises:
        TypeError: if ``arguments_class`` is not such a class.
    """
    from transformers import TrainingArguments

    if not (isinstance(arguments_class, type) and issubclass(arguments_class, TrainingArguments)):
        raise TypeError(
            "arguments_class must be transformers.TrainingArguments or derived, got "
            f"{arguments_class!r}.",
        )

    class OneGpu(arguments_class):
        @property
        def n_gpu(self) -> int:
            """The number of GPUs, which decides whether the Trainer uses ``DataParallel``."""
            return min(1, int(super().n_gpu))

        def __reduce__(self) -> Any:
            """Pickle as an instance of ``arguments_class``, which loads without tilefold."""
            stock = object.__new__(arguments_class)
            vars(stock).update(vars(self))
            # From protocol 2 on, pickle requires the class of the pickled object itself.
            return stock.__reduce_ex__(1)

    OneGpu.__name__ = f"OneGpu{arguments_class.__name__}"
    OneGpu.__qualname__ = OneGpu.__name__
    OneGpu.__doc__ = (
        f"``{arguments_class.__name__}`` whose ``n_gpu`` is at most 1; see :func:`one_gpu`."
    )
    return OneGpu
