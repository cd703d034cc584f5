"""sentence-transformers 6: SPLADE models without the ``[B, S, V]`` logits, ColBERT models without
token similarities.

:func:`accelerate` of a trainer switches on everything that makes its steps fast. Of a model, it
fuses, in place, the LM head and the SpladePooling of a ``SparseEncoder`` or the similarities of a
``MultiVectorEncoder``, and lets their encoders run on packed tokens. :func:`restore` undoes either;
:func:`collate_ahead` makes the batches of a stock trainer in a thread;
:func:`encode_sparse` encodes texts to a CSR matrix without a dense ``[B, V]``; :func:`warm_up`
builds the kernels of a model ahead; :func:`set_precision` chooses the dtype in which a model
computes; the module ``multi_vector`` has the scores for losses and
evaluators of a ``MultiVectorEncoder``.
"""

try:  # before the modules below, which import what older releases lack
    from tilefold._internal.sentence_transformers import (
        check_sentence_transformers as _check_release,
    )

    _check_release()
except ImportError as error:
    raise ImportError(f"{__name__}: {error}") from error

from tilefold._internal.precision import Precision, set_precision
from tilefold.integrations.sentence_transformers._accelerate import (
    Acceleration,
    encode_sparse,
    is_accelerated,
)
from tilefold.integrations.sentence_transformers._public import accelerate, restore
from tilefold.integrations.sentence_transformers._warm_up import warm_up
from tilefold.integrations.sentence_transformers.packing.collator import collate_ahead

__all__ = [
    "Acceleration",
    "Precision",
    "accelerate",
    "collate_ahead",
    "encode_sparse",
    "is_accelerated",
    "restore",
    "set_precision",
    "warm_up",
]
