"""Few texts as graphs: rows are those of the stock model, and whatever changes of the model is
seen.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.multi_vector_models import QUERIES, build_colbert
from tests.integrations.splade_models import FP32_BUDGET, assert_close, build_tiny_splade
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, restore
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    MAX_GRAPHS,
    TEXT_COUNTS,
    TOKEN_COUNTS,
    EncodingGraphs,
)
from tilefold.integrations.sentence_transformers.graphs.encoding_graph import Body, EncodingGraph
from tilefold.ops.lsr_head import rows_of_scores
from tilefold.pipeline.rows import RowCapacityError, unpack_capacity_rows
from tilefold.retrieval.encoding.sparse import encode_batch

TEXT = "a list of numbers"
FEW = ["cats and dogs", "a list of numbers is longer than a word", "x", "", "sum of all parts"]


class Repeated:
    """What a captured graph does, run anew each time: for machines without a GPU."""

    made = 0

    def __init__(self, body: Body, turns: object) -> None:
        Repeated.made += 1
        self.body = body
        self.launch()

    def launch(self) -> None:
        with torch.inference_mode():
            self.host_results = self.device_results = list(self.body())

    def wait(self) -> None:
        """Nothing runs elsewhere."""


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def with_graphs(stock: Any, device: str = "cpu", **options: Any) -> Any:
    """An accelerated copy on a device whose few texts go through graphs, or what stands for them."""
    model = copy.deepcopy(stock).to(device).eval()
    accelerate(model, **options)
    if device == "cpu":
        model.encoding_graphs = EncodingGraphs(model, Repeated)
    return model


def made(model: Any) -> int:
    return len(model.encoding_graphs.graphs)


def few_terms(kind: str, folder: Path) -> Any:
    """A stock model that leaves some hundred terms of a text."""
    model = build_tiny_splade(kind, folder).eval()
    with torch.no_grad():
        head = model.transformers_model.get_output_embeddings()
        head.bias.sub_(model.encode([TEXT, *FEW]).to_dense().expm1().quantile(0.97))
    return model


@pytest.fixture
def stock(tokenizer_folder: Path) -> Any:
    return few_terms("bert", tokenizer_folder)


def close(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            close(one, other)
        return
    if not isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        got, expected = torch.from_numpy(got), torch.from_numpy(expected)
    assert got.layout == expected.layout
    assert_close(got.to_dense().cpu(), expected.to_dense().cpu(), FP32_BUDGET)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_rows_of_every_size_are_those_of_the_stock_model(
    kind: str,
    device: str,
    tokenizer_folder: Path,
) -> None:
    stock = few_terms(kind, tokenizer_folder)
    model = with_graphs(stock, device)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 5, 17, 32):
        lengths = torch.randint(0, 40, (count,), generator=generator).tolist()
        texts = [
            " ".join(["word", "list", "sum"][n % 3] for n in range(length)) for length in lengths
        ]
        close(model.encode(texts).cpu(), stock.encode(texts))
    assert made(model) >= 4 and not model.encoding_graphs.failed
    assert {inputs.size for inputs, _ in model.encoding_graphs.graphs.values()} <= {
        (texts, tokens) for texts in TEXT_COUNTS for tokens in TOKEN_COUNTS
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"convert_to_tensor": False},
        {"convert_to_sparse_tensor": False},
        {"save_to_cpu": True},
        {"max_active_dims": 5},
        {"prompt": "query: "},
        {"prompt_name": "query"},
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", [TEXT, [TEXT], FEW], ids=["one", "list of one", "several"])
def test_what_a_call_returns_is_what_stock_returns(
    stock: Any,
    inputs: str | list[str],
    options: dict[str, Any],
    device: str,
) -> None:
    stock.prompts = {"query": "a question of ", "document": ""}
    model = with_graphs(stock, device)
    stock = stock.to(device)
    for name in ("encode", "encode_query", "encode_document"):
        close(getattr(model, name)(inputs, **options), getattr(stock, name)(inputs, **options))
    assert (
        made(model) <= 2
    )  # with a prompt and without; a model without routes runs both tasks alike


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_batches_and_matrices_take_the_graphs(stock: Any, device: str) -> None:
    model = with_graphs(stock, device)
    expected = stock.encode(FEW).to_dense()
    assert_close(encode_batch(model, FEW, "document").to_dense(), expected, FP32_BUDGET)
    assert_close(encode_sparse(model, FEW).to_dense(), expected, FP32_BUDGET)
    assert made(model) == 1
    best = encode_sparse(model, FEW, top_k=3, min_weight=0.01)
    assert best.crow_indices().diff().max() <= 3 and (best.values() > 0.01).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "expansion",
    [None, {"strategy": "fixed", "attend": False, "length": 16}],
    ids=["plain", "32"],
)
@pytest.mark.parametrize("numpy", [False, True])
def test_token_vectors_are_those_of_the_stock_model(
    device: str,
    expansion: Any,
    numpy: bool,
) -> None:
    stock = build_colbert()
    stock[0].query_expansion = expansion
    model = with_graphs(stock, device)
    stock = stock.to(device)
    for name in ("encode_query", "encode_document"):
        for inputs in (TEXT, QUERIES):
            options = {"convert_to_numpy": numpy, "normalize_embeddings": True}
            close(getattr(model, name)(inputs, **options), getattr(stock, name)(inputs, **options))
    assert made(model) == 4 and not model.encoding_graphs.failed


def changed(model: Any, how: str) -> None:
    network = model[0].model
    if how == "in place":
        with torch.no_grad():
            network.cls.predictions.bias.add_(0.5)
    elif how == "replaced":
        network.cls.predictions.decoder.bias = nn.Parameter(
            network.cls.predictions.bias.detach() + 0.5,
        )
    elif how == "data":
        network.cls.predictions.bias.data = network.cls.predictions.bias.data + 0.5
    elif how == "state dict":
        model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})
    elif how == "module":
        network.bert.encoder.layer[0] = copy.deepcopy(network.bert.encoder.layer[1])
    elif how == "forward":
        layer = network.bert.encoder.layer[1]
        layer.forward = lambda hidden, *args, **kwargs: type(layer).forward(
            layer,
            hidden * 0.5,
            *args,
            **kwargs,
        )
    elif how == "double":
        model.double()
    else:
        model[1].activation_function = "log1p_relu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "how",
    ["in place", "replaced", "data", "state dict", "module", "forward", "double", "activation"],
)
def test_changes_of_the_model_are_seen(stock: Any, how: str, device: str) -> None:
    if how == "double" and device == "cuda":
        pytest.skip("heads of fp64 are no kernels")
    model = with_graphs(stock, device)
    before = model.encode(TEXT).to_dense()
    changed(model, how)
    after = model.encode(TEXT).to_dense()
    assert not torch.equal(after, before.to(after.dtype))
    restore(model)
    close(after.cpu(), model.encode(TEXT).to_dense().cpu())


def test_what_did_not_change_is_captured_once(stock: Any) -> None:
    model, before = with_graphs(stock), Repeated.made
    for text in ("a", "b c", "list", "sum of"):
        model.encode(text)
        model.train()
        model.encode(text)  # which stock does in eval mode
        assert not model.training
    assert Repeated.made == before + 1 and made(model) == 1


def test_hooks_training_and_progress_run_the_model_itself(stock: Any) -> None:
    model, seen = with_graphs(stock), []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    close(model.encode(TEXT), stock.encode(TEXT))
    close(model.encode(TEXT), stock.encode(TEXT))
    assert len(seen) == 2 and made(model) == 0
    handle.remove()
    model.encode(TEXT, show_progress_bar=True)
    assert made(model) == 0
    model.encode(TEXT)
    assert made(model) == 1
    later = model[0].model.bert.register_forward_hook(lambda *_: seen.append(1))
    model.encode(TEXT)
    assert len(seen) > 2  # what stands for a graph calls hooks, too
    later.remove()
    model.train()
    assert encode_sparse(model, [TEXT]).shape[0] == 1 and model.training


def test_more_entries_than_there_is_room_for(stock: Any) -> None:
    model, before = with_graphs(stock), Repeated.made
    model.encoding_graphs.capacity = 1
    model.encode("")  # of few terms, or as many
    for _ in range(2):
        close(model.encode(FEW), stock.encode(FEW))
    assert made(model) == 2 and Repeated.made > before + 2


def test_rows_that_no_graph_has_room_for_are_captured_once(
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tilefold.integrations.sentence_transformers.graphs.encoding.MAX_CAPACITY",
        4,
    )
    model = with_graphs(stock)
    model.encoding_graphs.capacity = 4
    close(model.encode(FEW), stock.encode(FEW))
    assert model.encoding_graphs.failed and not model.encoding_graphs.may_run(FEW)


@pytest.mark.parametrize("top_k", [None, 3, 200])
def test_rows_with_room_hold_what_a_matrix_holds(top_k: int | None) -> None:
    scores = torch.rand(9, 50, generator=torch.Generator().manual_seed(1)) - 0.6
    got = unpack_capacity_rows(*rows_of_scores(scores, 64, top_k, 0.0)[:4], 64, 50)
    kept = scores.clamp(min=0)
    if top_k == 3:
        best = kept.topk(3, dim=1)
        kept = torch.zeros_like(kept).scatter(1, best.indices, best.values)
    rows, columns = kept.nonzero(as_tuple=True)
    assert torch.equal(got.counts, rows.bincount(minlength=9))
    assert torch.equal(got.columns.long(), columns) and torch.equal(got.values, kept[rows, columns])
    with pytest.raises(RowCapacityError):
        unpack_capacity_rows(*rows_of_scores(scores, 4, None, 0.0)[:4], 4, 50)


def test_a_capture_that_fails_is_told_once(stock: Any) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = with_graphs(stock)
    model.encoding_graphs = EncodingGraphs(model, Failing)
    with pytest.warns(
        UserWarning,
        match="without CUDA graphs, which could not be captured: RuntimeError: operation",
    ):
        close(model.encode(TEXT), stock.encode(TEXT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(model.encode(TEXT), stock.encode(TEXT))


def test_graphs_are_bounded_and_are_not_pickled(stock: Any) -> None:
    model = with_graphs(stock)
    for top_k in range(1, MAX_GRAPHS + 6):
        encode_sparse(model, [TEXT], top_k=top_k)
    assert made(model) == MAX_GRAPHS
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):  # noqa: S301 - our own bytes
        assert other.encoding_graphs.owner is other and made(other) == 0
        close(other.encode(TEXT), model.encode(TEXT))
    plain = copy.deepcopy(stock)
    accelerate(plain)
    plain.encode(TEXT)
    assert made(plain) == 0 and plain.encoding_graphs._capture is EncodingGraph  # on a CPU
    restore(plain)
    assert "encoding_graphs" not in vars(plain)


def test_graphs_are_made_ahead(stock: Any) -> None:
    model = with_graphs(stock)
    model.encoding_graphs.warm(lambda texts: model.encode(texts, batch_size=64), longest=32)
    sizes = {inputs.size for inputs, _ in model.encoding_graphs.graphs.values()}
    assert sizes == {
        (count, size)
        for count in TEXT_COUNTS
        for size in TOKEN_COUNTS
        if 4 * count <= size <= 32 * count
    }
    for texts in (["a list"], ["x"] * 3, ["sum of numbers"] * 40):
        model.encode(texts, batch_size=64)
    assert made(model) == len(sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_and_models_get_rows_of_their_own(stock: Any, device: str) -> None:
    models = [with_graphs(stock, device) for _ in range(2)]
    changed(models[1], "in place")
    texts = ["a list", "sum of numbers", "word " * 20, "x"]
    expected = [[model.encode(text).to_dense() for text in texts] for model in models]
    wrong: list[object] = []

    def run(model: Any, rows: Sequence[Tensor]) -> None:
        for turn in range(12):
            got = model.encode(texts[turn % 4]).to_dense()
            if not torch.equal(got, rows[turn % 4]):
                wrong.append(turn)

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in zip(models, expected, strict=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_model_that_leaves_the_gpu_and_comes_back(stock: Any) -> None:
    model = with_graphs(stock, "cuda")
    expected = model.encode(TEXT).to_dense().cpu()
    model.to("cpu")
    torch.cuda.empty_cache()
    close(model.encode(TEXT).to_dense(), expected)
    model.to("cuda")
    close(model.encode(TEXT).to_dense().cpu(), expected)
    with torch.autocast("cuda", torch.bfloat16):
        half = model.encode(TEXT).to_dense().float().cpu()
    assert 0 < (half - expected).abs().max() < 0.05 * expected.abs().max()
    assert not model.encoding_graphs.failed and made(model) == 2
