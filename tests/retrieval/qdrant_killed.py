"""``python -m tests.retrieval.qdrant_killed FOLDER SEED``: writers to an embedded collection, killed at some moment.

Everything that opens the collection is a process of its own. After each kill, all that was reported must be there,
whole; documents that were not reported are absent, old or new, and never anything else.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from tilefold.retrieval import SparseVectors, build_index
from tilefold.retrieval.qdrant import Documents, Layout, QdrantCollection

DOCUMENTS, BATCH, VOCABULARY, KILLS = 240, 20, 300, 3
LAYOUT = Layout(VOCABULARY)
FORK = multiprocessing.get_context("fork")


def vectors(seed: int) -> SparseVectors:
    generator = np.random.default_rng(seed)
    rows = {
        f"d{at}": {int(term): float(generator.random() + 0.1) for term in generator.permutation(VOCABULARY)[:12]}
        for at in range(DOCUMENTS)
    }
    return SparseVectors.from_rows(rows, VOCABULARY)


OLD, NEW = vectors(0), vectors(1)


def build(folder: Path, report: Callable[[int, int], None]) -> None:
    with QdrantCollection.embedded(folder, LAYOUT) as collection:
        collection.build(Documents(OLD.ids, OLD), batch_size=BATCH, progress=report)


def replace(folder: Path, report: Callable[[int, int], None]) -> None:
    with QdrantCollection.embedded(folder) as collection:
        collection.upsert(Documents(NEW.ids, NEW), batch_size=BATCH, progress=report)


def check(folder: Path, reported: int, before: SparseVectors | None, after: SparseVectors) -> None:
    """The first `reported` documents are those of `after`; the others as `before`, absent without, or of `after`."""
    if not (folder / "collection.json").is_file():
        assert reported == 0 and before is None
        return
    with QdrantCollection.embedded(folder) as collection:
        found = collection.vectors(OLD.ids)
        rows = {name: found.row(row) for row, name in enumerate(found.ids)}
        for at, name in enumerate(after.ids):
            allowed = [after] if at < reported or before is None else [before, after]
            assert name in rows or (at >= reported and before is None), f"{name} of {reported} is lost"
            if name in rows:
                same = [all(map(np.array_equal, rows[name], vectors.row(at))) for vectors in allowed]
                assert any(same), f"{name} is neither old nor new"
        query = SparseVectors.from_rows({"q": dict.fromkeys(range(VOCABULARY), 1.0)}, VOCABULARY)
        assert {hit.id for hit in collection.search(query, DOCUMENTS)[0]} == set(rows), "the index lacks some"
        assert len(collection) == len(rows)


def finished(work: Callable[..., None], *args: object) -> None:
    """Do `work` in a process of its own, to its end."""
    child = FORK.Process(target=work, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


def killed(folder: Path, work: Callable[..., None], reports: int, pause: float) -> int:
    """Do `work` in a process killed `pause` seconds after so many reports; how many documents it reported."""
    here, there = FORK.Pipe(duplex=False)
    child, told = FORK.Process(target=work, args=(folder, lambda done, _: there.send(done))), [0]
    child.start()
    there.close()
    with suppress(EOFError):
        while len(told) <= reports:
            told.append(here.recv())
        time.sleep(pause)
        child.kill()
        while True:
            told.append(here.recv())
    child.join()
    return told[-1]


def rounds(
    folder: Path, work: Callable[..., None], before: SparseVectors | None, after: SparseVectors, moments: random.Random
) -> None:
    """Do `work` in processes that are killed, checked after each, and then to its end."""
    for number in range(KILLS):
        reported = killed(folder, work, number % 3 + moments.randrange(2), moments.uniform(0.0, 0.15))
        finished(check, folder, reported, before, after)
    finished(work, folder, lambda done, total: None)
    finished(check, folder, DOCUMENTS, before, after)


def main() -> None:
    folder, moments = Path(sys.argv[1]), random.Random(int(sys.argv[2]))  # noqa: S311
    rounds(folder, build, None, OLD, moments)
    rounds(folder, replace, OLD, NEW, moments)
    with QdrantCollection.embedded(folder) as collection:
        query = NEW.take([3, 14])
        found = collection.search(query, 10)
    exact = build_index(NEW).search(query, 10)
    assert [[hit.id for hit in row] for row in found] == [[hit.id for hit in row] for row in exact]


if __name__ == "__main__":
    main()
