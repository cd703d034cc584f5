"""The steps of ``tilefold demo``; each keeps what it made, and reuses it when its settings are the same."""
# ruff: noqa: PLC0415 - heavy packages are imported by the step that needs them

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common

if TYPE_CHECKING:
    from tilefold.bench.head_comparison import HeadMeasurement
    from tilefold.recipes.splade import SpladeRecipe, TrainResult
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.tokens import TokenStore, TokenVectors
    from tilefold.retrieval.vectors import SparseVectors

Tick = Callable[[int, int, str], None]

HELD_OUT = 200
DEPTH = 100
# Heaviest terms kept of a text: a third of the postings for less than a point of nDCG@10 on held-out queries.
DOCUMENT_TERMS, QUERY_TERMS = 128, 32
HEAD_SHAPES = ((4, 128, 384, 30522), (8, 128, 384, 30522), (16, 128, 384, 30522))
RERANKED = 50  # candidates of a query for late interaction
TOKEN_SHARD = 1024
NDCG, RECALL = "nDCG@10", "R@100"


@dataclass(frozen=True)
class DemoPlan:
    """What a demo trains, measures, and where it keeps things."""

    recipe: SpladeRecipe
    head_shapes: tuple[tuple[int, int, int, int], ...]
    root: Path
    folder: Path


def make_plan(root: Path, quick: bool, data_digest: str) -> DemoPlan:
    """The plan of a full or a quick demo; its folder is named after its settings."""
    from tilefold.recipes.splade import SpladeRecipe

    steps = 27 if quick else 110
    recipe = SpladeRecipe(max_steps=steps, batch_size=64, train_max_length=64, max_length=128)
    key = hashlib.sha256(
        json.dumps([recipe.to_dict(), HELD_OUT, DOCUMENT_TERMS, data_digest], sort_keys=True).encode()
    ).hexdigest()
    folder = root / f"{'quick' if quick else 'full'}-{key[:8]}"
    return DemoPlan(recipe, HEAD_SHAPES[:2] if quick else HEAD_SHAPES, root, folder)


def hold_out(collection: Collection) -> Collection:
    """The collection with some training queries, evenly spaced, moved to a split ``"dev"``."""
    from tilefold.retrieval.collection import Collection

    train = collection.qrels["train"]
    names = sorted(train)
    step = max(1, len(names) // HELD_OUT)
    dev = set(names[::step][:HELD_OUT])
    qrels = dict(collection.qrels)
    qrels["train"] = {name: grades for name, grades in train.items() if name not in dev}
    qrels["dev"] = {name: train[name] for name in names if name in dev}
    return Collection(collection.name, collection.documents, collection.queries, qrels)


def collection_digest(collection: Collection) -> str:
    """SHA-256 over ids and texts."""
    sha = hashlib.sha256()
    for name, document in collection.documents.items():
        sha.update(json.dumps([name, document.contents]).encode())
    sha.update(json.dumps([collection.queries, collection.qrels], sort_keys=True).encode())
    return sha.hexdigest()


def train_model(plan: DemoPlan, collection: Collection, tick: Tick) -> TrainResult:
    """The trained model in ``<folder>/model``."""
    from tilefold.recipes.splade import train

    return train(
        plan.recipe,
        collection,
        plan.folder / "model",
        progress=lambda step, steps, loss: tick(step, steps, "" if loss is None else f"loss {loss:.2f}"),
    )


def contents(collection: Collection) -> dict[str, str]:
    """Document id -> text."""
    return {name: document.contents for name, document in collection.documents.items()}


def encode_documents(plan: DemoPlan, encoder: Any, collection: Collection, tick: Tick) -> SparseVectors:
    """The documents' vectors, kept in ``<folder>/vectors``."""
    from tilefold.retrieval.encoding import encode_collection
    from tilefold.retrieval.vectors import read_vectors

    path = plan.folder / "vectors"
    with _common.fast_inference():
        encode_collection(
            encoder,
            contents(collection),
            path,
            shard_size=512,
            top_k=DOCUMENT_TERMS,
            progress=lambda done, total: tick(done, total, ""),
        )
    return read_vectors(path)


def build_indexes(plan: DemoPlan, vectors: SparseVectors) -> dict[str, SparseIndex]:
    """An exact index in ``<folder>/index``, and a Seismic one beside it if its package is installed."""
    from tilefold.retrieval.errors import DataError, MissingPackageError
    from tilefold.retrieval.index import build_index, load_index

    built: dict[str, SparseIndex] = {}
    for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
        path = plan.folder / name
        try:
            try:
                built[backend] = load_index(path)
            except (FileNotFoundError, DataError):
                built[backend] = build_index(vectors, backend)
                built[backend].save(path)
        except MissingPackageError as error:
            _common.note(f"  {backend} index left out: {_common.first_line(error)}")
    return built


def zero_shot_baselines(
    plan: DemoPlan, collection: Collection, queries: dict[str, str], digest: str
) -> tuple[Run, TokenStore, TokenVectors]:
    """all-MiniLM-L6-v2 as published: its dense run, and the token vectors of documents and queries.

    The dense vector of a text is the mean of its token states, so that one pass over the documents gives both. They
    never change, and are kept beside the collection with the model of the token vectors, as --rerank needs it.
    """
    from tilefold.recipes.backbone import load_dense_minilm
    from tilefold.retrieval import encode_texts, open_tokens
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.evaluation import read_trec_run

    path, folder = plan.root / f"dense-{digest[:8]}.trec", plan.root / f"minilm-{digest[:8]}"
    model = load_dense_minilm()
    late = _late_interaction(model)
    try:
        run, store = read_trec_run(path), open_tokens(folder / "tokens")
    except (FileNotFoundError, DataError):
        run, store = _one_pass(model, late, collection, queries, path, folder)
    with _common.fast_inference():
        return run, store, encode_texts(late, queries)


def _late_interaction(model: Any) -> Any:
    """A stock MultiVectorEncoder over the transformer of a dense model: its token states, normalised."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [model[0], MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(model.device))


def _one_pass(
    model: Any, late: Any, collection: Collection, queries: dict[str, str], path: Path, folder: Path
) -> tuple[Run, TokenStore]:
    import torch

    from tilefold.recipes._quiet import quiet_libraries
    from tilefold.retrieval._token_vectors import TokenVectors
    from tilefold.retrieval.dense import rank_by_similarity
    from tilefold.retrieval.evaluation import write_trec_run
    from tilefold.retrieval.token_encoding import token_model_fingerprint
    from tilefold.retrieval.tokens import TokenManifest, TokenVectorWriter, open_tokens

    with quiet_libraries():
        late.save_pretrained(str(folder / "model"), create_model_card=False)
    dimension = int(model.get_embedding_dimension())
    source = str((folder / "model").resolve())
    manifest = TokenManifest(dimension, "int8", None, token_model_fingerprint(late), source)
    writer = TokenVectorWriter(folder / "tokens", manifest)
    texts = contents(collection)
    dense: list[Any] = []
    with _common.fast_inference():
        for number, start in enumerate(range(0, len(texts), TOKEN_SHARD)):
            ids = list(texts)[start : start + TOKEN_SHARD]
            states = model.encode_document(
                [texts[name] for name in ids], batch_size=64, output_value="token_embeddings", show_progress_bar=False
            )
            dense += [_pooled(model, row) for row in states]
            rows = [row.float() for row in states]
            unit = [torch.nn.functional.normalize(row, dim=-1) for row in rows]
            writer.write_shard(number, TokenVectors.pack(ids, unit, dimension, "int8"))
        found = model.encode_query(list(queries.values()), convert_to_tensor=True, show_progress_bar=False)
    writer.finish()
    run = rank_by_similarity(model, torch.stack(dense), found, list(texts), list(queries), DEPTH)
    write_trec_run(run, path)
    return run, open_tokens(folder / "tokens")


def _pooled(model: Any, states: Any) -> Any:
    """The vector ``[D]`` that the modules behind the transformer make of one text's token states ``[L, D]``."""
    features = {"token_embeddings": states[None], "attention_mask": states.new_ones(1, len(states)).long()}
    for module in list(model)[1:]:
        features = module(features)
    return features["sentence_embedding"][0].float()


def rerank_candidates(
    run: Run, queries: TokenVectors, documents: TokenStore, dev: dict[str, dict[str, int]]
) -> tuple[tuple[float, ...], Run]:
    """Late interaction over the best candidates of `run`, mixed with its own scores by weights chosen on `dev`."""
    from tilefold.retrieval import interpolate, rerank

    best = {query: dict(sorted(scores.items(), key=lambda item: -item[1])[:RERANKED]) for query, scores in run.items()}
    late = rerank({query: scores for query, scores in best.items() if scores}, queries, documents)
    weights, _ = pick_weights((run, late), dev)
    return weights, interpolate((run, late), weights, k=DEPTH)


def pick_weights(
    runs: Sequence[Run], qrels: dict[str, dict[str, int]], step: float = 0.1
) -> tuple[tuple[float, ...], float]:
    """Interpolation weights with the best nDCG@10 on `qrels`, from a grid that sums to 1; and that nDCG@10."""
    from tilefold.retrieval.evaluation import evaluate
    from tilefold.retrieval.fusion import interpolate

    mine = [{query: run[query] for query in qrels if query in run} for run in runs]
    parts = round(1 / step)
    best: tuple[float, tuple[float, ...]] = (-1.0, ())
    for counts in itertools.product(range(parts + 1), repeat=len(runs)):
        if sum(counts) != parts:
            continue
        weights = tuple(count / parts for count in counts)
        score = evaluate(interpolate(mine, weights, k=DEPTH), qrels, (NDCG,))[NDCG]
        best = max(best, (score, weights))
    return best[1], best[0]


def overlap(exact: Run, other: Run, k: int = 10) -> float:
    """Share of the exact top `k` that another run found in its own top `k`."""
    shares = []
    for query, scores in exact.items():
        top = set(sorted(scores, key=lambda name: -scores[name])[:k])
        found = other.get(query, {})
        theirs = set(sorted(found, key=lambda name: -found[name])[:k])
        if top:
            shares.append(len(top & theirs) / len(top))
    return sum(shares) / max(1, len(shares))


def compare_heads(plan: DemoPlan) -> list[HeadMeasurement]:
    """Plain head and fused head at a few batch sizes, measured once and kept in ``<folder>/heads.json``."""
    from tilefold.bench import head_comparison
    from tilefold.recipes._run import write_json

    path = plan.folder / "heads.json"
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return [head_comparison.HeadMeasurement(**row) for row in kept["rows"]]
        except (ValueError, TypeError, KeyError):
            path.unlink()
    rows = head_comparison.compare_heads(plan.head_shapes)
    write_json(path, {"rows": [asdict(row) for row in rows]})
    return rows
