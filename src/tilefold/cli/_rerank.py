"""``--rerank``: late interaction over the candidates of an index, for search and evaluate."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.tokens import TokenStore

HELP = "Rerank by late interaction: token vectors (tilefold encode), or a multi-vector model, which encodes candidates."
MODEL_HELP = "Multi-vector model for the queries; by default the one that made the token vectors."
DEPTH_HELP = "Best candidates per query to rerank."


def check(rerank: str | None, model: str | None, depth: int | None) -> None:
    """Raise an error for options that do nothing without --rerank, and for a depth below 1."""
    for name, value in (("--rerank-model", model), ("--rerank-depth", depth)):
        if value is not None and rerank is None:
            raise _common.UsageError(f"{name} goes together with --rerank.")
    _common.check_at_least_one(rerank_depth=depth)


@dataclass(frozen=True)
class Reranker:
    """A multi-vector model, and the token vectors of documents or the texts to encode.

    Attributes:
        model: encodes queries, and candidates where there is no store.
        store: token vectors of the documents, or None.
        texts: id -> text, where there is no store.
    """

    model: Any
    store: TokenStore | None
    texts: Mapping[str, str]

    def __call__(self, queries: Mapping[str, str], run: Run, depth: int | None) -> Run:
        """`run` with the first `depth` candidates of each query scored and ordered by MaxSim."""
        from tilefold.retrieval import encode_texts, rerank

        reduction = "mean" if self.model.similarity_fn_name == "meanmaxsim" else "sum"
        run = {query: scores for query, scores in run.items() if scores}
        if not run:
            return run
        encoded = encode_texts(self.model, {query: queries[query] for query in run})
        documents = (
            self.store
            if self.store is not None
            else encode_texts(self.model, self._candidates(run, depth), kind="document")
        )
        reranked: Run = rerank(run, encoded, documents, depth=depth, reduction=reduction)
        return reranked

    def _candidates(self, run: Run, depth: int | None) -> dict[str, str]:
        """The texts of all candidates."""
        found: dict[str, str] = {}
        for scores in run.values():
            for name in sorted(scores, key=lambda document: -scores[document])[:depth]:
                if name not in self.texts:
                    raise _common.CommandError(
                        f"--rerank: candidate {name!r} is not in the collection; --data must be what was indexed."
                    )
                found[name] = self.texts[name]
        return found


def load_reranker(rerank: str, model: str | None, collection: Collection | None) -> Reranker:
    """Load what --rerank and --rerank-model name; `collection` is needed where --rerank is a model."""
    folder = Path(rerank)
    if (folder / "manifest.json").is_file():
        return _from_store(folder, model)
    if folder.is_dir() and not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise _common.UsageError(
            f"--rerank: {rerank} holds neither token vectors nor a model; make token vectors with: "
            "tilefold encode --model MULTI_VECTOR_MODEL"
        )
    if model is not None:
        raise _common.UsageError("--rerank-model goes with token vectors in --rerank, which here is a model itself.")
    if collection is None:
        raise _common.UsageError(
            "--rerank with a model encodes the candidates' texts: give the collection with --data."
        )
    texts = {name: document.contents for name, document in collection.documents.items()}
    return Reranker(_common.load_multi_vector(rerank, "--rerank"), None, texts)


def _from_store(folder: Path, model: str | None) -> Reranker:
    from tilefold.retrieval import open_tokens
    from tilefold.retrieval.token_encoding import token_dimension, token_model_fingerprint

    store = open_tokens(folder)
    manifest = store.manifest
    if manifest.kind != "document":
        raise _common.UsageError(
            f"--rerank: {folder} holds {manifest.kind} vectors; encode documents, without --queries."
        )
    source = model or manifest.model_source
    if source is None or (model is None and Path(source).is_absolute() and not Path(source).is_dir()):
        where = "unknown" if source is None else f"no longer in {source}"
        raise _common.UsageError(f"--rerank: the model that made {folder} is {where}; name it with --rerank-model.")
    encoder = _common.load_multi_vector(source, "--rerank-model")
    dimension = token_dimension(encoder, "query")
    if dimension != manifest.dimension:
        raise _common.CommandError(
            f"--rerank-model: {source} makes vectors of dimension {dimension}, and {folder} holds vectors of dimension "
            f"{manifest.dimension}; give the model that made them, or encode the documents with this one."
        )
    if manifest.model_fingerprint not in (None, token_model_fingerprint(encoder)):
        raise _common.CommandError(
            f"--rerank-model: {source} is not the model that made {folder} (its weights or settings differ); give that "
            "one, or encode the documents with this one."
        )
    return Reranker(encoder, store, {})
