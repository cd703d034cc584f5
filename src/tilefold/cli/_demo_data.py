"""The data of ``tilefold demo``: its splits, and the part of the collection that a plan uses."""
# ruff: noqa: PLC0415 - heavy packages are imported by the functions that need them

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

HELD_OUT = 200  # queries that choose the weights of the fusion
TEST_QUERIES = 800  # of a planned demo; the full one keeps the collection's own
DEV, TEST = "dev", "test"
EXAMPLE_ID, EXAMPLE = "example", "how do I read a csv file"


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


def more_test_queries(collection: Collection) -> Collection:
    """The collection with up to `TEST_QUERIES` test queries, three in eight at most, and its ``"dev"`` split.

    A short training sees most pairs at most once, and the standard error of a difference falls with the number of test
    queries, so a planned demo takes some from the training split, in an order independent of their content.
    """
    from tilefold.retrieval.collection import Collection

    test, train = collection.qrels["test"], collection.qrels["train"]
    wanted = min(TEST_QUERIES, (len(test) + len(train)) * 3 // 8) - len(test)
    moved = set(sorted(train, key=_rank)[: max(0, wanted)])
    qrels = dict(collection.qrels)
    qrels["test"] = test | {name: train[name] for name in train if name in moved}
    qrels["train"] = {name: grades for name, grades in train.items() if name not in moved}
    return hold_out(Collection(collection.name, collection.documents, collection.queries, qrels))


def sampling_order(collection: Collection) -> tuple[list[str], int]:
    """All document ids, relevant ones first, then the others shuffled; and the number of the first."""
    judged = {name for grades in collection.qrels.values() for pairs in grades.values() for name in pairs}
    first = sorted(judged & collection.documents.keys(), key=_rank)
    rest = sorted(collection.documents.keys() - judged, key=_rank)
    return first + rest, len(first)


def take(collection: Collection, names: Sequence[str]) -> Collection:
    """The collection with these documents only, in its own order."""
    from tilefold.retrieval.collection import Collection

    kept = set(names)
    documents = {name: document for name, document in collection.documents.items() if name in kept}
    return Collection(collection.name, documents, collection.queries, collection.qrels)


def collection_digest(collection: Collection) -> str:
    """SHA-256 over ids and texts."""
    sha = hashlib.sha256()
    for name, document in collection.documents.items():
        sha.update(json.dumps([name, document.contents]).encode())
    sha.update(json.dumps([collection.queries, collection.qrels], sort_keys=True).encode())
    return sha.hexdigest()


def contents(collection: Collection) -> dict[str, str]:
    """Document id -> text."""
    return {name: document.contents for name, document in collection.documents.items()}


def _rank(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
