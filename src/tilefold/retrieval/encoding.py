"""Encode texts with a sentence-transformers ``SparseEncoder`` into sparse vectors."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tilefold._vocabulary import vocabulary_fingerprint
from tilefold.retrieval._shards import ShardWriter
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval._streamed import TOO_MANY, StreamedShards
from tilefold.retrieval._streamed_sparse import SparseMaker
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.truncation import cut_texts
from tilefold.retrieval.vectors import SparseVectorWriter, VectorManifest

if TYPE_CHECKING:
    from tilefold.retrieval._token_vectors import TokenVectors

__all__ = ["encode_batch", "encode_collection", "encode_queries", "model_fingerprint"]

Kind = Literal["document", "query"]
T = TypeVar("T", SparseVectors, "TokenVectors")
_SAMPLES_PER_TENSOR = 1024
PLAIN_TEXTS = 32  # of a batch of a model that is not accelerated


def encode_collection(
    model: Any,
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    shard_size: int = 1024,
    save_minutes: float = 1.0,
    top_k: int | None = None,
    min_weight: float = 0.0,
    special_tokens: bool = True,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
) -> VectorManifest:
    """Encode `texts` into a folder of vectors, shard by shard, resuming an earlier run.

    A shard holds `shard_size` consecutive texts and is encoded in batches of similar length. It is written
    atomically, and what is done of it is kept every `save_minutes`, so that a crash costs at most that. A text that
    cannot be encoded (not a string, an error or NaN in the model) is left out and listed with the reason in
    ``manifest.failed``; the others are not lost.

    With an accelerated model, tokenising, encoding and writing run at the same time: texts are tokenised by a thread
    that works ahead, encoded in batches of equal numbers of tokens, without padding where the model allows, and shards
    are assembled and written by a third thread. Rows are those of the plain model up to the order in which sums are
    evaluated: in 16 bits, bits of a row may depend on the texts it was encoded with.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        texts: id -> text, in a fixed order.
        output_dir: the folder; see :mod:`tilefold.retrieval.vectors`.
        kind: ``"document"`` uses the model's document prompt and route, ``"query"`` those of queries.
        batch_size: texts encoded at a time, at most; by default 32 of a plain model, and of an accelerated one as many
            as `batch_tokens` allows.
        batch_tokens: tokens that an accelerated model encodes at a time; by default what suits the device.
        shard_size: texts per shard.
        save_minutes: after this time, and on Ctrl-C, what is done of a shard is kept.
        top_k: heaviest terms kept per text; None uses the model's own ``max_active_dims``.
        min_weight: terms are kept above this weight.
        special_tokens: keep weights of the tokenizer's special tokens, such as ``[CLS]``, which match in every text.
        progress: called as ``progress(texts done, texts in all)`` after each batch, and once at the start.
        resume: keep the complete shards of an earlier run; a different model, text or setting is an error. With False,
            earlier vectors are discarded.

    Returns:
        The complete manifest.

    Raises:
        ValueError: a wrong argument, or no text.
        DataError: ``resume=True`` and the folder holds vectors with other settings; or every text failed, or every one
            of a shard of at least 16, which points at the model and not at the texts.
        FileExistsError: the folder holds other files.
        InUseError: another process writes there.
    """
    _check_settings(kind, batch_size, top_k, min_weight, batch_tokens)
    check_shards(shard_size, save_minutes)
    if not texts:
        raise ValueError("texts: expected at least one, got none.")
    vocab_size = _vocab_size(model, kind)
    fingerprint = vocabulary_fingerprint(_tokenizer(model))
    look = functools.cache(lambda: model_fingerprint(model))

    def open_writer() -> SparseVectorWriter:
        return SparseVectorWriter(
            output_dir,
            vocab_size=vocab_size,
            fingerprint=fingerprint,
            model_name=model_name(model),
            kind=kind,
            settings={
                "model_fingerprint": look(),
                "texts_sha256": texts_digest(texts),
                "shard_size": shard_size,
                "top_k": top_k,
                "min_weight": min_weight,
                **({} if special_tokens else {"special_tokens": False}),
            },
            resume=resume,
        )

    stream = _stream_of(model)
    if stream is not None:
        dropped = [] if special_tokens else list(_tokenizer(model).all_special_ids)
        how = {"top_k": top_k, "min_weight": min_weight, "batch_size": batch_size, "batch_tokens": batch_tokens}
        shards = StreamedShards(
            output_dir,
            open_writer,
            look,
            texts,
            shard_size,
            functools.partial(stream, task=kind, **how),
            functools.partial(cut_texts, model),
            SparseMaker(vocab_size, min_weight, fingerprint, dropped),
            progress or (lambda done, total: None),
            save_minutes,
        )
        shards.run()
        finished: VectorManifest = shards.finish()
        return finished
    writer = open_writer()
    write_shards(
        writer,
        texts,
        shard_size,
        lambda chunk, part: _encode(
            model, texts, chunk, kind, batch_size or PLAIN_TEXTS, top_k, min_weight, part, special_tokens
        ),
        progress,
        save_minutes,
    )
    return writer.finish()


def _stream_of(model: Any) -> Callable[..., Any] | None:
    """``encode_sparse_batch.stream`` of an accelerated model."""
    stream: Callable[..., Any] | None = getattr(getattr(model, "encode_sparse_batch", None), "stream", None)
    return stream


@dataclass
class Part(Generic[T]):
    """What is done of some texts.

    Attributes:
        done: vectors, in batches.
        failed: id -> reason.
        after: called after each batch.
    """

    done: list[T] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    after: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return sum(map(len, self.done)) + len(self.failed)

    def vectors(self) -> T | None:
        """All vectors so far, None without any."""
        return self.done[0].concatenate(self.done) if self.done else None


def write_shards(
    writer: ShardWriter[Any, T],
    texts: Mapping[str, str],
    shard_size: int,
    encode: Callable[[list[str], Part[T]], tuple[T, dict[str, str]]],
    progress: Callable[[int, int], None] | None,
    save_minutes: float,
) -> None:
    """Write the shards that `writer` lacks; ``encode(ids, part)`` gives their vectors, and the failed ids with reasons.

    What is done of a shard is kept every `save_minutes`, and on Ctrl-C.

    Raises:
        DataError: every text failed, or every one of a shard of at least 16, which points at the model and not at the
            texts.
    """
    ids = list(texts)
    report = progress or (lambda done, total: None)
    starts = range(0, len(ids), shard_size)
    missing = {
        number: ids[start : start + shard_size] for number, start in enumerate(starts) if not writer.has_shard(number)
    }
    finished = len(ids) - sum(map(len, missing.values()))
    report(finished, len(ids))
    for number, chunk in missing.items():
        vectors, failed = _encode_shard(
            writer, number, encode, chunk, save_minutes, functools.partial(_report_more, report, finished, len(ids))
        )
        nothing_yet = writer.manifest.n_documents == 0 and number == len(starts) - 1
        if failed and not len(vectors) and (len(chunk) >= TOO_MANY or nothing_yet):
            name, reason = next(iter(failed.items()))
            raise DataError(
                f"texts: all {len(chunk)} of shard {number} failed, {name!r} first ({reason}). "
                "Check the model; earlier shards are kept."
            )
        writer.write_shard(number, vectors, failed)
        finished += len(chunk)
        report(finished, len(ids))


def _report_more(report: Callable[[int, int], None], finished: int, total: int, done: int) -> None:
    report(finished + done, total)


def _encode_shard(
    writer: ShardWriter[Any, T],
    number: int,
    encode: Callable[[list[str], Part[T]], tuple[T, dict[str, str]]],
    chunk: list[str],
    save_minutes: float,
    report: Callable[[int], None],
) -> tuple[T, dict[str, str]]:
    """``encode(chunk, part)`` with a part that goes on from what was kept of the shard, and is kept in turn."""
    part: Part[T] = Part(*writer.read_partial(number))
    kept, saved = len(part), time.monotonic()

    def save() -> None:
        nonlocal kept, saved
        vectors = part.vectors()
        if vectors is not None and kept < len(part) < len(chunk):
            writer.write_partial(number, vectors, part.failed)
        kept, saved = len(part), time.monotonic()

    def after_batch() -> None:
        if time.monotonic() - saved >= 60 * save_minutes:
            save()
        if len(part) < len(chunk):  # what is done of the whole shard counts when it is written
            report(len(part))

    part.after = after_batch
    try:
        return encode(chunk, part)
    except KeyboardInterrupt:
        save()
        raise


def encode_queries(
    model: Any,
    queries: Mapping[str, str],
    *,
    batch_size: int | None = None,
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
    vectors, failed = _encode(model, queries, list(queries), "query", batch_size or PLAIN_TEXTS, top_k, min_weight)
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
    part: Part[SparseVectors] | None = None,
    special_tokens: bool = True,
) -> tuple[SparseVectors, dict[str, str]]:
    """Vectors of `ids` that could be encoded, in their order, and the reasons for the others."""
    dropped = [] if special_tokens else list(_tokenizer(model).all_special_ids)
    fingerprint = vocabulary_fingerprint(_tokenizer(model))

    def run(batch: list[str]) -> SparseVectors:
        matrix = encode_batch(model, [texts[name] for name in batch], kind, top_k, min_weight)
        vectors = SparseVectors.from_torch(batch, matrix, fingerprint, min_weight)
        return vectors.without(dropped) if dropped else vectors

    encoded, failed = encode_each(texts, ids, batch_size, run, Part[SparseVectors]() if part is None else part)
    if encoded is None:
        encoded = SparseVectors.from_rows({}, _vocab_size(model, kind), fingerprint)
    return encoded, failed


def encode_each(
    texts: Mapping[str, str], ids: Sequence[str], batch_size: int, run: Callable[[list[str]], T], part: Part[T]
) -> tuple[T | None, dict[str, str]]:
    """The vectors of `ids` in their order, and the reasons of failed texts; ``None`` if all of them failed.

    ``run(batch)`` encodes texts of similar length, longest first, except what `part` already has. A batch that fails
    is halved until the failing text is alone, so that the others are not lost.
    """
    failed, done = part.failed, part.done
    known = failed.keys() | {name for vectors in done for name in vectors.ids}

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
        batch = [name for name in strings[start : start + batch_size] if name not in known]
        if batch:
            attempt(batch)
            part.after()
    reasons = {name: failed[name] for name in ids if name in failed}
    encoded = part.vectors()
    if encoded is None:
        return None, reasons
    row_of = {name: row for row, name in enumerate(encoded.ids)}
    return encoded.take([row_of[name] for name in ids if name in row_of]), reasons


def check_shards(shard_size: int, save_minutes: float) -> None:
    """Raise an error for sizes and times that no shard has."""
    if shard_size < 1:
        raise ValueError(f"shard_size: expected at least 1, got {shard_size}.")
    if not save_minutes >= 0:
        raise ValueError(f"save_minutes: expected at least 0, got {save_minutes}.")


def _check_settings(
    kind: str, batch_size: int | None, top_k: int | None, min_weight: float, batch_tokens: int | None = None
) -> None:
    if kind not in ("document", "query"):
        raise ValueError(f"kind: expected 'document' or 'query', got {kind!r}.")
    for name, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected None or at least 1, got {top_k}.")
    if not min_weight >= 0:
        raise ValueError(f"min_weight: expected at least 0, got {min_weight}.")


def _tokenizer(model: Any) -> Any:
    return getattr(model, "tokenizer", None)


def _vocab_size(model: Any, kind: Kind) -> int:
    """Length of the model's vectors: of its fused head, else found by encoding one word."""
    known = getattr(getattr(model, "encode_sparse_batch", None), "vocab_size", None)
    if isinstance(known, int):
        return known
    vectors = encode_batch(model, ["a"], kind)
    if vectors.ndim != 2:
        raise ValueError(
            f"model: expected a SparseEncoder, got {type(model).__name__}, whose vectors for one text have "
            f"shape {tuple(vectors.shape)} and not [1, V]."
        )
    return int(vectors.shape[1])


def encode_batch(
    model: Any, texts: Sequence[str], kind: Kind, top_k: int | None = None, min_weight: float = 0.0
) -> Any:
    """One batch of texts, ``[len(texts), V]``: dense from a stock model, CSR from an accelerated one.

    Args:
        model: a ``SparseEncoder``; ``accelerate`` gave it ``encode_sparse_batch``, or did not.
        texts: encoded in one forward pass.
        kind: the model's prompt and route.
        top_k: heaviest terms kept per text; None uses the model's own ``max_active_dims``.
        min_weight: terms are kept above this weight, by an accelerated model.
    """
    batch = cut_texts(model, texts)
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
