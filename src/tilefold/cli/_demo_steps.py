"""The sizes and splits of ``tilefold demo``, and encoding, whose results a later run reuses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

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

Tokens: TypeAlias = "tuple[TokenVectors, TokenStore]"  # of queries, and of documents
HELD_OUT = 200  # queries that choose the weights of the fusion
TEST_QUERIES = 800  # of every size but the full one, which keeps the collection's own
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
# --minutes -> size: 27, 30, 56 and 74 TFLOP. With 40 steps of the first, SPLADE was 5.1 standard
# errors above BM25 and 2.3 above dense retrieval (800 queries); with steps of half the pairs it did
# not rise clearly above it.
SIZES = {
    3.0: Size("minutes-3", 3000, 64, 64, 48, 40),
    5.0: Size("minutes-5", 3000, 64, 64, 48, 50),
    10.0: Size("minutes-10", 4500, 96, 96, 64, 90),
    15.0: Size("minutes-15", None, 128, 128, 64, 110),
}


def split(collection: Collection, size: Size) -> Collection:
    """The collection with some training queries, evenly spaced, moved to a split ``"dev"``."""
    test, train = collection.qrels["test"], collection.qrels["train"]
    # a short training sees few pairs twice, and more test queries make the standard error of a
    # difference smaller
    wanted = (
        0 if size.published else min(TEST_QUERIES, (len(test) + len(train)) * 3 // 8) - len(test)
    )
    moved = set(sorted(train, key=_rank)[: max(0, wanted)])
    names = sorted(train.keys() - moved)
    dev = names[:: max(1, len(names) // HELD_OUT)][:HELD_OUT]
    parts = {
        "test": test | {name: grades for name, grades in train.items() if name in moved},
        "train": {name: grades for name, grades in train.items() if name not in moved.union(dev)},
        "dev": {name: train[name] for name in dev},
    }
    return replace(collection, qrels=collection.qrels | parts)


def take(collection: Collection, count: int | None) -> Collection:
    """The collection with `count` documents, in its own order: relevant ones, which all stay, and
    others at random.
    """
    judged = {
        name for grades in collection.qrels.values() for pairs in grades.values() for name in pairs
    }
    others = sorted(collection.documents.keys() - judged, key=_rank)
    judged &= collection.documents.keys()
    kept = judged.union(others if count is None else others[: max(0, count - len(judged))])
    documents = {name: document for name, document in collection.documents.items() if name in kept}
    return replace(collection, documents=documents)


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


DEPTH = 100
# Heaviest terms kept per text: a third of the postings, for less than .01 nDCG@10 on held-out
# queries.
DOCUMENT_TERMS, QUERY_TERMS = 128, 32
RERANKED = 50  # candidates per query for late interaction
NDCG, RECALL = "nDCG@10", "R@100"
BASE_MODEL = "minilm"


def folder_of(root: Path, size: Size, seed: int, data_digest: str) -> Path:
    """The folder of a demo of this size over this data."""
    key = hashlib.sha256(f"{size} {seed} {DOCUMENT_TERMS} {data_digest}".encode()).hexdigest()
    return root / f"{size.name}-{key[:8]}"


def make_recipe(size: Size, seed: int) -> LsrRecipe:
    """Return the recipe that trains the model of a demo of this size."""
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
    how: Callable[..., object],
    model: Model,
    part: Collection,
    folder: Path,
    **options: object,
) -> bool:
    """Encode documents into a folder, where an earlier run may have begun; whether it had done
    everything.
    """
    before: list[int] = []
    with _common.progress_bar(f"  encoding {folder.name}", resumes="") as tick:

        def progress(done: int, total: int) -> None:
            before.append(done)
            tick(done, total)

        run = partial(how, model, part.contents(), folder, progress=progress, **options)
        try:
            run()
        except DataError:  # damaged, or of other settings
            run(resume=False)
    return before[0] == len(part.documents)


def zero_shot(
    root: Path,
    collection: Collection,
    queries: dict[str, str],
    length: int,
) -> tuple[Run, Tokens, bool]:
    """Dense run of all-MiniLM-L6-v2, token vectors of queries and documents, and whether the latter
    were there.
    """
    from tilefold.recipes.colbert import ColbertRecipe, train

    # of all demos of these texts and this length; --rerank needs the model later
    folder = root / f"minilm-{length}-{texts_digest(collection.contents())[:8]}"
    dense, _ = _models.load_model(_models.PACKAGED, kinds=("dense",))
    _models.limit_length(dense, length)
    reused = encode(retrieval.encode_dense_collection, dense, collection, folder / "dense")
    index = retrieval.DenseIndex.build(retrieval.open_dense(folder / "dense"))
    run = retrieval.Searcher(index, dense).rank(queries, retrieval.SearchRequest(DEPTH)).run
    recipe = ColbertRecipe(
        max_steps=0,
        dimension=None,
        max_length=length,
        query_length=length,
        skip_punctuation=False,
    )
    source = str(Path(train(recipe, collection, folder / "model").model_dir).resolve())
    late, _ = _models.load_model(source, kinds=("multi-vector",), fast=_models.FUSED)
    reused &= encode(
        retrieval.encode_tokens,
        late,
        collection,
        folder / "tokens",
        storage="int8",
        source=source,
    )
    tokens = (
        retrieval.encode_texts(late, queries, kind="query"),
        retrieval.open_tokens(folder / "tokens"),
    )
    return run, tokens, reused


def overlap(exact: Run, other: Run, k: int = 10) -> float:
    """Share of the exact top `k` that another run has in its own top `k`; both have the best
    documents first.
    """
    tops = [
        (list(scores)[:k], list(other.get(query, {}))[:k])
        for query, scores in exact.items()
        if scores
    ]
    return sum(len({*mine} & {*theirs}) / len(mine) for mine, theirs in tops) / max(1, len(tops))
