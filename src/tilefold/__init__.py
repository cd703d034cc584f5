"""Fused operators for neural retrieval: large score matrices are reduced tile by tile and never
stored.

``tilefold.lsr_head``, ``tilefold.maxsim``, ``tilefold.token_scatter``, ``tilefold.entmax`` and
``tilefold.entmax_attention`` are the operators; ``tilefold.nn`` has modules. Importing the package
is cheap: torch is imported with the first operator, kernels and integrations at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilefold._internal.lazy import lazy_exports
from tilefold._internal.public import PACKAGE_OF
from tilefold._version import __version__ as __version__

if TYPE_CHECKING:  # what type checkers read; a test compares it with the table
    from tilefold import nn as nn
    from tilefold.ops import QuantizedTokens as QuantizedTokens
    from tilefold.ops import QuantizedWeight as QuantizedWeight
    from tilefold.ops import entmax as entmax
    from tilefold.ops import entmax_attention as entmax_attention
    from tilefold.ops import lsr_head as lsr_head
    from tilefold.ops import lsr_head_sparse as lsr_head_sparse
    from tilefold.ops import maxsim as maxsim
    from tilefold.ops import maxsim_contrastive_loss as maxsim_contrastive_loss
    from tilefold.ops import maxsim_topk as maxsim_topk
    from tilefold.ops import quantize_tokens as quantize_tokens
    from tilefold.ops import quantize_weight as quantize_weight
    from tilefold.ops import sparsemax as sparsemax
    from tilefold.ops import token_scatter as token_scatter
    from tilefold.ops import token_scatter_sparse as token_scatter_sparse
    from tilefold.ops import xtr_scores as xtr_scores

_NAMES = {"_version": "__version__", "nn": "nn", "ops": " ".join(PACKAGE_OF)}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
