"""Encode texts into token vectors with a ``MultiVectorEncoder``, or into dense ones with a
``SentenceTransformer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tilefold._internal.arguments import check_choice, check_encoder, check_least, check_mapping
from tilefold._internal.typing import Model
from tilefold.pipeline.rows import TokenRows
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.encoding.sparse import encode_stock, encode_to_folder, model_name
from tilefold.retrieval.encoding.streamed import Encoding, Job, Kind, MadeOf, Output
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
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    storage: str = "fp16",
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    shard_size: int = 1024,
    save_minutes: float = 1.0,
    source: str | None = None,
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    group: object = "world",
) -> TokenManifest:
    """Encode `texts` into a folder of token vectors as :func:`tilefold.retrieval.encode_collection`
    does sparse ones.

    Shards, failed texts, resuming, ranks, errors, and the arguments that are not named here are the
    same.

    Args:
        model: a ``MultiVectorEncoder``.
        kind: ``"document"`` or ``"query"``: the model's prompt, length, expansion and skipped
            words.
        storage: ``"fp16"``, or ``"int8"`` with one scale per token: half the bytes, and an error of
            at most half of 1/127 of the token's largest entry.
        source: folder or name that `model` was loaded from, stored so that queries can be encoded
            with it.
    """
    encoding = TokenEncoding(kind, batch_size, batch_tokens, max_length, storage, source)
    output = Output(Path(output_dir), shard_size, save_minutes, progress, resume)
    manifest: TokenManifest = encode_to_folder(encoding, model, texts, output, group)
    return manifest


@dataclass(frozen=True)
class TokenEncoding(Encoding):
    """Token vectors of a ``MultiVectorEncoder``; the fields are those of :func:`encode_tokens`."""

    MODEL: ClassVar[str] = "MultiVectorEncoder"
    STORAGES: ClassVar[tuple[str, ...]] = stored.STORAGES

    storage: str = "fp16"
    source: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("storage", self.storage, self.STORAGES)

    def job(
        self,
        model: Model,
        texts: Mapping[str, str],
        output: Output,
        made_of: MadeOf,
    ) -> TokenJob:
        return TokenJob(self, model, token_dimension(model, self.kind), texts, output, made_of)


class TokenJob(Job[TokenManifest, TokenVectors]):
    """Texts that become token vectors."""

    fused, options = "encode_token_batch", ("storage",)
    how: TokenEncoding

    def run(self, texts: list[str]) -> list[Tensor]:
        rows: list[Tensor] = encode_stock(self.model, texts, self.how.kind)
        return rows

    def vectors(self, names: list[str], rows: TokenRows | list[Tensor]) -> TokenVectors:
        storage = self.how.storage
        if not isinstance(rows, TokenRows):
            return TokenVectors.pack(names, rows, self.size, storage)
        offsets = torch.nn.functional.pad(rows.counts.cumsum(0), (1, 0))
        stored.check_finite(
            names,
            offsets,
            rows.finite,
            storage,
            rows.values if rows.scales is None else rows.scales,
        )
        return TokenVectors(names, offsets, rows.values, rows.scales)

    def nothing(self) -> TokenVectors:
        return TokenVectors.pack([], [], self.size, self.how.storage)

    manifest: ClassVar[type[TokenManifest]] = TokenManifest

    @property
    def settings(self) -> Json:
        return self.how.settings(self.made_of()) | {"shard_size": self.output.shard_size}

    def open_writer(self, lists: bool) -> TokenVectorWriter:
        how, output = self.how, self.output
        made_by = (model_name(self.model), self.fingerprint, how.source, how.kind)
        manifest = self.manifest(self.size, how.storage, *made_by, settings=self.settings)
        return TokenVectorWriter(
            output.folder,
            manifest,
            resume=output.resume,
            lists=lists,
            overwrite=not output.resume,
            precision=self.precision,
        )


def encode_dense_collection(
    model: Model,
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Kind = "document",
    storage: str = "fp32",
    dimension: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    shard_size: int = 1024,
    save_minutes: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
    group: object = "world",
) -> DenseManifest:
    """Encode `texts` into a folder of dense vectors as :func:`tilefold.retrieval.encode_collection`
    does sparse ones.

    Shards, failed texts, resuming, ranks, errors, and the arguments that are not named here are the
    same.

    Args:
        model: a ``SentenceTransformer``, with its prompts, routes and similarity.
        storage: ``"fp32"``; ``"fp16"``, half the bytes with relative errors up to 2^-11; or
            ``"int8"``, a quarter, with one scale per vector and errors of at most half of 1/127 of
            its largest entry.
        dimension: keep the first entries of a vector, for models trained so (Matryoshka, arXiv
            2205.13147).
    """
    encoding = DenseEncoding(kind, batch_size, None, max_length, storage, None, dimension)
    output = Output(Path(output_dir), shard_size, save_minutes, progress, resume)
    manifest: DenseManifest = encode_to_folder(encoding, model, texts, output, group)
    return manifest


@dataclass(frozen=True)
class DenseEncoding(TokenEncoding):
    """Dense vectors of a ``SentenceTransformer``; the fields are those of
    :func:`encode_dense_collection`.
    """

    MODEL = "SentenceTransformer"
    STORAGES = stored.DENSE_STORAGES

    storage: str = "fp32"
    dimension: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("dimension", self.dimension)

    def job(
        self,
        model: Model,
        texts: Mapping[str, str],
        output: Output,
        made_of: MadeOf,
    ) -> DenseJob:
        size = dense_dimension(model, self.kind)
        if self.dimension is not None and self.dimension > size:
            raise ValueError(
                f"dimension: expected at most {size}, as the model's vectors have, got {self.dimension}.",
            )
        return DenseJob(self, model, self.dimension or size, texts, output, made_of)


class DenseJob(TokenJob):
    """Texts that become one vector each."""

    fused, manifest = "encode_dense_batch", DenseManifest
    how: DenseEncoding

    def run(self, texts: list[str]) -> list[Tensor]:
        rows = encode_stock(self.model, texts, self.how.kind, convert_to_tensor=True)[
            :,
            : self.size,
        ].float()
        if self.model.similarity_fn_name == "cosine":
            rows = torch.nn.functional.normalize(rows)
        return list(rows.unsqueeze(1))

    @property
    def settings(self) -> Json:
        return super().settings | {"similarity": str(self.model.similarity_fn_name)}


def dense_dimension(model: Model, kind: Kind) -> int:
    """Dimension of the model's vectors, found by encoding one word."""
    expected = "model: expected a SentenceTransformer of dense vectors"
    if type(model).__name__ == "MultiVectorEncoder" or not hasattr(model, "similarity_fn_name"):
        raise ValueError(f"{expected}, got {type(model).__name__}.")
    vectors = encode_stock(model, ["a"], kind, convert_to_tensor=True)
    if (
        not isinstance(vectors, Tensor)
        or vectors.is_sparse
        or vectors.layout != torch.strided
        or vectors.dim() != 2
    ):
        raise ValueError(f"{expected}, got {type(model).__name__}, which makes others of a text.")
    return int(vectors.size(1))


def encode_texts(
    model: Model,
    texts: Mapping[str, str],
    *,
    kind: Kind,
    storage: str = "fp16",
    batch_size: int = 32,
) -> TokenVectors:
    """Encode id -> text into memory, queries or few texts; errors as of
    :func:`tilefold.retrieval.encode_queries`.
    """
    check_encoder("model", model, TokenEncoding.MODEL)
    check_mapping("texts", texts, "id -> text")
    encoding = TokenEncoding(kind=kind, batch_size=batch_size, storage=storage)
    return TokenJob(encoding, model, token_dimension(model, kind), texts).in_memory("texts")


def token_dimension(model: Model, kind: Kind) -> int:
    """Dimension of the model's vectors, found by encoding one word."""
    if not hasattr(model, "encode_query") or not hasattr(model, "similarity_fn_name"):
        raise ValueError(f"model: expected a MultiVectorEncoder, got {type(model).__name__}.")
    (vectors,) = encode_stock(model, ["a"], kind)
    if not isinstance(vectors, Tensor) or vectors.dim() != 2:
        got = f"{type(model).__name__}, whose vectors for one text are not a tensor [tokens, D]"
        raise ValueError(f"model: expected a MultiVectorEncoder, got {got}.")
    return int(vectors.size(1))
