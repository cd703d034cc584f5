"""Encode texts with a sentence-transformers ``SparseEncoder`` into sparse vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tilefold.retrieval._sparse import SparseVectors, vocabulary_fingerprint
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.vectors import SparseVectorWriter, VectorManifest

if TYPE_CHECKING:
    from tilefold.retrieval._token_vectors import TokenVectors

__all__ = ["encode_collection", "encode_queries", "model_fingerprint"]

Kind = Literal["document", "query"]
T = TypeVar("T", SparseVectors, "TokenVectors")
_SAMPLES_PER_TENSOR = 1024
_TOO_MANY = 16  # when every text of a shard of at least this size fails, the model is at fault, not the texts


def encode_collection(
    model: Any,
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    batch_size: int = 32,
    shard_size: int = 1024,
    top_k: int | None = None,
    min_weight: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
) -> VectorManifest:
    """Encode `texts` into a folder of vectors, shard by shard, resuming an earlier run.

    A shard holds `shard_size` consecutive texts and is encoded in batches of similar length. It is written
    atomically, so that a crash or an interrupt costs at most the shard in progress. A text that
    cannot be encoded (not a string, an error or NaN in the model) is left out and listed with the reason in
    ``manifest.failed``; the others are not lost.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        texts: id -> text, in a fixed order.
        output_dir: the folder; see :mod:`tilefold.retrieval.vectors`.
        kind: ``"document"`` uses the model's document prompt and route, ``"query"`` those of queries.
        batch_size: texts encoded at a time.
        shard_size: texts per shard.
        top_k: heaviest terms kept per text; None uses the model's own ``max_active_dims``.
        min_weight: terms are kept above this weight.
        progress: called as ``progress(texts done, texts in all)`` after each shard, and once at the start.
        resume: keep the complete shards of an earlier run; a different model, text or setting is an error. With False,
            earlier vectors are discarded.

    Returns:
        The complete manifest.

    Raises:
        ValueError: a wrong argument, or no text.
        DataError: ``resume=True`` and the folder holds vectors with other settings; or every text failed, or every one
            of a shard of at least 16, which points at the model and not at the texts.
        FileExistsError: the folder holds other files.
    """
    _check_settings(kind, batch_size, top_k, min_weight)
    if shard_size < 1:
        raise ValueError(f"shard_size: expected at least 1, got {shard_size}.")
    if not texts:
        raise ValueError("texts: expected at least one, got none.")
    writer = SparseVectorWriter(
        output_dir,
        vocab_size=_vocab_size(model, kind),
        fingerprint=vocabulary_fingerprint(_tokenizer(model)),
        model_name=model_name(model),
        kind=kind,
        settings={
            "model_fingerprint": model_fingerprint(model),
            "texts_sha256": texts_digest(texts),
            "shard_size": shard_size,
            "top_k": top_k,
            "min_weight": min_weight,
        },
        resume=resume,
    )
    write_shards(
        writer,
        texts,
        shard_size,
        lambda chunk: _encode(model, texts, chunk, kind, batch_size, top_k, min_weight),
        progress,
    )
    return writer.finish()


def write_shards(
    writer: Any,
    texts: Mapping[str, str],
    shard_size: int,
    encode: Callable[[list[str]], tuple[Any, dict[str, str]]],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write the shards that `writer` lacks; ``encode(ids)`` returns their vectors, and the failed ids with reasons.

    Raises:
        DataError: every text failed, or every one of a shard of at least 16, which points at the model and not at the
            texts.
    """
    ids = list(texts)
    report = progress or (lambda done, total: None)
    report(0, len(ids))
    for number, start in enumerate(range(0, len(ids), shard_size)):
        chunk = ids[start : start + shard_size]
        if not writer.has_shard(number):
            vectors, failed = encode(chunk)
            nothing_yet = writer.manifest.n_documents == 0 and start + shard_size >= len(ids)
            if failed and not len(vectors) and (len(chunk) >= _TOO_MANY or nothing_yet):
                name, reason = next(iter(failed.items()))
                raise DataError(
                    f"texts: all {len(chunk)} of shard {number} failed, {name!r} first ({reason}). "
                    "Check the model; earlier shards are kept."
                )
            writer.write_shard(number, vectors, failed)
        report(min(start + shard_size, len(ids)), len(ids))


def encode_queries(
    model: Any,
    queries: Mapping[str, str],
    *,
    batch_size: int = 32,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> SparseVectors:
    """Encode id -> query text into memory with the model's query prompt and route.

    Raises:
        ValueError: a wrong argument, or no query.
        DataError: a query cannot be encoded; the message names it.
    """
    _check_settings("query", batch_size, top_k, min_weight)
    if not queries:
        raise ValueError("queries: expected at least one, got none.")
    vectors, failed = _encode(model, queries, list(queries), "query", batch_size, top_k, min_weight)
    if failed:
        name, reason = next(iter(failed.items()))
        raise DataError(f"queries: {len(failed)} of {len(queries)} failed, {name!r} first ({reason}).")
    return vectors


def model_fingerprint(model: Any) -> str:
    """SHA-256 over the names, shapes and a sample of every weight, the prompts and the length limit.

    Up to 1,024 evenly spaced values of each tensor are hashed, so that it is cheap for a large model and any training
    step changes it; it does not detect deliberate forgery.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
        sample = flat[::step].cpu().double().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(sample.tobytes())
    for name in ("prompts", "default_prompt_name", "max_seq_length", "max_active_dims"):
        digest.update(f"{name}={getattr(model, name, None)!r}\n".encode())
    return digest.hexdigest()


def _encode(
    model: Any,
    texts: Mapping[str, str],
    ids: Sequence[str],
    kind: Kind,
    batch_size: int,
    top_k: int | None,
    min_weight: float,
) -> tuple[SparseVectors, dict[str, str]]:
    """Vectors of `ids` that could be encoded, in their order, and the reasons for the others."""
    fingerprint = vocabulary_fingerprint(_tokenizer(model))

    def run(batch: list[str]) -> SparseVectors:
        matrix = _run(model, [texts[name] for name in batch], kind, top_k, min_weight)
        return SparseVectors.from_torch(batch, matrix, fingerprint, min_weight)

    encoded, failed = encode_each(texts, ids, batch_size, run)
    if encoded is None:
        encoded = SparseVectors.from_rows({}, _vocab_size(model, kind), fingerprint)
    return encoded, failed


def encode_each(
    texts: Mapping[str, str], ids: Sequence[str], batch_size: int, run: Callable[[list[str]], T]
) -> tuple[T | None, dict[str, str]]:
    """The vectors of `ids` in their order, and the reasons of failed texts; ``None`` if all of them failed.

    ``run(batch)`` encodes texts of similar length, longest first. A batch that fails is halved until the failing text
    is alone, so that the others are not lost.
    """
    failed: dict[str, str] = {}
    done: list[T] = []

    def attempt(batch: list[str]) -> None:
        try:
            done.append(run(batch))
        except Exception as error:  # an error of one text must not lose the others
            if len(batch) == 1:
                failed[batch[0]] = f"{type(error).__name__}: {error}"
                return
            middle = len(batch) // 2
            attempt(batch[:middle])
            attempt(batch[middle:])

    strings: list[str] = []
    for name in ids:
        if isinstance(texts[name], str):
            strings.append(name)
        else:
            failed[name] = f"expected a string, got {type(texts[name]).__name__}"
    strings.sort(key=lambda name: len(texts[name]), reverse=True)
    for start in range(0, len(strings), batch_size):
        attempt(strings[start : start + batch_size])
    reasons = {name: failed[name] for name in ids if name in failed}
    if not done:
        return None, reasons
    encoded = done[0].concatenate(done)
    row_of = {name: row for row, name in enumerate(encoded.ids)}
    return encoded.take([row_of[name] for name in ids if name in row_of]), reasons


def _check_settings(kind: str, batch_size: int, top_k: int | None, min_weight: float) -> None:
    if kind not in ("document", "query"):
        raise ValueError(f"kind: expected 'document' or 'query', got {kind!r}.")
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected None or at least 1, got {top_k}.")
    if not min_weight >= 0:
        raise ValueError(f"min_weight: expected at least 0, got {min_weight}.")


def _tokenizer(model: Any) -> Any:
    return getattr(model, "tokenizer", None)


def _vocab_size(model: Any, kind: Kind) -> int:
    """Length of the model's vectors, found by encoding one word, because stock models need not declare it."""
    vectors = _run(model, ["a"], kind, None)
    if vectors.ndim != 2:
        raise ValueError(
            f"model: expected a SparseEncoder, got {type(model).__name__}, whose vectors for one text have "
            f"shape {tuple(vectors.shape)} and not [1, V]."
        )
    return int(vectors.shape[1])


def _run(model: Any, batch: list[str], kind: Kind, top_k: int | None, min_weight: float = 0.0) -> Any:
    """``[len(batch), V]``: dense from a stock model, CSR from one that ``accelerate`` gave ``encode_sparse_batch``."""
    encode_sparse_batch = getattr(model, "encode_sparse_batch", None)
    if encode_sparse_batch is not None:
        return encode_sparse_batch(batch, task=kind, top_k=top_k, min_weight=min_weight)
    encode = model.encode_document if kind == "document" else model.encode_query
    return encode(
        batch,
        batch_size=len(batch),
        show_progress_bar=False,
        convert_to_tensor=True,
        convert_to_sparse_tensor=False,
        max_active_dims=top_k,
    )


def model_name(model: Any) -> str | None:
    """The name on the model's card, if it has one."""
    card = getattr(model, "model_card_data", None)
    name = getattr(card, "model_name", None) or getattr(card, "base_model", None)
    return str(name) if name else None
