"""Encoding into a folder by plain and accelerated models of both kinds, with the same promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilefold import retrieval as r
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.vectors.tokens import TokenManifest

TEXTS = {
    "d0": "a cat sleeps",
    "d1": "x",
    "d2": "dogs chase cats and birds and, on some days, each other all around the house",
    "d3": "sparse retrieval weighs the words of a vocabulary",
    "d4": "",
    "d5": "the quick brown fox jumps over the lazy dog",
    "d6": "trees grow slowly",
}
FORTY_TEXTS = {f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(40)}
# Sums of 32 products in another order within a batch of other lengths: sqrt(32) eps, with a margin.
SPARSE_BUDGET = 1e-5
# Entries of unit vectors are rounded to fp16.
TOKEN_BUDGET = 2.0**-11


def to_dense(vectors: r.SparseVectors) -> torch.Tensor:
    """Vectors as a float32 matrix ``[len(vectors), vocab_size]``."""
    matrix = np.zeros((len(vectors), vectors.vocab_size), np.float32)
    for row in range(len(vectors)):
        terms, weights = vectors.row(row)
        matrix[row, terms] = weights
    return torch.from_numpy(matrix)


@dataclass(frozen=True)
class Encoder:
    """A model, and the functions that encode with it and read what they wrote.

    Attributes:
        model: makes sparse vectors or token vectors.
        is_sparse: which of the two.
        is_accelerated: whether the model is accelerated.
    """

    model: Any
    is_sparse: bool
    is_accelerated: bool = False

    @property
    def shard_suffix(self) -> str:
        return "parquet" if self.is_sparse else "safetensors"

    @property
    def budget(self) -> float:
        """The error of an entry that rounding allows."""
        return SPARSE_BUDGET if self.is_sparse else TOKEN_BUDGET

    @property
    def small_batches(self) -> dict[str, Any]:
        """The option that makes batches small."""
        return {"batch_tokens": 60} if self.is_accelerated else {"batch_size": 3}

    def encode(self, texts: Any, folder: Path, **options: Any) -> Any:
        encode: Any = r.encode_collection if self.is_sparse else r.encode_tokens
        return encode(self.model, texts, folder, **options)

    def encode_queries(self, texts: Any) -> Any:
        if self.is_sparse:
            return r.encode_queries(self.model, texts)
        return r.encode_texts(self.model, texts, kind="query")

    def manifest(self, folder: Path) -> Any:
        return r.read_manifest(folder) if self.is_sparse else TokenManifest.read(folder)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The vectors of a folder by id, in its order."""
        if self.is_sparse:
            vectors = r.read_vectors(folder)
            return dict(zip(vectors.ids, to_dense(vectors), strict=True))
        store = r.open_tokens(folder)
        tokens = store.read(store.ids)
        return {name: tokens.rows(row) for row, name in enumerate(tokens.ids)}

    def encode_by_its_own_method(self, texts: dict[str, str]) -> dict[str, torch.Tensor]:
        """The vectors that ``encode`` of the model's class returns, by id."""
        options = {"convert_to_sparse_tensor": False} if self.is_sparse else {}
        encode = type(self.model).encode
        vectors = encode(self.model, list(texts.values()), task="document", **options)
        return dict(zip(texts, vectors, strict=True))


@pytest.fixture(params=["sparse", "sparse, accelerated", "tokens", "tokens, accelerated"])
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    is_sparse = request.param.startswith("sparse")
    model = request.getfixturevalue("splade" if is_sparse else "late")
    if not request.param.endswith("accelerated"):
        yield Encoder(model, is_sparse)
        return
    # Trainers of other tests of this process may still have threads.
    earlier_threads = set(threading.enumerate())
    with accelerate(model):
        yield Encoder(model, is_sparse, is_accelerated=True)
    assert model[0].model.config._attn_implementation == "sdpa"
    assert not hasattr(model, "encode_token_batch")
    assert not hasattr(model, "encode_sparse_batch")
    new_threads = set(threading.enumerate()) - earlier_threads
    assert not [thread for thread in new_threads if thread.name.startswith("tilefold-")]


@pytest.fixture
def accelerated_splade(splade: Any) -> Iterator[Any]:
    with accelerate(splade):
        yield splade


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """The content of the files of a folder by name."""
    return {file.name: file.read_bytes() for file in folder.glob(pattern)}


BATCH_OPTIONS = pytest.mark.parametrize(
    "batch_options",
    [
        pytest.param({}, id="default batches"),
        pytest.param({"batch_tokens": 20}, id="20 tokens"),
        pytest.param({"batch_size": 2}, id="2 texts"),
    ],
)


@BATCH_OPTIONS
@pytest.mark.filterwarnings("ignore:batch_tokens does nothing")
def test_rows_are_those_of_the_stock_model_in_their_order(
    encoder: Encoder,
    tmp_path: Path,
    batch_options: dict[str, Any],
) -> None:
    manifest = encoder.encode(TEXTS, tmp_path, shard_size=3, **batch_options)
    assert manifest.complete
    assert not manifest.failed
    assert encoder.manifest(tmp_path) == manifest
    assert manifest.n_documents == 7
    assert [shard["rows"] for shard in manifest.shards] == [3, 3, 1]

    vectors = encoder.read(tmp_path)

    assert list(vectors) == list(TEXTS)
    for name, expected in encoder.encode_by_its_own_method(TEXTS).items():
        torch.testing.assert_close(
            vectors[name],
            expected,
            rtol=encoder.budget,
            atol=encoder.budget,
        )


@BATCH_OPTIONS
@pytest.mark.filterwarnings("ignore:batch_tokens does nothing")
def test_progress_rises_from_none_to_all_texts(
    encoder: Encoder,
    tmp_path: Path,
    batch_options: dict[str, Any],
) -> None:
    progress: list[tuple[int, int]] = []
    encoder.encode(
        TEXTS,
        tmp_path,
        shard_size=3,
        progress=lambda done, total: progress.append((done, total)),
        **batch_options,
    )
    assert progress[0] == (0, 7)
    assert progress[-1] == (7, 7)
    assert progress == sorted(set(progress))
    if not encoder.is_accelerated and batch_options == {"batch_size": 2}:
        assert [done for done, _ in progress] == [0, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("storage", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["document", "query"])
def test_an_accelerated_model_stores_token_vectors_as_a_plain_one(
    late: Any,
    tmp_path: Path,
    storage: Any,
    kind: Any,
) -> None:
    options: dict[str, Any] = {"storage": storage, "kind": kind, "shard_size": 3}
    r.encode_tokens(late, TEXTS, tmp_path / "plain", **options)
    with accelerate(late):
        r.encode_tokens(late, TEXTS, tmp_path / "accelerated", **options)
    plain = r.open_tokens(tmp_path / "plain").read(TEXTS)
    accelerated = r.open_tokens(tmp_path / "accelerated").read(TEXTS)
    assert plain.values.dtype == accelerated.values.dtype
    assert torch.equal(plain.offsets, accelerated.offsets)
    for row in range(len(plain)):
        torch.testing.assert_close(plain.rows(row), accelerated.rows(row), rtol=0, atol=2 / 127)
    with torch.autocast("cpu", torch.bfloat16):
        vectors = r.encode_texts(late, TEXTS, kind=kind, storage=storage, batch_size=2)
    assert vectors.ids == list(TEXTS)


def test_queries_get_the_query_prompt_and_their_heaviest_terms(splade: Any) -> None:
    vectors = r.encode_queries(splade, TEXTS, top_k=50)
    expected = splade.encode_query(
        list(TEXTS.values()),
        convert_to_sparse_tensor=False,
        max_active_dims=50,
    )
    torch.testing.assert_close(to_dense(vectors), expected, rtol=SPARSE_BUDGET, atol=SPARSE_BUDGET)
    assert int(np.diff(vectors.indptr).max()) == 50
    as_document = splade.encode_document("a cat sleeps", convert_to_sparse_tensor=False)
    assert not torch.allclose(to_dense(vectors)[0], as_document)


def test_terms_up_to_a_weight_are_left_out(splade: Any) -> None:
    vectors = r.encode_queries(splade, TEXTS, top_k=50)
    threshold = float(np.median(vectors.data))
    heavy_terms = r.encode_queries(splade, TEXTS, top_k=50, min_weight=threshold)
    assert heavy_terms.data.min() > threshold
    assert heavy_terms.indices.size == int((vectors.data > threshold).sum())


class InterruptedProgress:
    """Progress that raises ``KeyboardInterrupt`` at one of its calls, counted from 1."""

    def __init__(self, call: int) -> None:
        self.call = call
        self.n_done: list[int] = []

    def __call__(self, done: int, total: int) -> None:
        self.n_done.append(done)
        if len(self.n_done) == self.call:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted_call", [1, 3, 5])
def test_an_interrupted_run_goes_on_and_writes_the_same_bytes(
    encoder: Encoder,
    tmp_path: Path,
    interrupted_call: int,
) -> None:
    folder = tmp_path / "interrupted"
    options = {"shard_size": 8, **encoder.small_batches}
    progress = InterruptedProgress(interrupted_call)
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(FORTY_TEXTS, folder, progress=progress, **options)
    with pytest.raises(DataError, match="unfinished run"):
        encoder.read(folder)
    shards = list(folder.glob(f"part-0000?.{encoder.shard_suffix}"))
    times = [file.stat().st_mtime_ns for file in shards]
    assert len(shards) == len(encoder.manifest(folder).shards)

    resumed: list[int] = []
    encoder.encode(
        FORTY_TEXTS,
        folder,
        progress=lambda done, total: resumed.append(done),
        **options,
    )
    # The first report counts the finished shards and the saved part of the next one.
    assert resumed[0] >= progress.n_done[-1], "reported texts are not encoded again"
    assert [file.stat().st_mtime_ns for file in shards] == times

    encoder.encode(FORTY_TEXTS, tmp_path / "complete", **options)
    assert contents(folder) == contents(tmp_path / "complete")
    assert len(contents(folder, "part-*")) == 5


@pytest.mark.parametrize("save_minutes", [0.0, 1.0], ids=["partial shards", "shards"])
def test_progress_is_reported_after_texts_are_stored(
    encoder: Encoder,
    tmp_path: Path,
    save_minutes: float,
) -> None:
    folder = tmp_path / "checked"
    options = {"shard_size": 8, **encoder.small_batches}
    saves_partial_shards = save_minutes == 0

    def check_is_stored(done: int, total: int) -> None:
        if done == 0:
            return
        manifest = encoder.manifest(folder)
        n_in_complete_shards = done // 8 * 8
        assert manifest.n_documents >= n_in_complete_shards, "reported before it is listed"
        if not saves_partial_shards:
            assert not manifest.partial, "stored before its time"
        elif done % 8 != 0 and manifest.n_documents <= done:
            assert manifest.partial, "reported before it is stored"

    encoder.encode(
        FORTY_TEXTS,
        folder,
        progress=check_is_stored,
        save_minutes=save_minutes,
        **options,
    )

    encoder.encode(FORTY_TEXTS, tmp_path / "expected", **options)
    assert contents(folder) == contents(tmp_path / "expected")


@pytest.mark.parametrize(
    ("model_name", "changes", "message"),
    [
        pytest.param("splade", {"top_k": 5}, "top_k: 20 before, 5 now", id="top_k"),
        pytest.param(
            "splade",
            {"min_weight": 0.5},
            "min_weight: 0.0 before, 0.5 now",
            id="min_weight",
        ),
        pytest.param(
            "splade",
            {"kind": "query"},
            "kind: 'document' before, 'query' now",
            id="kind of sparse vectors",
        ),
        pytest.param(
            "splade",
            {"texts": {**TEXTS, "d0": "changed"}},
            "texts_sha256",
            id="text",
        ),
        pytest.param(
            "late",
            {"storage": "int8"},
            "storage: 'fp16' before, 'int8' now",
            id="storage",
        ),
        pytest.param("late", {"shard_size": 3}, "shard_size: 2 before, 3 now", id="shard_size"),
        pytest.param(
            "late",
            {"kind": "query"},
            "kind: 'document' before",
            id="kind of token vectors",
        ),
    ],
)
def test_resuming_with_other_settings_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model_name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    encoder = Encoder(request.getfixturevalue(model_name), model_name == "splade")
    options: dict[str, Any] = {"texts": TEXTS, "folder": tmp_path}
    if encoder.is_sparse:
        options["top_k"] = 20
    else:
        options["shard_size"] = 2
    encoder.encode(**options)
    options.update(changes)
    with pytest.raises(DataError, match=message):
        encoder.encode(**options)
    assert encoder.encode(**options, resume=False).complete


def test_resuming_with_another_length_of_the_model_is_refused(
    late: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r.encode_tokens(late, TEXTS, tmp_path, shard_size=2)
    monkeypatch.setattr(late[0], "document_length", 12)
    with pytest.raises(DataError, match="model_fingerprint"):
        r.encode_tokens(late, TEXTS, tmp_path, shard_size=2)
    assert r.encode_tokens(late, TEXTS, tmp_path, shard_size=2, resume=False).complete


@pytest.mark.parametrize(
    ("shard_size", "rows_by_shard"),
    [(20, [8]), (1, [0, 0, *[1] * 8, 0, 0])],
)
def test_texts_that_fail_are_listed_and_the_others_are_encoded(
    encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_size: int,
    rows_by_shard: list[int],
) -> None:
    preprocess = encoder.model.preprocess

    def fail_at_boom(batch: list[str], **options: Any) -> Any:
        if any("boom" in text for text in batch):
            raise RuntimeError("tokenizer gave up")
        return preprocess(batch, **options)

    good_texts = {**TEXTS, "long": "cats " * 100}
    texts: dict[str, Any] = {
        "half": "cats \ud800",
        "number": 3,
        **good_texts,
        "nothing": None,
        "poison": "boom " * 20,
    }
    truncated = encoder.encode(good_texts, tmp_path / "good").truncated
    monkeypatch.setattr(encoder.model, "preprocess", fail_at_boom)

    manifest = encoder.encode(texts, tmp_path / "all", shard_size=shard_size)

    assert set(manifest.failed) == {"half", "number", "nothing", "poison"}
    assert manifest.failed["poison"] == "RuntimeError: tokenizer gave up"
    assert manifest.failed["number"] == "expected a string, got int"
    assert manifest.failed["nothing"] == "expected a string, got NoneType"
    assert encoder.manifest(tmp_path / "all").failed == manifest.failed
    assert [shard["rows"] for shard in manifest.shards] == rows_by_shard
    assert list(encoder.read(tmp_path / "all")) == list(good_texts)
    assert truncated["count"] > 0
    assert manifest.truncated == truncated, "of the texts that were encoded"


def test_documents_that_are_passed_as_texts_are_an_error_that_says_what_to_pass(
    encoder: Encoder,
    tmp_path: Path,
) -> None:
    documents = {name: r.Document(name, "", text) for name, text in TEXTS.items()}
    with pytest.raises(DataError, match=r"got Document; pass the texts, such as collection\."):
        encoder.encode(documents, tmp_path / "v")


def test_texts_that_all_fail_are_an_error(
    encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocess = encoder.model.preprocess

    def fail_but_at_a(batch: list[str], **options: Any) -> Any:
        if batch != ["a"]:
            raise ZeroDivisionError
        return preprocess(batch, **options)

    monkeypatch.setattr(encoder.model, "preprocess", fail_but_at_a)
    message = r"all 7 of shard 0 failed; the first is 'd0' .ZeroDivisionError.*Check the texts and the model"
    with pytest.raises(DataError, match=message):
        encoder.encode(TEXTS, tmp_path / "v")
    with pytest.raises(DataError, match=r"1 of 2 failed; the first is 'b' .expected a string"):
        encoder.encode_queries({"a": "a", "b": 5})


@pytest.fixture
def embeddings(encoder: Encoder) -> Iterator[torch.Tensor]:
    """The weight of the model's embeddings, which a test may change."""
    network = encoder.model[0].model
    if encoder.is_sparse:
        # The decoder shares the weight of the embeddings; it gets a copy for this test.
        decoder = network.cls.predictions.decoder
        shared_weight = decoder.weight
        decoder.weight = torch.nn.Parameter(shared_weight.detach().clone())
    weight = network.get_input_embeddings().weight
    original = weight.detach().clone()
    yield weight
    with torch.no_grad():
        weight.copy_(original)
    if encoder.is_sparse:
        decoder.weight = shared_weight


def test_a_text_with_vectors_of_nan_is_listed_as_failed(
    encoder: Encoder,
    embeddings: torch.Tensor,
    tmp_path: Path,
) -> None:
    token_id = encoder.model.tokenizer.convert_tokens_to_ids("trees")
    with torch.no_grad():
        embeddings[token_id] = float("nan")
    manifest = encoder.encode(TEXTS, tmp_path)
    assert list(manifest.failed) == ["d6"]
    assert "got nan for 'd6'" in manifest.failed["d6"]
    assert list(encoder.read(tmp_path)) == list(TEXTS)[:6]


def test_a_model_with_weights_of_nan_is_an_error(
    encoder: Encoder,
    embeddings: torch.Tensor,
    tmp_path: Path,
) -> None:
    with torch.no_grad():
        embeddings.fill_(float("nan"))
    message = r"all 7 of shard 0 failed; the first is 'd0' .*Check the texts and the model"
    with pytest.raises(DataError, match=message):
        encoder.encode(TEXTS, tmp_path / "v")


def test_a_batch_that_does_not_fit_into_memory_is_divided(
    accelerated_splade: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head_type = type(accelerated_splade[1].forward)
    call_head = head_type.__call__

    def fail_above_three_texts(self: Any, features: dict[str, Any]) -> Any:
        if "cu_seq_lens_q" in features:
            n_texts = features["cu_seq_lens_q"].numel() - 1
        else:
            n_texts = len(features["input_ids"])
        if n_texts > 3:
            raise torch.OutOfMemoryError("too much")
        return call_head(self, features)

    monkeypatch.setattr(head_type, "__call__", fail_above_three_texts)
    manifest = r.encode_collection(accelerated_splade, TEXTS, tmp_path, top_k=20)
    assert not manifest.failed
    assert manifest.n_documents == 7


def test_an_accelerated_model_gives_the_same_sparse_vectors(splade: Any, tmp_path: Path) -> None:
    plain = r.encode_queries(splade, TEXTS)
    manifest = r.encode_collection(splade, TEXTS, tmp_path)
    with accelerate(splade):
        accelerated = r.encode_queries(splade, TEXTS)
        # It counts as the same model, so that nothing is left to encode.
        assert r.encode_collection(splade, TEXTS, tmp_path) == manifest
    assert accelerated.ids == plain.ids
    assert accelerated.fingerprint == plain.fingerprint
    torch.testing.assert_close(
        to_dense(accelerated),
        to_dense(plain),
        rtol=SPARSE_BUDGET,
        atol=SPARSE_BUDGET,
    )


@pytest.mark.parametrize("model_name", ["splade", "late"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"kind": "passage"},
            "kind: expected one of document, query, got 'passage'",
            id="unknown kind",
        ),
        pytest.param({"batch_size": 0}, "batch_size: expected at least 1", id="batch_size of 0"),
        pytest.param({"shard_size": 0}, "shard_size: expected at least 1", id="shard_size of 0"),
        pytest.param(
            {"texts": {}},
            "texts: expected at least one, got an empty mapping",
            id="no texts",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_any_file_is_written(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model_name: str,
    options: dict[str, Any],
    message: str,
) -> None:
    encoder = Encoder(request.getfixturevalue(model_name), model_name == "splade")
    arguments: dict[str, Any] = {"texts": TEXTS, "folder": tmp_path / "v", **options}
    with pytest.raises(ValueError, match=message):
        encoder.encode(**arguments)
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"top_k": 0}, "top_k: expected at least 1", id="top_k of 0"),
        pytest.param(
            {"min_weight": float("nan")},
            "min_weight: expected at least 0",
            id="min_weight of nan",
        ),
    ],
)
def test_wrong_options_of_sparse_vectors_are_refused_before_any_file_is_written(
    splade: Any,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.encode_collection(splade, TEXTS, tmp_path / "v", **options)
    assert not (tmp_path / "v").exists()


def test_an_unknown_storage_is_refused_before_any_file_is_written(
    late: Any,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="storage: expected one of fp16, int8, got 'fp8'"):
        r.encode_tokens(late, TEXTS, tmp_path / "v", storage="fp8")
    assert not (tmp_path / "v").exists()


@pytest.fixture(scope="module")
def minilm() -> Any:
    from tilefold.recipes.backbone import load_dense_minilm

    return load_dense_minilm("cpu")


def test_the_dense_baseline_ranks_by_the_similarity_of_the_model(minilm: Any) -> None:
    from tests.recipes.small import ranked_by_itself

    documents = {name: text for name, text in TEXTS.items() if text}
    queries = {"q1": "an animal asleep", "q2": "growing plants", "q3": "inverted index"}
    searcher = r.Searcher(r.encoded_index(minilm, documents), minilm)

    run = searcher.rank(queries, r.SearchRequest(2)).run

    best_documents = {query: next(iter(scores)) for query, scores in run.items()}
    assert best_documents == {"q1": "d0", "q2": "d6", "q3": "d3"}
    expected = ranked_by_itself(minilm, documents, queries, 2)
    assert run.keys() == expected.keys()
    for query, scores in expected.items():
        assert run[query] == pytest.approx(scores)
    all_documents = searcher.rank({"q": "cat"}, r.SearchRequest(100)).run["q"]
    assert len(all_documents) == len(documents)


def test_no_texts_are_not_encoded_as_dense_vectors(minilm: Any) -> None:
    message = "texts: expected at least one, got an empty mapping"
    with pytest.raises(ValueError, match=message):
        r.encoded_index(minilm, {})
    with pytest.raises(ValueError, match=message):
        r.encode_dense(minilm, {}, kind="query")
