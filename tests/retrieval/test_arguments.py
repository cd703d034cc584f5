"""Arguments of another type: taken by position, or refused by name at every public function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.retrieval.conftest import random_vectors
from tests.sequences import LabelledSeries
from tilefold import recipes
from tilefold import retrieval as r
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection

TEXTS = {"a": "cats sleep all day", "b": "dogs chase cats", "c": "trees grow slowly"}
RUN = {"q": {"a": 2.0, "b": 1.0}}
TABLE = {"q": {"nDCG@10": 0.5}}


def series(*values: Any) -> LabelledSeries:
    """Values with labels in the opposite order."""
    return LabelledSeries(values, range(len(values) - 1, -1, -1))


def collection() -> r.Collection:
    return r.Collection("tiny", {"a": "cats sleep"}, {"q": "cats"}, {"train": {"q": {"a": 1}}})


def rows() -> r.TrainingRows:
    return r.TrainingRows(
        queries=["q"],
        documents=["a", "b"],
        offsets=np.array([0, 2]),
        document=np.array([0, 1], np.int32),
        relevant=np.array([True, False]),
        rank=np.array([1, 2], np.int32),
        retrieved=np.array([2.0, 1.0], np.float32),
    )


def tokens() -> r.TokenVectors:
    return r.TokenVectors.pack(["a"], [torch.ones(2, 8)], 8, "fp16")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(
            lambda path: r.encode_collection("minilm", TEXTS, path),
            "model",
            id="encode_collection: name of a model",
        ),
        pytest.param(
            lambda path: r.encode_tokens("minilm", TEXTS, path),
            "model",
            id="encode_tokens: name of a model",
        ),
        pytest.param(
            lambda path: r.encode_tokens(object(), TEXTS, path),
            "model",
            id="encode_tokens: no model",
        ),
        pytest.param(
            lambda path: r.encode_dense_collection("minilm", TEXTS, path),
            "model",
            id="encode_dense_collection: name of a model",
        ),
        pytest.param(
            lambda _: r.encode_queries("minilm", TEXTS),
            "model",
            id="encode_queries: name of a model",
        ),
        pytest.param(
            lambda _: r.encode_texts("minilm", TEXTS, kind="query"),
            "model",
            id="encode_texts: name of a model",
        ),
        pytest.param(
            lambda _: r.encode_dense("minilm", TEXTS, kind="query"),
            "model",
            id="encode_dense: name of a model",
        ),
        pytest.param(
            lambda _: r.encoded_index("minilm", TEXTS),
            "model",
            id="encoded_index: name of a model",
        ),
        pytest.param(
            lambda _: r.Teacher("t", "sparse", "minilm"),
            "model",
            id="Teacher: name of a model",
        ),
        pytest.param(
            lambda _: r.Teacher("t", "cross-encoder", "minilm"),
            "model",
            id="Teacher: name of a cross-encoder",
        ),
        pytest.param(
            lambda _: r.Teacher("t", "bm25", "index"),
            "model",
            id="Teacher: path of an index",
        ),
        pytest.param(lambda _: r.build_index({"a": {1: 1.0}}), "vectors", id="build_index: dict"),
        pytest.param(lambda _: r.build_index("vectors"), "vectors", id="build_index: path"),
        pytest.param(lambda _: r.DenseIndex.build("vectors"), "vectors", id="DenseIndex: path"),
        pytest.param(
            lambda path: r.LateIndex.build({"a": 1}, path),
            "vectors",
            id="LateIndex: dict",
        ),
        pytest.param(
            lambda path: r.write_vectors({"a": {1: 1.0}}, path),
            "vectors",
            id="write_vectors: dict",
        ),
        pytest.param(
            lambda path: r.export_jsonl("vectors", path),
            "vectors",
            id="export_jsonl: path",
        ),
        pytest.param(
            lambda path: r.export_opensearch({}, path),
            "vectors",
            id="export_opensearch: dict",
        ),
        pytest.param(lambda _: r.active_terms({"a": 1}), "vectors", id="active_terms: dict"),
        pytest.param(
            lambda _: r.flops(random_vectors(2), {"a": 1}),
            "documents",
            id="flops: dict of documents",
        ),
        pytest.param(lambda _: r.hits_to_run(TEXTS, []), "queries", id="hits_to_run: texts"),
        pytest.param(
            lambda _: r.build_index(random_vectors(3)).search(TEXTS, 3),
            "queries",
            id="SparseIndex.search: texts",
        ),
        pytest.param(
            lambda _: r.DenseIndex.build(tokens_of_one()).search(TEXTS, 3),
            "queries",
            id="DenseIndex.search: texts",
        ),
        pytest.param(lambda _: r.BM25Index.build(["cats"]), "documents", id="BM25Index: list"),
        pytest.param(
            lambda _: r.BM25Index.build(collection().documents),
            "documents",
            id="BM25Index: documents instead of texts",
        ),
        pytest.param(
            lambda _: r.BM25Index.build(TEXTS).search("cats", 3),
            "queries",
            id="BM25Index.search: one string",
        ),
        pytest.param(
            lambda _: r.BM25Index.build(TEXTS).query_vectors("cats"),
            "queries",
            id="BM25Index.query_vectors: one string",
        ),
        pytest.param(
            lambda _: r.BM25Index.build(TEXTS).updated({}, delete="ab"),
            "delete",
            id="BM25Index.updated: one id, whose letters are ids",
        ),
        pytest.param(lambda _: r.Searcher("index"), "index", id="Searcher: path"),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), documents=["cats"]),
            "documents",
            id="Searcher: list of documents",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), documents={"a": 3}),
            "documents",
            id="Searcher: number as a document",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), second="run.trec"),
            "second",
            id="Searcher: path of a run",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), late="colbert"),
            "late",
            id="Searcher: name of a model that reranks",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS)).rank("cats", r.SearchRequest()),
            "queries",
            id="Searcher.rank: one string",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS)).rank({"q": "cats"}, 5),
            "request",
            id="Searcher.rank: number",
        ),
        pytest.param(
            lambda _: r.Collection("c", ["cats"], {}, {}),
            "documents",
            id="Collection: list of documents",
        ),
        pytest.param(
            lambda _: r.Collection("c", {}, ["cats"], {}),
            "queries",
            id="Collection: list of queries",
        ),
        pytest.param(
            lambda _: r.Collection("c", {}, {}, {"test": [("q", "d", 1)]}),
            "qrels",
            id="Collection: list of judgements",
        ),
        pytest.param(lambda _: r.Passages(8).of(["cats"]), "documents", id="Passages: list"),
        pytest.param(lambda _: r.best_passages([]), "run", id="best_passages: list"),
        pytest.param(lambda path: r.merge_vectors(str(path), path), "folders", id="merge_vectors"),
        pytest.param(
            lambda path: r.update_index(path, delete="ab"),
            "delete",
            id="update_index: one id, whose letters are ids",
        ),
        pytest.param(lambda path: r.read_rows(path, "ab"), "names", id="read_rows: one id"),
        pytest.param(
            lambda _: r.rerank(RUN, TEXTS, tokens()),
            "queries",
            id="rerank: texts as queries",
        ),
        pytest.param(
            lambda _: r.rerank(RUN, tokens(), "tokens"),
            "documents",
            id="rerank: path of documents",
        ),
        pytest.param(lambda _: r.evaluate([], {"q": {"a": 1}}), "run", id="evaluate: list"),
        pytest.param(lambda _: r.evaluate(RUN, "qrels.tsv"), "qrels", id="evaluate: path"),
        pytest.param(
            lambda _: r.evaluate(RUN, {"q": {"a": 1}}, "nDCG@10"),
            "measures",
            id="evaluate: one measure",
        ),
        pytest.param(
            lambda path: r.write_trec_run([("q", "a", 1.0)], path),
            "run",
            id="write_trec_run: list",
        ),
        pytest.param(lambda _: r.interpolate(RUN), "runs", id="interpolate: one run"),
        pytest.param(
            lambda _: r.reciprocal_rank_fusion(["a.trec", "b.trec"]),
            "runs",
            id="reciprocal_rank_fusion: paths",
        ),
        pytest.param(lambda _: r.compare([TABLE, TABLE]), "tables", id="compare: list"),
        pytest.param(
            lambda _: r.mean_of({1: 0.5, 2: 0.75}),
            "values",
            id="mean_of: mapping, whose keys are numbers",
        ),
        pytest.param(
            lambda _: r.expand_sparse(TEXTS, random_vectors(2), RUN, r.Feedback()),
            "queries",
            id="expand_sparse: texts",
        ),
        pytest.param(
            lambda _: r.mine_negatives([], "pydocs", "train", [r.Window(1, 9, 1)]),
            "collection",
            id="mine_negatives: name of a collection",
        ),
        pytest.param(
            lambda _: r.drop_false_negatives("rows.parquet", r.FalseNegatives(0.1)),
            "rows",
            id="drop_false_negatives: path",
        ),
        pytest.param(
            lambda path: r.score_rows("teacher", rows(), collection(), path),
            "teacher",
            id="score_rows: name of a teacher",
        ),
        pytest.param(
            lambda _: r.ensemble("rows.parquet", {}),
            "rows",
            id="ensemble: path",
        ),
        pytest.param(
            lambda _: r.ensemble(rows(), [[1.0, 2.0]]),
            "teachers",
            id="ensemble: list of scores",
        ),
        pytest.param(
            lambda path: r.write_training_rows([("q", "a")], path),
            "rows",
            id="write_training_rows: list",
        ),
        pytest.param(
            lambda path: r.load_beir(path, splits="test"),
            "splits",
            id="load_beir: one split",
        ),
        pytest.param(
            lambda path: recipes.train("splade", collection(), path),
            "recipe",
            id="train: name of a recipe",
        ),
        pytest.param(
            lambda path: recipes.train(recipes.get_recipe("splade"), "pydocs", path),
            "collection",
            id="train: name of a collection",
        ),
        pytest.param(
            lambda _: r.build_index(random_vectors(2), metadata=["lang"]),
            "metadata",
            id="build_index: list of metadata",
        ),
        pytest.param(
            lambda _: r.BM25Index.build(TEXTS, metadata={"a": "de"}),
            "metadata",
            id="BM25Index: text as metadata of a document",
        ),
        pytest.param(
            lambda _: r.SparseVectors.from_rows({"a": "b"}, 8),
            "rows",
            id="from_rows: text as a row",
        ),
        pytest.param(
            lambda _: r.SparseVectors.concatenate(["a", "b"]),
            "parts",
            id="concatenate: paths",
        ),
        pytest.param(
            lambda _: r.TokenVectors.pack(["a"], ["vectors"], 8, "fp16"),
            "vectors",
            id="TokenVectors.pack: path",
        ),
        pytest.param(
            lambda path: r.export_opensearch(random_vectors(2), path / "o", texts=["cats"]),
            "texts",
            id="export_opensearch: list of texts",
        ),
        pytest.param(
            lambda path: r.export_vespa(random_vectors(2), path / "o", texts="cats"),
            "texts",
            id="export_vespa: one text",
        ),
        pytest.param(
            lambda _: r.Searcher(r.build_index(random_vectors(2)), vectors={"a": 1}),
            "vectors",
            id="Searcher: dict as vectors",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), tokens="tokens"),
            "tokens",
            id="Searcher: path of token vectors",
        ),
        pytest.param(
            lambda _: r.Searcher(r.BM25Index.build(TEXTS), options=["heap_factor"]),
            "options",
            id="Searcher: list of options",
        ),
        pytest.param(
            lambda _: r.SearchRequest(feedback="rocchio"), "feedback", id="feedback: name"
        ),
        pytest.param(lambda _: r.SearchRequest(fusion="rrf"), "fusion", id="fusion: name"),
        pytest.param(lambda _: r.SearchRequest(reranking=100), "reranking", id="reranking: depth"),
        pytest.param(lambda _: r.SearchRequest(where="lang=de"), "where", id="where: text"),
        pytest.param(
            lambda _: r.hits_to_run(random_vectors(1), [["a"]]),
            "hits",
            id="hits_to_run: ids",
        ),
        pytest.param(
            lambda _: r.feedback_documents([("q", "a")], r.Feedback()),
            "run",
            id="feedback_documents: list",
        ),
        pytest.param(
            lambda _: r.feedback_documents(RUN, "rocchio"),
            "feedback",
            id="feedback_documents: name of a method",
        ),
        pytest.param(
            lambda _: r.expand_dense([[1.0]], ["q"], torch.eye(1), ["a"], {}, r.Feedback()),
            "queries",
            id="expand_dense: list",
        ),
        pytest.param(
            lambda _: r.mine_negatives("run.trec", collection(), "train", [r.Window(1, 9, 1)]),
            "rankings",
            id="mine_negatives: path of a run",
        ),
        pytest.param(
            lambda _: r.mine_negatives([], collection(), "train", (1, 9, 1)),
            "windows",
            id="mine_negatives: numbers as windows",
        ),
        pytest.param(
            lambda _: r.training_passages(r.Passages(8), "pydocs"),
            "collection",
            id="training_passages: name of a collection",
        ),
        pytest.param(lambda _: r.evaluate({"q": ["a"]}, {"q": {"a": 1}}), "run", id="ranked ids"),
        pytest.param(lambda _: r.evaluate(RUN, {"q": ["a"]}), "qrels", id="relevant ids"),
        pytest.param(
            lambda _: r.interpolate([RUN], ["0.5"]),
            "weights",
            id="interpolate: text as a weight",
        ),
        pytest.param(lambda _: r.query_of_line(b"cats", 1), "line", id="query_of_line: bytes"),
        pytest.param(
            lambda _: r.load_collection(TEXTS), "name_or_path", id="load_collection: dict"
        ),
        pytest.param(
            lambda path: r.load_collection(path, fields={"text": "body"}),
            "fields",
            id="load_collection: dict of fields",
        ),
        pytest.param(lambda _: r.load_documents(TEXTS), "path", id="load_documents: dict"),
        pytest.param(lambda _: r.load_index(TEXTS), "path", id="load_index: dict"),
        pytest.param(lambda _: r.read_vectors(TEXTS), "path", id="read_vectors: dict"),
        pytest.param(lambda _: r.open_tokens(None), "path", id="open_tokens: none"),
        pytest.param(lambda _: r.read_training_rows([]), "path", id="read_training_rows: list"),
        pytest.param(lambda _: recipes.get_recipe(["splade"]), "recipe", id="get_recipe: list"),
        pytest.param(
            lambda _: recipes.build_encoder(None, "mlm", None),
            "document",
            id="build_encoder: name of a kind",
        ),
        pytest.param(
            lambda _: recipes.minilm_splade("cats"),
            "sample_texts",
            id="minilm_splade: one text",
        ),
        pytest.param(
            lambda path: r.LateIndex.build(tokens(), path / "late", queries="x"),
            "queries",
            id="LateIndex.build: text as queries",
        ),
        pytest.param(lambda _: r.LateIndex.build(tokens(), None), "folder", id="LateIndex.build"),
        pytest.param(lambda _: r.LateIndex.load(None), "path", id="LateIndex.load"),
        pytest.param(lambda _: r.build_index(random_vectors(2)).save(None), "path", id="save"),
        pytest.param(lambda _: r.BM25Index.load(None), "path", id="BM25Index.load"),
        pytest.param(lambda _: r.BM25Index.build(TEXTS, k1="1.5"), "k1", id="k1 of BM25: text"),
        pytest.param(lambda _: r.BM25Index.build(TEXTS, b=None), "b", id="b of BM25: None"),
        pytest.param(
            lambda _: r.BM25Index.build(TEXTS, language=None),
            "language",
            id="language of BM25: None",
        ),
        pytest.param(lambda _: r.Window("1", "2", 3), "first", id="Window: texts"),
        pytest.param(lambda _: r.Reranking(depth=2.5), "depth", id="depth of Reranking: float"),
        pytest.param(lambda _: r.Reranking(depth="2"), "depth", id="depth of Reranking: text"),
        pytest.param(lambda _: r.Reranking(weight="x"), "weight", id="weight of Reranking"),
        pytest.param(lambda _: r.Interpolation(weight="x"), "weight", id="Interpolation"),
        pytest.param(lambda _: r.Fusion(weight=None), "weight", id="Fusion"),
        pytest.param(lambda _: r.Feedback(gamma="x"), "gamma", id="Feedback"),
        pytest.param(lambda _: r.interpolate([RUN], k="x"), "k", id="k of interpolate"),
        pytest.param(lambda _: r.reciprocal_rank_fusion([RUN], k="x"), "k", id="k of RRF"),
        pytest.param(
            lambda _: r.best_passages({"q": ["a"]}),
            "run",
            id="best_passages: list of passages",
        ),
        pytest.param(
            lambda _: r.best_passages({"q": {5: 1.0}}), "run", id="best_passages: numbers"
        ),
        pytest.param(lambda _: r.term_names("bert", 5), "tokenizer", id="term_names"),
        pytest.param(lambda _: r.Passage.of(5), "name", id="Passage.of"),
        pytest.param(lambda _: r.Passages.parse(5), "text", id="Passages.parse"),
        pytest.param(
            lambda path: r.merge_vectors(["a", 3], path), "folders", id="number as folder"
        ),
        pytest.param(lambda _: r.merge_vectors(["a", "b"], None), "output_dir", id="no output_dir"),
        pytest.param(
            lambda _: r.write_vectors(random_vectors(2), None), "path", id="write_vectors"
        ),
        pytest.param(
            lambda path: r.write_vectors(random_vectors(2), path, shard_size="x"),
            "shard_size",
            id="shard_size: text",
        ),
        pytest.param(
            lambda path: r.write_trec_run(RUN, path / "run", tag=5),
            "tag",
            id="write_trec_run: number as tag",
        ),
        pytest.param(
            lambda _: r.mine_negatives(RUN, collection(), "train", [r.Window(1, 2, 1)], seed="x"),
            "seed",
            id="mine_negatives: text as seed",
        ),
        pytest.param(lambda _: r.Filter("x"), "where", id="Filter"),
        pytest.param(lambda _: r.Filter.parse([5]), "where", id="Filter.parse"),
        pytest.param(lambda _: random_vectors(2).take("x"), "rows", id="SparseVectors.take"),
        pytest.param(
            lambda _: random_vectors(2).take(np.array([True, False])),
            "rows",
            id="SparseVectors.take: mask",
        ),
        pytest.param(
            lambda _: r.SparseVectors.from_rows({"a": {1: 1.0}}, "x"),
            "vocab_size",
            id="vocab_size: text",
        ),
        pytest.param(lambda _: Documents(["a"], "x"), "sparse", id="Documents: text as vectors"),
        pytest.param(
            lambda _: Documents(5, random_vectors(2)), "ids", id="Documents: number as ids"
        ),
        pytest.param(
            lambda _: Documents(["d0"], random_vectors(1), payloads=["x"]),
            "payloads",
            id="Documents: list of payloads",
        ),
        pytest.param(lambda _: Layout(5, fields=["x"]), "fields", id="Layout: list of fields"),
        pytest.param(lambda _: QdrantCollection.embedded(None), "folder", id="QdrantCollection"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    call: Callable[[Path], Any],
    argument: str,
    tmp_path: Path,
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{argument}\b.*(expected|must)"):
        call(tmp_path)
    assert not any(tmp_path.iterdir()), "something was written"


def tokens_of_one() -> r.TokenVectors:
    return r.TokenVectors.pack(["a"], [torch.ones(1, 8)], 8, "fp32")


def test_negatives_are_mined_from_a_run_as_from_its_items() -> None:
    documents = {"a": "cats sleep", "b": "dogs run", "c": "trees grow"}
    judged = r.Collection("tiny", documents, {"q": "cats"}, {"train": {"q": {"a": 1}}})
    window = [r.Window(1, 9, 1)]
    mined = [
        r.mine_negatives(run, judged, "train", window).mined_rows for run in (RUN, RUN.items())
    ]
    assert mined[0] == mined[1] != []


def test_a_searcher_takes_texts_as_documents() -> None:
    searcher = r.Searcher(r.BM25Index.build(TEXTS), documents=TEXTS)
    (first, *_) = searcher.search("trees")
    assert (first["id"], first["title"]) == ("c", "trees grow slowly")


def test_a_collection_takes_texts_as_documents() -> None:
    assert collection().documents == {"a": r.Document("a", "", "cats sleep")}


def test_ids_of_vectors_are_read_by_position() -> None:
    vectors = r.SparseVectors.from_torch(series("a", "b"), torch.eye(2))
    assert vectors.ids == ["a", "b"]
    packed = r.TokenVectors.pack(series("a", "b"), [torch.ones(1, 8), torch.ones(2, 8)], 8, "fp16")
    assert packed.ids == ["a", "b"]


def test_scores_and_ids_of_training_rows_are_read_by_position() -> None:
    plain = rows()
    labelled = r.TrainingRows(
        queries=series("q"),
        documents=series("a", "b"),
        offsets=series(0, 2),
        document=series(0, 1),
        relevant=series(True, False),
        rank=series(1, 2),
        retrieved=series(2.0, 1.0),
    )
    (expected,), (actual,) = plain.groups(), labelled.groups()
    assert actual.documents == expected.documents
    assert actual.retrieved.tolist() == expected.retrieved.tolist()


def test_scores_of_teachers_are_read_by_position() -> None:
    of_list = r.ensemble(rows(), {"t": [0.25, 1.0]}, normalization="none")
    of_series = r.ensemble(rows(), {"t": series(0.25, 1.0)}, normalization="none")
    assert of_list.tolist() == of_series.tolist() == [0.25, 1.0]


def test_scores_of_a_teacher_for_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"teachers: expected 2 scores of 't'.*shape \[3\]"):
        r.ensemble(rows(), {"t": [1.0, 2.0, 3.0]})


def test_weights_of_an_interpolation_are_read_by_position() -> None:
    runs = [{"q": {"a": 2.0, "b": 0.0}}, {"q": {"a": 0.0, "b": 2.0}}]
    for weights in (series(0.25, 0.75), np.array([0.25, 0.75]), iter([0.25, 0.75])):
        fused = r.interpolate(iter(runs), weights, normalization="none")
        assert fused == {"q": {"b": 1.5, "a": 0.5}}


def test_tokens_of_an_export_are_read_by_position(tmp_path: Path) -> None:
    vectors = r.SparseVectors.from_rows({"a": {0: 1.0}}, 2)
    r.export_jsonl(vectors, tmp_path / "v.jsonl", series("zero", "one"))
    assert '"zero"' in (tmp_path / "v.jsonl").read_text(encoding="utf-8")


def test_terms_to_leave_out_may_be_a_set() -> None:
    vectors = r.SparseVectors.from_rows({"a": {0: 1.0, 1: 2.0}}, 2)
    assert vectors.without({0}).indices.tolist() == [1]


def test_ids_to_delete_may_be_a_series_whose_labels_are_others() -> None:
    index = r.BM25Index.build(TEXTS).updated({}, delete=LabelledSeries(["a"], [7]))
    assert index.ids == ["b", "c"]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(
            lambda path, **options: r.write_trec_run(RUN, path, **options),
            id="write_trec_run",
        ),
        pytest.param(
            lambda path, **options: r.write_training_rows(rows(), path, **options),
            id="write_training_rows",
        ),
        pytest.param(
            lambda path, **options: r.export_jsonl(random_vectors(2), path, **options),
            id="export_jsonl",
        ),
    ],
)
def test_a_file_that_exists_is_replaced_only_if_asked_for(
    write: Callable[..., None],
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"expected a new file, .*\(overwrite=True"):
        write(file)
    assert file.read_text(encoding="utf-8") == "mine"
    with pytest.raises(FileExistsError, match="expected a file, got a folder"):
        write(tmp_path, overwrite=True)
    write(file, overwrite=True)
    assert file.read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        pytest.param(lambda index: index.search("x", 3), "queries", id="search"),
        pytest.param(lambda index: index.upsert(random_vectors(1)), "documents", id="upsert"),
        pytest.param(lambda index: index.add("x"), "documents", id="add"),
        pytest.param(lambda index: index.build(random_vectors(1)), "documents", id="build"),
    ],
)
def test_a_qdrant_collection_refuses_other_objects_by_name(
    call: Callable[[Any], Any],
    argument: str,
    tmp_path: Path,
) -> None:
    pytest.importorskip("qdrant_edge")
    with (
        QdrantCollection.embedded(tmp_path / "index", Layout(vocab_size=500)) as collection,
        pytest.raises(TypeError, match=f"^{argument}: expected"),
    ):
        call(collection)


def test_a_late_index_refuses_texts_as_queries_and_no_path(tmp_path: Path) -> None:
    index = r.LateIndex.build(tokens(), tmp_path / "late")
    with pytest.raises(TypeError, match=r"^queries: expected TokenVectors, got 'x'"):
        index.search("x", 3)
    with pytest.raises(TypeError, match=r"^path: expected a path, got None"):
        index.save(None)


@pytest.mark.parametrize("row", [2, -1])
def test_a_row_that_vectors_do_not_have_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match=f"rows: expected positions among 2 rows, got {row}"):
        random_vectors(2).take([row])


@pytest.mark.parametrize("choice", [["min_max"], None, 5])
def test_a_choice_that_is_no_text_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match="normalization: expected one of min_max"):
        r.interpolate([RUN], normalization=choice)
    with pytest.raises(ValueError, match="normalization: expected one of min_max"):
        r.Interpolation(normalization=choice)
