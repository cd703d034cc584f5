"""Dense retrieval with a sentence-transformers bi-encoder, as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tilefold._typing import Model
from tilefold.pipeline.truncated import Truncation, tell, watching
from tilefold.retrieval._checks import check_choice, check_k
from tilefold.retrieval._files import check_text_ids
from tilefold.retrieval.fusion import Run
from tilefold.retrieval.truncation import cut_texts

if TYPE_CHECKING:
    import torch

__all__ = ["dense_run", "encode_dense", "rank_by_similarity"]

DOCUMENT_CHUNK = 1024  # documents encoded between two reports of progress


def dense_run(
    model: Model,
    documents: Mapping[str, str],
    queries: Mapping[str, str],
    k: int,
    *,
    batch_size: int = 64,
    query_chunk: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """The `k` best documents per query by the model's own similarity, over all documents.

    The prompts, routes and cosine or dot product of a ``SentenceTransformer`` are used. `documents` and `queries` are
    id -> text, at least one each; `query_chunk` of them are scored at a time, which bounds the scores in memory to
    ``[query_chunk, N]``. `progress` is called with (documents encoded, documents).
    """
    check_k(k)
    for name, texts in (("documents", documents), ("queries", queries)):
        if not texts:
            raise ValueError(f"{name}: expected at least one, got an empty mapping.")
        check_text_ids(name, texts)
    vectors = encode_dense(model, documents, kind="document", batch_size=batch_size, progress=progress)
    asked = encode_dense(model, queries, kind="query", batch_size=batch_size)
    return rank_by_similarity(model, vectors, asked, list(documents), list(queries), k, query_chunk)


def encode_dense(
    model: Model,
    texts: Mapping[str, str],
    *,
    kind: Literal["document", "query"],
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """The vectors ``[N, D]`` of id -> text with the model's prompt and route for `kind`, on its device."""
    check_choice("kind", kind, ("document", "query"))
    if not texts:
        raise ValueError("texts: expected at least one, got an empty mapping.")
    import torch  # the package is imported without it

    contents, parts = list(texts.values()), []
    contents = cut_texts(model, contents) if kind == "document" else contents
    encode, cut = model.encode_document if kind == "document" else model.encode_query, Truncation()
    for start in range(0, len(contents), DOCUMENT_CHUNK):
        chunk = contents[start : start + DOCUMENT_CHUNK]
        with watching(cut):
            parts.append(encode(chunk, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False))
        if progress is not None:
            progress(min(start + DOCUMENT_CHUNK, len(contents)), len(contents))
    tell(kind, len(contents), cut)
    return torch.cat(parts)


def rank_by_similarity(
    model: Model,
    document_vectors: torch.Tensor,
    query_vectors: torch.Tensor,
    document_ids: Sequence[str],
    query_ids: Sequence[str],
    k: int,
    query_chunk: int = 256,
) -> Run:
    """The `k` best documents per query by ``model.similarity`` of given vectors, `query_chunk` queries at a time."""
    check_k(k)
    run: Run = {}
    for start in range(0, len(query_ids), query_chunk):
        scores = model.similarity(query_vectors[start : start + query_chunk], document_vectors)
        best = scores.float().topk(min(k, len(document_ids)), dim=1)
        names = query_ids[start : start + query_chunk]
        for name, values, rows in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
            run[name] = {document_ids[at]: score for at, score in zip(rows, values, strict=True)}
    return run
