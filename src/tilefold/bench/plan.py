"""Estimates of a model's memory and batch in training, and of rate and bytes of encoding, from its shape.

The constants are fitted to ``train_splade.csv`` and a row of ``encode.csv`` in ``benchmarks/results/nvidia-h200``.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
USABLE = 0.955  # of the memory of a GPU: what the largest batches of the benchmark used
_STATE = 16  # bytes of a parameter: fp32 weight, gradient and both moments of AdamW
_LAYER, _FEED = 28.2, 4.0  # bytes that a layer saves of a token, per hidden dimension and per intermediate one
_SAVED = 4.0  # bytes of a token and dimension that a checkpointed layer saves
_ENDS = 16.0  # the same of embedding and head, which checkpointing leaves
_ROWS = 2.85  # fp32 rows [V] of a text at the peak: scores, their gradient, the regulariser's
_ENCODING_FLOPS = 3.89e14  # per second, of an H200 that encodes BERT-base to Parquet
_TOKENISED = 4.85e6  # tokens per second of the Rust tokenizer on the 16 cores beside it
TERM_BYTES, POSTING_BYTES = 5.0, 8.0  # in Parquet, at most; in the exact index


@dataclass(frozen=True)
class Shape:
    """A BERT-like encoder with a tied LM head."""

    hidden: int  # D
    layers: int
    intermediate: int  # width of the feed-forward part
    vocab: int  # V

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, about."""
        return self.layer_parameters + (self.vocab + 512) * self.hidden + self.hidden**2


@dataclass(frozen=True)
class Training:
    """One training step of pairs."""

    fixed_gib: float  # weights, gradients and the state of AdamW
    mib_a_pair: float  # that each query with its document adds at the peak
    largest_batch: int  # pairs that fit; 0 where the weights alone do not


def training(shape: Shape, length: int, query_length: int, memory_gib: float, *, checkpointing: bool) -> Training:
    """SPLADE with `accelerate`, bf16 autocast, texts of full length: a query and a document for each pair."""
    layer = _LAYER * shape.hidden + _FEED * shape.intermediate
    ends = _ENDS * shape.hidden
    of_token = shape.layers * _SAVED * shape.hidden + layer + ends if checkpointing else shape.layers * layer
    rows = 1.0 if checkpointing else _ROWS  # the layers' backward runs when most of the head's are gone
    pair = (length + query_length) * of_token + 2 * rows * 4 * shape.vocab
    fixed = _STATE * shape.parameters
    largest = int((USABLE * memory_gib * GIB - fixed) / pair)
    return Training(fixed / GIB, pair / 2**20, max(0, largest))


def texts_per_second(shape: Shape, length: int) -> float:
    """Rate of encoding to Parquet on one H200 in bf16: that of BERT-base by operations, or the tokenizer's."""
    attention = 4 * length * shape.hidden * shape.layers
    of_token = 2 * (shape.layer_parameters + shape.hidden * shape.vocab) + attention
    return min(_ENCODING_FLOPS / of_token, _TOKENISED) / length
