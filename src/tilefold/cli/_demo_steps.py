"""The steps of ``tilefold demo``; each saves its result, and reuses it when its settings are the same."""
# ruff: noqa: PLC0415 - heavy packages are imported by the step that needs them

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._files import read_json, write_json
from tilefold.cli import _common, _demo_plan
from tilefold.cli._demo_data import collection_digest, contents
from tilefold.cli._demo_plan import Plan, Size

if TYPE_CHECKING:
    from tilefold.bench.head_comparison import HeadMeasurement
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
HEAD_WIDTH = (384, 30522)  # of MiniLM
RERANKED = 50  # candidates per query for late interaction
TOKEN_SHARD = 512
NDCG, RECALL = "nDCG@10", "R@100"
BASE_MODEL = "minilm"
PLAN = "plan.json"


@dataclass(frozen=True)
class Workspace:
    """The folders of a demo: `root` holds what several demos share, `folder` what belongs to one."""

    root: Path
    folder: Path

    @classmethod
    def open(cls, root: Path, minutes: float | str, seed: int, data_digest: str) -> Workspace:
        """The folders of a demo of so many minutes over this data."""
        key = hashlib.sha256(json.dumps([minutes, seed, DOCUMENT_TERMS, data_digest]).encode()).hexdigest()
        name = minutes if isinstance(minutes, str) else f"minutes-{minutes:g}"
        return cls(root, root / f"{name}-{key[:8]}")


def read_plan(where: Workspace) -> Plan | None:
    """The plan of an earlier run of the same demo; its saved results fit only that plan."""

    kept = read_json(where.folder / PLAN)
    try:
        return None if kept is None else Plan.from_dict(kept)
    except (KeyError, TypeError):
        return None


def write_plan(where: Workspace, plan: Plan) -> None:
    """Save the plan for a resumed run."""

    where.folder.mkdir(parents=True, exist_ok=True)
    write_json(where.folder / PLAN, plan.to_dict())


def make_recipe(size: Size, steps: int, seed: int) -> SpladeRecipe:
    """The recipe of a size."""
    from tilefold.recipes.splade import SpladeRecipe

    return SpladeRecipe(
        base_model=BASE_MODEL,
        max_steps=steps,
        batch_size=size.batch_size,
        learning_rate=size.learning_rate,
        max_length=size.max_length,
        train_max_length=size.train_length,
        group_by_length=size != _demo_plan.FULL_SIZE,
        seed=seed,
    )


def train_model(where: Workspace, recipe: SpladeRecipe, collection: Collection, tick: Tick) -> TrainResult:
    """The trained model in ``<folder>/model``."""
    from tilefold.recipes.splade import train

    return train(
        recipe,
        collection,
        where.folder / "model",
        progress=lambda step, steps, loss: tick(step, steps, "" if loss is None else f"loss {loss:.2f}"),
    )


def encode_documents(where: Workspace, encoder: Any, collection: Collection, tick: Tick) -> tuple[SparseVectors, bool]:
    """The documents' vectors, saved in ``<folder>/vectors``, and whether they were there already."""
    from tilefold.retrieval.encoding import encode_collection
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.vectors import read_manifest, read_vectors

    path = where.folder / "vectors"
    try:
        reused = read_manifest(path).complete
    except (FileNotFoundError, DataError):
        reused = False
    encode_collection(
        encoder,
        contents(collection),
        path,
        shard_size=512,
        top_k=DOCUMENT_TERMS,
        progress=lambda done, total: tick(done, total, ""),
    )
    return read_vectors(path), reused


def build_indexes(where: Workspace, vectors: SparseVectors) -> dict[str, SparseIndex]:
    """An exact index in ``<folder>/index``, and a Seismic one beside it if its package is installed."""
    from tilefold.retrieval.errors import DataError, MissingPackageError
    from tilefold.retrieval.index import build_index, load_index

    built: dict[str, SparseIndex] = {}
    for backend, name in (("exact", "index"), ("seismic", "index-seismic")):
        path = where.folder / name
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


def zero_shot(
    where: Workspace, collection: Collection, queries: dict[str, str], max_length: int, tick: Tick
) -> ZeroShot:
    """Computed once for these texts and this length, and saved with the model that --rerank needs."""
    from tilefold.recipes.backbone import load_dense_minilm
    from tilefold.recipes.precision import fast_inference
    from tilefold.retrieval import open_tokens
    from tilefold.retrieval.dense import rank_by_similarity
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.evaluation import read_trec_run, write_trec_run

    key = hashlib.sha256(f"{collection_digest(collection)} {sorted(queries)} {max_length}".encode()).hexdigest()[:8]
    path, folder = where.root / f"dense-{key}.trec", where.root / f"minilm-{key}"
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


def _late_interaction(model: Any) -> Any:
    """A stock MultiVectorEncoder that returns the normalised token states of a dense model."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [model[0], MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device=str(model.device))


def _encode_documents_once(model: Any, collection: Collection, folder: Path, tick: Tick) -> tuple[Any, TokenStore]:
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
    texts = contents(collection)
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


def _encode_once(model: Any, texts: dict[str, str], kind: str, storage: str) -> tuple[Any, TokenVectors]:
    """Dense vectors ``[N, D]`` and normalised token vectors of id -> text, from one pass."""
    import torch

    from tilefold.retrieval.tokens import TokenVectors

    encode = model.encode_query if kind == "query" else model.encode_document
    states = encode(list(texts.values()), batch_size=64, output_value="token_embeddings", show_progress_bar=False)
    unit = [torch.nn.functional.normalize(row.float(), dim=-1) for row in states]
    tokens = TokenVectors.pack(list(texts), unit, int(model.get_embedding_dimension()), storage)
    return torch.stack([_pooled(model, row) for row in states]), tokens


def _pooled(model: Any, states: Any) -> Any:
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
    shares = []
    for query, scores in exact.items():
        top = set(sorted(scores, key=lambda name: -scores[name])[:k])
        found = other.get(query, {})
        theirs = set(sorted(found, key=lambda name: -found[name])[:k])
        if top:
            shares.append(len(top & theirs) / len(top))
    return sum(shares) / max(1, len(shares))


def head_shapes(count: int) -> tuple[tuple[int, int, int, int], ...]:
    """``(batch, tokens, hidden, vocabulary)`` of the first `count` comparisons of the stock head with the fused one."""
    return tuple((batch, _demo_plan.HEAD_TOKENS, *HEAD_WIDTH) for batch in _demo_plan.HEAD_BATCHES[:count])


def compare_heads(where: Workspace, count: int) -> tuple[list[HeadMeasurement], bool]:
    """Time the stock and the fused head at `count` batch sizes, or read them from ``<folder>/heads.json``."""
    from tilefold.bench import head_comparison

    path = where.folder / "heads.json"
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return [head_comparison.HeadMeasurement(**row) for row in kept["rows"]], True
        except (ValueError, TypeError, KeyError):
            path.unlink()
    rows = head_comparison.compare_heads(head_shapes(count))
    write_json(path, {"rows": [asdict(row) for row in rows]})
    return rows, False
