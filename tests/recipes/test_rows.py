"""The rows of a training: negatives of every kind of file, their draws, and documents that stay in
their file.
"""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recipes.small import small_collection, tiny_masked_lm
from tests.refusals import refused
from tilefold.recipes import LsrRecipe, train
from tilefold.recipes._rows import (
    BalancedBatches,
    Column,
    Reader,
    TextsInMemory,
    draw_without_repetition,
)
from tilefold.recipes.lsr import make_examples
from tilefold.retrieval.data import lazy_documents as stored
from tilefold.retrieval.data.datasets import load_collection
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import RowsAhead, read_training_rows

PUBLISHED = {
    "triples.tsv": "q0\td0\td2\nq1\td1\td3\n\nq0\td0\td4\nq0\td0\td2\n",
    "triples.json": '["q0", "d0", "d2", "d4"]\n["q1", "d1", "d3"]\n',
    "hard.jsonl.gz": '{"qid": "q0", "pos": ["d0"], "neg": {"bm25": ["d2"], "dense": ["d4", "d2"]}}\n'
    '{"qid": "q1", "pos": ["d1"], "neg": ["d3"]}\n',
    "scores.json": '["q0", ["d0", 2.5], ["d2", 1], ["d4", -1]]\n["q1", ["d1", 3], ["d3", 0.5]]\n',
}


def put(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith("gz") else text.encode())
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_negatives_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    rows = read_training_rows(put(tmp_path / name, PUBLISHED[name]))
    actual = {
        group.query: dict(zip(group.documents, group.relevant.tolist(), strict=True))
        for group in rows.groups()
    }
    assert actual == {"q0": {"d0": True, "d2": False, "d4": False}, "q1": {"d1": True, "d3": False}}
    assert rows.scored == (name == "scores.json")
    recipe = LsrRecipe(
        negatives=1,
        epochs=1,
        **({"loss": {"margin_mse": 1.0}} if rows.scored else {}),
    )
    made = make_examples(recipe, small_collection(), tmp_path / name)
    contents = small_collection().contents()
    assert made.pairs == 2 and made.columns["positive"][:] == [contents["d0"], contents["d1"]]
    assert made.columns["negative_1"][1] == contents["d3"]
    if rows.scored:
        assert (
            made.columns["label"][1].tolist() == [3.0, 0.5] and made.columns["label"][0, 0] == 2.5
        )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.tsv",
            "q0\td0\n",
            r"a\.tsv: line 1: expected a line of three ids .*got q0\td0 \(2 fields\)",
        ),
        ("a.tsv", "q0\t0\td0\t1\n", r"a\.tsv: line 1: .*\(4 fields\)"),
        (
            "a.json",
            '["q0", "d0", "d1"]\n["q1", 2.5, "d3"]\n',
            r"a\.json: line 2: .*not an id: 2\.5",
        ),
        ("a.json", '["q0", "d0"]\n', r"a\.json: line 1: .*fewer than two documents"),
        ("a.jsonl", '{"qid": 1, "pos": [2]}\n', r"a\.jsonl: line 1: .*'neg'"),
        ("a.jsonl", '{"qid": 1, "pos": "23", "neg": [4]}\n', r"a\.jsonl: line 1: .*are not lists"),
        (
            "a.json",
            f'["q0", ["d0", {"9" * 400}], ["d1", 1]]\n',
            r"a\.json: line 1: .*not a finite float32",
        ),
        (
            "a.json",
            '["q0", ["d0", 1], "d1"]\n',
            "line 1: .*.d1. has no score, but earlier rows have one",
        ),
        (
            "a.json",
            '["q0", ["d0", NaN], ["d1", 1]]\n',
            "line 1: .*the score of .d0. is nan, which is not a finite float32",
        ),
        ("a.json", "", r"a\.json: expected at least one line, got an empty file"),
    ],
)
def test_published_negatives_that_are_none_are_named(
    tmp_path: Path,
    name: str,
    text: str,
    message: str,
) -> None:
    refused(DataError, message, read_training_rows, put(tmp_path / name, text))


def test_a_run_is_no_file_of_negatives(tmp_path: Path) -> None:
    run = put(tmp_path / "run.tsv", "".join(f"q0\td{place}\td{place + 1}\n" for place in range(4)))
    text = "only 1 of the 4 documents that they mark as relevant"
    refused(DataError, text, make_examples, LsrRecipe(negatives=1), small_collection(), run)


def test_draws_have_every_negative_equally_often_and_none_twice_while_there_are_others() -> None:
    drawn = draw_without_repetition(np.full(6000, 5), 3, 0)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    counts = Counter(
        map(tuple, drawn.tolist()),
    )  # of 60 equally likely ones: 100 each, give or take 10
    assert len(counts) == 60 and all(50 < count < 150 for count in counts.values())
    assert all(
        {*row[:2]} == {*row} == {0, 1}
        for row in draw_without_repetition(np.full(50, 2), 5, 0).tolist()
    )


def test_documents_that_stay_in_their_file_train_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    small_collection().save_beir(tmp_path / "data")
    triples = put(
        tmp_path / "triples.tsv",
        "".join(f"q{i}\td{i}\td{(i + 3) % 12}\n" for i in range(12)),
    )
    base = str(tiny_masked_lm(tmp_path / "base", small_collection(), layers=1, bias=0.1))
    recipe = LsrRecipe(
        base_model=base,
        negatives=1,
        max_steps=3,
        batch_size=4,
        max_length=8,
        bf16=False,
        epochs=1,
    )
    runs: list[Any] = []
    ahead = RowsAhead(triples)
    for part in (None, 0):
        data = load_collection(tmp_path / "data", tmp_path / "cache", stored=part)
        assert isinstance(data.documents, stored.LazyDocuments) == (part == 0)
        made = train(
            recipe,
            data,
            tmp_path / str(part),
            negatives=triples if part is None else ahead,
        )
        assert part is None or len(ahead.take()) == 24  # read again
        runs.append(
            [(tmp_path / str(part) / "model.safetensors").read_bytes(), made.truncated, made.loss],
        )
    assert runs[0] == runs[1]
    held, kept = (
        Reader(make_examples(recipe, part, triples).columns, None, "")
        for part in (small_collection(), data)
    )
    assert held.rows([3, 0]) == kept.rows([3, 0])
    assert np.array_equal(held.text_keys(np.arange(12)), kept.text_keys(np.arange(12)))
    assert np.array_equal(held.document_lengths(), kept.document_lengths())
    assert (
        np.corrcoef(held.sizes(range(12)), kept.sizes(range(12)))[0, 1] > 0.9
    )  # of texts, and of their lines
    assert (
        len({*TextsInMemory(["a", "b", "a"]).text_keys.tolist()}) == 2
    )  # a text of two ids comes once in a batch
    data.qrels["train"]["q3"]["d99"] = 1
    lacks = "has a judgement for query 'q3' and document 'd99', but one of them is missing"
    refused(ValueError, lacks, make_examples, recipe, data, None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_parts_of_a_batch_that_take_about_equally_long(ranks: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 100) ** 2 // 1000
    columns = {
        name: Column(TextsInMemory("x" * length for length in lengths), np.arange(100))
        for name in ("query", "document")
    }
    reader = Reader(columns, None, "")
    batches = [[*range(at, at + 24)] for at in (0, 24, 48, 76)] + [[7]]
    for given, dealt in zip(batches, BalancedBatches(batches, reader, ranks), strict=True):
        assert sorted(dealt) == given  # 1 row cannot be dealt
        parts = reader.sizes(dealt).reshape(-1, len(dealt) // ranks or 1).sum(1)
        assert len(given) == 1 or parts.max() <= 1.05 * parts.mean()
