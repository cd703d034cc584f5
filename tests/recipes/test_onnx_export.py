"""Tests of models that are exported as ONNX graphs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tests.cli.program import Outcome, done, measured, run_cli
from tests.modules.batches import QUERIES, TEXTS, tiny_masked_lm
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.modules import OnnxGraph, load_encoder
from tilefold.recipes import ExportedGraph, export_onnx, onnx_export
from tilefold.retrieval.common.provenance import model_fingerprint
from tilefold.serve.models import Served

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[2]


def splade(folder: Path, kind: str = "bert", *pooling: str) -> SparseEncoder:
    """Return a tiny SPLADE model that keeps 40 terms.

    Args:
        folder: folder of its language model, which is written.
        kind: architecture of the language model.
        pooling: arguments of ``SpladePooling``.
    """
    transformer, _ = SparseEncoder(str(tiny_masked_lm(folder, kind)), device="cpu")
    return SparseEncoder(
        modules=[transformer, SpladePooling(*pooling)],
        device="cpu",
        max_active_dims=40,
    )


def encode(model: SparseEncoder, texts: list[str] = TEXTS) -> torch.Tensor:
    """Return the vectors of texts as a dense matrix."""
    return model.encode(texts, convert_to_sparse_tensor=False, show_progress_bar=False)


EXPORT_OPTIONS: dict[str, dict[str, Any]] = {
    "onnx": {},
    "int8": {"quantize": "int8"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a saved model, ``"stock"``, and of its graphs by ``EXPORT_OPTIONS``."""
    parent = tmp_path_factory.mktemp("graphs")
    model = splade(parent / "lm")
    model.save_pretrained(str(parent / "stock"))
    for name, options in EXPORT_OPTIONS.items():
        exported = export_onnx(model, parent / name, **options)
        assert isinstance(exported, ExportedGraph)
        largest_error = next(iter(exported.error.values()))
        assert 0 < largest_error <= 1, exported.error
    return {name: parent / name for name in ("stock", *EXPORT_OPTIONS)}


@pytest.fixture
def stock(folders: dict[str, Path]) -> SparseEncoder:
    """The model that was exported."""
    return SparseEncoder(str(folders["stock"]), device="cpu")


@pytest.fixture
def graph(folders: dict[str, Path]) -> Any:
    """The graph in fp32."""
    return load_encoder(str(folders["onnx"]), device="cpu")


@pytest.fixture
def fp32_budget(stock: SparseEncoder) -> dict[str, float]:
    """Tolerances of scores in fp32, relative to the largest score."""
    return {"rtol": 0.0, "atol": 1e-5 * float(encode(stock).max())}


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(TEXTS, id="several texts"),
        pytest.param(TEXTS[:1], id="one text"),
        pytest.param([" ".join(TEXTS * 20), "x", ""], id="long, short and empty texts"),
    ],
)
def test_a_graph_has_the_scores_of_its_model(
    stock: SparseEncoder,
    graph: Any,
    fp32_budget: dict[str, float],
    texts: list[str],
) -> None:
    torch.testing.assert_close(encode(graph, texts), encode(stock, texts), **fp32_budget)


def test_a_graph_has_the_fingerprint_of_its_model(stock: SparseEncoder, graph: Any) -> None:
    assert model_fingerprint(graph) == model_fingerprint(stock)
    graph.max_active_dims = 3
    assert model_fingerprint(graph) != model_fingerprint(stock)


def test_an_accelerated_graph_encodes_the_heaviest_terms(
    stock: SparseEncoder,
    graph: Any,
    fp32_budget: dict[str, float],
) -> None:
    accelerate(graph)
    rows = encode_sparse(graph, TEXTS * 4, top_k=5).to_dense()
    weights = rows[: len(TEXTS)].topk(5).values
    torch.testing.assert_close(weights, encode(stock).topk(5).values, **fp32_budget)


def test_an_int8_graph_has_similar_vectors_and_another_fingerprint(
    folders: dict[str, Path],
    stock: SparseEncoder,
) -> None:
    int8_graph = load_encoder(str(folders["int8"]), device="cpu")
    cosines = torch.cosine_similarity(encode(stock), encode(int8_graph))
    assert float(cosines.min()) >= onnx_export.MIN_COSINE
    assert not torch.equal(encode(stock), encode(int8_graph))
    # an index of the model's vectors is not searched with those of the graph by mistake
    assert model_fingerprint(int8_graph) != model_fingerprint(stock)


@pytest.mark.slow
def test_a_graph_with_top_k_has_the_heaviest_terms(stock: SparseEncoder, tmp_path: Path) -> None:
    export_onnx(stock, tmp_path / "top_k", top_k=8)
    vectors = encode(load_encoder(str(tmp_path / "top_k"), device="cpu"))
    n_active = (vectors > 0).sum(1)
    assert int(n_active.max()) == 8
    expected = encode(stock).topk(8).values
    torch.testing.assert_close(vectors.topk(8).values, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_document_encoder_of_a_router_with_sum_pooling_is_exported(tmp_path: Path) -> None:
    document_encoder = splade(tmp_path / "lm", "distilbert", "sum", "log1p_relu")
    tokenizer = document_encoder.tokenizer
    query_encoder = SparseStaticEmbedding(tokenizer, torch.rand(len(tokenizer)))
    router = Router.for_query_document(
        query_modules=[query_encoder],
        document_modules=list(document_encoder.children()),
    )
    prompts = {"query": "", "document": "read "}
    model = SparseEncoder(modules=[router], device="cpu", prompts=prompts)
    assert export_onnx(model, tmp_path / "out").graphs == 1
    graph = load_encoder(str(tmp_path / "out"), device="cpu")
    assert any(isinstance(module, OnnxGraph) for module in graph.modules())
    assert model_fingerprint(graph) == model_fingerprint(model)
    torch.testing.assert_close(
        graph.encode_query(QUERIES).to_dense(),
        model.encode_query(QUERIES).to_dense(),
    )
    expected = model.encode_document(TEXTS).to_dense()
    torch.testing.assert_close(
        graph.encode_document(TEXTS).to_dense(),
        expected,
        rtol=0,
        atol=1e-5 * float(expected.max()),
    )


def assert_export_is_refused(model: Any, output: Path, message: str, **options: Any) -> None:
    """Check that a model is not exported, and that nothing is written."""
    refused(ValueError, message, export_onnx, model, output, **options)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"quantize": "int4"}, "quantize: expected 'int8'", id="unknown type"),
        pytest.param({"top_k": 0}, "top_k: expected 1 to", id="no terms"),
    ],
)
def test_export_rejects_options(
    stock: SparseEncoder,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    assert_export_is_refused(stock, tmp_path / "out", message, **options)


def test_a_module_of_a_model_is_not_exported(stock: SparseEncoder, tmp_path: Path) -> None:
    assert_export_is_refused(stock[0], tmp_path / "out", "got a Transformer")


def test_a_model_without_a_network_is_not_exported(stock: SparseEncoder, tmp_path: Path) -> None:
    static = SparseStaticEmbedding(stock.tokenizer, torch.ones(len(stock.tokenizer)))
    model = SparseEncoder(modules=[static])
    assert_export_is_refused(model, tmp_path / "out", "got SparseStatic")


@pytest.mark.slow
def test_a_model_with_empty_vectors_is_not_exported(stock: SparseEncoder, tmp_path: Path) -> None:
    torch.nn.init.constant_(stock[0].model.get_output_embeddings().bias, -1e4)
    message = "got empty vectors. Train the model first"
    assert_export_is_refused(stock, tmp_path / "out", message)


@pytest.mark.slow
def test_a_graph_with_other_scores_is_not_written(
    stock: SparseEncoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnx_export, "activate", lambda logits, name: logits.relu())
    message = "on random texts, got"
    assert_export_is_refused(stock, tmp_path / "out", message)


def test_an_accelerated_model_is_not_exported(stock: SparseEncoder, tmp_path: Path) -> None:
    accelerate(stock)
    assert_export_is_refused(stock, tmp_path / "out", r"Call restore\(model\) first")


def test_a_graph_is_not_trained(graph: Any) -> None:
    graph.train()
    refused(RuntimeError, "an ONNX graph cannot be trained", graph, graph.preprocess(["a"]))


def test_a_graph_whose_file_was_exchanged_is_not_loaded(
    folders: dict[str, Path],
    graph: Any,
    tmp_path: Path,
) -> None:
    graph.save_pretrained(str(tmp_path / "copy"))
    shutil.copy(folders["int8"] / "model.onnx", tmp_path / "copy")
    refused(ValueError, "expected the graph with SHA-256", load_encoder, str(tmp_path / "copy"))


def test_the_documented_script_runs_a_graph_without_tilefold_and_torch(
    folders: dict[str, Path],
    stock: SparseEncoder,
) -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(import onnxruntime.*?)```", text, re.DOTALL)
    assert len(script.splitlines()) <= 12
    assert "tilefold" not in script
    assert "torch" not in script
    variables: dict[str, Any] = {}
    script = script.replace("onnx-model", str(folders["onnx"]))
    exec(script, variables)  # noqa: S102 - a script of our documentation
    scores = variables["scores"]
    expected = encode(stock, variables["texts"]).numpy()
    # the model keeps the 40 heaviest terms
    smallest_kept = np.sort(scores)[:, -40][:, None]
    pruned = np.where(scores >= smallest_kept, scores, 0)
    np.testing.assert_allclose(pruned, expected, rtol=0, atol=1e-5 * expected.max())


@pytest.fixture
def call(capsys: Any) -> Callable[..., Outcome]:
    """A function that runs the command line in this process."""

    def run_command(*words: str | Path) -> Outcome:
        capsys.readouterr()
        code = run_cli(*words)
        output = capsys.readouterr()
        return Outcome(code, output.out, output.err)

    return run_command


@pytest.mark.slow
def test_the_export_command_writes_a_graph_that_the_server_loads(
    folders: dict[str, Path],
    call: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "graph")
    result = measured(
        call(
            "export",
            "--to",
            "onnx",
            "--model",
            folders["stock"],
            "--output",
            folder,
            "--json",
        ),
    )
    assert result["graphs"] == 1
    assert result["error"]["budget_used"] <= 1
    served = Served(load_encoder(folder, device="cpu"), "sparse", folder)
    (row,) = served.encode(served.batch_key("query", None), [QUERIES[0]])
    assert len(row.indices) == 40


def test_commands_search_an_index_of_the_model_with_its_graph(
    folders: dict[str, Path],
    call: Callable[..., Outcome],
    tmp_path: Path,
    collection: Any,
) -> None:
    collection.save_beir(tmp_path / "data")
    data = ("--data", tmp_path / "data")
    vectors = tmp_path / "vectors"
    done(call("encode", "--model", folders["stock"], *data, "--output", vectors))
    done(call("index", "--vectors", vectors, "--output", tmp_path / "index"))
    evaluate = ("evaluate", "--index", tmp_path / "index", *data, "--json", "--model")
    expected = measured(call(*evaluate, folders["stock"]))["measures"]
    assert measured(call(*evaluate, folders["onnx"]))["measures"] == expected
    assert call(*evaluate, folders["int8"]).code == 1
    assert call(*evaluate, folders["int8"], "--other-model").code == 0


@pytest.mark.parametrize("target", ["onnx", "vespa"])
def test_the_export_command_needs_something_to_export(
    call: Callable[..., Outcome],
    tmp_path: Path,
    target: str,
) -> None:
    assert call("export", "--to", target, "--output", tmp_path / "out").code == 2
