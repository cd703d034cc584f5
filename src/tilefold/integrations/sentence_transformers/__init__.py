"""sentence-transformers 6: SPLADE models without the ``[B, S, V]`` logits, ColBERT models without
token similarities.

:func:`accelerate` fuses, in place, the LM head and the SpladePooling of a ``SparseEncoder`` or the
similarities of a ``MultiVectorEncoder``, and lets their encoders run on packed tokens;
:func:`restore` undoes it; :func:`collate_ahead` makes the batches of a stock trainer in a thread;
:func:`encode_sparse` encodes texts to a CSR matrix without a dense ``[B, V]``; :func:`warm_up`
builds the kernels of a model ahead; the module ``multi_vector`` has the scores for losses and
evaluators of a ``MultiVectorEncoder``.
"""

try:
    import sentence_transformers.sparse_encoder.modules  # noqa: F401
except ImportError as error:
    remedy = 'pip install "tilefold[sentence-transformers]".'
    raise ImportError(f"{__name__} needs sentence-transformers 6.0 or later; {remedy}") from error

from tilefold.integrations.sentence_transformers._accelerate import (
    Acceleration,
    accelerate,
    encode_sparse,
    is_accelerated,
    restore,
)
from tilefold.integrations.sentence_transformers._warm_up import warm_up
from tilefold.integrations.sentence_transformers.collating import collate_ahead

__all__ = [
    "Acceleration",
    "accelerate",
    "collate_ahead",
    "encode_sparse",
    "is_accelerated",
    "restore",
    "warm_up",
]
