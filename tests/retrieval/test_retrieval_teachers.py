"""Teachers' scores against the models' own, and the ensemble against sums by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.recipes.small import VOCABULARY, make_tokenizer_folder, small_collection, small_masked_lm
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.recipes.loading import load_saved, saved_kind
from tilefold.retrieval import teachers
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.mining import Window, mine_negatives
from tilefold.retrieval.teachers import Teacher, ensemble, score_rows, with_relevant
from tilefold.retrieval.training_rows import TrainingRows

COLLECTION = small_collection()


def reranker(folder: Path, labels: int = 1) -> Path:
    """A small BertForSequenceClassification as rerankers are published."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        num_labels=labels, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(str(folder))
    return make_tokenizer_folder(folder, VOCABULARY)


@pytest.fixture(scope="module")
def rows() -> TrainingRows:
    run = r.BM25Index.build(COLLECTION.contents(), language="none").search(COLLECTION.queries, 16)
    return mine_negatives(run.items(), COLLECTION, "train", [Window(1, 16, 5)]).rows({"split": "train"})


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = reranker(tmp_path_factory.mktemp("reranker"))
    assert saved_kind(str(folder)) == "cross-encoder"
    return load_saved(str(folder), "cross-encoder")


def pairs(rows: TrainingRows) -> list[tuple[str, str]]:
    return [
        (COLLECTION.queries[group.query], COLLECTION.documents[name].contents)
        for group in rows.groups()
        for name in group.documents
    ]


def test_a_cross_encoder_gives_its_logits_and_goes_on_after_an_interruption(
    rows: TrainingRows, cross_encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "SHARD", 20)
    teacher = Teacher("small", "cross-encoder", cross_encoder)

    def stop(done: int, total: int) -> None:
        if done == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_rows(teacher, rows, COLLECTION, tmp_path, progress=stop)
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2
    np.save(kept[0], np.full(20, 7, np.float32))  # so that it shows that this shard is not scored again
    seen: list[int] = []
    scores = score_rows(teacher, rows, COLLECTION, tmp_path, progress=lambda done, total: seen.append(done))
    expected = cross_encoder.predict(pairs(rows), activation_fn=torch.nn.Identity(), show_progress_bar=False)
    assert scores[:20].tolist() == [7] * 20 and seen[-1] == len(rows)
    np.testing.assert_allclose(scores[20:], expected[20:], rtol=2**-6, atol=2**-6)  # other batches, in bf16 by machine
    assert np.ptp(expected) > 0.1
    np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)
    (whole,) = (file for file in tmp_path.glob("*.npy") if np.load(file).shape == scores.shape)
    for damaged in (whole.read_bytes()[:200], whole.read_bytes()[:-4] + np.float32(np.nan).tobytes()):
        whole.write_bytes(damaged)
        np.testing.assert_array_equal(score_rows(teacher, rows, COLLECTION, tmp_path), scores)


def test_bi_encoders_and_bm25_give_their_own_similarities(rows: TrainingRows, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    from tilefold.cli._models import load_model
    from tilefold.recipes.colbert import untrained_colbert

    small = small_masked_lm(tmp_path / "masked-lm")
    dense, _ = load_model("minilm", kinds=("dense",))
    sparse, late = SparseEncoder(str(small), device="cpu"), untrained_colbert()
    queries = [COLLECTION.queries[name] for name in rows.queries]
    documents = [COLLECTION.documents[name].contents for name in rows.documents]
    for model, kind in ((dense, "dense"), (sparse, "sparse"), (late, "multi-vector")):
        scores = score_rows(Teacher(kind, kind, model), rows, COLLECTION, tmp_path / "work")
        plain = {"convert_to_sparse_tensor": False} if kind == "sparse" else {}
        encoded = model.encode_query(queries, **plain), model.encode_document(documents, **plain)
        similar = model.similarity(*encoded).float()
        own = similar[rows.query_of_row(), rows.document].tolist()
        np.testing.assert_allclose(scores, own, rtol=2**-5, atol=2**-6, err_msg=kind)  # other batches, some in bf16
    index = r.BM25Index.build(COLLECTION.contents())
    scores = score_rows(Teacher("bm25", "bm25", index), rows, COLLECTION, tmp_path / "work")
    run = index.search(COLLECTION.queries, 16)
    expected = [run[group.query].get(name, 0.0) for group in rows.groups() for name in group.documents]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    assert 0 in expected and max(expected) > 1


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
    expected = [30 * (4 / 4.000001 + 1 / 1.000001) / 2, 30 * (2 / 4.000001 + 1 / 1.000001) / 2, 0, 0]
    np.testing.assert_allclose(ensemble(rows, given), expected, rtol=1e-6)
    np.testing.assert_allclose(ensemble(rows, given, scale=2.0), np.array(expected) / 15, rtol=1e-6)
    np.testing.assert_allclose(ensemble(rows, given, normalization="none"), [2, 1, -0.5, 4.5])
    like = ensemble(rows, given, like="one")
    assert like.mean() == pytest.approx(4.5) and like.std() == pytest.approx(np.std([5, 3, 1, 9]))
    assert np.argsort(like).tolist()[-2:] == [1, 0], "the order of the ensemble"
    assert ensemble(rows, {"one": given["one"]}, scale=1.0)[1] == pytest.approx(0.5, abs=1e-6)
    for options, message in (
        ({"normalization": "z"}, "expected min_max or none"),
        ({"like": "three"}, "like: expected one of the teachers one, two"),
        ({"like": "one", "scale": 3.0}, "expected one of them"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
    ):
        refused(ValueError, message, ensemble, rows, given, **options)
    refused(ValueError, "expected scores that differ", ensemble, rows, {"one": np.ones(4, np.float32)}, like="one")
    seven = made({"a": [f"d{i}" for i in range(7)]})
    equal = {name: np.full(7, value, np.float32) for name, value in (("one", 1e-3), ("two", 0.2), ("three", 0.1))}
    with pytest.raises(ValueError, match="expected scores that differ"):  # their deviation is a rounding, and not 0
        ensemble(seven, equal, normalization="none", like="one")


def test_relevant_documents_that_lack_a_row_get_one(rows: TrainingRows) -> None:
    without = rows.take(~rows.relevant)
    whole = with_relevant(without, COLLECTION, "train")
    assert [group.documents for group in whole.groups()] == [group.documents for group in rows.groups()]
    assert whole.relevant.tolist() == rows.relevant.tolist() and not whole.rank[whole.relevant].any()
    assert with_relevant(rows, COLLECTION, "train") is rows
    without.teachers, without.target = {"t": without.retrieved}, without.retrieved
    refused(ValueError, "Score the mined file again", with_relevant, without, COLLECTION, "train")


def test_what_is_no_teacher_is_refused(rows: TrainingRows, cross_encoder: Any, tmp_path: Path) -> None:
    refused(ValueError, "kind: expected one of", Teacher, "x", "colbert", None)
    classifier = load_saved(str(reranker(tmp_path / "three", 3)), "cross-encoder")
    refused(ValueError, "one with 3 classes", Teacher, "x", "cross-encoder", classifier)
    with torch.no_grad():
        broken = load_saved(str(reranker(tmp_path / "broken")), "cross-encoder")
        next(module for module in broken.modules() if hasattr(module, "classifier")).classifier.bias.fill_(torch.nan)
    with pytest.raises(DataError, match="teacher broken: gave nan to document 'd0' of query 'q0'"):
        score_rows(Teacher("broken", "cross-encoder", broken), rows, COLLECTION, tmp_path / "work")
