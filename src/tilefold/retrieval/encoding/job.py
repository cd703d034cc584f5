"""Options of encoding, and jobs: a model with the options and texts that it encodes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

from torch import Tensor

from tilefold._internal.arguments import (
    check_callable,
    check_choice,
    check_instance,
    check_integer,
    check_least,
    check_least_count,
    check_number,
)
from tilefold._internal.precision import inference_precision, requested_dtype
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import (
    Batch,
    Item,
    StreamStart,
    Window,
    WindowEnd,
    bisect_failures,
    warn_unused_batch_tokens,
)
from tilefold.pipeline.truncation import Truncation, counting_truncation
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.encoding.pages import contains_pages
from tilefold.retrieval.vectors.shards import M, ShardWriter, V

__all__ = ["Encoding", "GetProvenance", "Job", "Kind", "Output", "Stream"]

# Setting of vectors that have the same bits in every batch: the device and the libraries.
INVARIANT = "invariant"
PLAIN_BATCH_SIZE = 32  # texts per batch of a model that is not accelerated
PAGE_BATCH_SIZE = 8  # pages per batch, each of about a thousand tokens

Kind = Literal["document", "query"]
# Returns the provenance of the texts. It is called when a folder is opened, because the digest of
# many texts takes a while.
GetProvenance = Callable[[], Provenance]
# Encodes windows of texts. None in place of a window means that the next one is not ready yet.
Stream = Callable[[Iterator[Window | None]], Generator[Any, None, None]]


@dataclass(frozen=True)
class Output:
    """Folder of vectors, and how it is written.

    Attributes:
        folder: path of the folder.
        shard_size: texts per shard.
        save_minutes: minutes after which the finished part of a shard is saved.
        progress: called as ``progress(texts done, texts in all)``.
        resume: whether complete shards of an earlier run are kept. Otherwise earlier vectors are
            replaced.
    """

    folder: Path
    shard_size: int = 1024
    save_minutes: float = 1.0
    progress: Callable[[int, int], None] | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        """Raise an error for an option of a wrong type or out of range."""
        check_instance("folder", self.folder, Path, "Path(folder)")
        check_integer("shard_size", self.shard_size)
        check_least("shard_size", self.shard_size)
        check_number("save_minutes", self.save_minutes)
        check_least("save_minutes", self.save_minutes, 0)
        if self.progress is not None:
            check_callable("progress", self.progress, "progress(texts done, texts in all)")

    def report(self, n_done: int, n_texts: int) -> None:
        """Call ``progress``, if there is one."""
        if self.progress is not None:
            self.progress(n_done, n_texts)


IN_MEMORY = Output(Path())


@dataclass(frozen=True)
class Encoding(ABC):
    """Options of encoding texts, without the model.

    Attributes:
        kind: whether texts are documents or queries, which selects the model's prompt and route.
        batch_size: texts per batch, at most.
        batch_tokens: tokens per batch of an accelerated model, at most.
        max_length: tokens read per text; ``None`` uses the model's limit.
    """

    MODEL: ClassVar[str] = "SparseEncoder"  # class of the models in sentence-transformers
    ENCODES_PAGES: ClassVar[bool] = False  # whether documents may be page images

    kind: Kind = "document"
    batch_size: int | None = None
    batch_tokens: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_least_count("max_length", self.max_length)
        check_choice("kind", self.kind, ("document", "query"))
        check_least_count("batch_size", self.batch_size)
        check_least_count("batch_tokens", self.batch_tokens)

    @abstractmethod
    def create_job(
        self,
        model: Model,
        texts: Mapping[str, Content],
        output: Output,
        get_provenance: GetProvenance,
    ) -> Job[Any, Any]:
        """Create the job of encoding texts with a model.

        Args:
            model: a model of sentence-transformers, plain or accelerated.
            texts: id -> text; or page, if the encoding encodes pages.
            output: the folder of vectors, and how it is written.
            get_provenance: returns the provenance of the texts; called when the folder is opened.

        Raises:
            ValueError: if `model` does not produce vectors of this kind.
        """

    def settings(self, provenance: Provenance) -> dict[str, object]:
        """Return the manifest settings that all kinds of vectors have, by name.

        Args:
            provenance: digest of the texts, and how they were divided into passages.
        """
        settings: dict[str, object] = {"texts_sha256": provenance.texts_sha256}
        if provenance.passages:
            settings["passages"] = provenance.passages
        if self.max_length:
            settings["max_length"] = self.max_length
        return settings


@dataclass
class Job(ABC, Generic[M, V]):
    """A model, the texts that it encodes, and where their vectors go.

    Attributes:
        encoding: options of encoding.
        model: a model of sentence-transformers, plain or accelerated.
        vector_size: length of a vector: the terms of the vocabulary, or the dimension.
        texts: id -> text, or page that is encoded as an image.
        output: the folder of vectors; unused if vectors stay in memory.
        get_provenance: returns the provenance of the texts.
        contains_pages: whether some of `texts` are pages.
        stream: encodes windows of texts into batches.
        is_streaming: whether threads tokenise and write while the device computes. Otherwise a
            shard is written before the next one is encoded.
    """

    STREAM_OWNER: ClassVar[str]  # attribute of an accelerated model that has a stream

    encoding: Encoding
    model: Model
    vector_size: int
    texts: Mapping[str, object]
    output: Output = IN_MEMORY
    get_provenance: GetProvenance = Provenance

    def __post_init__(self) -> None:
        """Choose how windows are encoded: by the model's own stream, or by one without threads.

        Only an accelerated model has a stream, which tokenises in threads.
        """
        self.contains_pages = contains_pages(self.texts)
        model_stream = None
        if self._uses_model_stream():
            model_stream = getattr(getattr(self.model, self.STREAM_OWNER, None), "stream", None)
        self.is_streaming = model_stream is not None
        self.stream: Stream = self.single_threaded_stream
        if model_stream is not None:
            self.stream = self._configure_stream(model_stream)
        elif self.encoding.batch_tokens is not None:
            warn_unused_batch_tokens()

    @abstractmethod
    def _configure_stream(self, model_stream: Callable[..., Any]) -> Stream:
        """Return the stream of an accelerated model with the options of this job."""

    def _uses_model_stream(self) -> bool:
        """Return whether the stream of an accelerated model can encode the texts of this job.

        The stream reads no pages.
        """
        return not self.contains_pages

    def common_settings(self) -> dict[str, object]:
        """Return the manifest settings that all kinds of vectors have, by name.

        A model that was accelerated with ``invariant=True`` computes a vector with the same bits in
        every batch. The settings then record the device and the libraries: the bits depend on them.
        """
        settings = self.encoding.settings(self.get_provenance())
        invariance = getattr(self.model, "invariance", None)  # set by accelerate(invariant=True)
        if invariance is not None:
            settings[INVARIANT] = invariance.environment()
        return settings

    @abstractmethod
    def encode_batch(self, texts: list[Any]) -> Tensor | list[Tensor]:
        """Return a row for each text, from one forward pass of a model that is not accelerated.

        Args:
            texts: texts only, or pages only if the job encodes pages.
        """

    @abstractmethod
    def to_vectors(self, ids: list[str], rows: Any) -> V:
        """Return the rows of a batch as vectors with ids.

        Raises:
            Exception: if a row is invalid, such as one with NaN.
        """

    @abstractmethod
    def empty_vectors(self) -> V:
        """Return vectors of no text."""

    @abstractmethod
    def open_writer(self, *, writes_manifest: bool) -> ShardWriter[M, V]:
        """Open the output folder.

        Args:
            writes_manifest: whether the writer locks the folder and writes the manifest. Otherwise
                it writes shards with receipts for the writer that does.
        """

    def single_threaded_stream(
        self,
        windows: Iterator[Window | None],
    ) -> Generator[Item, None, None]:
        """Encode windows, each of which has the texts of a shard, without threads.

        The batches of a window have texts of similar length.

        Args:
            windows: the windows. None means that the next window is not ready yet, and is skipped.

        Yields:
            ``StreamStart`` once; for each window its batches and then ``WindowEnd``.
        """
        yield StreamStart()
        available_windows = (window for window in windows if window is not None)
        for number, window in enumerate(available_windows):
            yield from self.encode_window(number, window)
            yield WindowEnd(number)

    def encode_window(self, number: int, window: Window) -> Iterator[Batch]:
        """Encode the texts of a window without threads.

        Args:
            number: number of the window.
            window: the texts, and the positions of those that are not encoded again.

        Yields:
            The batches of the window.
        """
        texts = window.prepared_texts()
        for positions in self.batches_of(texts, window.skip):
            yield from self.encode_bisecting(number, texts, positions)

    def batches_of(
        self,
        texts: Sequence[Content],
        skipped_positions: frozenset[int],
    ) -> Iterator[list[int]]:
        """Divide the texts of a window into batches of similar length, longest texts first.

        Pages follow in their order, in batches of their own, because a processor reads either texts
        or images. Skipped positions are removed after batches are formed, so that a resumed run has
        the same batches as an uninterrupted run.

        Args:
            texts: texts of the window.
            skipped_positions: positions of texts that are encoded already.

        Yields:
            Positions of the texts of each batch.
        """
        length_of = {
            position: len(text) for position, text in enumerate(texts) if isinstance(text, str)
        }
        longest_first = sorted(length_of, key=length_of.__getitem__, reverse=True)
        pages = [position for position in range(len(texts)) if position not in length_of]
        text_batch_size = self.encoding.batch_size or PLAIN_BATCH_SIZE
        page_batch_size = self.encoding.batch_size or PAGE_BATCH_SIZE
        for batch in (
            *_divide(longest_first, text_batch_size),
            *_divide(pages, page_batch_size),
        ):
            positions = [position for position in batch if position not in skipped_positions]
            if positions:
                yield positions

    def encode_bisecting(
        self,
        window_number: int,
        texts: Sequence[Content],
        positions: Sequence[int],
    ) -> Iterator[Batch]:
        """Encode a batch of texts, and halve it while it fails, to isolate the failing texts.

        Args:
            window_number: number of the window.
            texts: texts of the window.
            positions: positions of the texts to encode.

        Yields:
            A ``Batch`` for each forward pass that succeeds, and one for each text that fails, with
            the exception in place of its rows.
        """
        last_truncation = Truncation()  # truncated texts of the last forward pass

        def encode(batch: Sequence[int]) -> Tensor | list[Tensor]:
            nonlocal last_truncation
            with counting_truncation() as last_truncation:
                return self.encode_batch([texts[position] for position in batch])

        # An outcome is yielded before the next forward pass, so the counts belong to it.
        for batch, outcome in bisect_failures(positions, encode):
            yield Batch(
                window_number,
                batch,
                outcome,
                last_truncation.count,
                last_truncation.max_length,
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the model's weights and settings. Its first computation takes a while."""
        return model_fingerprint(self.model)

    @functools.cached_property
    def precision(self) -> str | None:
        """Number type in which the model computes in this process, such as ``"bf16"``."""
        return inference_precision(self.model)

    @property
    def precision_is_requested(self) -> bool:
        """Whether the user has chosen the precision, instead of the default of the device."""
        return self.precision == "fp8" or requested_dtype(self.model) not in (None, "auto")

    def shard_ids(self) -> list[list[str]]:
        """Return the ids of the texts of each shard."""
        ids = list(self.texts)
        shard_size = self.output.shard_size
        return [ids[start : start + shard_size] for start in range(0, len(ids), shard_size)]

    def defers_opening(self) -> bool:
        """Return whether the folder is opened only when the device has its first batch.

        Opening needs the model's fingerprint, which takes a while because it reads all weights. A
        streaming model can encode its first batch in the meantime. If the folder may have vectors
        to resume, it must be opened first, to know which texts are left.
        """
        folder = self.output.folder
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        return self.is_streaming and is_new


def _divide(positions: Sequence[int], size: int) -> list[Sequence[int]]:
    """Divide positions into consecutive parts of `size` positions. The last one may be shorter."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]
