"""Encode texts with a sentence-transformers ``SparseEncoder`` into sparse vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold._internal.arguments import check_encoder, check_least, check_mapping
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.distributed.process_group import ranks_of
from tilefold.pipeline.ragged import offsets_of
from tilefold.pipeline.rows import SparseRows
from tilefold.retrieval.common.provenance import provenance_of
from tilefold.retrieval.encoding.rank_shards import RankShards, meeting
from tilefold.retrieval.encoding.streamed import Encoding, FolderShards, Job, Kind, MadeOf, Output
from tilefold.retrieval.encoding.truncation import cut_texts, limited
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
]
__all__ += ["encode_to_folder"]


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
) -> VectorManifest:
    """Encode `texts` into a folder of vectors, shard by shard, resuming an earlier run.

    A text that cannot be encoded (not a string, an error or NaN in the model) is left out and
    listed with the reason in ``manifest.failed``; the others are not lost. With an accelerated
    model, threads tokenise and write while it encodes batches of equal numbers of tokens, without
    padding where the model allows. Rows are those of the plain model up to the order in which sums
    are evaluated: in 16 bits, bits of a row may depend on the texts it was encoded with.

    Args:
        model: a ``SparseEncoder``, plain or accelerated.
        texts: id -> text, in a fixed order; or passages of long ones
            (:class:`tilefold.retrieval.Passages`).
        output_dir: the folder; see :mod:`tilefold.retrieval.vectors.sparse_files`.
        kind: ``"document"`` or ``"query"``: the model's prompt and route.
        batch_size: texts encoded at a time, at most; 32 of a plain model, else as many as
            `batch_tokens` allows.
        batch_tokens: tokens that an accelerated model encodes at a time; by default what suits the
            device.
        shard_size: consecutive texts of a shard, which is written atomically.
        save_minutes: after this time, and on Ctrl-C, what is done of a shard is kept.
        top_k: heaviest terms kept per text; None uses the model's own ``max_active_dims``.
        min_weight: terms are kept above this weight.
        special_tokens: keep weights of the tokenizer's special tokens, such as ``[CLS]``, which
            match in every text.
        max_length: tokens read of a text, at most those that the model reads; None takes the
            model's own limit.
        progress: called as ``progress(texts done, texts in all)`` after each batch, and once at the
            start.
        resume: keep the complete shards of an earlier run; a different model, text or setting is an
            error. With False, earlier vectors are discarded.
        group: the ranks of ``torch.distributed`` that share the work: a process group, ``"world"``
            for all of them, if there are any, or None for this process alone. Every rank calls with
            the same arguments and gets the same manifest; the folder holds the bytes that one
            process writes, on a CPU with as many threads. A rank takes the next shard when it is
            ready for one, so shards should be many more than ranks; only whole ones are kept. The
            first calls `progress`.

    Returns:
        The complete manifest.

    Raises:
        TypeError: `model` is no loaded model, or `texts` is no mapping.
        ValueError: a wrong argument, or no text.
        DataError: ``resume=True`` and the folder holds vectors with other settings; or every text
            failed, or every one of a shard of at least 16, which points at the model and not at the
            texts.
        FileExistsError: the folder holds other files.
        InUseError: another process writes there.
        RankError: another rank of the group failed or ended, or some did not come within five
            minutes.
    """
    encoding = SparseEncoding(
        kind,
        batch_size,
        batch_tokens,
        max_length,
        top_k,
        min_weight,
        special_tokens,
    )
    output = Output(Path(output_dir), shard_size, save_minutes, progress, resume)
    manifest: VectorManifest = encode_to_folder(encoding, model, texts, output, group)
    return manifest


def encode_to_folder(
    encoding: Encoding,
    model: Model,
    texts: Mapping[str, str],
    output: Output,
    group: object = None,
) -> Any:
    """The complete manifest of texts that were encoded as :func:`encode_collection` says, with its
    errors.
    """
    check_encoder("model", model, encoding.MODEL)
    check_mapping("texts", texts, "id -> text")
    if not texts:
        raise ValueError("texts: expected at least one, got an empty mapping.")
    job = encoding.job(model, texts, output, lambda: provenance_of(texts))
    ranks = ranks_of(group)
    with limited(model, encoding.kind, encoding.max_length, before=lambda: job.fingerprint):
        if ranks is None:
            return FolderShards(job).run()
        with meeting(ranks) as found, found.stopping():
            shards = RankShards(job, found)
            return shards.lead() if found.rank == 0 else shards.help()


@dataclass(frozen=True)
class SparseEncoding(Encoding):
    """Sparse vectors of a ``SparseEncoder``; the fields are those of :func:`encode_collection`."""

    top_k: int | None = None
    min_weight: float = 0.0
    special_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("top_k", self.top_k)
        check_least("min_weight", self.min_weight, 0)

    def job(
        self,
        model: Model,
        texts: Mapping[str, str],
        output: Output,
        made_of: MadeOf,
    ) -> SparseJob:
        return SparseJob(self, model, _vocab_size(model, self.kind), texts, output, made_of)


class SparseJob(Job[VectorManifest, SparseVectors]):
    """Texts that become sparse vectors."""

    fused, options = "encode_sparse_batch", ("top_k", "min_weight")
    how: SparseEncoding

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = vocabulary_fingerprint(getattr(self.model, "tokenizer", None))
        self.dropped = [] if self.how.special_tokens else list(self.model.tokenizer.all_special_ids)

    def run(self, texts: list[str]) -> Tensor:
        return encode_batch(self.model, texts, self.how.kind, self.how.top_k, self.how.min_weight)

    def vectors(self, names: list[str], rows: SparseRows | Tensor) -> SparseVectors:
        if isinstance(rows, SparseRows):
            indptr = offsets_of(rows.counts.numpy())
            weights = rows.values.float().numpy()
            made = SparseVectors(
                names,
                indptr,
                rows.columns.numpy(),
                weights,
                rows.vocab_size,
                self.vocabulary,
            )
            made = made.above(self.how.min_weight)
        else:
            made = SparseVectors.from_torch(names, rows, self.vocabulary, self.how.min_weight)
        return made.without(self.dropped) if self.dropped else made

    def nothing(self) -> SparseVectors:
        return SparseVectors.from_rows({}, self.size, self.vocabulary)

    def open_writer(self, lists: bool) -> SparseVectorWriter:
        how, output = self.how, self.output
        settings = {
            "model_fingerprint": self.fingerprint,
            **how.settings(self.made_of()),
            "shard_size": output.shard_size,
            "top_k": how.top_k,
            "min_weight": how.min_weight,
            **({} if how.special_tokens else {"special_tokens": False}),
        }
        manifest = VectorManifest(
            self.size,
            self.vocabulary,
            model_name(self.model),
            how.kind,
            settings=settings,
        )
        return SparseVectorWriter(
            output.folder,
            manifest,
            resume=output.resume,
            lists=lists,
            overwrite=not output.resume,
            precision=self.precision,
        )


def encode_queries(
    model: Model,
    queries: Mapping[str, str],
    *,
    batch_size: int | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> SparseVectors:
    """Encode id -> query text into memory with the model's query prompt and route.

    No query or a wrong argument is a ``ValueError``, a query that cannot be encoded a ``DataError``
    that names it.
    """
    check_encoder("model", model)
    check_mapping("queries", queries, "id -> text")
    encoding = SparseEncoding(
        kind="query",
        batch_size=batch_size,
        top_k=top_k,
        min_weight=min_weight,
    )
    return SparseJob(encoding, model, 1, queries).in_memory("queries")


def _vocab_size(model: Model, kind: Kind) -> int:
    """Length of the model's vectors: of its fused head, else found by encoding one word."""
    known = getattr(getattr(model, "encode_sparse_batch", None), "vocab_size", None)
    if isinstance(known, int):
        return known
    vectors = encode_batch(model, ["a"], kind)
    if vectors.ndim != 2:
        got = f"{type(model).__name__}, whose vectors for one text have shape {tuple(vectors.shape)} and not [1, V]"
        raise ValueError(f"model: expected a SparseEncoder, got {got}.")
    return int(vectors.shape[1])


def encode_batch(
    model: Model,
    texts: Sequence[str],
    kind: Kind,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """The texts of one forward pass, ``[len(texts), V]``: dense from a stock model, CSR from an
    accelerated one.
    """
    encode: Callable[..., Tensor] | None = getattr(model, "encode_sparse_batch", None)
    if encode is not None:
        return encode(cut_texts(model, texts), task=kind, top_k=top_k, min_weight=min_weight)
    made = {"convert_to_tensor": True, "convert_to_sparse_tensor": False}
    rows: Tensor = encode_stock(model, texts, kind, max_active_dims=top_k, **made)
    return rows


@torch.no_grad()
def encode_stock(model: Model, texts: Sequence[str], kind: Kind, **options: object) -> Any:
    """Result of ``encode_document`` or ``encode_query`` for the texts of one forward pass."""
    encode = model.encode_document if kind == "document" else model.encode_query
    return encode(
        cut_texts(model, texts),
        batch_size=len(texts),
        show_progress_bar=False,
        **options,
    )


def model_name(model: Model) -> str | None:
    """The name on the model's card, if it has one."""
    card = getattr(model, "model_card_data", None)
    name = getattr(card, "model_name", None) or getattr(card, "base_model", None)
    return str(name) if name else None
