"""The steps of ``tilefold demo``; each saves its result, and reuses it when its settings are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._typing import Model
from tilefold.cli import _common
from tilefold.cli._demo_data import Size, collection_digest

if TYPE_CHECKING:
    from tilefold.recipes.splade import SpladeRecipe, TrainResult
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.tokens import TokenStore, TokenVectors
    from tilefold.retrieval.vectors import SparseVectors

Tick = Callable[[int, int, str], None]

DEPTH = 100
# Heaviest terms kept per text: a third of the postings, for less than .01 nDCG@10 on held-out queries.
DOCUMENT_TERMS, QUERY_TERMS = 128, 32
RERANKED = 50  # candidates per query for late interaction
TOKEN_SHARD = 512
NDCG, RECALL = "nDCG@10", "R@100"
BASE_MODEL = "minilm"


def folder_of(root: Path, size: Size, seed: int, data_digest: str) -> Path:
    """The folder of a demo of this size over this data."""
    key = hashlib.sha256(json.dumps([asdict(size), seed, DOCUMENT_TERMS, data_digest]).encode()).hexdigest()
    return root / f"{size.name}-{key[:8]}"


def make_recipe(size: Size, seed: int) -> SpladeRecipe:
    """The recipe of a size."""
    from tilefold.recipes.splade import SpladeRecipe

    return SpladeRecipe(
        base_model=BASE_MODEL,
        max_steps=size.steps,
        batch_size=size.batch_size,
        learning_rate=size.learning_rate,
        max_length=size.max_length,
        train_max_length=size.train_length,
        group_by_length=not size.published,
        seed=seed,
    )


def train_model(folder: Path, size: Size, seed: int, collection: Collection, tick: Tick) -> TrainResult:
    """The trained model in ``<folder>/model``."""
    from tilefold.recipes.splade import train

    return train(
        make_recipe(size, seed),
        collection,
        folder / "model",
        progress=lambda step, steps, loss: tick(step, steps, "" if loss is None else f"loss {loss:.2f}"),
    )


def encode_documents(folder: Path, encoder: Model, collection: Collection, tick: Tick) -> tuple[SparseVectors, bool]:
    """The documents' vectors, saved in ``<folder>/vectors``, and whether they were there already."""
    from tilefold.retrieval.encoding import encode_collection
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.vectors import read_manifest, read_vectors

    path = folder / "vectors"
    try:
        reused = read_manifest(path).complete
    except (FileNotFoundError, DataError):
        reused = False
    encode_collection(
        encoder,
        collection.contents(),
        path,
        shard_size=512,
        top_k=DOCUMENT_TERMS,
        progress=lambda done, total: tick(done, total, ""),
    )
    return read_vectors(path), reused


def build_indexes(folder: Path, vectors: SparseVectors) -> dict[str, SparseIndex]:
    """An exact index in ``<folder>/index``, and a Seismic one beside it if its package is installed."""
    from tilefold.retrieval.errors import DataError, MissingPackageError
    from tilefold.retrieval.index import build_index, load_index

    built: dict[str, SparseIndex] = {}
    for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
        path = folder / name
        try:
            try:
                built[backend] = load_index(path)
            except (FileNotFoundError, DataError):
                built[backend] = build_index(vectors, backend)
                built[backend].save(path)
        except MissingPackageError as error:
            _common.note(f"  {backend} index left out: {_common.first_line(error)}")
    return built


@dataclass(frozen=True)
class ZeroShot:
    """all-MiniLM-L6-v2 as published: its dense run, all token vectors, and whether they were saved already.

    The dense vector of a text is the mean of its token states, so that one pass over a text gives both.
    """

    run: Run
    documents: TokenStore
    queries: TokenVectors
    reused: bool


def zero_shot(root: Path, collection: Collection, queries: dict[str, str], max_length: int, tick: Tick) -> ZeroShot:
    """Computed once for these texts and this length, and saved with the model that --rerank needs."""
    from tilefold.recipes.backbone import load_dense_minilm
    from tilefold.recipes.precision import fast_inference
    from tilefold.retrieval import open_tokens
    from tilefold.retrieval.dense import rank_by_similarity
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.evaluation import read_trec_run, write_trec_run

    key = hashlib.sha256(f"{collection_digest(collection)} {sorted(queries)} {max_length}".encode()).hexdigest()[:8]
    path, folder = root / f"dense-{key}.trec", root / f"minilm-{key}"
    model = load_dense_minilm()
    model.max_seq_length = max_length
    with fast_inference():
        vectors, query_tokens = _encode_once(model, queries, "query", "fp16")
        try:
            return ZeroShot(read_trec_run(path), open_tokens(folder / "tokens"), query_tokens, True)
        except (FileNotFoundError, DataError):
            dense, store = _encode_documents_once(model, collection, folder, tick)
    run = rank_by_similarity(model, dense, vectors, list(collection.documents), list(queries), DEPTH)
    write_trec_run(run, path)
    return ZeroShot(run, store, query_tokens, False)


def _late_interaction(model: Model) -> Any:
    """A stock MultiVectorEncoder that returns the normalised token states of a dense model."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [model[0], MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(model.device))


def _encode_documents_once(model: Model, collection: Collection, folder: Path, tick: Tick) -> tuple[Any, TokenStore]:
    """Dense vectors ``[N, D]`` in memory, token vectors in ``<folder>/tokens``."""
    import torch

    from tilefold.recipes.quiet import quiet_libraries
    from tilefold.retrieval.provenance import texts_digest
    from tilefold.retrieval.token_encoding import token_model_fingerprint
    from tilefold.retrieval.tokens import TokenManifest, TokenVectorWriter, open_tokens

    late = _late_interaction(model)
    with quiet_libraries():
        late.save_pretrained(str(folder / "model"), create_model_card=False)
    source = str((folder / "model").resolve())
    dimension = int(model.get_embedding_dimension())
    texts = collection.contents()
    manifest = TokenManifest(dimension, "int8", None, token_model_fingerprint(late), source)
    manifest.settings["texts_sha256"] = texts_digest(texts)
    writer = TokenVectorWriter(folder / "tokens", manifest, resume=False)
    dense: list[Any] = []
    tick(0, len(texts), "")
    for number, start in enumerate(range(0, len(texts), TOKEN_SHARD)):
        ids = list(texts)[start : start + TOKEN_SHARD]
        vectors, tokens = _encode_once(model, {name: texts[name] for name in ids}, "document", "int8")
        dense.append(vectors)
        writer.write_shard(number, tokens)
        tick(start + len(ids), len(texts), "")
    writer.finish()
    return torch.cat(dense), open_tokens(folder / "tokens")


def _encode_once(model: Model, texts: dict[str, str], kind: str, storage: str) -> tuple[Any, TokenVectors]:
    """Dense vectors ``[N, D]`` and normalised token vectors of id -> text, from one pass."""
    import torch

    from tilefold.retrieval.tokens import TokenVectors

    encode = model.encode_query if kind == "query" else model.encode_document
    states = encode(list(texts.values()), batch_size=64, output_value="token_embeddings", show_progress_bar=False)
    unit = [torch.nn.functional.normalize(row.float(), dim=-1) for row in states]
    tokens = TokenVectors.pack(list(texts), unit, int(model.get_embedding_dimension()), storage)
    return torch.stack([_pooled(model, row) for row in states]), tokens


def _pooled(model: Model, states: Any) -> Any:
    """The vector ``[D]`` that the modules after the transformer compute from one text's token states ``[L, D]``."""
    features = {"token_embeddings": states[None], "attention_mask": states.new_ones(1, len(states)).long()}
    for module in list(model)[1:]:
        features = module(features)
    return features["sentence_embedding"][0].float()


def rerank_candidates(
    run: Run, queries: TokenVectors, documents: TokenStore, dev: dict[str, dict[str, int]]
) -> tuple[tuple[float, ...], Run]:
    """Late interaction over the best candidates of `run`, interpolated with its scores by weights chosen on `dev`."""
    from tilefold.retrieval import interpolate, rerank
    from tilefold.retrieval.tuning import choose_weights

    best = {query: dict(sorted(scores.items(), key=lambda item: -item[1])[:RERANKED]) for query, scores in run.items()}
    late = rerank({query: scores for query, scores in best.items() if scores}, queries, documents)
    weights, _ = choose_weights((run, late), dev, measure=NDCG, k=DEPTH)
    return weights, interpolate((run, late), weights, k=DEPTH)


def overlap(exact: Run, other: Run, k: int = 10) -> float:
    """Share of the exact top `k` that another run found in its own top `k`."""
    tops = [
        [set(sorted(scores, key=lambda name: -scores[name])[:k]) for scores in (answers, other.get(query, {}))]
        for query, answers in exact.items()
        if answers
    ]
    return sum(len(mine & theirs) / len(mine) for mine, theirs in tops) / max(1, len(tops))
