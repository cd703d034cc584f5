"""Estimates of ``tilefold info plan`` for decoders: memory of a training step, rate of encoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilefold.cli._common import UsageError
from tilefold.cli._plan import (
    CHECKPOINTED_PEAK_ROWS,
    ENDS_BYTES,
    GIB,
    PEAK_ROWS,
    TEXTS_PER_PAIR,
    TOKENIZER_RATE,
    USABLE,
    largest_batch,
    largest_in_mini_batches,
)

# GPUs whose memory is planned for, in GiB, unless the user names another.
GPUS = {"80 GiB (H100)": 80.0, "140 GiB (H200)": 140.0}
LORA_RANK = 64  # of the recipe causal-splade

_FP32_BYTES = 4
_BF16_BYTES = 2
_NORMS_OF_LLAMA = 2  # per layer
# Operations per second of an H200 that encodes a Llama of a billion weights, fitted to
# benchmarks/results/nvidia-h200/decoders.csv.
_ENCODING_FLOPS = 5.3e14


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that autograd saves in a layer per token, measured as a linear function of its sizes.

    Attributes:
        hidden: bytes per hidden dimension, in a layer with two norms.
        queries: bytes per dimension of all query heads together.
        keys: bytes per dimension of all key heads together.
        intermediate: bytes per intermediate dimension.
        norm: bytes per hidden dimension of a further norm, as Gemma has.
        queries_norm: bytes per dimension of the queries, if they are normalised, as in Qwen 3.
        keys_norm: the same for the keys.
        checkpoint: bytes per hidden dimension of the input of a layer, which is all that is saved
            if the layer is recomputed.
    """

    hidden: float
    queries: float
    keys: float
    intermediate: float
    norm: float
    queries_norm: float
    keys_norm: float
    checkpoint: float


# Weights in fp32 and bf16 autocast: hidden states between layers are fp32.
ALL_WEIGHTS_BYTES = LayerBytes(
    hidden=26.1,
    queries=6.2,
    keys=4.3,
    intermediate=8.0,
    norm=8.0,
    queries_norm=6.2,
    keys_norm=6.3,
    checkpoint=4.0,
)
# Frozen weights in bf16: hidden states are bf16. LoRA saves the cast input of each projection.
LORA_BYTES = LayerBytes(
    hidden=18.5,
    queries=6.3,
    keys=5.0,
    intermediate=8.1,
    norm=4.0,
    queries_norm=4.2,
    keys_norm=4.3,
    checkpoint=2.0,
)
# With dropout, LoRA also saves a mask of a byte for each value of these inputs: five projections
# read hidden states, one reads the output of attention, and one the intermediate values.
LORA_DROPOUT_BYTES = replace(
    LORA_BYTES,
    hidden=LORA_BYTES.hidden + 5,
    queries=LORA_BYTES.queries + 1,
    intermediate=LORA_BYTES.intermediate + 1,
)


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a causal language model with a gated MLP, such as Llama, Qwen or Gemma.

    Attributes:
        hidden: the hidden dimension D.
        layers: the number of layers.
        queries: the dimension of all query heads together.
        keys: the dimension of all key heads together.
        intermediate: the intermediate dimension of the MLP.
        vocab: the vocabulary size V.
        norms: the number of norms of hidden states in a layer.
        has_qk_norm: whether queries and keys are normalised.
        layer_parameters: the number of parameters of all layers.
        parameters: the number of all parameters.
        lora_parameters: the number of parameters of LoRA updates of rank 1 to all projections.
        weight_bytes: the bytes of a weight in the checkpoint.
    """

    hidden: int
    layers: int
    queries: int
    keys: int
    intermediate: int
    vocab: int
    norms: int
    has_qk_norm: bool
    layer_parameters: int
    parameters: int
    lora_parameters: int
    weight_bytes: int


def is_decoder(config: Any) -> bool:
    """Return whether a configuration is of a causal language model, with or without its LM head.

    Embedding models on decoders are often saved without the head, as ``Qwen3Model``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    architectures = getattr(config, "architectures", None) or []
    if any(name.endswith("ForCausalLM") for name in architectures):
        return True
    kind = type(config)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING


def decoder_shape(config: Any) -> DecoderShape:
    """Return the sizes of a causal language model, whose weights are not read.

    The network is built without memory, so that all weights are counted.

    Args:
        config: the configuration of the model.

    Raises:
        UsageError: if a layer has no gated MLP of projections with the names of Llama, such as a
            mixture of experts.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import GradientCheckpointingLayer

    from tilefold.recipes.decoders import PROJECTIONS

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    modules = network.modules()
    # transformers derives the layers of its decoders from this class
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    projections: dict[str, Any] = {}  # projections of the first layer, by name
    norm_names: list[str] = []
    if layers:
        for path, module in layers[0].named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, torch.nn.Linear):
                projections[name] = module
            elif "norm" in name:
                norm_names.append(name)
    if set(projections) != set(PROJECTIONS):
        raise UsageError(
            "--model: expected an encoder like BERT, or a decoder whose layers have the "
            f"projections {', '.join(PROJECTIONS)}, got {type(network).__name__} with "
            f"{', '.join(projections) or 'none'}.",
        )
    # Norms of queries and keys have the size of a head. The others have that of hidden states.
    qk_norm_names = [name for name in norm_names if name in ("q_norm", "k_norm")]
    layer_parameters = sum(
        parameter.numel() for layer in layers for parameter in layer.parameters()
    )
    lora_parameters_per_layer = sum(
        projection.in_features + projection.out_features for projection in projections.values()
    )
    return DecoderShape(
        hidden=config.hidden_size,
        layers=len(layers),
        queries=projections["q_proj"].out_features,
        keys=projections["k_proj"].out_features,
        intermediate=projections["gate_proj"].out_features,
        vocab=network.get_output_embeddings().weight.size(0),
        norms=len(norm_names) - len(qk_norm_names),
        has_qk_norm=bool(qk_norm_names),
        layer_parameters=layer_parameters,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        lora_parameters=len(layers) * lora_parameters_per_layer,
        weight_bytes=_read_bytes_per_weight(config),
    )


def _read_bytes_per_weight(config: Any) -> int:
    """Return the bytes of a weight in the dtype that a configuration names; fp32 without one."""
    import torch

    dtype = getattr(config, "dtype", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _FP32_BYTES


@dataclass(frozen=True)
class Fit:
    """The batches that fit on a GPU.

    Attributes:
        gpu_memory: the memory of the GPU in GiB.
        largest_batch: the number of pairs that fit; 0 if the weights alone do not fit.
        largest_in_mini_batches: the number of pairs that fit in mini-batches with cached gradients.
    """

    gpu_memory: float
    largest_batch: int
    largest_in_mini_batches: int


@dataclass(frozen=True)
class DecoderTraining:
    """Estimated memory of a training step of a decoder, and the batches that fit.

    Attributes:
        lora_rank: the rank of LoRA updates; None if all weights are trained.
        lora_dropout: the dropout probability of LoRA updates; None if all weights are trained.
        checkpointing: whether layers are recomputed in the backward pass.
        weights_gib: the memory of the weights, and of their copies in bf16, in GiB.
        gradients_gib: the memory of the gradients of trained weights, in GiB.
        optimizer_gib: the memory of the states of AdamW, in GiB.
        mib_a_pair: the peak memory per pair of a query and a document, in MiB.
        fits: the batches that fit on each GPU.
    """

    lora_rank: int | None
    lora_dropout: float | None
    checkpointing: bool
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    mib_a_pair: float
    fits: list[Fit]


def layer_bytes(shape: DecoderShape, coefficients: LayerBytes) -> float:
    """Return the bytes that autograd saves per token in a layer, for the backward pass.

    Args:
        shape: the sizes of the decoder.
        coefficients: measured bytes per hidden, query, key and intermediate dimension.
    """
    n_further_norms = shape.norms - _NORMS_OF_LLAMA  # two are counted in `hidden`
    queries = coefficients.queries
    keys = coefficients.keys
    if shape.has_qk_norm:
        queries += coefficients.queries_norm
        keys += coefficients.keys_norm
    return (
        shape.hidden * (coefficients.hidden + n_further_norms * coefficients.norm)
        + shape.queries * queries
        + shape.keys * keys
        + shape.intermediate * coefficients.intermediate
    )


def pair_bytes(
    shape: DecoderShape,
    coefficients: LayerBytes,
    tokens: int,
    *,
    checkpointing: bool,
) -> float:
    """Return the peak memory in bytes that a training step needs per pair of query and document.

    It holds the activations of the tokens, and a few rows of vocabulary size per text.

    Args:
        shape: the sizes of the decoder.
        coefficients: the bytes that autograd saves in a layer per token and dimension.
        tokens: the tokens of the query and the document together.
        checkpointing: whether layers are recomputed in the backward pass.
    """
    saved_in_layer = layer_bytes(shape, coefficients)
    peak_rows = PEAK_ROWS
    if checkpointing:
        # Every layer saves its input, and one layer at a time saves all activations.
        token_bytes = shape.layers * coefficients.checkpoint * shape.hidden + saved_in_layer
        peak_rows = CHECKPOINTED_PEAK_ROWS
    else:
        token_bytes = shape.layers * saved_in_layer
    token_bytes += ENDS_BYTES * shape.hidden  # embedding and head
    return tokens * token_bytes + TEXTS_PER_PAIR * peak_rows * _FP32_BYTES * shape.vocab


def decoder_training(
    shape: DecoderShape,
    tokens: int,
    gpu_memories: list[float],
    mini_batch_size: int,
    *,
    lora_rank: int | None,
    lora_dropout: float | None,
    checkpointing: bool,
) -> DecoderTraining:
    """Estimate the memory of training SPLADE on packed tokens, in bf16 autocast with AdamW.

    Recipes train fp32 weights, and leave frozen ones in the dtype of the checkpoint. Autocast keeps
    copies in bf16 of fp32 weights from the forward to the backward pass.

    Args:
        shape: the sizes of the decoder.
        tokens: the tokens of a query and a document together.
        gpu_memories: the memory of each GPU to plan for, in GiB.
        mini_batch_size: the pairs per mini-batch.
        lora_rank: the rank of LoRA updates; None to train all weights.
        lora_dropout: the dropout probability of LoRA updates; None without them.
        checkpointing: whether layers are recomputed in the backward pass.
    """
    if lora_rank is None:
        coefficients = ALL_WEIGHTS_BYTES
        trained_parameters = shape.parameters
        weight_bytes: float = _FP32_BYTES * shape.parameters
        has_fp32_weights = True
    else:
        coefficients = LORA_DROPOUT_BYTES if lora_dropout else LORA_BYTES
        trained_parameters = lora_rank * shape.lora_parameters
        weight_bytes = shape.weight_bytes * shape.parameters + _FP32_BYTES * trained_parameters
        has_fp32_weights = shape.weight_bytes == _FP32_BYTES
    if has_fp32_weights:
        # bf16 copies of layers and embedding. With recomputed layers, only one has its copies.
        layer_copies = shape.layer_parameters / (shape.layers if checkpointing else 1)
        weight_bytes += _BF16_BYTES * (layer_copies + shape.vocab * shape.hidden)
    gradient_bytes = _FP32_BYTES * trained_parameters
    optimizer_bytes = 2 * _FP32_BYTES * trained_parameters  # both moments of AdamW
    bytes_of_pair = pair_bytes(shape, coefficients, tokens, checkpointing=checkpointing)
    fits = []
    for gpu_memory in gpu_memories:
        free_bytes = USABLE * gpu_memory * GIB - weight_bytes - gradient_bytes - optimizer_bytes
        fit = Fit(
            gpu_memory=gpu_memory,
            largest_batch=largest_batch(free_bytes, bytes_of_pair),
            largest_in_mini_batches=largest_in_mini_batches(
                free_bytes,
                bytes_of_pair,
                shape.vocab,
                mini_batch_size,
            ),
        )
        fits.append(fit)
    return DecoderTraining(
        lora_rank=lora_rank,
        lora_dropout=lora_dropout,
        checkpointing=checkpointing,
        weights_gib=weight_bytes / GIB,
        gradients_gib=gradient_bytes / GIB,
        optimizer_gib=optimizer_bytes / GIB,
        mib_a_pair=bytes_of_pair / 2**20,
        fits=fits,
    )


def all_trainings(
    shape: DecoderShape,
    tokens: int,
    gpu_memories: list[float],
    mini_batch_size: int,
) -> list[DecoderTraining]:
    """Estimate training with LoRA and of all weights, with and without recomputed layers.

    LoRA has the dropout of the recipe causal-splade.

    Args:
        shape: the sizes of the decoder.
        tokens: the tokens of a query and a document together.
        gpu_memories: the memory of each GPU to plan for, in GiB.
        mini_batch_size: the pairs per mini-batch.
    """
    from tilefold.recipes.decoders import LORA_DROPOUT  # needs torch

    return [
        decoder_training(
            shape,
            tokens,
            gpu_memories,
            mini_batch_size,
            lora_rank=lora_rank,
            lora_dropout=None if lora_rank is None else LORA_DROPOUT,
            checkpointing=checkpointing,
        )
        for lora_rank in (LORA_RANK, None)
        for checkpointing in (False, True)
    ]


def decoder_texts_per_second(shape: DecoderShape, length: int) -> float:
    """Estimate the rate of encoding on one H200 in bf16, without compiled layers.

    Args:
        shape: the sizes of the decoder.
        length: the tokens per text.
    """
    # A token needs a multiplication and an addition for each weight of the layers and the head, and
    # for each position in the two products of attention, Q @ K and P @ V.
    weight_operations = 2 * (shape.layer_parameters + shape.hidden * shape.vocab)
    attention_operations = 4 * length * shape.queries * shape.layers
    tokens_per_second = _ENCODING_FLOPS / (weight_operations + attention_operations)
    return min(tokens_per_second, TOKENIZER_RATE) / length


def training_table(
    trainings: list[DecoderTraining],
    mini_batch_size: int,
) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table of trainings.

    Args:
        trainings: the estimates.
        mini_batch_size: the pairs per mini-batch.
    """
    names = {memory: name for name, memory in GPUS.items()}
    columns = ["trained", "recomputed", "weights", "gradients", "AdamW", "MiB per pair"]
    for fit in trainings[0].fits:
        columns.append(f"pairs on {names.get(fit.gpu_memory, f'{fit.gpu_memory:g} GiB')}")
        columns.append(f"in mini-batches of {mini_batch_size:,}")
    rows = []
    for step in trainings:
        row = [
            "all weights" if step.lora_rank is None else f"LoRA of rank {step.lora_rank}",
            "layers" if step.checkpointing else "nothing",
            f"{step.weights_gib:.1f} GiB",
            f"{step.gradients_gib:.1f} GiB",
            f"{step.optimizer_gib:.1f} GiB",
            f"{step.mib_a_pair:.1f}",
        ]
        for fit in step.fits:
            row += [f"{fit.largest_batch:,}", f"{fit.largest_in_mini_batches:,}"]
        rows.append(row)
    return columns, rows
