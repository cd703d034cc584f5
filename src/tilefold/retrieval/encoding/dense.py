"""Encode texts into dense vectors in memory with a bi-encoder, or into an index of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tilefold._internal.arguments import (
    ArgumentError,
    check_callable,
    check_choice,
    check_encoder,
    check_integer,
    check_least,
    check_mapping,
)
from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model, Tensor
from tilefold.pipeline.truncation import Truncation, counting_truncation, report_truncation
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.common.provenance import model_fingerprint, provenance_of
from tilefold.retrieval.encoding.truncation import shorten_texts

if TYPE_CHECKING:
    from tilefold.retrieval.index.dense import DenseIndex

__all__ = ["encode_dense", "encoded_index"]

CHUNK_SIZE = 1024  # texts encoded between two reports of progress


def encoded_index(
    model: Model,
    texts: Mapping[str, str],
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> DenseIndex:
    """Encode documents, and return an index of them in memory.

    Args:
        model: a ``SentenceTransformer``. The index searches by its similarity.
        texts: id -> text, at least one; or passages of long documents
            (:class:`tilefold.retrieval.data.passages.PassageTexts`).
        batch_size: texts per batch.
        progress: called as ``progress(documents encoded, documents in all)``.

    Returns:
        The index, with vectors in fp32 on the model's device. They are normalized if the model uses
        cosine similarity.
    """
    from torch.nn.functional import normalize  # importing this module must not import torch

    from tilefold.retrieval.index.dense import DenseIndex

    check_mapping("texts", texts, "id -> text")
    check_text_ids("texts", texts)
    rows = encode_dense(
        model,
        texts,
        kind="document",
        batch_size=batch_size,
        progress=progress,
    ).float()
    similarity = str(model.similarity_fn_name)
    if similarity == "cosine":
        rows = normalize(rows)
    provenance = replace(
        provenance_of(texts),
        model_fingerprint=model_fingerprint(model),
        precision=inference_precision(model),
    )
    return DenseIndex(
        ids=list(texts),
        values=rows,
        scales=None,
        similarity=similarity,
        provenance=provenance,
    )


def encode_dense(
    model: Model,
    texts: Mapping[str, str],
    *,
    kind: Literal["document", "query"],
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Encode texts into dense vectors in memory.

    Args:
        model: a ``SentenceTransformer``.
        texts: id -> text, at least one.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.
        batch_size: texts per batch.
        progress: called as ``progress(texts encoded, texts in all)``.

    Returns:
        ``[N, D]``, on the model's device.
    """
    check_encoder("model", model, "SentenceTransformer")
    check_mapping("texts", texts, "id -> text")
    check_choice("kind", kind, ("document", "query"))
    check_integer("batch_size", batch_size)
    check_least("batch_size", batch_size)
    if progress is not None:
        check_callable("progress", progress, "progress(texts encoded, texts in all)")
    if not texts:
        raise ArgumentError("texts", "expected at least one, got an empty mapping.")
    import torch  # importing this module must not import torch

    # Long documents are shortened before they are tokenised. Queries are short.
    contents = list(texts.values())
    encode = model.encode_query
    if kind == "document":
        contents = shorten_texts(model, contents)
        encode = model.encode_document
    truncation = Truncation()
    vectors = []
    for start in range(0, len(contents), CHUNK_SIZE):
        chunk = contents[start : start + CHUNK_SIZE]
        with counting_truncation(truncation):
            chunk_vectors = encode(
                chunk,
                batch_size=batch_size,
                convert_to_tensor=True,
                show_progress_bar=False,
            )
        vectors.append(chunk_vectors)
        if progress is not None:
            progress(start + len(chunk), len(contents))
    report_truncation(kind, len(contents), truncation)
    return torch.cat(vectors)
