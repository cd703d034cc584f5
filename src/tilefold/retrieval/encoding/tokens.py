"""Encode texts into token vectors, or into dense vectors, with sentence-transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_encoder,
    check_integer,
    check_least,
    check_least_count,
    check_mapping,
    check_optional_text,
    path_of,
)
from tilefold._internal.precision import Dtype
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import Batch, Item, StreamStart, TokenRows, Window, WindowEnd
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.pages import DEFAULT_DPI, Page
from tilefold.retrieval.encoding.job import Encoding, GetProvenance, Job, Kind, Output, Stream
from tilefold.retrieval.encoding.page_workers import default_page_workers, prepare_ahead
from tilefold.retrieval.encoding.pages import (
    EncodingStep,
    PreparedPages,
    check_encodes_images,
    contains_pages,
    encode_features,
    encode_images,
    pool_tokens,
)
from tilefold.retrieval.encoding.pending_shards import encode_in_memory
from tilefold.retrieval.encoding.sparse import (
    encode_to_folder,
    encode_with_model_method,
    model_name,
)
from tilefold.retrieval.vectors import tokens as stored
from tilefold.retrieval.vectors.tokens import (
    DenseManifest,
    TokenManifest,
    TokenVectors,
    TokenVectorWriter,
)

__all__ = [
    "DenseEncoding",
    "TokenEncoding",
    "encode_dense_collection",
    "encode_texts",
    "encode_tokens",
]


def encode_tokens(
    model: Model,
    texts: Mapping[str, Content],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    storage: str = "fp16",
    pool_factor: float | None = None,
    dpi: int = DEFAULT_DPI,
    page_workers: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    shard_size: int = 1024,
    save_minutes: float = 1.0,
    source: str | None = None,
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    group: object = "world",
    dtype: Dtype | None = None,
) -> TokenManifest:
    """Encode texts or pages into a folder of token vectors, resuming an earlier run.

    Shards, failed texts, resuming, ranks and errors are the same as in
    :func:`tilefold.retrieval.encode_collection`.

    Args:
        model: a ``MultiVectorEncoder``, plain or accelerated.
        texts: id -> text, in a fixed order; or passages of long documents
            (:class:`tilefold.retrieval.Passages`). For a model of images, values may be pages
            (:class:`tilefold.retrieval.Page`), as of
            :meth:`tilefold.retrieval.Collection.content`.
        output_dir: the folder.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt, length, expansion and
            skipped words.
        storage: ``"fp16"``; or ``"int8"`` with one scale per token, which takes half the bytes. Its
            error is at most max|x| / 254, for the largest entry max|x| of the token's vector.
        pool_factor: the quotient of the numbers of token vectors of a document before and after
            similar ones are merged (``HierarchicalTokenPooling`` of sentence-transformers); None
            merges none.
        dpi: dots per inch at which pages of PDFs are rendered.
        page_workers: number of processes that decode pages ahead of the model. By default one per
            spare core, at most 16, and none for fewer than 64 pages. 0 decodes in this process.
        batch_size: maximum number of texts or pages per batch. By default 8 pages or 32 texts, and
            for an accelerated model as many texts as `batch_tokens` allows.
        batch_tokens: maximum number of tokens per batch of an accelerated model. By default a
            number that suits the device.
        shard_size: consecutive texts per shard, which is written atomically.
        save_minutes: minutes after which the finished part of a shard is saved.
        source: folder or name that `model` was loaded from. It is stored, so that queries can be
            encoded with the same model.
        max_length: tokens read per text, at most as many as the model reads; None uses the model's
            limit.
        progress: called as ``progress(texts done, texts in all)``.
        resume: keep the complete shards of an earlier run. With False, earlier vectors are
            discarded.
        group: the ranks of ``torch.distributed`` that share the work, as in
            :func:`tilefold.retrieval.encode_collection`.
        dtype: the dtype in which `model` computes during this call, as for
            :func:`tilefold.retrieval.encode_collection`.

    Returns:
        The complete manifest.

    Raises:
        WorkerError: if processes that decode pages are killed again and again, as happens when
            memory is short. Finished shards are kept.
    """
    encoding = TokenEncoding(
        kind=kind,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        max_length=max_length,
        storage=storage,
        source=source,
        pool_factor=pool_factor,
        dpi=dpi,
        page_workers=page_workers,
    )
    output = Output(
        folder=path_of("output_dir", output_dir),
        shard_size=shard_size,
        save_minutes=save_minutes,
        progress=progress,
        resume=resume,
    )
    manifest: TokenManifest = encode_to_folder(
        encoding,
        model,
        texts,
        output,
        group,
        dtype,
    )
    return manifest


@dataclass(frozen=True)
class TokenEncoding(Encoding):
    """Options of encoding token vectors with a ``MultiVectorEncoder``.

    Attributes:
        storage: number type of the stored vectors, one of ``STORAGES``.
        source: folder or name that the model was loaded from.
        pool_factor: the quotient of the numbers of token vectors of a document before and after
            similar ones are merged; None merges none.
        dpi: dots per inch at which pages of PDFs are rendered.
        page_workers: number of processes that decode pages; None chooses it by the number of pages.
    """

    MODEL: ClassVar[str] = "MultiVectorEncoder"
    ENCODES_PAGES: ClassVar[bool] = True
    STORAGES: ClassVar[tuple[str, ...]] = stored.STORAGES

    storage: str = "fp16"
    source: str | None = None
    pool_factor: float | None = None
    dpi: int = DEFAULT_DPI
    page_workers: int | None = None

    def __post_init__(self) -> None:
        """Raise an error for an option of a wrong type or out of range."""
        super().__post_init__()
        check_choice("storage", self.storage, self.STORAGES)
        check_optional_text("source", self.source)
        check_least("pool_factor", self.pool_factor)
        if self.pool_factor is not None and self.kind == "query":
            raise ArgumentError(
                "pool_factor",
                "expected none for queries, whose token vectors are not merged. Leave it out.",
            )
        check_integer("dpi", self.dpi)
        check_least("dpi", self.dpi)
        check_least_count("page_workers", self.page_workers, 0)

    def create_job(
        self,
        model: Model,
        texts: Mapping[str, Content],
        output: Output,
        get_provenance: GetProvenance,
    ) -> TokenJob:
        """Create the job of encoding texts or pages into token vectors.

        The model encodes one word here, because the job needs the dimension of its vectors.

        Args:
            model: a ``MultiVectorEncoder``, plain or accelerated.
            texts: id -> text or page.
            output: the folder of vectors, and how it is written.
            get_provenance: returns the provenance of the texts; called when the folder is opened.

        Raises:
            ValueError: if the model does not return token vectors, or there are pages and the model
                does not encode images.
        """
        return TokenJob(
            encoding=self,
            model=model,
            vector_size=_dimension_for(model, texts, self.kind),
            texts=texts,
            output=output,
            get_provenance=get_provenance,
        )


class TokenJob(Job[TokenManifest, TokenVectors]):
    """A ``MultiVectorEncoder`` and the texts that it encodes into token vectors."""

    STREAM_OWNER = "encode_token_batch"
    MANIFEST: ClassVar[type[TokenManifest]] = TokenManifest
    encoding: TokenEncoding

    def _configure_stream(self, model_stream: Callable[..., Any]) -> Stream:
        return functools.partial(
            model_stream,
            task=self.encoding.kind,
            batch_size=self.encoding.batch_size,
            batch_tokens=self.encoding.batch_tokens,
            storage=self.encoding.storage,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contains_pages:
            self.stream = self.page_stream
            # A shard of pages is large: a GPU would wait for a noticeable time while it is written.
            self.is_streaming = True

    def _uses_model_stream(self) -> bool:
        """Return whether the stream of an accelerated model can encode the texts of this job.

        The stream reads no pages. It also quantizes token vectors at once, so that similar ones
        cannot be merged afterwards (``pool_factor``).
        """
        return super()._uses_model_stream() and self.encoding.pool_factor is None

    def encode_batch(self, texts: list[Any]) -> list[Tensor]:
        """Return a tensor ``[tokens, D]`` for each text, or for each page.

        Args:
            texts: texts only, or pages only.
        """
        pages = [page for page in texts if isinstance(page, Page)]
        rows: list[Tensor]
        if pages:
            rows = encode_images(self.model, [page.image(self.encoding.dpi) for page in pages])
        else:
            rows = encode_with_model_method(self.model, texts, self.encoding.kind)
        return pool_tokens(rows, self.encoding.pool_factor)

    def page_stream(self, windows: Iterator[Window | None]) -> Generator[Item, None, None]:
        """Encode texts and pages in batches, while worker processes prepare later pages.

        Args:
            windows: texts and pages of one shard each. None means that the next window is not ready
                yet.

        Yields:
            ``StreamStart`` once; for each window its batches and then ``WindowEnd``.
        """
        n_workers = self.encoding.page_workers
        if n_workers is None:
            n_pages = sum(isinstance(content, Page) for content in self.texts.values())
            n_workers = default_page_workers(n_pages)
        with prepare_ahead(
            self.model,
            self._steps_of(windows),
            self.encoding.dpi,
            n_workers,
        ) as prepared_steps:
            yield StreamStart()  # workers decode the first pages meanwhile
            for step, prepared in prepared_steps:
                if prepared is not None:
                    yield from self._encode_prepared(step, prepared)
                elif step.ends_window:
                    yield WindowEnd(step.window)
                else:
                    yield from self.encode_bisecting(step.window, step.contents, step.positions)

    def _steps_of(self, windows: Iterator[Window | None]) -> Iterator[EncodingStep]:
        """Yield the batches of each window, and then its end.

        Args:
            windows: texts and pages of one shard each. None means that the next window is not ready
                yet, and yields an empty step.
        """
        number = 0
        for window in windows:
            if window is None:
                yield EncodingStep(number)
                continue
            contents: list[Any] = window.prepared_texts()
            for positions in self.batches_of(contents, window.skip):
                yield EncodingStep(number, contents, positions)
            yield EncodingStep(number, ends_window=True)
            number += 1

    def _encode_prepared(self, step: EncodingStep, prepared: PreparedPages) -> Iterator[Batch]:
        """Encode the pages of a batch from the features that a processor has computed of them.

        Args:
            step: the batch.
            prepared: the features of its pages, and the errors of pages without features.

        Yields:
            A ``Batch`` for each forward pass, and one for each page that failed.
        """
        for position, error in prepared.failures.items():
            yield Batch(step.window, [position], error)
        for positions, features in prepared.groups:
            try:
                rows = encode_features(self.model, features)
            except Exception:  # smaller batches may fit into memory, or isolate the page that fails
                yield from self.encode_bisecting(step.window, step.contents, positions)
                continue
            yield Batch(step.window, positions, pool_tokens(rows, self.encoding.pool_factor))

    def to_vectors(self, ids: list[str], rows: TokenRows | list[Tensor]) -> TokenVectors:
        """Convert the rows of a batch to token vectors with ids.

        Args:
            ids: ids of the texts of the batch.
            rows: packed rows of an accelerated model, or ``[tokens, D]`` of each text.

        Raises:
            DataError: if a vector is not finite after conversion to the storage dtype.
        """
        storage = self.encoding.storage
        if not isinstance(rows, TokenRows):
            return TokenVectors.pack(ids, rows, self.vector_size, storage)
        # Offsets [N + 1]: the cumulative numbers of tokens, with a 0 in front.
        offsets = torch.nn.functional.pad(rows.counts.cumsum(0), (1, 0))
        # int8 values are always finite, so an invalid number is in their scales.
        numbers = rows.values if rows.scales is None else rows.scales
        stored.check_finite(
            ids,
            offsets,
            numbers,
            is_finite=rows.finite,
            storage=storage,
        )
        return TokenVectors(ids, offsets, rows.values, rows.scales)

    def empty_vectors(self) -> TokenVectors:
        return TokenVectors.pack([], [], self.vector_size, self.encoding.storage)

    def open_writer(self, *, writes_manifest: bool) -> TokenVectorWriter:
        """Open the output folder for token vectors or, in a subclass, dense vectors.

        Args:
            writes_manifest: whether the writer locks the folder and writes the manifest.
        """
        manifest = self.MANIFEST(
            dimension=self.vector_size,
            storage=self.encoding.storage,
            model_name=model_name(self.model),
            model_fingerprint=self.fingerprint,
            model_source=self.encoding.source,
            kind=self.encoding.kind,
            settings=self._manifest_settings(),
        )
        return TokenVectorWriter(
            self.output.folder,
            manifest,
            resume=self.output.resume,
            writes_manifest=writes_manifest,
            overwrite=not self.output.resume,
            precision=self.precision,
            precision_is_requested=self.precision_is_requested,
        )

    def _manifest_settings(self) -> Json:
        """Return the settings that a resumed run must share, in the order of the manifest."""
        settings = self.common_settings()
        settings["shard_size"] = self.output.shard_size
        # Not written by default, because older manifests do not have these settings.
        if self.encoding.pool_factor is not None:
            settings["pool_factor"] = self.encoding.pool_factor
        if self.contains_pages:
            settings["dpi"] = self.encoding.dpi
        return settings


def encode_dense_collection(
    model: Model,
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    storage: str = "fp32",
    dimension: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    shard_size: int = 1024,
    save_minutes: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    group: object = "world",
    dtype: Dtype | None = None,
) -> DenseManifest:
    """Encode `texts` into a folder of dense vectors, shard by shard, resuming an earlier run.

    Shards, failed texts, resuming, ranks and errors are the same as in
    :func:`tilefold.retrieval.encode_collection`.

    Args:
        model: a ``SentenceTransformer``, plain or accelerated, with its prompts, routes and
            similarity.
        texts: id -> text, in a fixed order; or passages of long documents
            (:class:`tilefold.retrieval.Passages`).
        output_dir: the folder.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.
        storage: ``"fp32"``; ``"fp16"``, which takes half the bytes, with relative errors up to
            2^-11; or ``"int8"``, which takes a quarter of the bytes, with one scale per vector and
            errors of at most max|x| / 254, for the largest entry max|x| of the vector.
        dimension: number of leading entries of a vector to keep, for models that are trained for it
            (Matryoshka, arXiv 2205.13147).
        batch_size: maximum number of texts per batch. By default 32 for a plain model, and as many
            as `batch_tokens` allows for an accelerated one.
        batch_tokens: maximum number of tokens per batch of an accelerated model. By default a
            number that suits the device.
        max_length: tokens read per text, at most as many as the model reads; None uses the model's
            limit.
        shard_size: consecutive texts per shard, which is written atomically.
        save_minutes: minutes after which the finished part of a shard is saved.
        progress: called as ``progress(texts done, texts in all)``.
        resume: keep the complete shards of an earlier run. With False, earlier vectors are
            discarded.
        group: the ranks of ``torch.distributed`` that share the work, as in
            :func:`tilefold.retrieval.encode_collection`.
        dtype: the dtype in which `model` computes during this call, as for
            :func:`tilefold.retrieval.encode_collection`.

    Returns:
        The complete manifest.
    """
    encoding = DenseEncoding(
        kind=kind,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        max_length=max_length,
        storage=storage,
        dimension=dimension,
    )
    output = Output(
        folder=path_of("output_dir", output_dir),
        shard_size=shard_size,
        save_minutes=save_minutes,
        progress=progress,
        resume=resume,
    )
    manifest: DenseManifest = encode_to_folder(
        encoding,
        model,
        texts,
        output,
        group,
        dtype,
    )
    return manifest


@dataclass(frozen=True)
class DenseEncoding(TokenEncoding):
    """Options of encoding dense vectors with a ``SentenceTransformer``.

    Attributes:
        dimension: number of leading entries to keep; ``None`` keeps all.
    """

    MODEL = "SentenceTransformer"
    ENCODES_PAGES = False
    STORAGES = stored.DENSE_STORAGES

    storage: str = "fp32"
    dimension: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_count("dimension", self.dimension)

    def create_job(
        self,
        model: Model,
        texts: Mapping[str, Content],
        output: Output,
        get_provenance: GetProvenance,
    ) -> DenseJob:
        """Return the job of encoding `texts` into dense vectors.

        One word is encoded to measure the dimension of the vectors. `get_provenance` returns the
        digest of the texts, and is called when the output folder is opened.

        Raises:
            ValueError: if the model does not return dense vectors, or has fewer dimensions.
        """
        model_dimension = dense_dimension(model, self.kind)
        if self.dimension is not None and self.dimension > model_dimension:
            raise ArgumentError(
                "dimension",
                f"expected at most {model_dimension}, the model's dimension, got {self.dimension}.",
            )
        return DenseJob(
            encoding=self,
            model=model,
            vector_size=self.dimension or model_dimension,
            texts=texts,
            output=output,
            get_provenance=get_provenance,
        )


class DenseJob(TokenJob):
    """A ``SentenceTransformer`` and the texts that it encodes into one vector each.

    Dense vectors are stored as token vectors, where every text has one token.
    """

    STREAM_OWNER = "encode_dense_batch"
    MANIFEST = DenseManifest
    encoding: DenseEncoding

    def _configure_stream(self, model_stream: Callable[..., Any]) -> Stream:
        token_stream: Callable[..., Any] = super()._configure_stream(model_stream)
        return functools.partial(token_stream, dimension=self.vector_size)

    def encode_batch(self, texts: list[Any]) -> list[Tensor]:
        """Encode texts in a single forward pass.

        Returns:
            A tensor ``[1, D]`` for each text, normalized if the model uses cosine similarity.
            Dimensions beyond the requested ones are dropped.
        """
        vectors = encode_with_model_method(
            self.model, texts, self.encoding.kind, convert_to_tensor=True
        )
        rows = vectors[:, : self.vector_size].float()
        if self.model.similarity_fn_name == "cosine":
            rows = torch.nn.functional.normalize(rows)
        return list(rows.unsqueeze(1))

    def _manifest_settings(self) -> Json:
        settings = super()._manifest_settings()
        settings["similarity"] = str(self.model.similarity_fn_name)
        return settings


def dense_dimension(model: Model, kind: Kind) -> int:
    """Return the dimension of the model's dense vectors, measured on one word.

    Args:
        model: a ``SentenceTransformer``.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.

    Raises:
        ValueError: if the model does not return one dense vector per text.
    """
    expected = "expected a SentenceTransformer of dense vectors"
    # Only models that encode texts for retrieval have a similarity.
    if type(model).__name__ == "MultiVectorEncoder" or not hasattr(model, "similarity_fn_name"):
        raise ArgumentError("model", f"{expected}, got {type(model).__name__}.")
    vectors = encode_with_model_method(model, ["a"], kind, convert_to_tensor=True)
    is_dense_matrix = (
        isinstance(vectors, Tensor)
        and not vectors.is_sparse
        and vectors.layout == torch.strided
        and vectors.dim() == 2
    )
    if not is_dense_matrix:
        raise ArgumentError(
            "model",
            f"{expected}, got {type(model).__name__}, which does not return one dense vector per "
            "text.",
        )
    return int(vectors.size(1))


def encode_texts(
    model: Model,
    texts: Mapping[str, Content],
    *,
    kind: Kind,
    storage: str = "fp16",
    batch_size: int = 32,
) -> TokenVectors:
    """Encode queries, or a few documents, into token vectors in memory.

    Args:
        model: a ``MultiVectorEncoder``.
        texts: id -> text; also a page, for a model of images.
        kind: ``"document"`` or ``"query"``.
        storage: ``"fp16"``, or ``"int8"`` with one scale per token.
        batch_size: maximum number of texts per batch.

    Raises:
        ValueError: if there is no text, or an argument is invalid.
        DataError: if a text cannot be encoded. The message names the text.
    """
    check_encoder("model", model, TokenEncoding.MODEL)
    check_mapping("texts", texts, "id -> text")
    encoding = TokenEncoding(kind=kind, batch_size=batch_size, storage=storage)
    dimension = _dimension_for(model, texts, kind)
    job = TokenJob(encoding, model, vector_size=dimension, texts=texts)
    return encode_in_memory(job, "texts")


def _dimension_for(model: Model, texts: Mapping[str, Content], kind: Kind) -> int:
    """Return the dimension of the model's token vectors, and check that it encodes the inputs.

    Args:
        model: a ``MultiVectorEncoder``.
        texts: id -> text or page.
        kind: ``"document"`` or ``"query"``.

    Raises:
        ValueError: if the model does not return token vectors, or there are pages and the model
            does not encode images.
    """
    if contains_pages(texts):
        check_encodes_images(model)
        kind = "query"  # the dimension is measured on a text, which may have to be a query
    return token_dimension(model, kind)


def token_dimension(model: Model, kind: Kind) -> int:
    """Return the dimension of the model's token vectors, measured on one word.

    Args:
        model: a ``MultiVectorEncoder``.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.

    Raises:
        ValueError: if the model does not return token vectors.
    """
    if not hasattr(model, "encode_query") or not hasattr(model, "similarity_fn_name"):
        raise ArgumentError("model", f"expected a MultiVectorEncoder, got {type(model).__name__}.")
    (vectors,) = encode_with_model_method(model, ["a"], kind)
    if not isinstance(vectors, Tensor) or vectors.dim() != 2:
        raise ArgumentError(
            "model",
            f"expected a MultiVectorEncoder, got {type(model).__name__}, whose vectors for "
            "one text are not a tensor [tokens, D].",
        )
    return int(vectors.size(1))
