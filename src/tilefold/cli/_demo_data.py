"""The data of ``tilefold demo``: its sizes and splits, and the part of the collection that a size uses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

HELD_OUT = 200  # queries that choose the weights of the fusion
TEST_QUERIES = 800  # of every size but the full one, which keeps the collection's own
DEV, TEST = "dev", "test"
EXAMPLE_ID, EXAMPLE = "example", "how do I read a csv file"


@dataclass(frozen=True)
class Size:
    """The size of a demo.

    Attributes:
        name: of its folder.
        documents: of the collection, None for all; those that a query asks for are always taken.
        max_length, dense_length, train_length: tokens at which SPLADE, dense retrieval and training cut texts.
        steps: of training, each of `batch_size` pairs.
        published: whether splits and batches are those of the published figures.
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
# --minutes -> size: 24, 27, 51 and 66 TFLOP. With 40 steps of the first, SPLADE was 5.1 standard errors
# above BM25 and 2.3 above dense retrieval (800 queries); with steps of half the pairs it did not rise clearly above it.
SIZES = {
    3.0: Size("minutes-3", 3000, 64, 64, 48, 40),
    5.0: Size("minutes-5", 3000, 64, 64, 48, 50),
    10.0: Size("minutes-10", 4500, 96, 96, 64, 90),
    15.0: Size("minutes-15", None, 128, 128, 64, 110),
}


def size_for(minutes: float) -> Size:
    """The largest size that is meant for at most so many minutes, or the smallest."""
    return SIZES[max((limit for limit in SIZES if limit <= minutes), default=min(SIZES))]


def split(collection: Collection, size: Size) -> Collection:
    """The collection with some training queries, evenly spaced, moved to a split ``"dev"``.

    A short training sees most pairs at most once, and the standard error of a difference falls with the number of test
    queries. So unless the size is the published one, some training queries become test queries first: up to
    `TEST_QUERIES` of them, three in eight at most, in an order independent of their content.
    """
    from tilefold.retrieval.collection import Collection

    test, train = collection.qrels[TEST], collection.qrels["train"]
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
    from tilefold.retrieval.collection import Collection

    judged = {name for grades in collection.qrels.values() for pairs in grades.values() for name in pairs}
    others = sorted(collection.documents.keys() - judged, key=_rank)
    judged &= collection.documents.keys()
    kept = judged.union(others if count is None else others[: max(0, count - len(judged))])
    documents = {name: document for name, document in collection.documents.items() if name in kept}
    return Collection(collection.name, documents, collection.queries, collection.qrels)


def collection_digest(collection: Collection) -> str:
    """SHA-256 over ids and texts."""
    sha = hashlib.sha256()
    for name, document in collection.documents.items():
        sha.update(json.dumps([name, document.contents]).encode())
    sha.update(json.dumps([collection.queries, collection.qrels], sort_keys=True).encode())
    return sha.hexdigest()


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
