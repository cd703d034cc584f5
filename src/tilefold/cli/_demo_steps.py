"""The sizes and splits of ``tilefold demo``, and its steps, each of which saves its result and reuses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold import retrieval
from tilefold._typing import Model
from tilefold.cli import _common
from tilefold.cli._common import note
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.errors import DataError, MissingPackageError
from tilefold.retrieval.provenance import texts_digest

if TYPE_CHECKING:
    from torch import Tensor

    from tilefold.recipes.splade import SpladeRecipe
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.tokens import TokenStore, TokenVectors
    from tilefold.retrieval.vectors import SparseVectors

HELD_OUT = 200  # queries that choose the weights of the fusion
TEST_QUERIES = 800  # of every size but the full one, which keeps the collection's own
DEV, TEST = "dev", "test"
EXAMPLE_ID, EXAMPLE = "example", "how do I read a csv file"


@dataclass(frozen=True)
class Size:
    """The size of a demo."""

    name: str  # of its folder
    documents: int | None  # None for all; those that a query asks for are always taken
    max_length: int  # tokens at which SPLADE cuts texts
    dense_length: int  # the same of dense retrieval, and of training
    train_length: int
    steps: int
    batch_size: int = 64
    learning_rate: float = 2e-4
    published: bool = False  # splits and batches are those of the published figures


FULL = Size("full", None, 128, 256, 64, 110, published=True)
# --minutes -> size: 24, 27, 51 and 66 TFLOP. With 40 steps of the first, SPLADE was 5.1 standard errors
# above BM25 and 2.3 above dense retrieval (800 queries); with steps of half the pairs it did not rise clearly above it.
SIZES = {
    3.0: Size("minutes-3", 3000, 64, 64, 48, 40),
    5.0: Size("minutes-5", 3000, 64, 64, 48, 50),
    10.0: Size("minutes-10", 4500, 96, 96, 64, 90),
    15.0: Size("minutes-15", None, 128, 128, 64, 110),
}


def split(collection: Collection, size: Size) -> Collection:
    """The collection with some training queries, evenly spaced, moved to a split ``"dev"``."""
    test, train = collection.qrels[TEST], collection.qrels["train"]
    # a short training sees few pairs twice, and more test queries make the standard error of a difference smaller
    wanted = min(TEST_QUERIES, (len(test) + len(train)) * 3 // 8) - len(test)
    moved = set() if size.published else set(sorted(train, key=_rank)[: max(0, wanted)])
    names = sorted(train.keys() - moved)
    dev = set(names[:: max(1, len(names) // HELD_OUT)][:HELD_OUT])
    qrels = {
        **collection.qrels,
        TEST: test | {name: train[name] for name in train if name in moved},
        "train": {name: grades for name, grades in train.items() if name not in moved | dev},
        DEV: {name: train[name] for name in names if name in dev},
    }
    return Collection(collection.name, collection.documents, collection.queries, qrels)


def take(collection: Collection, count: int | None) -> Collection:
    """The collection with `count` documents, in its own order: relevant ones, which all stay, and others at random."""
    judged = {name for grades in collection.qrels.values() for pairs in grades.values() for name in pairs}
    others = sorted(collection.documents.keys() - judged, key=_rank)
    judged &= collection.documents.keys()
    kept = judged.union(others if count is None else others[: max(0, count - len(judged))])
    documents = {name: document for name, document in collection.documents.items() if name in kept}
    return Collection(collection.name, documents, collection.queries, collection.qrels)


def collection_digest(collection: Collection) -> str:
    """SHA-256 over ids and texts."""
    told = [texts_digest(collection.contents()), collection.queries, collection.qrels]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


Tick = Callable[[int, int], None]

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


def encode_documents(folder: Path, encoder: Model, collection: Collection, tick: Tick) -> tuple[SparseVectors, bool]:
    """The documents' vectors, saved in ``<folder>/vectors``, and whether they were there already."""
    path = folder / "vectors"
    try:
        reused = retrieval.read_manifest(path).complete
    except (FileNotFoundError, DataError):
        reused = False
    options = {"shard_size": 512, "top_k": DOCUMENT_TERMS, "progress": tick}
    retrieval.encode_collection(encoder, collection.contents(), path, **options)
    return retrieval.read_vectors(path), reused


def build_indexes(folder: Path, vectors: SparseVectors) -> dict[str, SparseIndex]:
    """An exact index in ``<folder>/index``, and a Seismic one beside it if its package is installed."""
    built: dict[str, SparseIndex] = {}
    for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
        try:
            try:
                built[backend] = retrieval.load_index(folder / name)
            except (FileNotFoundError, DataError):
                built[backend] = retrieval.build_index(vectors, backend)
                built[backend].save(folder / name)
        except MissingPackageError as error:
            note(f"  {backend} index left out: {_common.first_line(error)}")
    return built


@dataclass(frozen=True)
class ZeroShot:
    """Dense run and token vectors of all-MiniLM-L6-v2 as published, and whether they were saved already."""

    run: Run
    documents: TokenStore
    queries: TokenVectors
    reused: bool


def zero_shot(root: Path, collection: Collection, queries: dict[str, str], max_length: int, tick: Tick) -> ZeroShot:
    """Computed once for these texts and this length, and saved with the model that --rerank needs."""
    from tilefold.recipes.backbone import load_dense_minilm
    from tilefold.recipes.loading import fast_inference

    key = hashlib.sha256(f"{collection_digest(collection)} {sorted(queries)} {max_length}".encode()).hexdigest()[:8]
    path, folder = root / f"dense-{key}.trec", root / f"minilm-{key}"
    model = load_dense_minilm()
    model.max_seq_length = max_length
    with fast_inference():
        vectors, query_tokens = _encode_once(model, queries, "query", "fp16")
        try:
            return ZeroShot(retrieval.read_trec_run(path), retrieval.open_tokens(folder / "tokens"), query_tokens, True)
        except (FileNotFoundError, DataError):
            dense, store = _encode_documents_once(model, collection, folder, tick)
    run = retrieval.rank_by_similarity(model, dense, vectors, list(collection.documents), list(queries), DEPTH)
    retrieval.write_trec_run(run, path)
    return ZeroShot(run, store, query_tokens, False)


def _late_interaction(model: Model) -> Any:
    """A stock MultiVectorEncoder that returns the normalised token states of a dense model."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [model[0], MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(model.device))


def _encode_documents_once(model: Model, collection: Collection, folder: Path, tick: Tick) -> tuple[Tensor, TokenStore]:
    """Dense vectors ``[N, D]`` in memory, token vectors in ``<folder>/tokens``."""
    import torch

    from tilefold.recipes.loading import quiet_libraries
    from tilefold.retrieval.token_encoding import token_model_fingerprint

    late = _late_interaction(model)
    with quiet_libraries():
        late.save_pretrained(str(folder / "model"), create_model_card=False)
    source = str((folder / "model").resolve())
    dimension = int(model.get_embedding_dimension())
    texts = collection.contents()
    manifest = retrieval.TokenManifest(dimension, "int8", None, token_model_fingerprint(late), source)
    manifest.settings["texts_sha256"] = texts_digest(texts)
    writer = retrieval.TokenVectorWriter(folder / "tokens", manifest, resume=False)
    dense: list[Tensor] = []
    tick(0, len(texts))
    for number, start in enumerate(range(0, len(texts), TOKEN_SHARD)):
        ids = list(texts)[start : start + TOKEN_SHARD]
        vectors, tokens = _encode_once(model, {name: texts[name] for name in ids}, "document", "int8")
        dense.append(vectors)
        writer.write_shard(number, tokens)
        tick(start + len(ids), len(texts))
    writer.finish()
    return torch.cat(dense), retrieval.open_tokens(folder / "tokens")


def _encode_once(model: Model, texts: dict[str, str], kind: str, storage: str) -> tuple[Tensor, TokenVectors]:
    """Dense vectors ``[N, D]`` and normalised token vectors of id -> text, from one pass."""
    import torch

    encode = model.encode_query if kind == "query" else model.encode_document
    states = encode(list(texts.values()), batch_size=64, output_value="token_embeddings", show_progress_bar=False)
    unit = [torch.nn.functional.normalize(row.float(), dim=-1) for row in states]
    tokens = retrieval.TokenVectors.pack(list(texts), unit, int(model.get_embedding_dimension()), storage)
    return torch.stack([_pooled(model, row) for row in states]), tokens


def _pooled(model: Model, states: Tensor) -> Tensor:
    """The vector ``[D]`` that the modules after the transformer compute from one text's token states ``[L, D]``."""
    features = {"token_embeddings": states[None], "attention_mask": states.new_ones(1, len(states)).long()}
    for module in list(model)[1:]:
        features = module(features)
    vectors: Tensor = features["sentence_embedding"]
    return vectors[0].float()


def rerank_candidates(
    run: Run, queries: TokenVectors, documents: TokenStore, dev: dict[str, dict[str, int]]
) -> tuple[tuple[float, ...], Run]:
    """Late interaction over the best candidates of `run`, interpolated with its scores by weights chosen on `dev`."""
    from tilefold.retrieval.evaluation import choose_weights

    best = {query: dict(sorted(scores.items(), key=lambda item: -item[1])[:RERANKED]) for query, scores in run.items()}
    late = retrieval.rerank({query: scores for query, scores in best.items() if scores}, queries, documents)
    weights, _ = choose_weights((run, late), dev, measure=NDCG, k=DEPTH)
    return weights, retrieval.interpolate((run, late), weights, k=DEPTH)


def overlap(exact: Run, other: Run, k: int = 10) -> float:
    """Share of the exact top `k` that another run found in its own top `k`."""
    tops = [
        [set(sorted(scores, key=lambda name: -scores[name])[:k]) for scores in (answers, other.get(query, {}))]
        for query, answers in exact.items()
        if answers
    ]
    return sum(len(mine & theirs) / len(mine) for mine, theirs in tops) / max(1, len(tops))
