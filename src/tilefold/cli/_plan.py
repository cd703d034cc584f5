"""Estimates of ``tilefold info plan`` for encoders: memory of a training step, rate of encoding."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

GIB = 2**30
# Constants of the estimates, fitted to train_splade.csv and a row of encode.csv in
# benchmarks/results/nvidia-h200.
USABLE = 0.955  # share of a GPU's memory that the largest batches of the benchmark used
_STATE_BYTES = 16  # bytes per parameter: fp32 weight, gradient and both moments of AdamW
_HIDDEN_BYTES = 28.2  # bytes that a layer saves per token and hidden dimension
_INTERMEDIATE_BYTES = 4.0  # bytes that a layer saves per token and intermediate dimension
_CHECKPOINT_BYTES = 4.0  # bytes that a checkpointed layer saves per token and hidden dimension
ENDS_BYTES = 16.0  # bytes that embedding and head save per token and hidden dimension
PEAK_ROWS = 2.85  # fp32 rows [V] per text at the peak: scores, gradients, and regularisation
# the same if layers are recomputed: most rows are freed before the backward pass of the layers
CHECKPOINTED_PEAK_ROWS = 1.0
# fp32 rows [V] per pair at the peaks of the forward and the backward pass of the loss, if gradients
# are cached.
_LOSS_FORWARD_ROWS = 9.25
_LOSS_BACKWARD_ROWS = 7
_LOSS_BACKWARD_SCORES = 4  # fp32 matrices of scores [B, B] in the backward pass
_ENCODING_FLOPS = 3.89e14  # operations per second of an H200 that encodes BERT-base to Parquet
TOKENIZER_RATE = 4.85e6  # tokens per second of the Rust tokenizer on 16 cores
TEXTS_PER_PAIR = 2  # a query and a document


@dataclass(frozen=True)
class Shape:
    """Dimensions of a BERT-like encoder with a tied LM head.

    Attributes:
        hidden: the hidden dimension D.
        layers: the number of layers.
        intermediate: the intermediate dimension of the feed-forward part.
        vocab: the vocabulary size V.
    """

    hidden: int
    layers: int
    intermediate: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """The approximate number of parameters of the model, with 512 positions."""
        return self.layer_parameters + (self.vocab + 512) * self.hidden + self.hidden**2


@dataclass(frozen=True)
class Training:
    """Estimated memory of a training step, and the batches that fit.

    Attributes:
        fixed_gib: the memory of weights, gradients and the state of AdamW, in GiB.
        mib_a_pair: the peak memory per pair of a query and a document, in MiB.
        largest_batch: the number of pairs that fit; 0 if the weights alone do not fit.
        largest_in_mini_batches: the number of pairs that fit if the batch is split into
            mini-batches with cached gradients.
    """

    fixed_gib: float
    mib_a_pair: float
    largest_batch: int
    largest_in_mini_batches: int


def training(
    shape: Shape,
    length: int,
    query_length: int,
    memory_gib: float,
    mini_batch_size: int,
    *,
    checkpointing: bool,
) -> Training:
    """Estimate the memory of training SPLADE with tilefold's kernels, in bf16 autocast.

    The memory of a step is fixed_bytes + pairs * pair_bytes. The fixed part holds the weights, the
    gradients and the state of AdamW. A pair needs the activations that layers save for each token,
    and rows of vocabulary size for each text. All texts are assumed to have the full length. The
    bytes per token and the number of rows were fitted to measurements.

    Args:
        shape: the shape of the model.
        length: the tokens per document.
        query_length: the tokens per query.
        memory_gib: the memory of the GPU in GiB.
        mini_batch_size: the pairs per mini-batch.
        checkpointing: whether layers are recomputed in the backward pass.
    """
    layer_bytes = _HIDDEN_BYTES * shape.hidden + _INTERMEDIATE_BYTES * shape.intermediate
    if checkpointing:
        # Every layer saves its input, and one layer at a time saves all activations.
        checkpoints = shape.layers * _CHECKPOINT_BYTES * shape.hidden
        token_bytes = checkpoints + layer_bytes + ENDS_BYTES * shape.hidden
        peak_rows = CHECKPOINTED_PEAK_ROWS
    else:
        token_bytes = shape.layers * layer_bytes
        peak_rows = PEAK_ROWS
    row_bytes = 4 * shape.vocab  # fp32
    pair_bytes = (length + query_length) * token_bytes + TEXTS_PER_PAIR * peak_rows * row_bytes
    fixed_bytes = _STATE_BYTES * shape.parameters
    free_bytes = USABLE * memory_gib * GIB - fixed_bytes

    return Training(
        fixed_gib=fixed_bytes / GIB,
        mib_a_pair=pair_bytes / 2**20,
        largest_batch=largest_batch(free_bytes, pair_bytes),
        largest_in_mini_batches=largest_in_mini_batches(
            free_bytes,
            pair_bytes,
            shape.vocab,
            mini_batch_size,
        ),
    )


def largest_batch(free_bytes: float, pair_bytes: float) -> int:
    """Return the largest number of pairs whose activations and scores fit in memory, or 0.

    Args:
        free_bytes: the memory that weights, gradients and optimiser states leave.
        pair_bytes: the peak memory of a pair.
    """
    return max(0, int(free_bytes / pair_bytes))


def largest_in_mini_batches(
    free_bytes: float,
    pair_bytes: float,
    vocab: int,
    mini_batch_size: int,
) -> int:
    """Return the largest number of pairs that fit if they are encoded in mini-batches.

    Gradients of vectors are cached: all pairs are encoded for the loss without saving
    activations, and then again, one mini-batch at a time, for the gradients of the model.

    Args:
        free_bytes: the memory that weights, gradients and optimiser states leave.
        pair_bytes: the peak memory of a pair while its mini-batch is encoded.
        vocab: the vocabulary size V.
        mini_batch_size: the pairs per mini-batch.
    """
    row_bytes = 4 * vocab  # fp32

    def cached_bytes(n_pairs: int) -> float:
        """Return the peak memory of a step of `n_pairs` in mini-batches with cached gradients."""
        bytes_of_one_row_per_pair = row_bytes * n_pairs
        score_bytes = 4 * n_pairs**2  # fp32 scores of each query with each document
        # The vectors of all pairs stay in memory while a mini-batch is encoded.
        mini_batch = mini_batch_size * pair_bytes + TEXTS_PER_PAIR * bytes_of_one_row_per_pair
        loss_forward = _LOSS_FORWARD_ROWS * bytes_of_one_row_per_pair + score_bytes
        loss_backward = (
            _LOSS_BACKWARD_ROWS * bytes_of_one_row_per_pair + _LOSS_BACKWARD_SCORES * score_bytes
        )
        return max(mini_batch, loss_forward, loss_backward)

    # Binary search: the count of numbers 1, 2, ... whose peak fits is the largest of them.
    return bisect.bisect(range(1, 1 << 24), free_bytes, key=cached_bytes)


def texts_per_second(shape: Shape, length: int) -> float:
    """Estimate the rate of encoding to Parquet on one H200 in bf16.

    The limit is either the floating-point operations of the model, at the rate that was measured
    for BERT-base, or the tokenizer.

    Args:
        shape: the shape of the model.
        length: the tokens per text.
    """
    # A token needs a multiplication and an addition for each weight of the layers and the head, and
    # for each position in the two products of attention, Q @ K and P @ V.
    weight_operations = 2 * (shape.layer_parameters + shape.hidden * shape.vocab)
    attention_operations = 4 * length * shape.hidden * shape.layers
    tokens_per_second = _ENCODING_FLOPS / (weight_operations + attention_operations)
    return min(tokens_per_second, TOKENIZER_RATE) / length
