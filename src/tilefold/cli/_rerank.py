"""``--rerank``: late interaction over the candidates of an index, for search and evaluate."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection, Document
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.reranking import Tail
    from tilefold.retrieval.tokens import TokenStore

HELP = (
    "Rerank by late interaction: token vectors (tilefold encode), or a multi-vector model, which encodes candidates; "
    "minilm takes the token states of the packaged one."
)
MODEL_HELP = "Multi-vector model for the queries, or minilm; by default the one that made the token vectors."
DEPTH_HELP = "Best candidates per query to rerank."
TAIL_HELP = "Candidates that were not reranked: keep them after the others (default), or drop them."
WEIGHT_HELP = "Weight of MaxSim in [0, 1] beside the first scores, both from 0 to 1 per query; by default MaxSim alone."


@dataclass(frozen=True)
class RerankOptions:
    """What to rerank with, how deep, and how its scores are mixed with the first ones."""

    rerank: str
    model: str | None
    depth: int | None
    tail: Tail
    weight: float | None


def options(
    rerank: str | None, model: str | None, depth: int | None, tail: str | None, weight: float | None
) -> RerankOptions | None:
    """The --rerank options of a command, None without --rerank.

    Raises:
        UsageError: an option that does nothing without --rerank, or a value out of range.
    """
    if rerank is None:
        given = {"--rerank-model": model, "--rerank-depth": depth, "--rerank-tail": tail, "--rerank-weight": weight}
        for name, value in given.items():
            _common.refuse(name, value, "goes together with --rerank")
        return None
    _common.check_at_least_one(rerank_depth=depth)
    if tail not in (None, "keep", "drop"):
        raise _common.UsageError(f"--rerank-tail: expected keep or drop, got {tail!r}.")
    if weight is not None and not 0 <= weight <= 1:
        raise _common.UsageError(f"--rerank-weight: expected a number in [0, 1], got {weight:g}.")
    if weight is not None and tail is not None:
        raise _common.UsageError(
            "--rerank-tail goes without --rerank-weight, under which every candidate keeps its share."
        )
    return RerankOptions(rerank, model, depth, "drop" if tail == "drop" else "keep", weight)


@dataclass(frozen=True)
class Reranker:
    """A multi-vector model, and the token vectors of documents or the texts to encode.

    Attributes:
        options: of the command.
        model: encodes queries, and candidates where there is no store.
        store: token vectors of the documents, or None.
        documents: id -> document, where there is no store.
    """

    options: RerankOptions
    model: Any
    store: TokenStore | None
    documents: Mapping[str, Document]

    def __call__(self, queries: Mapping[str, str], run: Run, depth: int | None = None) -> Run:
        """`run` with the best candidates of each query scored and ordered by MaxSim, or by both scores.

        --rerank-depth of them, else `depth`, else all.
        """
        from tilefold.retrieval import encode_texts, interpolate, rerank

        reduction = "mean" if self.model.similarity_fn_name == "meanmaxsim" else "sum"
        run = {query: scores for query, scores in run.items() if scores}
        if not run:
            return run
        depth, weight = self.options.depth or depth, self.options.weight
        encoded = encode_texts(self.model, {query: queries[query] for query in run}, kind="query")
        documents = (
            self.store
            if self.store is not None
            else encode_texts(self.model, self._candidates(run, depth), kind="document")
        )
        tail = self.options.tail if weight is None else "drop"
        late: Run = rerank(run, encoded, documents, depth=depth, tail=tail, reduction=reduction)
        if weight is None:
            return late
        longest = max(map(len, run.values()))
        mixed: Run = interpolate([run, late], [1 - weight, weight], k=longest)
        return mixed

    def _candidates(self, run: Run, depth: int | None) -> dict[str, str]:
        """The contents of all candidates."""
        found: dict[str, str] = {}
        for scores in run.values():
            for name in sorted(scores, key=lambda document: -scores[document])[:depth]:
                document = self.documents.get(name)
                if document is None:
                    raise _common.CommandError(
                        f"--rerank: candidate {name!r} is not in the collection; --data must be what was indexed."
                    )
                found[name] = document.contents
        return found


def load_reranker(options: RerankOptions, collection: Collection | None, made_of: Provenance | None) -> Reranker:
    """Load what --rerank and --rerank-model name.

    Args:
        options: of the command.
        collection: the documents; needed where --rerank is a model.
        made_of: fingerprint of the documents that are reranked, if known; token vectors of others are refused.
    """
    rerank, model = options.rerank, options.model
    folder, packaged = Path(rerank), rerank == _models.PACKAGED
    if not packaged and (folder / "manifest.json").is_file():
        return _from_store(options, folder, made_of)
    if (
        not packaged
        and folder.is_dir()
        and not (folder / "config.json").is_file()
        and not (folder / "modules.json").is_file()
    ):
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
    return Reranker(options, _models.load_multi_vector(rerank, "--rerank"), None, collection.documents)


def _from_store(options: RerankOptions, folder: Path, made_of: Provenance | None) -> Reranker:
    from tilefold.retrieval import open_tokens
    from tilefold.retrieval.token_encoding import token_dimension, token_model_fingerprint

    store = open_tokens(folder)
    manifest = store.manifest
    if manifest.kind != "document":
        raise _common.UsageError(
            f"--rerank: {folder} holds {manifest.kind} vectors; encode documents, without --queries."
        )
    if made_of is not None and "texts_sha256" in made_of.differs(manifest.provenance):
        raise _common.CommandError(
            f"--rerank: {folder} holds token vectors of other documents: of another collection, or of one that has "
            "changed since. Encode the documents that are searched: tilefold encode --model MULTI_VECTOR_MODEL"
        )
    source = options.model or manifest.model_source
    if source is None or (options.model is None and Path(source).is_absolute() and not Path(source).is_dir()):
        where = "unknown" if source is None else f"no longer in {source}"
        raise _common.UsageError(f"--rerank: the model that made {folder} is {where}; name it with --rerank-model.")
    encoder = _models.load_multi_vector(source, "--rerank-model")
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
    return Reranker(options, encoder, store, {})
