"""Encode texts with a sentence-transformers ``SparseEncoder`` into sparse vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_encoder,
    check_instance,
    check_least,
    check_least_count,
    check_mapping,
    check_number,
    list_of,
    path_of,
)
from tilefold._internal.precision import Dtype, computing_in
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.distributed.process_group import resolve_group
from tilefold.distributed.rank_store import open_rank_store
from tilefold.pipeline.ragged import offsets_of
from tilefold.pipeline.rows import SparseRows
from tilefold.retrieval.common.provenance import provenance_of
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.encoding.folder_encoder import FolderEncoder
from tilefold.retrieval.encoding.job import Encoding, GetProvenance, Job, Kind, Output, Stream
from tilefold.retrieval.encoding.pages import contains_pages
from tilefold.retrieval.encoding.pending_shards import encode_in_memory
from tilefold.retrieval.encoding.rank_encoder import RankEncoder
from tilefold.retrieval.encoding.truncation import limited, shorten_texts
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.retrieval.vectors.sparse_files import SparseVectorWriter, VectorManifest

__all__ = [
    "Encoding",
    "Kind",
    "Output",
    "SparseEncoding",
    "encode_batch",
    "encode_collection",
    "encode_queries",
    "encode_to_folder",
]


def encode_collection(
    model: Model,
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
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    group: object = "world",
    dtype: Dtype | None = None,
) -> VectorManifest:
    """Encode `texts` into a folder of vectors, shard by shard, resuming an earlier run.

    A text that cannot be encoded (it is not a string, or the model fails or returns NaN) is left
    out, and listed with the reason in ``manifest.failed``.

    With an accelerated model, threads tokenise and write while it encodes batches of equal numbers
    of tokens, without padding if the model allows it. Rows are equal to those of the plain model up
    to the order in which sums are evaluated. In 16 bits, the bits of a row may depend on the texts
    that it was encoded with.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        texts: id -> text, in a fixed order; or passages of long documents
            (:class:`tilefold.retrieval.Passages`).
        output_dir: the folder; see :mod:`tilefold.retrieval.vectors.sparse_files`.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.
        batch_size: maximum number of texts per batch. By default 32 for a plain model, and as many
            as `batch_tokens` allows for an accelerated one.
        batch_tokens: maximum number of tokens per batch of an accelerated model. By default a
            number that suits the device.
        shard_size: consecutive texts per shard, which is written atomically.
        save_minutes: minutes after which the finished part of a shard is saved. It is also saved on
            Ctrl-C.
        top_k: number of heaviest terms to keep per text; None uses the model's own
            ``max_active_dims``.
        min_weight: terms are kept if their weight is above this.
        special_tokens: whether weights of the tokenizer's special tokens, such as ``[CLS]``, are
            kept. They match in every text.
        max_length: tokens read per text, at most as many as the model reads; None uses the model's
            limit.
        progress: called as ``progress(texts done, texts in all)`` at the start and after each
            batch.
        resume: keep the complete shards of an earlier run; a different model, text or setting is an
            error. With False, earlier vectors are discarded.
        group: the ranks of ``torch.distributed`` that share the work: a process group, ``"world"``
            for all ranks if there are any, or None for only this process. Every rank calls with the
            same arguments and gets the same manifest. On a CPU with the same number of threads, the
            folder has the same bytes as one process writes. A rank takes the next shard when it is
            ready for it, so there should be many more shards than ranks. Only complete shards are
            kept. Rank 0 calls `progress`.
        dtype: the dtype in which `model` computes during this call: ``"auto"``, ``"fp32"``,
            ``"bf16"`` or ``"fp16"``, as for
            :func:`tilefold.integrations.sentence_transformers.set_precision`. None uses the dtype
            in which it computes now. The manifest records the dtype as ``precision``.

    Returns:
        The complete manifest.

    Raises:
        TypeError: if `model` is not a loaded model, or `texts` is not a mapping.
        ValueError: if an argument is invalid, or there is no text.
        DataError: if the folder has vectors with other settings, and `resume` is True; or if all
            texts failed, or all texts of a shard of at least 16, because the model is then at
            fault.
        FileExistsError: if the folder has other files.
        InUseError: if another process writes into the folder.
        RankError: if another rank of the group failed or ended, or did not join within five
            minutes.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> from tilefold.retrieval import build_index, load_collection, read_vectors
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> texts = load_collection("bank").contents()
        >>> manifest = encode_collection(model, texts, "vectors", top_k=64)
        >>> index = build_index(read_vectors("vectors"))
        >>> len(index.ids)
        8
    """
    encoding = SparseEncoding(
        kind=kind,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        max_length=max_length,
        top_k=top_k,
        min_weight=min_weight,
        special_tokens=special_tokens,
    )
    output = Output(
        folder=path_of("output_dir", output_dir),
        shard_size=shard_size,
        save_minutes=save_minutes,
        progress=progress,
        resume=resume,
    )
    manifest: VectorManifest = encode_to_folder(
        encoding,
        model,
        texts,
        output,
        group,
        dtype,
    )
    return manifest


def encode_to_folder(
    encoding: Encoding,
    model: Model,
    texts: Mapping[str, Content],
    output: Output,
    group: object = None,
    dtype: Dtype | None = None,
) -> Any:
    """Encode `texts` into a folder of vectors.

    Args:
        encoding: options of encoding. Their class selects the kind of vectors.
        model: a model of the class ``encoding.MODEL``.
        texts: id -> text, or page for a ``TokenEncoding``.
        output: the folder, and how it is written.
        group: the ranks that share the work: a process group, ``"world"`` for all ranks, or None
            for only this process.
        dtype: the dtype in which the model computes during this call; None changes nothing.

    Returns:
        The complete manifest.

    Raises:
        Exception: the errors of :func:`encode_collection`.
    """
    check_instance("encoding", encoding, Encoding, "SparseEncoding()")
    check_instance("output", output, Output, "Output(Path(folder))")
    check_encoder("model", model, encoding.MODEL)
    check_mapping("texts", texts, "id -> text")
    if not texts:
        raise ArgumentError("texts", "expected at least one, got an empty mapping.")
    if not encoding.ENCODES_PAGES and contains_pages(texts):
        raise ArgumentError(
            "texts",
            f"expected texts for a {encoding.MODEL}, got page images. Encode them with a "
            "MultiVectorEncoder of images, such as ColPali.",
        )
    with computing_in(model, dtype):
        job = encoding.create_job(model, texts, output, lambda: provenance_of(texts))
        process_group = resolve_group(group)
        if encoding.max_length is not None:
            _ = job.fingerprint  # computed and cached before the limits of the model are changed
        with limited(model, encoding.kind, encoding.max_length):
            if process_group is None:
                return FolderEncoder(job).run()
            with open_rank_store(process_group) as store, store.sharing_failures():
                return RankEncoder(job, store).run()


@dataclass(frozen=True)
class SparseEncoding(Encoding):
    """Options of encoding sparse vectors with a ``SparseEncoder``.

    Attributes:
        top_k: number of heaviest terms to keep per text; ``None`` uses the model's own limit.
        min_weight: terms are kept if their weight is above this.
        special_tokens: whether weights of special tokens are kept.
    """

    top_k: int | None = None
    min_weight: float = 0.0
    special_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least_count("top_k", self.top_k)
        check_number("min_weight", self.min_weight)
        check_least("min_weight", self.min_weight, 0)

    def create_job(
        self,
        model: Model,
        texts: Mapping[str, Content],
        output: Output,
        get_provenance: GetProvenance,
    ) -> SparseJob:
        """Return the job of encoding `texts` into sparse vectors.

        The output folder is opened later. Then `get_provenance` is called for the digest of texts.
        """
        return SparseJob(
            encoding=self,
            model=model,
            vector_size=_vocab_size(model, self.kind),
            texts=texts,
            output=output,
            get_provenance=get_provenance,
        )


class SparseJob(Job[VectorManifest, SparseVectors]):
    """A ``SparseEncoder`` and the texts that it encodes into sparse vectors."""

    STREAM_OWNER = "encode_sparse_batch"
    encoding: SparseEncoding

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = vocabulary_fingerprint(getattr(self.model, "tokenizer", None))
        self._dropped_terms: list[int] = []  # ids of the terms whose weights are not stored
        if not self.encoding.special_tokens:
            self._dropped_terms = list(self.model.tokenizer.all_special_ids)

    def _configure_stream(self, model_stream: Callable[..., Any]) -> Stream:
        """Return the stream of an accelerated model with the options of this job."""
        return functools.partial(
            model_stream,
            task=self.encoding.kind,
            batch_size=self.encoding.batch_size,
            batch_tokens=self.encoding.batch_tokens,
            top_k=self.encoding.top_k,
            min_weight=self.encoding.min_weight,
        )

    def encode_batch(self, texts: list[str]) -> Tensor:
        return encode_batch(
            self.model,
            texts,
            self.encoding.kind,
            self.encoding.top_k,
            self.encoding.min_weight,
        )

    def to_vectors(self, ids: list[str], rows: SparseRows | Tensor) -> SparseVectors:
        """Convert the rows of a batch to sparse vectors with ids.

        Terms with a weight of at most ``min_weight`` are dropped. Special tokens are dropped if
        ``special_tokens`` is False.

        Args:
            ids: ids of the texts of the batch.
            rows: sparse rows of an accelerated model, or a tensor ``[N, V]`` of a plain model.
        """
        min_weight = self.encoding.min_weight
        if isinstance(rows, SparseRows):
            vectors = SparseVectors(
                ids,
                offsets_of(rows.counts.numpy()),
                rows.columns.numpy(),
                rows.values.float().numpy(),
                rows.vocab_size,
                self.vocabulary,
            )
            vectors = vectors.above(min_weight)
        else:
            vectors = SparseVectors.from_torch(ids, rows, self.vocabulary, min_weight)
        return vectors.without(self._dropped_terms) if self._dropped_terms else vectors

    def empty_vectors(self) -> SparseVectors:
        return SparseVectors.from_rows({}, self.vector_size, self.vocabulary)

    def open_writer(self, *, writes_manifest: bool) -> SparseVectorWriter:
        """Open the output folder for sparse vectors.

        Args:
            writes_manifest: whether the writer locks the folder and writes the manifest.
        """
        manifest = VectorManifest(
            vocab_size=self.vector_size,
            fingerprint=self.vocabulary,
            model_name=model_name(self.model),
            kind=self.encoding.kind,
            settings=self._manifest_settings(),
        )
        return SparseVectorWriter(
            self.output.folder,
            manifest,
            resume=self.output.resume,
            writes_manifest=writes_manifest,
            overwrite=not self.output.resume,
            precision=self.precision,
            precision_is_requested=self.precision_is_requested,
        )

    def _manifest_settings(self) -> dict[str, object]:
        """Return the settings that a resumed run must share, in the order of the manifest."""
        settings = {
            "model_fingerprint": self.fingerprint,
            **self.common_settings(),
            "shard_size": self.output.shard_size,
            "top_k": self.encoding.top_k,
            "min_weight": self.encoding.min_weight,
        }
        if not self.encoding.special_tokens:
            # Not written by default, because older manifests do not have this setting.
            settings["special_tokens"] = False
        return settings


def encode_queries(
    model: Model,
    queries: Mapping[str, str],
    *,
    batch_size: int | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> SparseVectors:
    """Encode queries into sparse vectors in memory, with the model's query prompt and route.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        queries: id -> text.
        batch_size: maximum number of texts per batch; 32 by default.
        top_k: number of heaviest terms to keep per query; None uses the model's own limit.
        min_weight: terms are kept if their weight is above this.

    Raises:
        ValueError: if there is no query, or an argument is invalid.
        DataError: if a query cannot be encoded. The message names the query.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> queries = encode_queries(model, {"q1": "my card was stolen"}, top_k=16)
        >>> queries.ids
        ['q1']
    """
    check_encoder("model", model)
    check_mapping("queries", queries, "id -> text")
    encoding = SparseEncoding(
        kind="query",
        batch_size=batch_size,
        top_k=top_k,
        min_weight=min_weight,
    )
    # A job needs the length of vectors only if no text can be encoded, which is an error here. So
    # any length will do, and no text is encoded to measure it.
    job = SparseJob(encoding, model, vector_size=1, texts=queries)
    return encode_in_memory(job, "queries")


def _vocab_size(model: Model, kind: Kind) -> int:
    """Return the length V of the model's vectors.

    The head of an accelerated model has the length as an attribute. For a plain model, one word is
    encoded and the length of its vector is returned.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.

    Raises:
        ValueError: if the model does not return one vector per text.
    """
    head_vocab_size = getattr(getattr(model, "encode_sparse_batch", None), "vocab_size", None)
    if isinstance(head_vocab_size, int):
        return head_vocab_size
    vectors = encode_batch(model, ["a"], kind)
    if vectors.ndim != 2:
        raise ArgumentError(
            "model",
            f"expected a SparseEncoder, got {type(model).__name__}, whose vectors for one "
            f"text have shape {tuple(vectors.shape)} and not [1, V].",
        )
    return int(vectors.shape[1])


def encode_batch(
    model: Model,
    texts: Sequence[str],
    kind: Kind,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Encode texts into sparse rows in a single forward pass.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        texts: the texts of one batch.
        kind: ``"document"`` or ``"query"``, which selects the model's prompt and route.
        top_k: number of heaviest terms to keep per text; None uses the model's own limit.
        min_weight: an accelerated model keeps terms whose weight is above this. A plain model
            ignores it.

    Returns:
        ``[len(texts), V]``, dense from a plain model and CSR from an accelerated one.

    Raises:
        TypeError: if `model` is not a loaded model, or `texts` is not a sequence.
        ValueError: if another argument is invalid.
    """
    check_encoder("model", model)
    check_choice("kind", kind, ("document", "query"))
    check_least_count("top_k", top_k)
    check_number("min_weight", min_weight)
    texts = list_of("texts", texts)
    encode_accelerated: Callable[..., Tensor] | None = getattr(model, "encode_sparse_batch", None)
    if encode_accelerated is not None:
        return encode_accelerated(
            shorten_texts(model, texts),
            task=kind,
            top_k=top_k,
            min_weight=min_weight,
        )
    rows: Tensor = encode_with_model_method(
        model,
        texts,
        kind,
        max_active_dims=top_k,
        convert_to_tensor=True,
        convert_to_sparse_tensor=False,
    )
    return rows


@torch.no_grad()
def encode_with_model_method(
    model: Model, texts: Sequence[str], kind: Kind, **options: object
) -> Any:
    """Encode texts in one forward pass with the model's ``encode_document`` or ``encode_query``.

    Long texts are shortened first, which saves time in the tokenizer.

    Args:
        model: a plain model of sentence-transformers.
        texts: the texts of one batch.
        kind: ``"document"`` or ``"query"``, which selects the method.
        options: additional arguments of the method.

    Returns:
        The result of the method, whose type depends on the model and the options.
    """
    encode = model.encode_document if kind == "document" else model.encode_query
    return encode(
        shorten_texts(model, texts),
        batch_size=len(texts),
        show_progress_bar=False,
        **options,
    )


def model_name(model: Model) -> str | None:
    """Return the name on the model's card, if it has one."""
    card = getattr(model, "model_card_data", None)
    name = getattr(card, "model_name", None) or getattr(card, "base_model", None)
    return str(name) if name else None
