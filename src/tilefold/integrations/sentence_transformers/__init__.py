"""sentence-transformers 6: SPLADE models without the ``[B, S, V]`` logits.

:func:`accelerate` fuses the LM head and the SpladePooling of a ``SparseEncoder`` in place, :func:`restore` undoes it;
:func:`encode_sparse` encodes texts to a CSR matrix without a dense ``[B, V]``.
"""

try:
    import sentence_transformers.sparse_encoder.modules  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tilefold.integrations.sentence_transformers needs sentence-transformers 6.0 or later; "
        'pip install "tilefold[sentence-transformers]".'
    ) from error

from tilefold.integrations.sentence_transformers._accelerate import (
    Acceleration,
    accelerate,
    is_accelerated,
    restore,
)
from tilefold.integrations.sentence_transformers._encode import encode_sparse

__all__ = ["Acceleration", "accelerate", "encode_sparse", "is_accelerated", "restore"]
