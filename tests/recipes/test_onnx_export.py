"""Models as ONNX graphs: their scores, what is said and refused, in commands, in a server and in
onnxruntime alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tests.cli.program import done, measured, run_cli
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
    transformer, _ = SparseEncoder(str(tiny_masked_lm(folder, kind)), device="cpu")
    return SparseEncoder(
        modules=[transformer, SpladePooling(*pooling)],
        device="cpu",
        max_active_dims=40,
    )


def vectors(model: SparseEncoder, texts: list[str] = TEXTS) -> torch.Tensor:
    return model.encode(texts, convert_to_sparse_tensor=False, show_progress_bar=False)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model, and its graphs."""
    base = tmp_path_factory.mktemp("graphs")
    model = splade(base / "lm")
    model.save_pretrained(str(base / "stock"))
    for name, options in {"onnx": {}, "int8": {"quantize": "int8"}, "best": {"top_k": 8}}.items():
        made: Any = export_onnx(model, base / name, **options)
        assert isinstance(made, ExportedGraph)
        assert 0 < next(iter(made.error.values())) <= 1, made.error
    return {name: base / name for name in ("stock", "onnx", "int8", "best")}


def test_a_graph_has_the_scores_of_its_model_whatever_the_batch(places: dict[str, Path]) -> None:
    stock, graph = (
        SparseEncoder(str(places["stock"]), device="cpu"),
        load_encoder(str(places["onnx"]), device="cpu"),
    )
    budget = {
        "rtol": 0.0,
        "atol": 1e-5 * float(vectors(stock).max()),
    }  # as of every fp32 model here
    for texts in (TEXTS, TEXTS[:1], [" ".join(TEXTS * 20), "x", ""]):
        torch.testing.assert_close(vectors(graph, texts), vectors(stock, texts), **budget)
    assert model_fingerprint(graph) == model_fingerprint(stock)
    graph.max_active_dims = 3
    assert model_fingerprint(graph) != model_fingerprint(stock)
    graph.max_active_dims = 40
    accelerate(graph)
    rows = encode_sparse(graph, TEXTS * 4, top_k=5).to_dense()
    torch.testing.assert_close(
        rows[: len(TEXTS)].topk(5).values,
        vectors(stock).topk(5).values,
        **budget,
    )


def test_eight_bits_and_top_k(places: dict[str, Path]) -> None:
    stock, graph = (
        SparseEncoder(str(places["stock"]), device="cpu"),
        load_encoder(str(places["int8"]), device="cpu"),
    )
    assert (
        float(torch.cosine_similarity(vectors(stock), vectors(graph)).min())
        >= onnx_export.MIN_COSINE
    )
    assert not torch.equal(vectors(stock), vectors(graph))
    assert model_fingerprint(graph) != model_fingerprint(
        stock,
    )  # so that an index of the other is not searched by mistake
    best = vectors(load_encoder(str(places["best"]), device="cpu"))
    assert int((best > 0).sum(1).max()) == 8
    torch.testing.assert_close(
        best.topk(8).values,
        vectors(stock).topk(8).values,
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_router_keeps_its_queries_and_other_poolings_export(tmp_path: Path) -> None:
    document = splade(tmp_path / "lm", "distilbert", "sum", "log1p_relu")
    static = SparseStaticEmbedding(document.tokenizer, torch.rand(len(document.tokenizer)))
    router = Router.for_query_document(
        query_modules=[static],
        document_modules=list(document.children()),
    )
    model = SparseEncoder(
        modules=[router],
        device="cpu",
        prompts={"query": "", "document": "read "},
    )
    assert export_onnx(model, tmp_path / "out").graphs == 1
    graph = load_encoder(str(tmp_path / "out"), device="cpu")
    assert any(isinstance(module, OnnxGraph) for module in graph.modules())
    torch.testing.assert_close(
        graph.encode_query(QUERIES).to_dense(),
        model.encode_query(QUERIES).to_dense(),
    )
    got, expected = (each.encode_document(TEXTS).to_dense() for each in (graph, model))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.max()))
    assert model_fingerprint(graph) == model_fingerprint(model)


def test_what_cannot_be_exported_is_refused_and_nothing_written(
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SparseEncoder(str(places["stock"]), device="cpu")
    for options, message in (
        ({"quantize": "int4"}, "quantize: expected 'int8'"),
        ({"top_k": 0}, "top_k: expected 1 to"),
    ):
        refused(ValueError, message, export_onnx, model, tmp_path / "out", **options)
    static = SparseStaticEmbedding(model.tokenizer, torch.ones(len(model.tokenizer)))
    for other, message in (
        (model[0], "got a Transformer"),
        (SparseEncoder(modules=[static]), "got SparseStatic"),
    ):
        refused(ValueError, message, export_onnx, other, tmp_path / "out")
    dead = SparseEncoder(str(places["stock"]), device="cpu")
    torch.nn.init.constant_(dead[0].model.get_output_embeddings().bias, -1e4)
    refused(
        ValueError,
        "got empty vectors. Train the model first",
        export_onnx,
        dead,
        tmp_path / "out",
    )
    monkeypatch.setattr(onnx_export, "activate", lambda x, name: x.relu())
    refused(
        ValueError,
        "on random texts, got a difference of",
        export_onnx,
        model,
        tmp_path / "out",
    )
    accelerate(model)
    refused(ValueError, "Call restore\\(model\\) first", export_onnx, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_is_not_trained_and_not_exchanged(places: dict[str, Path], tmp_path: Path) -> None:
    graph = load_encoder(str(places["onnx"]), device="cpu").train()
    refused(RuntimeError, "an ONNX graph is not trained", graph, graph.preprocess(["a"]))
    graph.save_pretrained(str(tmp_path / "copy"))
    (tmp_path / "copy" / "model.onnx").write_bytes((places["int8"] / "model.onnx").read_bytes())
    refused(ValueError, "expected the graph with SHA-256", load_encoder, str(tmp_path / "copy"))


def test_ten_lines_of_the_documents_run_a_graph_without_this_package(
    places: dict[str, Path],
) -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(import onnxruntime.*?)```", text, re.DOTALL)
    assert len(script.splitlines()) <= 12 and "tilefold" not in script and "torch" not in script
    names: dict[str, Any] = {}
    exec(script.replace("onnx-model", str(places["onnx"])), names)  # noqa: S102 - of our own documents
    expected = vectors(SparseEncoder(str(places["stock"]), device="cpu"), names["texts"]).numpy()
    kept = names["scores"] >= np.sort(names["scores"])[:, -40][:, None]
    np.testing.assert_allclose(
        np.where(kept, names["scores"], 0),
        expected,
        rtol=0,
        atol=1e-5 * expected.max(),
    )


def test_commands_and_the_server_take_the_folder_of_a_graph(
    places: dict[str, Path],
    tmp_path: Path,
    collection: Any,
    capsys: Any,
) -> None:
    collection.save_beir(tmp_path / "data")

    def call(*words: str | Path) -> Any:
        capsys.readouterr()
        from tests.cli.program import Outcome

        return Outcome(run_cli(*words), *capsys.readouterr())

    out = ("--output", tmp_path / "graph")
    made = measured(call("export", "--to", "onnx", "--model", places["stock"], *out, "--json"))
    assert made["graphs"] == 1 and made["error"]["budget_used"] <= 1
    data = ("--data", tmp_path / "data")
    done(call("encode", "--model", places["stock"], *data, "--output", tmp_path / "vectors"))
    done(call("index", "--vectors", tmp_path / "vectors", "--output", tmp_path / "index"))
    ask = ("evaluate", "--index", tmp_path / "index", *data, "--json", "--model")
    assert (
        measured(call(*ask, tmp_path / "graph"))["measures"]
        == measured(call(*ask, places["stock"]))["measures"]
    )
    assert call(*ask, places["int8"]).code == 1
    assert call(*ask, places["int8"], "--other-model").code == 0
    served = Served(
        load_encoder(str(tmp_path / "graph"), device="cpu"),
        "sparse",
        str(tmp_path / "graph"),
    )
    (row,) = served.encode(served.batch_key("query", None), [QUERIES[0]])
    assert len(row[0]) == 40
    assert call("export", "--to", "onnx", *out).code == 2
    assert call("export", "--to", "vespa", *out).code == 2
