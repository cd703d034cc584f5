"""The precision in which a model computes: its name, where it is stored, and scores in fp32."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from torch import nn

from tests.cli.program import run_cli
from tests.recipes.small import VOCABULARY, make_tokenizer_folder, small_collection, tiny_causal_lm
from tests.refusals import refused
from tests.retrieval.encoding.test_interruptions import stop_at
from tilefold import retrieval as r
from tilefold._internal.precision import inference_precision, scores_in_fp32, set_precision
from tilefold.cli import _scores
from tilefold.recipes.loading import load_saved
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint
from tilefold.retrieval.errors import DataError, PrecisionWarning
from tilefold.retrieval.evaluation.measures import read_trec_provenance
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.qdrant import Documents
from tilefold.retrieval.search.reranking import Reranker
from tilefold.retrieval.training_data.teachers import Teacher, score_rows
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable

COLLECTION = small_collection()
PAIRS = [
    (query, text)
    for query in list(COLLECTION.queries.values())[:4]
    for text in list(COLLECTION.contents().values())[:8]
]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(params=["bert", "roberta", "deberta-v2", "modernbert", "llama"])
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> CrossEncoder:
    """A small cross-encoder of a family, whose heads are built in their own ways."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES)
    network = transformers.AutoModelForSequenceClassification.from_config(config)
    network.save_pretrained(str(tmp_path))
    make_tokenizer_folder(tmp_path, VOCABULARY)
    return CrossEncoder(str(tmp_path), device="cpu", local_files_only=True)


def predicted(model: CrossEncoder, dtype: torch.dtype | None = None) -> np.ndarray[Any, Any]:
    """Raw scores of the pairs, under autocast of a number type."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        scores: np.ndarray[Any, Any] = model.predict(
            PAIRS,
            activation_fn=nn.Identity(),
            show_progress_bar=False,
        )
    return scores


def rounded(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(scores).bfloat16().float().numpy()


def test_scores_under_autocast_are_not_rounded_to_16_bits(classifier: CrossEncoder) -> None:
    stock, exact = predicted(classifier, torch.bfloat16), predicted(classifier)
    with scores_in_fp32(classifier):
        scores = predicted(classifier, torch.bfloat16)
    assert (stock == rounded(stock)).all()
    assert (scores != rounded(scores)).mean() > 0.9
    assert np.abs(scores - exact).mean() <= 1.1 * np.abs(stock - exact).mean()
    assert predicted(classifier, torch.bfloat16).tolist() == stock.tolist()
    assert not any("forward" in vars(module) for module in classifier.modules())


def test_scores_of_a_model_in_fp32_stay_as_they_are(classifier: CrossEncoder) -> None:
    expected = predicted(classifier)
    with scores_in_fp32(classifier):
        assert predicted(classifier).tolist() == expected.tolist()


def test_scores_of_a_causal_model_with_weights_in_bf16_are_not_rounded(tmp_path: Path) -> None:
    transformer = Transformer(
        str(tiny_causal_lm(tmp_path, "qwen2")),
        transformer_task="text-generation",
        model_kwargs={"dtype": torch.bfloat16},
    )
    model = CrossEncoder(modules=[transformer, LogitScore(5, 6)], device="cpu")
    assert inference_precision(model) == "bf16"
    before = model_fingerprint(model)
    stock = predicted(model)
    with scores_in_fp32(model):
        scores = predicted(model)
    assert (stock == rounded(stock)).all()
    assert (scores != rounded(scores)).mean() > 0.9
    assert model_fingerprint(model) == before


def test_an_error_puts_the_layers_back(classifier: CrossEncoder) -> None:
    with contextlib.suppress(RuntimeError), scores_in_fp32(classifier):
        raise RuntimeError
    assert not any("forward" in vars(module) for module in classifier.modules())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(str(folder))
    make_tokenizer_folder(folder, VOCABULARY)
    yield load_saved(str(folder), "backbone")


@pytest.fixture(autouse=True)
def default_precision(encoder: Any) -> None:
    """Let the shared encoder compute in the default precision at the start of a test."""
    set_precision(encoder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")
def test_the_precision_of_a_loaded_model_does_not_depend_on_autocast(encoder: Any) -> None:
    assert inference_precision(encoder) == "fp32"
    with torch.autocast("cpu", torch.float16):  # which the model itself switches off
        assert inference_precision(encoder) == "fp32"
    set_precision(encoder, "bf16")
    assert inference_precision(encoder) == "bf16"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")],
)
def test_the_precision_of_a_plain_model_is_that_of_its_weights(
    dtype: torch.dtype,
    name: str,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to(dtype)
    assert inference_precision(model) == name
    with torch.autocast("cpu", torch.float16):
        assert inference_precision(model) == ("fp64" if dtype == torch.float64 else "fp16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")
def test_vectors_and_indexes_tell_in_which_precision_they_were_computed(
    encoder: Any,
    tmp_path: Path,
) -> None:
    texts = COLLECTION.contents()
    for name in ("fp32", "bf16"):
        set_precision(encoder, name)
        manifest = r.encode_collection(encoder, texts, tmp_path / name, shard_size=16)
        assert manifest.precision == name
        assert {shard["precision"] for shard in manifest.shards} == {name}
        vectors = r.read_vectors(tmp_path / name)
        assert vectors.provenance.precision == name
        r.build_index(vectors).save(tmp_path / f"index-{name}")
        assert r.load_index(tmp_path / f"index-{name}").provenance.precision == name
        written = r.write_vectors(vectors, tmp_path / f"written-{name}")
        assert written.precision == name
    both = [
        vectors.provenance
        for vectors in map(r.read_vectors, (tmp_path / "fp32", tmp_path / "bf16"))
    ]
    assert both[0].differing_fields(both[1]) == []
    assert Provenance.shared(both).precision == "bf16, fp32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_an_index_of_dense_vectors_in_memory_has_the_precision_of_its_model(
    tmp_path: Path,
    name: Any,
) -> None:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(str(tmp_path))
    make_tokenizer_folder(tmp_path, VOCABULARY)
    model = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    set_precision(model, name)
    index = r.encoded_index(model, COLLECTION.contents())
    assert index.provenance.precision == name


def vectors_in(precision: str | None, *names: str) -> r.SparseVectors:
    vectors = r.SparseVectors.from_rows({name: {1: 1.0} for name in names}, 500)
    vectors.provenance = Provenance("m" * 64, precision=precision)
    return vectors


@pytest.mark.parametrize("precision", ["bf16", "bf16, fp32", None])
def test_the_tag_of_a_run_has_the_precision(tmp_path: Path, precision: str | None) -> None:
    file = tmp_path / "run.trec"
    tag = Provenance("m" * 64, "t" * 64, "64/32", precision).tag
    r.write_trec_run({"q": {"d": 1.0}}, file, tag=tag)
    assert read_trec_provenance(file) == Provenance("m" * 16, "t" * 16, "64/32", precision)


def test_a_run_that_a_command_saves_has_the_precision_in_its_tag(tmp_path: Path) -> None:
    file = tmp_path / "run.trec"
    searched = Provenance("m" * 64, "t" * 64, precision="bf16")
    texts = Provenance(texts_sha256="t" * 64)
    _scores.save_run(
        _scores.NamedRun("run", {"q": {"d": 1.0}}, searched), texts, file, overwrite=False
    )
    assert read_trec_provenance(file).precision == "bf16"


def test_a_qdrant_index_keeps_the_precision_of_its_vectors(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    index = r.build_index(vectors_in("bf16", "a", "b"), "qdrant", folder=tmp_path / "index")
    index.close()
    loaded = r.load_index(tmp_path / "index")
    assert loaded.provenance.precision == "bf16"
    manifest = json.loads((tmp_path / "index" / "index.json").read_text(encoding="utf-8"))
    assert manifest["precision"] == "bf16"
    assert loaded.collection.vectors(["a"]).provenance.precision == "bf16"
    with pytest.warns(PrecisionWarning, match="sparse vectors: were computed in fp32, .* in bf16"):
        loaded.collection.upsert(Documents(["c"], vectors_in("fp32", "c")))
    assert loaded.provenance.precision == "bf16, fp32"
    loaded.collection.close()
    reopened = r.load_index(tmp_path / "index")
    assert reopened.provenance.precision == "bf16, fp32"
    reopened.collection.close()


def test_an_update_warns_of_vectors_of_another_precision(tmp_path: Path) -> None:
    r.build_index(vectors_in("bf16", "a")).save(tmp_path / "index")
    with pytest.warns(PrecisionWarning, match="vectors: were computed in fp32, .*index in bf16"):
        r.update_index(tmp_path / "index", vectors_in("fp32", "b"))
    assert open_index(tmp_path / "index").provenance.precision == "bf16, fp32"


@pytest.mark.parametrize(
    ("stored", "new"),
    [
        pytest.param("bf16", "bf16", id="the same"),
        pytest.param("bf16", None, id="unknown in the vectors"),
        pytest.param(None, "fp32", id="unknown in the index"),
    ],
)
def test_an_update_without_another_precision_does_not_warn(
    tmp_path: Path,
    stored: str | None,
    new: str | None,
) -> None:
    r.build_index(vectors_in(stored, "a")).save(tmp_path / "index")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        r.update_index(tmp_path / "index", vectors_in(new, "b"))


def test_a_merge_of_folders_of_two_precisions_warns(tmp_path: Path) -> None:
    for name, precision in (("a", "bf16"), ("b", "fp32")):
        r.write_vectors(vectors_in(precision, name), tmp_path / name)
    with pytest.warns(PrecisionWarning, match="b: were computed in fp32, .*a in bf16"):
        merged = r.merge_vectors([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert merged.precision == "bf16, fp32"


def test_the_command_that_updates_an_index_notes_another_precision(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    r.build_index(vectors_in("bf16", "a")).save(tmp_path / "index")
    r.write_vectors(vectors_in("fp32", "b"), tmp_path / "new")
    arguments = ["index", "--update", "--vectors", tmp_path / "new", "--output", tmp_path / "index"]
    assert run_cli(*arguments) == 0
    error = capsys.readouterr().err
    assert "vectors: were computed in fp32" in error
    assert "PrecisionWarning" not in error


def precision_warnings(build: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings about precisions that `build` raises."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        build()
    return [warning for warning in raised if issubclass(warning.category, PrecisionWarning)]


@pytest.mark.parametrize("other_model", [False, True])
def test_a_searcher_warns_once_of_a_model_in_another_precision(
    encoder: Any,
    other_model: bool,
) -> None:
    set_precision(encoder, "fp32")
    index = r.build_index(r.encode_queries(encoder, COLLECTION.contents()))
    index.provenance = Provenance(model_fingerprint(encoder), precision="bf16")
    (warning,) = precision_warnings(lambda: r.Searcher(index, encoder, other_model=other_model))
    assert str(warning.message).startswith(
        "the index was computed in bf16, and queries are encoded in fp32: "
    )
    assert warning.filename == __file__


@pytest.mark.parametrize("stored", ["fp32", None])
def test_a_searcher_of_the_same_or_an_unknown_precision_does_not_warn(
    encoder: Any,
    stored: str | None,
) -> None:
    set_precision(encoder, "fp32")
    index = r.build_index(r.encode_queries(encoder, COLLECTION.contents()))
    index.provenance = Provenance(precision=stored)
    assert not precision_warnings(lambda: r.Searcher(index, encoder))
    assert not precision_warnings(lambda: r.Searcher(index))  # queries are passed as vectors


def test_a_served_index_warns_once_of_a_model_in_another_precision(
    encoder: Any,
) -> None:
    set_precision(encoder, "fp32")
    index = r.build_index(r.encode_queries(encoder, COLLECTION.contents()))
    index.provenance = Provenance(precision="bf16")
    served = Served(encoder, "sparse", "small")
    (warning,) = precision_warnings(lambda: Searchable("papers", index, served))
    assert "the index was computed in bf16" in str(warning.message)


def test_a_reranker_warns_of_token_vectors_in_another_precision(
    late: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "tokens"
    r.encode_tokens(late, COLLECTION.contents(), folder)
    stored = r.open_tokens(folder)
    assert not precision_warnings(lambda: Reranker(late, stored))
    monkeypatch.setattr(type(stored.manifest), "precision", "bf16")
    (warning,) = precision_warnings(lambda: Reranker(late, stored))
    assert str(warning.message).startswith(
        f"{folder} was computed in bf16, and queries are encoded in fp32: "
    )
    assert warning.filename == __file__


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")
def test_an_interrupted_encoding_does_not_go_on_in_another_precision(
    encoder: Any,
    tmp_path: Path,
) -> None:
    texts = COLLECTION.contents()
    set_precision(encoder, "bf16")
    refused(
        KeyboardInterrupt,
        "^$",
        r.encode_collection,
        encoder,
        texts,
        tmp_path / "vectors",
        shard_size=4,
        progress=stop_at(4),
    )
    set_precision(encoder, "fp32")
    with pytest.raises(DataError, match="computed in bf16, but here the model computes in fp32"):
        r.encode_collection(encoder, texts, tmp_path / "vectors", shard_size=4)
    set_precision(encoder, "bf16")
    manifest = r.encode_collection(encoder, texts, tmp_path / "vectors", shard_size=4)
    set_precision(encoder, "auto")  # another default, but nothing is left to compute
    assert r.encode_collection(encoder, texts, tmp_path / "vectors", shard_size=4) == manifest


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model would be on the GPU")
def test_scores_of_another_precision_are_computed_again(
    encoder: Any,
    tmp_path: Path,
) -> None:
    run = r.BM25Index.build(COLLECTION.contents(), language="none").search(COLLECTION.queries, 16)
    rows = r.mine_negatives(run.items(), COLLECTION, "train", [r.Window(1, 16, 5)]).rows({})
    teacher = Teacher("small", "sparse", encoder)
    scores = {}
    for name in ("bf16", "fp32"):
        set_precision(encoder, name)
        assert teacher.precision == name
        scores[name] = score_rows(teacher, rows, COLLECTION, tmp_path)
    assert scores["bf16"].tolist() != scores["fp32"].tolist()
