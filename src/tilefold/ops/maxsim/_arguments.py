"""Checks of the arguments of MaxSim and of its contrastive loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tilefold.ops._shared.autocast import autocast_dtype
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
from tilefold.ops.maxsim._problem import (
    QUANTIZED_DTYPES,
    MaxSimOptions,
    MaxSimTensors,
    sequence_counts,
)

PAIRINGS = ("all", "aligned", "grouped")
REDUCTIONS = ("sum", "mean")
MASK_MODES = ("exclude", "zero")
# arguments that describe the padding of queries and of documents
_MASK_AND_OFFSETS = {
    "queries": ("query_mask", "cu_seqlens_q"),
    "documents": ("document_mask", "cu_seqlens_d"),
}


def check_arguments(
    tensors: MaxSimTensors,
    pairing: object,
    reduction: object,
    mask_mode: object,
    temperature: float | None,
    normalize: bool,
    longest_query: int = 0,
) -> Checked:
    """Check everything that can be checked without reading a value of a tensor.

    Args:
        tensors: the tensors, as the caller passed them.
        pairing: ``"all"``, ``"aligned"`` or ``"grouped"``; ignored if ``tensors`` has pairs.
        reduction: ``"sum"`` or ``"mean"`` over the tokens of a query.
        mask_mode: ``"exclude"`` or ``"zero"``: how masked document tokens count.
        temperature: temperature of the smooth maximum, ``None`` for the maximum.
        normalize: whether token vectors are divided by their Euclidean norm.
        longest_query: number of tokens of the longest packed query, if pairs are listed and a
            gradient is needed.

    Returns:
        The options of the operator and, under autocast, the function that casts queries and
        documents.

    Raises:
        TypeError: for arguments that are not tensors, or of a dtype that is not supported.
        ValueError: for shapes, devices or options that are not supported together.
    """
    _check_options(reduction, mask_mode, temperature)
    pairing_name = _check_pairing(pairing if tensors.pairs is None else tensors.pairs)
    quantized = tensors.document_scale is not None
    if quantized:
        _check_quantized(tensors.queries, normalize)
    _check_token_vectors(
        "queries",
        tensors.queries,
        tensors.query_mask,
        tensors.cu_queries,
        padded_shape="N L D",
        dtypes=FLOAT_DTYPES,
    )
    _check_token_vectors(
        "documents",
        tensors.documents,
        tensors.document_mask,
        tensors.cu_documents,
        padded_shape="B N L D" if pairing_name == "grouped" else "N L D",
        dtypes=QUANTIZED_DTYPES if quantized else FLOAT_DTYPES,
    )
    _check_sides_agree(tensors)
    autocast = None if quantized else _cast_dtype(tensors.queries, tensors.documents)
    _check_counts(pairing_name, tensors)
    options = MaxSimOptions(
        pairing=pairing_name,
        mask_zero=mask_mode == "zero",
        temperature=float(temperature or 0),
        normalize=normalize,
        mean=reduction == "mean" and operator_takes_mean(tensors),
        longest_query=longest_query,
    )
    return Checked(options, None if autocast is None else functools.partial(_cast_to, autocast))


def operator_takes_mean(tensors: MaxSimTensors) -> bool:
    """Return whether the operator itself divides scores by the number of query tokens.

    This is the case if all queries have the same number of tokens. Otherwise the public function
    divides the sums.

    Args:
        tensors: tensors of the call.
    """
    return (
        tensors.query_mask is None and tensors.cu_queries is None and tensors.document_scale is None
    )


def _cast_to(dtype: torch.dtype, tensors: MaxSimTensors) -> MaxSimTensors:
    """Cast queries and documents, as autocast does."""
    return tensors._replace(
        queries=tensors.queries.to(dtype),
        documents=tensors.documents.to(dtype),
    )


def _check_options(reduction: object, mask_mode: object, temperature: object) -> None:
    """Check ``reduction``, ``mask_mode`` and ``temperature``."""
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("mask_mode", mask_mode, MASK_MODES)
    if temperature is None or (_is_finite_number(temperature) and temperature > 0):
        return
    raise ValueError(
        f"temperature must be a positive Python number or None, got {temperature!r}.",
    )


def _is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite Python number, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _check_pairing(pairing: object) -> str:
    """Check the argument ``pairing``, and return the name of the pairing.

    Args:
        pairing: a name, or listed pairs of a query and a document ``[P, 2]``.

    Returns:
        ``"index"`` for listed pairs, else the name.
    """
    if isinstance(pairing, Tensor):
        if pairing.dim() != 2 or pairing.size(1) != 2:
            raise ValueError(f"pairing must have shape [P, 2], got {list(pairing.shape)}.")
        check_dtype("pairing", pairing, (torch.int32, torch.int64), "use pairing.long().")
        return "index"
    if pairing not in PAIRINGS:
        names = ", ".join(repr(name) for name in PAIRINGS)
        raise ValueError(
            f"pairing must be one of {names}, or an integer tensor [P, 2], got {pairing!r}.",
        )
    return str(pairing)


def _check_quantized(queries: object, normalize: bool) -> None:
    """Check that a call with quantized documents needs no gradient and does not normalize."""
    if isinstance(queries, Tensor) and queries.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "documents must be a floating tensor if a gradient is needed, got "
            "QuantizedTokens; score under torch.no_grad(), or give documents.dequantize().",
        )
    if normalize:
        raise ValueError(
            "normalize must be False with quantized documents, got True; normalize documents "
            "before quantize_tokens, and queries before scoring.",
        )


def _check_token_vectors(
    name: str,
    vectors: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    *,
    padded_shape: str,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Check the token vectors of queries or documents, with their mask and offsets.

    Args:
        name: ``"queries"`` or ``"documents"``.
        vectors: padded token vectors, or packed ones ``[T, D]``.
        mask: mask of the tokens, or ``None``.
        offsets: offsets of packed sequences, or ``None`` for padded ones.
        padded_shape: names of the dimensions of padded vectors, such as ``"N L D"``.
        dtypes: dtypes that the vectors may have.
    """
    mask_name, offsets_name = _MASK_AND_OFFSETS[name]
    check_tensor(name, vectors)
    check_shape(name, vectors, padded_shape if offsets is None else "T D")
    check_dtype(name, vectors, dtypes, "cast it with .to(torch.bfloat16) or another of these.")
    if vectors.size(-1) == 0:
        raise ValueError(
            f"{name} must have D of at least 1, got D=0 in shape {list(vectors.shape)}.",
        )
    if mask is not None:
        check_tensor(mask_name, mask)
        if mask.is_complex():
            raise TypeError(f"{mask_name} must be bool, integer or floating, got {mask.dtype}.")
        if mask.shape != vectors.shape[:-1]:
            raise ValueError(
                f"{mask_name} must have shape {list(vectors.shape[:-1])}, got {list(mask.shape)}.",
            )
    if offsets is not None:
        check_offsets(offsets_name, offsets, "[N + 1]")


def _check_sides_agree(tensors: MaxSimTensors) -> None:
    """Check that queries and documents have the same D, and that all tensors are on one device."""
    queries = tensors.queries
    documents = tensors.documents
    if documents.size(-1) != queries.size(-1):
        raise ValueError(
            f"documents must have the last dimension D of queries ({queries.size(-1)}), got "
            f"{documents.size(-1)} in shape {list(documents.shape)}.",
        )
    check_same_device(
        "queries",
        queries,
        {
            "documents": documents,
            "query_mask": tensors.query_mask,
            "document_mask": tensors.document_mask,
            "cu_seqlens_q": tensors.cu_queries,
            "cu_seqlens_d": tensors.cu_documents,
            "pairing": tensors.pairs,
        },
    )


def _cast_dtype(queries: Tensor, documents: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts to, or ``None`` if it casts nothing.

    Raises:
        TypeError: if nothing is cast, and queries and documents differ in dtype.
    """
    dtype = autocast_dtype(queries, documents)
    if dtype is not None:
        return dtype
    if documents.dtype != queries.dtype:
        raise TypeError(
            f"documents must have the dtype of queries ({dtype_name(queries.dtype)}), got "
            f"{dtype_name(documents.dtype)}; cast one of them, or run under torch.autocast.",
        )
    return None


def _check_counts(pairing: str, tensors: MaxSimTensors) -> None:
    """Check that the number of documents fits the number of queries.

    Aligned documents are as many as queries. Grouped documents are ``[Nq, N, Ld, D]`` if they are
    padded. If they are packed, the first ``N`` documents belong to the first query, and so on.

    Args:
        pairing: which pairs are scored.
        tensors: tensors of the call.
    """
    n_queries, n_documents = sequence_counts(tensors)
    if pairing == "aligned" and n_queries != n_documents:
        raise ValueError(
            f"documents must be as many as queries ({n_queries}) for pairing='aligned', got "
            f"{n_documents}.",
        )
    if pairing == "grouped":
        documents = tensors.documents
        if tensors.cu_documents is not None:
            groups_are_equal = n_documents % max(n_queries, 1) == 0
        else:
            groups_are_equal = documents.size(0) == n_queries
        if not groups_are_equal:
            raise ValueError(
                f"documents must be {n_queries} groups of equal size, one for each query, for "
                f"pairing='grouped', got {n_documents} documents in shape "
                f"{list(documents.shape)}.",
            )


# Contrastive loss


def check_scale(scale: object) -> None:
    """Check that ``scale`` is a finite number."""
    if not _is_finite_number(scale):
        raise ValueError(
            f"scale must be a finite Python number, got {scale!r}; multiply queries to learn one.",
        )


def check_labels(
    labels: Tensor | None,
    n_queries: int,
    n_documents: int,
    device: torch.device,
) -> Tensor:
    """Check the labels, and return the document of each query.

    Values are checked on the CPU only, since reading them would wait for a GPU. See
    :func:`labelled_loss`.

    Args:
        labels: ``[Nq]`` int64, or ``None``: query i then belongs to document i.
        n_queries: number of queries.
        n_documents: number of documents.
        device: device of the queries.

    Returns:
        ``[Nq]`` int64 documents.

    Raises:
        TypeError: if the labels are not an int64 tensor.
        ValueError: if their shape or device is wrong, or a label is out of range.
    """
    if labels is None:
        if n_documents < n_queries:
            raise ValueError(
                f"documents must be at least as many as queries ({n_queries}) without labels, got "
                f"{n_documents}.",
            )
        return torch.arange(n_queries, device=device)
    check_tensor("labels", labels)
    check_dtype("labels", labels, (torch.int64,), "use labels.long().")
    if labels.shape != (n_queries,):
        raise ValueError(f"labels must have shape [{n_queries}], got {list(labels.shape)}.")
    if labels.device != device:
        raise ValueError(
            f"labels must be on the device of queries ({device}), got {labels.device}; move it "
            "there.",
        )
    if n_queries and not n_documents:
        raise ValueError(
            f"documents must be at least one with labels, got 0 for {n_queries} queries; skip the "
            "batch.",
        )
    if device.type == "cpu" and n_queries and not torch.compiler.is_compiling():
        smallest, largest = (int(bound) for bound in labels.aminmax())
        if smallest < 0 or largest >= n_documents:
            raise ValueError(
                f"labels must be at least 0 and below the number of documents ({n_documents}), got "
                f"{smallest if smallest < 0 else largest}.",
            )
    return labels


def labels_were_checked(labels: Tensor | None) -> bool:
    """Return whether :func:`check_labels` read the values of the caller's labels.

    It does not on a GPU, nor in a compiled function.
    """
    return labels is None or (labels.device.type == "cpu" and not torch.compiler.is_compiling())


def labelled_loss(
    scores: Tensor,
    labels: Tensor,
    n_documents: int,
    first_document: int = 0,
    reduction: str = "mean",
    *,
    were_checked: bool,
) -> Tensor:
    """Compute the cross entropy of scores and labels, or NaN if a label is out of range.

    A label out of range would fail an assertion in a GPU kernel, after which the process can no
    longer use the device, or it would name a document of another rank. Labels that were not checked
    are therefore clamped to the valid range, and the loss is multiplied by NaN if this changed one.

    Args:
        scores: ``[Nq, N]``.
        labels: ``[Nq]`` int64, from 0 to ``n_documents - 1``.
        n_documents: number of documents that labels may name.
        first_document: column of ``scores`` of the document with label 0.
        reduction: ``"mean"`` or ``"sum"`` over the queries.
        were_checked: whether the values of the labels were checked.
    """
    valid_labels = labels if were_checked else labels.clamp(0, max(n_documents - 1, 0))
    columns = valid_labels
    if first_document:  # adding 0 would launch a kernel
        columns = valid_labels + first_document
    loss = cross_entropy(scores, columns, reduction=reduction)
    if were_checked:
        return loss
    # a factor, so that the gradients are NaN, too
    return loss * torch.where((valid_labels == labels).all(), 1.0, math.nan)
