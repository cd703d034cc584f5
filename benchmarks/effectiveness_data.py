"""The collections of `effectiveness.py`: their splits, and copies small enough to carry to another
machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from tilefold.retrieval.collection import Collection
from tilefold.retrieval.datasets import load_collection

WHOLE = 6000  # `prepare` leaves collections of up to this many documents whole
HELD_OUT = 4  # without training judgements, every fourth query is held out for evaluation


def evaluation_split(collection: Collection) -> str:
    """`"test"` if there is one, else `"dev"`."""
    for split in ("test", "dev"):
        if split in collection.qrels:
            return split
    raise ValueError(
        f"data must have a test or dev split, got {sorted(collection.qrels)} in {collection.name}.",
    )


def with_splits(collection: Collection, limit: int | None = None) -> Collection:
    """The collection with a training and an evaluation split; `limit` cuts it down to that many
    documents.

    A collection with one split alone gives every fourth query of it to evaluation.
    """
    found = dict(collection.qrels)
    if "train" not in found or not {"test", "dev"} & set(found):
        judged = {query: row for split in sorted(found) for query, row in found[split].items()}
        held = {query for place, query in enumerate(judged) if place % HELD_OUT == 0}
        found = {
            "train": {query: row for query, row in judged.items() if query not in held},
            "test": {query: row for query, row in judged.items() if query in held},
        }
    whole = Collection(collection.name, collection.documents, collection.queries, found)
    return whole if limit is None else subset(whole, limit, limit)


def subset(collection: Collection, documents: int, queries: int, seed: int = 0) -> Collection:
    """At most `documents` documents and `queries` evaluation queries: their relevant documents
    first, then any.
    """
    split = evaluation_split(collection)
    chooser = random.Random(seed)  # noqa: S311 - a reproducible sample, no secret
    judged = collection.qrels[split]
    kept_queries: list[str] = []
    kept: dict[str, None] = {}
    for query in chooser.sample(sorted(judged), len(judged)):
        relevant = [name for name, grade in judged[query].items() if grade > 0]
        # half of the room at most, so that documents of training pairs are in the corpus too
        if len(kept_queries) < queries and len(kept.keys() | set(relevant)) <= max(
            1,
            documents // 2,
        ):
            kept_queries.append(query)
            kept |= dict.fromkeys(relevant)
    trained = sorted(
        {
            name
            for row in collection.qrels["train"].values()
            for name, grade in row.items()
            if grade > 0
        },
    )
    others = [
        *chooser.sample(trained, len(trained)),
        *chooser.sample(sorted(collection.documents), len(collection.documents)),
    ]
    for name in others:
        if len(kept) >= documents:
            break
        kept.setdefault(name)
    qrels = {
        name: {
            query: {
                document: grade
                for document, grade in collection.qrels[name][query].items()
                if document in kept
            }
            for query in wanted
        }
        for name, wanted in (("train", list(collection.qrels["train"])), (split, kept_queries))
    }
    qrels = {
        name: {query: row for query, row in rows.items() if row} for name, rows in qrels.items()
    }
    used = {query for rows in qrels.values() for query in rows}
    return Collection(
        collection.name,
        {name: document for name, document in collection.documents.items() if name in kept},
        {query: text for query, text in collection.queries.items() if query in used},
        qrels,
    )


def prepare(
    folder: Path,
    data: Mapping[str, str],
    tokenizer: str | None,
    documents: int,
    queries: int,
) -> None:
    """Write what the runs need into `folder`: BEIR folders, large collections cut to `documents`,
    and the tokenizer.
    """
    for name, path in data.items():
        collection = with_splits(load_collection(path))
        if len(collection.documents) > WHOLE:
            collection = subset(collection, documents, queries)
        collection.save_beir(folder / name)
        pairs, judged = (
            collection.pairs("train"),
            collection.split_qrels(evaluation_split(collection)),
        )
        print(
            f"{name}: {len(collection.documents)} documents, {len(pairs)} pairs, {len(judged)} evaluation queries",
        )
    if tokenizer is not None:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).save_pretrained(
            str(folder / "tokenizer"),
        )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
