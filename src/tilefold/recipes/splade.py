"""The untrained SPLADE encoder with the packaged MiniLM."""

from __future__ import annotations

from tilefold._internal.precision import Dtype
from tilefold._internal.typing import SparseEncoder
from tilefold.integrations.sentence_transformers import set_precision
from tilefold.recipes.backbone import minilm_splade

__all__ = ["untrained_splade"]


def untrained_splade(dtype: Dtype = "auto") -> SparseEncoder:
    """Return the packaged MiniLM as an untrained SPLADE model, without reading any documents.

    Args:
        dtype: the dtype in which the model computes, see
            :func:`tilefold.recipes.loading.load_saved`.
    """
    model = minilm_splade()
    set_precision(model, dtype)
    return model
