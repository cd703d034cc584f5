"""Steps of ``tilefold demo``: sizes, splits, the recipe, encoding, and overlaps of runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tilefold import retrieval
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import DataError

if TYPE_CHECKING:
    from tilefold.recipes.lsr import LsrRecipe
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

HELD_OUT = 200  # queries on which the weights of the fusion are chosen
TEST_QUERIES = 800  # test queries of every size except the full one
EXAMPLE_ID = "example"
EXAMPLE = "how do I read a csv file"


@dataclass(frozen=True)
class Size:
    """The size of a demo.

    Attributes:
        name: the first part of the name of the demo's folder, before a digest.
        documents: the number of documents, with all judged ones; None takes the whole collection.
        max_length: the tokens that SPLADE reads per text.
        dense_length: the tokens that the dense model reads per text.
        train_length: the tokens per text in the training of SPLADE.
        steps: the number of training steps.
        batch_size: the pairs per training step.
        learning_rate: the peak learning rate.
        published: whether this is the full size, which repeats the published figures with their
            splits and batches.
    """

    name: str
    documents: int | None
    max_length: int
    dense_length: int
    train_length: int
    steps: int
    batch_size: int = 64
    learning_rate: float = 2e-4
    published: bool = False


FULL = Size("full", None, 128, 256, 64, 110, published=True)
# --minutes -> size: 17, 27, 50 and 63 TFLOP. With the first, SPLADE was 2.8 standard errors above
# BM25 and 1.4 above dense retrieval (800 queries); with 32 steps of 40 tokens at a learning rate of
# 4e-4, it was 1.4 and 0.1 above them.
SIZES = {
    3.0: Size("minutes-3", 2500, 48, 48, 32, 40, learning_rate=3e-4),
    5.0: Size("minutes-5", 3000, 64, 64, 48, 50),
    10.0: Size("minutes-10", 4500, 96, 96, 64, 90),
    15.0: Size("minutes-15", None, 128, 128, 64, 110),
}


def split(collection: Collection, size: Size) -> Collection:
    """Return a collection with some training queries moved to the splits ``test`` and ``dev``.

    A larger test split gives smaller standard errors. A short training does not need the moved
    queries, because it sees few of them twice. The full size keeps the original test split.

    Args:
        collection: a collection with the splits ``train`` and ``test``.
        size: the size of the demo.
    """
    test = collection.qrels["test"]
    train = collection.qrels["train"]
    moved_to_test = set[str]()
    if not size.published:
        moved_to_test = _queries_to_move(list(train), n_test=len(test))
    remaining = sorted(train.keys() - moved_to_test)
    step = max(1, len(remaining) // HELD_OUT)
    dev = remaining[::step][:HELD_OUT]  # evenly over the sorted ids
    not_train = moved_to_test.union(dev)
    moved_qrels = {query: grades for query, grades in train.items() if query in moved_to_test}
    qrels = {
        **collection.qrels,
        "test": {**test, **moved_qrels},
        "train": {query: grades for query, grades in train.items() if query not in not_train},
        "dev": {query: train[query] for query in dev},
    }
    return replace(collection, qrels=qrels)


def _queries_to_move(train: list[str], n_test: int) -> set[str]:
    """Choose training queries at random that enlarge the test split to ``TEST_QUERIES``.

    At most 3 of 8 queries are for testing: a small collection must leave some for training.

    Args:
        train: the ids of the training queries.
        n_test: the number of test queries of the collection.
    """
    target = min(TEST_QUERIES, (n_test + len(train)) * 3 // 8)
    n_moved = max(0, target - n_test)
    return set(sorted(train, key=_random_key)[:n_moved])


def sample_documents(collection: Collection, count: int | None) -> Collection:
    """Return a collection with a sample of its documents, in the same order.

    Args:
        collection: a collection with judgements.
        count: the number of documents to keep; all judged documents are kept, and the remaining
            ones are chosen at random. None keeps all documents.
    """
    judged = set[str]()
    for qrels in collection.qrels.values():
        for grades in qrels.values():
            judged.update(grades)
    not_judged = sorted(collection.documents.keys() - judged, key=_random_key)
    judged &= collection.documents.keys()
    if count is not None:
        not_judged = not_judged[: max(0, count - len(judged))]
    selected = judged.union(not_judged)
    documents = {
        name: document for name, document in collection.documents.items() if name in selected
    }
    return replace(collection, documents=documents)


def _random_key(id_: str) -> str:
    """Return a sort key of an id (its hash), which gives a random but reproducible order."""
    return hashlib.sha256(id_.encode()).hexdigest()


DEPTH = 100
# Heaviest terms that are kept per text. They leave a third of the postings, and cost less than 0.01
# nDCG@10 on held-out queries.
DOCUMENT_TERMS = 128
QUERY_TERMS = 32
RERANKED = 50  # candidates per query for late interaction
NDCG = "nDCG@10"
RECALL = "R@100"
BASE_MODEL = "minilm"


def folder_of(root: Path, size: Size, seed: int, data_digest: str) -> Path:
    """Return the folder of a demo. Demos with different data, size or seed have different ones.

    Args:
        root: the folder of all demos.
        size: the size of the demo.
        seed: the seed of the training.
        data_digest: the fingerprint of the documents and queries.
    """
    key = hashlib.sha256(f"{size} {seed} {DOCUMENT_TERMS} {data_digest}".encode()).hexdigest()
    return root / f"{size.name}-{key[:8]}"


def make_recipe(size: Size, seed: int) -> LsrRecipe:
    """Return the recipe that trains the sparse model of a demo.

    Batches of texts of similar length are faster. The full size has random batches, as the
    published figures.

    Args:
        size: the size of the demo.
        seed: the seed of the training.
    """
    from tilefold.recipes import get_recipe

    recipe: LsrRecipe = get_recipe(
        "splade",
        base_model=BASE_MODEL,
        max_length=size.max_length,
        train_max_length=size.train_length,
        max_steps=size.steps,
        batch_size=size.batch_size,
        learning_rate=size.learning_rate,
        group_by_length=not size.published,
        seed=seed,
    )
    return recipe


def encode(
    encode_collection: Callable[..., object],
    model: Model,
    collection: Collection,
    folder: Path,
    **options: object,
) -> bool:
    """Encode documents into a folder, and keep what an earlier run has encoded.

    If the folder is damaged or was made with other settings, all documents are encoded again.

    Args:
        encode_collection: a function of the model, the texts and the folder, such as
            :func:`tilefold.retrieval.encode_tokens`.
        model: the model.
        collection: the documents.
        folder: the folder for the vectors.
        options: additional arguments of `encode_collection`.

    Returns:
        Whether an earlier run had encoded all documents.
    """
    reported_counts: list[int] = []  # numbers of encoded documents
    with _common.resumable_progress_bar(f"  encoding {folder.name}") as update:

        def progress(done: int, total: int) -> None:
            reported_counts.append(done)
            update(done, total)

        encode_into_folder = partial(
            encode_collection,
            model,
            collection.contents(),
            folder,
            progress=progress,
            **options,
        )
        try:
            encode_into_folder()
        except DataError:  # the folder is damaged, or was made with other settings
            encode_into_folder(resume=False)
    n_encoded_before = reported_counts[0]  # the first report counts documents of an earlier run
    return n_encoded_before == len(collection.documents)


@dataclass(frozen=True)
class UntrainedResults:
    """Results of all-MiniLM-L6-v2 without training on the collection.

    Attributes:
        dense_run: the documents that its dense vectors find for each query.
        query_tokens: its token vectors of the queries.
        document_tokens: its token vectors of the documents, on the disk.
        reused: whether all vectors of the documents are those of an earlier demo.
    """

    dense_run: Run
    query_tokens: TokenVectors
    document_tokens: TokenStore
    reused: bool


def search_untrained(
    root: Path,
    collection: Collection,
    queries: dict[str, str],
    max_length: int,
) -> UntrainedResults:
    """Encode dense and token vectors with all-MiniLM-L6-v2, and search with the dense ones.

    The network runs once per text: the dense vectors are computed from the token states.

    Args:
        root: the folder of all demos. Demos with the same texts and `max_length` share the vectors.
        collection: the documents.
        queries: query id -> text.
        max_length: the tokens that the model reads per text.
    """
    from tilefold.cli._demo_states import SharedStates

    folder = root / f"minilm-{max_length}-{texts_digest(collection.contents())[:8]}"
    token_model_folder = _save_untrained_token_model(folder / "model", collection, max_length)
    token_model, _ = _models.load_model(
        token_model_folder,
        kinds=("multi-vector",),
        fast=_models.FUSED,
    )
    # The mean token states of a text are its dense vector.
    token_states = SharedStates()
    token_states.record(token_model)
    tokens_reused = encode(
        retrieval.encode_tokens,
        token_model,
        collection,
        folder / "tokens",
        storage="int8",
        source=token_model_folder,
    )
    query_tokens = retrieval.encode_texts(token_model, queries, kind="query")
    dense_model, _ = _models.load_model(_models.PACKAGED, kinds=("dense",))
    _models.limit_length(dense_model, max_length)
    token_states.reuse(dense_model)
    dense_reused = encode(
        retrieval.encode_dense_collection,
        dense_model,
        collection,
        folder / "dense",
    )
    index = retrieval.DenseIndex.build(retrieval.open_dense(folder / "dense"))
    ranking = retrieval.Searcher(index, dense_model).rank(queries, retrieval.SearchRequest(DEPTH))
    return UntrainedResults(
        dense_run=ranking.run,
        query_tokens=query_tokens,
        document_tokens=retrieval.open_tokens(folder / "tokens"),
        reused=dense_reused and tokens_reused,
    )


def _save_untrained_token_model(folder: Path, collection: Collection, max_length: int) -> str:
    """Save all-MiniLM-L6-v2 as a late-interaction model, which ``search --rerank`` loads later.

    Args:
        folder: the folder of the model and its training, which has no step.
        collection: the documents, which the recipe needs.
        max_length: the tokens that the model reads per text.

    Returns:
        The absolute path of the model.
    """
    from tilefold.recipes.colbert import ColbertRecipe, train

    recipe = ColbertRecipe(
        max_steps=0,
        dimension=None,
        max_length=max_length,
        query_length=max_length,
        skip_punctuation=False,
    )
    result = train(recipe, collection, folder)
    return str(Path(result.model_dir).resolve())


def overlap(exact: Run, approximate: Run, k: int = 10) -> float:
    """Return the mean share of the exact top `k` of a query that an approximate search finds.

    Args:
        exact: the run of an exact search, with the best documents first.
        approximate: the run of an approximate search, with the best documents first.
        k: the number of documents per query.

    Returns:
        A number from 0 to 1. Queries without hits in the exact run do not count.
    """
    shares = []
    for query, scores in exact.items():
        if scores:
            exact_top = list(scores)[:k]
            approximate_top = list(approximate.get(query, {}))[:k]
            n_shared = len(set(exact_top) & set(approximate_top))
            shares.append(n_shared / len(exact_top))
    return sum(shares) / max(1, len(shares))
