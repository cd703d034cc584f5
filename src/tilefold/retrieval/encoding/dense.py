"""Texts to dense vectors with a sentence-transformers bi-encoder, or to an index of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tilefold._internal.arguments import check_choice, check_encoder, check_mapping
from tilefold._internal.typing import Model, Tensor
from tilefold.pipeline.truncation import Truncation, counting_truncation, report_truncation
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.common.provenance import model_fingerprint, provenance_of
from tilefold.retrieval.encoding.truncation import cut_texts

if TYPE_CHECKING:
    from tilefold.retrieval.index.dense import DenseIndex

__all__ = ["encode_dense", "encoded_index"]

DOCUMENT_CHUNK = 1024  # documents encoded between two reports of progress


def encoded_index(
    model: Model,
    texts: Mapping[str, str],
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> DenseIndex:
    """An index in memory of id -> text, at least one, which are encoded now; it searches by the
    model's similarity.

    `texts` may be passages; `progress` is called with (documents encoded, documents).
    """
    from torch.nn.functional import normalize  # the package is imported without it

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
    made_by = replace(provenance_of(texts), model_fingerprint=model_fingerprint(model))
    return DenseIndex(
        list(texts),
        normalize(rows) if similarity == "cosine" else rows,
        None,
        similarity,
        made_by,
    )


def encode_dense(
    model: Model,
    texts: Mapping[str, str],
    *,
    kind: Literal["document", "query"],
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The vectors ``[N, D]`` of id -> text with the model's prompt and route for `kind`, on its
    device.
    """
    check_encoder("model", model, "SentenceTransformer")
    check_mapping("texts", texts, "id -> text")
    check_choice("kind", kind, ("document", "query"))
    if not texts:
        raise ValueError("texts: expected at least one, got an empty mapping.")
    import torch  # the package is imported without it

    contents, parts = list(texts.values()), []
    contents = cut_texts(model, contents) if kind == "document" else contents
    encode, cut = model.encode_document if kind == "document" else model.encode_query, Truncation()
    for start in range(0, len(contents), DOCUMENT_CHUNK):
        chunk = contents[start : start + DOCUMENT_CHUNK]
        with counting_truncation(cut):
            parts.append(
                encode(
                    chunk,
                    batch_size=batch_size,
                    convert_to_tensor=True,
                    show_progress_bar=False,
                ),
            )
        if progress is not None:
            progress(min(start + DOCUMENT_CHUNK, len(contents)), len(contents))
    report_truncation(kind, len(contents), cut)
    return torch.cat(parts)
