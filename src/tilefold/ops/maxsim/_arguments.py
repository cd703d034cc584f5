"""Checks of the arguments of MaxSim and its contrastive loss, and the options that they say."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_dtype,
    check_offsets,
    check_same_device,
    check_shape,
    check_tensor,
    dtype_name,
)
from tilefold.ops._shared.operator import Checked
from tilefold.ops.maxsim._problem import QUANTIZED_DTYPES, MaxSimOptions, MaxSimTensors, sequences

PAIRINGS = ("all", "aligned", "grouped")
REDUCTIONS = ("sum", "mean")
MASK_MODES = ("exclude", "zero")
Dtypes = Sequence[torch.dtype]


def checked(
    tensors: MaxSimTensors,
    pairing: object,
    reduction: object,
    mask_mode: object,
    temperature: float | None,
    normalize: bool,
    longest_query: int = 0,
) -> Checked:
    """Check everything that can be checked without reading a value; both sides are cast as autocast
    asks.

    Raises:
        TypeError, ValueError: as :func:`tilefold.ops.maxsim`.
    """
    mode = _check_options(tensors.pairs, pairing, reduction, mask_mode, temperature)
    queries, documents, query_mask, document_mask, cu_queries, cu_documents, _, scale = tensors
    if scale is not None:
        _check_quantized(queries, normalize)
    dtypes = FLOAT_DTYPES if scale is None else QUANTIZED_DTYPES
    spec = "B N L D" if mode == "grouped" else "N L D"
    _check_side(
        ("queries", "query_mask", "cu_seqlens_q"),
        queries,
        query_mask,
        cu_queries,
        "N L D",
        FLOAT_DTYPES,
    )
    _check_side(
        ("documents", "document_mask", "cu_seqlens_d"),
        documents,
        document_mask,
        cu_documents,
        spec,
        dtypes,
    )
    _check_together(tensors)
    cast = None if scale is not None else _autocast_dtype(queries, documents)
    _check_counts(mode, tensors)
    mean = reduction == "mean" and divides_itself(tensors)
    options = MaxSimOptions(
        mode,
        mask_mode == "zero",
        float(temperature or 0),
        normalize,
        mean,
        longest_query,
    )
    return Checked(options, None if cast is None else functools.partial(_cast_to, cast))


def divides_itself(tensors: MaxSimTensors) -> bool:
    """Whether the operator makes means: of queries that all have one length."""
    return (
        tensors.query_mask is None and tensors.cu_queries is None and tensors.document_scale is None
    )


def _cast_to(dtype: torch.dtype, tensors: MaxSimTensors) -> MaxSimTensors:
    return tensors._replace(
        queries=tensors.queries.to(dtype),
        documents=tensors.documents.to(dtype),
    )


def _check_options(
    pairs: Tensor | None,
    pairing: object,
    reduction: object,
    mask_mode: object,
    temperature: object,
) -> str:
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("mask_mode", mask_mode, MASK_MODES)
    if temperature is not None and (
        isinstance(temperature, bool)
        or not isinstance(temperature, (int, float))
        or not 0 < temperature < math.inf
    ):
        raise ValueError(
            f"temperature must be a positive Python number or None, got {temperature!r}.",
        )
    if pairs is not None:
        if pairs.dim() != 2 or pairs.size(1) != 2:
            raise ValueError(f"pairing must have shape [P, 2], got {list(pairs.shape)}.")
        check_dtype("pairing", pairs, (torch.int32, torch.int64), "use pairing.long().")
        return "index"
    if pairing not in PAIRINGS:
        listed = ", ".join(repr(name) for name in PAIRINGS)
        raise ValueError(
            f"pairing must be one of {listed}, or an integer tensor [P, 2], got {pairing!r}.",
        )
    return str(pairing)


def _check_quantized(queries: object, normalize: bool) -> None:
    if isinstance(queries, Tensor) and queries.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "documents must be a floating tensor where a gradient is asked for, got QuantizedTokens; score under "
            "torch.no_grad(), or give documents.dequantize().",
        )
    if normalize:
        raise ValueError(
            "normalize must be False with quantized documents, got True; normalize the vectors before quantize_tokens, "
            "and the queries.",
        )


def _check_side(
    names: Sequence[str],
    rows: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    dtypes: Dtypes,
) -> None:
    name, mask_name, cu_name = names
    check_tensor(name, rows)
    check_shape(name, rows, spec if cu_seqlens is None else "T D")
    check_dtype(name, rows, dtypes, "cast it with .to(torch.bfloat16) or another of these.")
    if rows.size(-1) == 0:
        raise ValueError(f"{name} must have D of at least 1, got D=0 in shape {list(rows.shape)}.")
    if mask is not None:
        check_tensor(mask_name, mask)
        if mask.is_complex():
            raise TypeError(f"{mask_name} must be bool, integer or floating, got {mask.dtype}.")
        if mask.shape != rows.shape[:-1]:
            raise ValueError(
                f"{mask_name} must have shape {list(rows.shape[:-1])}, got {list(mask.shape)}.",
            )
    if cu_seqlens is not None:
        check_offsets(cu_name, cu_seqlens, "[N + 1]")


def _check_together(tensors: MaxSimTensors) -> None:
    queries, documents = tensors[:2]
    if documents.size(-1) != queries.size(-1):
        raise ValueError(
            f"documents must have the D of queries ({queries.size(-1)}), got {documents.size(-1)} in shape "
            f"{list(documents.shape)}.",
        )
    names = ("documents", "query_mask", "document_mask", "cu_seqlens_q", "cu_seqlens_d", "pairing")
    check_same_device("queries", queries, dict(zip(names, tensors[1:7], strict=True)))


def _autocast_dtype(queries: Tensor, documents: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it asks."""
    device_type = queries.device.type
    if (
        torch.float64 not in (queries.dtype, documents.dtype)
        and device_type != "meta"  # has no autocast state to ask for
        and torch.is_autocast_enabled(device_type)
    ):
        return torch.get_autocast_dtype(device_type)
    if documents.dtype != queries.dtype:
        raise TypeError(
            f"documents must have the dtype of queries ({dtype_name(queries.dtype)}), got "
            f"{dtype_name(documents.dtype)}; cast one of them, or run under torch.autocast.",
        )
    return None


def _check_counts(mode: str, tensors: MaxSimTensors) -> None:
    n_queries, n_documents = sequences(tensors)
    if mode == "aligned" and n_queries != n_documents:
        raise ValueError(
            f"documents must be as many as queries ({n_queries}) for pairing='aligned', got {n_documents}.",
        )
    if mode == "grouped":
        documents, packed = tensors.documents, tensors.cu_documents is not None
        if n_documents % max(n_queries, 1) if packed else documents.size(0) != n_queries:
            raise ValueError(
                f"documents must come in one group of equal size for each of the {n_queries} queries for "
                f"pairing='grouped', got {n_documents} documents in shape {list(documents.shape)}.",
            )


# ---- the contrastive loss


def check_scale(scale: object) -> None:
    """Raise ``ValueError`` unless ``scale`` is a finite number."""
    if (
        isinstance(scale, bool)
        or not isinstance(scale, (int, float))
        or not -math.inf < scale < math.inf
    ):
        raise ValueError(
            f"scale must be a finite Python number, got {scale!r}; multiply queries to learn one.",
        )


def check_labels(
    labels: Tensor | None,
    n_queries: int,
    n_documents: int,
    device: torch.device,
) -> Tensor:
    """The document of each query, checked as far as the host can see without waiting; see
    :func:`labelled_loss`.
    """
    if labels is None:
        if n_documents < n_queries:
            raise ValueError(
                f"documents must be at least as many as queries ({n_queries}) without labels, got {n_documents}.",
            )
        return torch.arange(n_queries, device=device)
    check_tensor("labels", labels)
    check_dtype("labels", labels, (torch.int64,), "use labels.long().")
    if labels.shape != (n_queries,):
        raise ValueError(f"labels must have shape [{n_queries}], got {list(labels.shape)}.")
    if labels.device != device:
        raise ValueError(
            f"labels must be on the device of queries ({device}), got {labels.device}; move it there.",
        )
    if n_queries and not n_documents:
        raise ValueError(
            f"documents must be at least one with labels, got 0 for {n_queries} queries; skip the batch.",
        )
    if device.type == "cpu" and n_queries and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= n_documents:
            raise ValueError(
                f"labels must be at least 0 and below the number of documents ({n_documents}), got "
                f"{low if low < 0 else high}.",
            )
    return labels


def labelled_loss(
    scores: Tensor,
    labels: Tensor | None,
    checked: Tensor,
    n_documents: int,
    first: int = 0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of ``scores`` at the ``checked`` labels plus ``first``, NaN with a label out of
    range.

    Where the host does not look at the ``labels`` (a GPU, a compiled function), one out of range
    would be an assertion in a kernel, after which nothing runs on the device any more, or another
    rank's document.
    """
    if labels is None or (labels.device.type == "cpu" and not torch.compiler.is_compiling()):
        return cross_entropy(scores, checked + first if first else checked, reduction=reduction)
    within = checked.clamp(0, max(n_documents - 1, 0))
    # a factor, so that gradients are NaN too
    factor = torch.where((within == checked).all(), 1.0, math.nan)
    return cross_entropy(scores, within + first if first else within, reduction=reduction) * factor
