"""Graphs of few texts return the rows of the stock model, and notice every change of the model."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import Tensor, nn

from tests.integrations.eager_graphs import EagerGraph
from tests.integrations.multi_vector_models import QUERIES, build_colbert
from tests.integrations.splade_models import (
    FP32_BUDGET,
    assert_close,
    build_tiny_splade,
    tiny_transformer,
)
from tilefold._internal.precision import set_precision
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, restore
from tilefold.integrations.sentence_transformers.graphs import encoding
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    GRAPH_TEXT_COUNTS,
    GRAPH_TOKEN_COUNTS,
    MAX_GRAPHS,
    EncodingGraphs,
)
from tilefold.integrations.sentence_transformers.graphs.encoding_graph import (
    EncodingGraph,
    GraphSize,
)
from tilefold.ops._shared import row_groups, row_probes
from tilefold.ops.lsr_head import rows_of_scores
from tilefold.pipeline.rows import RowCapacityError, unpack_capacity_rows
from tilefold.retrieval.encoding.sparse import encode_batch

TEXT = "a list of numbers"
WORDS = ["word", "list", "sum"] * 14
FEW = ["cats and dogs", "a list of numbers is longer than a word", "x", "", "sum of all parts"]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def with_graphs(stock: Any, device: str = "cpu", **options: Any) -> Any:
    """Return an accelerated copy that encodes few texts by graphs, eager ones on the CPU."""
    model = copy.deepcopy(stock).to(device).eval()
    accelerate(model, **options)
    if device == "cpu":
        model.encoding_graphs = EncodingGraphs(model, EagerGraph)
    return model


def n_graphs(model: Any) -> int:
    return len(model.encoding_graphs.graphs)


def graph_sizes(model: Any) -> set[GraphSize]:
    return {captured.inputs.size for captured in model.encoding_graphs.graphs.values()}


def build_sparse_splade(kind: str, folder: Path) -> Any:
    """Build a stock model, whose rows have some hundred entries if its head has a bias."""
    model = build_tiny_splade(kind, folder).eval()
    head = model.transformers_model.get_output_embeddings()
    if head.bias is None:
        return model
    with torch.no_grad():
        head.bias.sub_(model.encode([TEXT, *FEW]).to_dense().expm1().quantile(0.97))
    return model


@pytest.fixture
def stock(tokenizer_folder: Path) -> Any:
    return build_sparse_splade("bert", tokenizer_folder)


def assert_same_outputs(outputs: Any, expected: Any) -> None:
    """Check that outputs have the type, layout and numbers of the expected ones."""
    assert type(outputs) is type(expected)
    if isinstance(expected, list):
        assert len(outputs) == len(expected)
        for output, expected_output in zip(outputs, expected, strict=True):
            assert_same_outputs(output, expected_output)
        return
    if not isinstance(expected, Tensor):
        assert outputs.dtype == expected.dtype
        outputs = torch.from_numpy(outputs)
        expected = torch.from_numpy(expected)
    assert outputs.layout == expected.layout
    assert_close(outputs.to_dense().cpu(), expected.to_dense().cpu(), FP32_BUDGET)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_rows_of_every_graph_size_equal_those_of_the_stock_model(
    kind: str,
    device: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_sparse_splade(kind, tokenizer_folder)
    model = with_graphs(stock, device)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 5, 17, 32):
        lengths = torch.randint(0, 40, (count,), generator=generator).tolist()
        texts = [" ".join(WORDS[:length]) for length in lengths]
        assert_same_outputs(model.encode(texts).cpu(), stock.encode(texts))
    assert n_graphs(model) >= 4 and not model.encoding_graphs.failed
    assert all(
        size.texts in GRAPH_TEXT_COUNTS and size.tokens in GRAPH_TOKEN_COUNTS
        for size in graph_sizes(model)
    )


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
def test_encode_returns_the_types_and_numbers_of_the_stock_method(
    stock: Any,
    inputs: str | list[str],
    options: dict[str, Any],
    device: str,
) -> None:
    stock.prompts = {"query": "a question of ", "document": ""}
    model = with_graphs(stock, device)
    stock = stock.to(device)
    for name in ("encode", "encode_query", "encode_document"):
        assert_same_outputs(
            getattr(model, name)(inputs, **options), getattr(stock, name)(inputs, **options)
        )
    assert (
        n_graphs(model) <= 2
    )  # with a prompt and without; a model without routes runs both tasks alike


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_batches_and_matrices_are_encoded_by_graphs(stock: Any, device: str) -> None:
    model = with_graphs(stock, device)
    expected = stock.encode(FEW).to_dense()
    assert_close(encode_batch(model, FEW, "document").to_dense(), expected, FP32_BUDGET)
    assert_close(encode_sparse(model, FEW).to_dense(), expected, FP32_BUDGET)
    assert n_graphs(model) == 1
    pruned = encode_sparse(model, FEW, top_k=3, min_weight=0.01)
    assert pruned.crow_indices().diff().max() <= 3
    assert (pruned.values() > 0.01).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "expansion",
    [None, {"strategy": "fixed", "attend": False, "length": 16}],
    ids=["plain", "32"],
)
@pytest.mark.parametrize("numpy", [False, True])
def test_token_vectors_equal_those_of_the_stock_model(
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
            assert_same_outputs(
                getattr(model, name)(inputs, **options), getattr(stock, name)(inputs, **options)
            )
    assert n_graphs(model) == 4 and not model.encoding_graphs.failed


def build_dense(tokenizer_folder: Path, pooling: str = "mean") -> Any:
    """Build a stock dense model with a prompt for queries, and vectors of length 1."""
    network = tiny_transformer("bert", tokenizer_folder).model
    transformer = Transformer(network.name_or_path)
    modules = [transformer, Pooling(32, pooling), Dense(32, 16), Normalize()]
    prompts = {"query": "a question of ", "document": ""}
    return SentenceTransformer(modules=modules, prompts=prompts, device="cpu").eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "weightedmean"])
def test_dense_vectors_of_every_pooling_equal_those_of_the_stock_model(
    pooling: str,
    device: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_dense(tokenizer_folder, pooling)
    model = with_graphs(stock, device)
    for n_texts in (1, 5, 17):
        texts = (FEW * 4)[:n_texts]
        assert_same_outputs(model.encode_query(texts), stock.encode_query(texts))
    assert n_graphs(model) == 3
    assert not model.encoding_graphs.failed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="array"),
        pytest.param({"convert_to_tensor": True}, id="tensor"),
        pytest.param({"convert_to_numpy": False}, id="list"),
        pytest.param({"truncate_dim": 8, "normalize_embeddings": True}, id="truncated"),
        pytest.param({"prompt_name": "query"}, id="prompt"),
    ],
)
@pytest.mark.parametrize("inputs", [TEXT, [TEXT], FEW], ids=["one", "list of one", "several"])
def test_dense_encode_returns_the_types_and_numbers_of_the_stock_method(
    inputs: str | list[str],
    options: dict[str, Any],
    device: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_dense(tokenizer_folder)
    model = with_graphs(stock, device)
    stock = stock.to(device)
    assert_same_outputs(model.encode(inputs, **options), stock.encode(inputs, **options))
    assert n_graphs(model) == 1


@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_quantized_dense_vectors_are_those_of_the_stock_method(
    precision: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_dense(tokenizer_folder)
    model = with_graphs(stock)
    expected = stock.encode(FEW, precision=precision)
    result = model.encode(FEW, precision=precision)
    assert result.dtype == expected.dtype
    # A rounding error may cross the limit of two integers.
    assert (abs(result.astype(int) - expected) <= 1).mean() > 0.95
    assert n_graphs(model) == 0


def test_a_pooling_without_the_prompt_runs_without_graphs(tokenizer_folder: Path) -> None:
    stock = build_dense(tokenizer_folder)
    stock[1].include_prompt = False
    model = with_graphs(stock)
    assert_same_outputs(model.encode_query(FEW), stock.encode_query(FEW))
    assert n_graphs(model) == 0
    assert_same_outputs(model.encode_document(FEW), stock.encode_document(FEW))
    assert n_graphs(model) == 1


def test_a_pooling_that_leaves_out_the_prompt_from_now_on_is_not_captured(
    tokenizer_folder: Path,
) -> None:
    stock = build_dense(tokenizer_folder)
    model = with_graphs(stock)
    assert_same_outputs(model.encode_query(FEW), stock.encode_query(FEW))
    captures_before = EagerGraph.n_captures
    for changed in (model, stock):
        changed[1].include_prompt = False
    assert_same_outputs(model.encode_query(FEW), stock.encode_query(FEW))
    assert EagerGraph.n_captures == captures_before
    assert not model.encoding_graphs.failed


def test_long_texts_are_not_tokenised_to_learn_that_no_graph_has_room(
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = build_dense(tokenizer_folder)
    model = with_graphs(stock)
    tokenised: list[int] = []
    tokenize = EncodingGraphs._tokenize

    def record_and_tokenize(graphs: EncodingGraphs, texts: Sequence[str], *args: Any) -> Any:
        tokenised.append(len(texts))
        return tokenize(graphs, texts, *args)

    monkeypatch.setattr(EncodingGraphs, "_tokenize", record_and_tokenize)
    many = [" ".join(WORDS)] * 64  # more than 1,024 tokens, the room for more than 16 texts
    assert_same_outputs(model.encode(many, batch_size=64), stock.encode(many))
    assert tokenised == []
    few = many[:2]
    assert_same_outputs(model.encode(few), stock.encode(few))
    assert tokenised == [2]


def test_the_memory_of_padded_token_vectors_is_limited_for_wide_models(
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = build_dense(tokenizer_folder)
    # Room for 5 texts of 16 tokens, with the filler text, and 32 dimensions.
    monkeypatch.setattr(encoding, "_MAX_POOLED_VALUES", 5 * 16 * 32)
    model = with_graphs(stock)
    for texts in (["x", "sum"], FEW, [TEXT] * 4):
        assert_same_outputs(model.encode(texts), stock.encode(texts))
    assert graph_sizes(model) == {GraphSize(texts=4, tokens=16)}


def test_graphs_of_an_invariant_dense_model_keep_the_bits(tokenizer_folder: Path) -> None:
    stock = build_dense(tokenizer_folder)
    model = with_graphs(stock, invariant=True)
    together = model.encode(FEW)
    for text, vector in zip(FEW, together, strict=True):
        assert (model.encode(text) == vector).all()
    assert n_graphs(model) >= 2  # of one text, and of several


def test_graphs_of_an_invariant_model_have_the_number_of_tokens_that_suits_its_dtype(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    def prefer_few_rows_in_bf16(probe: row_probes.SizeProbe, size: int) -> int:
        return size if probe._kind.dtype == torch.bfloat16 else -size

    uncached = row_groups._fastest_row_count.__wrapped__
    monkeypatch.setattr(row_groups, "_fastest_row_count", uncached)
    monkeypatch.setattr(row_probes.SizeProbe, "time_of_few_rows", prefer_few_rows_in_bf16)
    model = with_graphs(build_dense(tokenizer_folder), invariant=True)
    for dtype, n_tokens in (("bf16", 16), ("fp32", 256)):
        set_precision(model, dtype)
        model.encode(TEXT)
        assert GraphSize(texts=1, tokens=n_tokens) in graph_sizes(model)


def test_paused_graphs_are_kept(tokenizer_folder: Path) -> None:
    model = with_graphs(build_dense(tokenizer_folder))
    vector = model.encode(TEXT)
    captures_before = EagerGraph.n_captures
    with model.encoding_graphs.paused():
        model[3].forward = lambda features, **_: features
        raw_vector = model.encode(TEXT)
        del model[3].forward
    assert abs((raw_vector**2).sum() - 1) > 0.01
    assert (model.encode(TEXT) == vector).all()
    assert EagerGraph.n_captures == captures_before


def test_dense_models_that_run_padded_have_no_graphs(tokenizer_folder: Path) -> None:
    model = build_dense(tokenizer_folder)
    accelerate(model, packed=False)
    assert encoding.graphs_of(model) is None


def add_to_bias_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].model.cls.predictions.bias.add_(0.5)


def replace_bias(model: Any) -> None:
    predictions = model[0].model.cls.predictions
    predictions.decoder.bias = nn.Parameter(predictions.bias.detach() + 0.5)


def replace_data_of_bias(model: Any) -> None:
    bias = model[0].model.cls.predictions.bias
    bias.data = bias.data + 0.5


def load_other_weights(model: Any) -> None:
    model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})


def replace_layer(model: Any) -> None:
    layers = model[0].model.bert.encoder.layer
    layers[0] = copy.deepcopy(layers[1])


def replace_forward_of_layer(model: Any) -> None:
    layer = model[0].model.bert.encoder.layer[1]

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return type(layer).forward(layer, hidden * 0.5, *args, **kwargs)

    layer.forward = forward


def convert_to_fp64(model: Any) -> None:
    model.double()


def change_activation(model: Any) -> None:
    model[1].activation_function = "log1p_relu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change",
    [
        add_to_bias_in_place,
        replace_bias,
        replace_data_of_bias,
        load_other_weights,
        replace_layer,
        replace_forward_of_layer,
        convert_to_fp64,
        change_activation,
    ],
)
def test_rows_follow_a_change_of_the_model(
    stock: Any,
    change: Callable[[Any], None],
    device: str,
) -> None:
    if change is convert_to_fp64 and device == "cuda":
        pytest.skip("heads of fp64 have no kernels")
    model = with_graphs(stock, device)
    before = model.encode(TEXT).to_dense()
    change(model)
    after = model.encode(TEXT).to_dense()
    assert not torch.equal(after, before.to(after.dtype))
    restore(model)
    assert_same_outputs(after.cpu(), model.encode(TEXT).to_dense().cpu())


def test_an_unchanged_model_is_captured_once(stock: Any) -> None:
    model = with_graphs(stock)
    captures_before = EagerGraph.n_captures
    for text in ("a", "b c", "list", "sum of"):
        model.encode(text)
        model.train()
        model.encode(text)  # in eval mode, like the stock method
        assert not model.training
    assert EagerGraph.n_captures == captures_before + 1
    assert n_graphs(model) == 1


def test_a_model_with_hooks_runs_without_graphs(stock: Any) -> None:
    model = with_graphs(stock)
    hook_calls: list[int] = []
    handle = model[0].register_forward_hook(lambda *_: hook_calls.append(1))
    for _ in range(2):
        assert_same_outputs(model.encode(TEXT), stock.encode(TEXT))
    assert len(hook_calls) == 2
    assert n_graphs(model) == 0
    handle.remove()
    model.encode(TEXT)
    assert n_graphs(model) == 1


def test_a_hook_that_is_added_after_the_capture_is_called(stock: Any) -> None:
    model = with_graphs(stock)
    model.encode(TEXT)
    hook_calls: list[int] = []
    handle = model[0].model.bert.register_forward_hook(lambda *_: hook_calls.append(1))
    eager_calls = 1  # an eager graph calls hooks, too
    model.encode(TEXT)
    assert len(hook_calls) > eager_calls
    handle.remove()


def test_a_progress_bar_or_training_mode_runs_without_graphs(stock: Any) -> None:
    model = with_graphs(stock)
    model.encode(TEXT, show_progress_bar=True)
    assert n_graphs(model) == 0
    model.train()
    assert encode_sparse(model, [TEXT]).shape[0] == 1
    assert model.training
    assert n_graphs(model) == 0


def test_a_row_with_more_entries_than_its_capacity_is_captured_with_a_larger_one(
    stock: Any,
) -> None:
    model = with_graphs(stock)
    captures_before = EagerGraph.n_captures
    model.encoding_graphs.capacity = 1
    model.encode("")
    for _ in range(2):
        assert_same_outputs(model.encode(FEW), stock.encode(FEW))
    assert n_graphs(model) == 2
    assert EagerGraph.n_captures > captures_before + 2


def test_a_row_above_the_largest_capacity_turns_graphs_off(
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "MAX_CAPACITY", 4)
    model = with_graphs(stock)
    model.encoding_graphs.capacity = 4
    assert_same_outputs(model.encode(FEW), stock.encode(FEW))
    assert model.encoding_graphs.failed
    assert not model.encoding_graphs.may_run(FEW)


@pytest.mark.parametrize("top_k", [None, 3, 200])
def test_rows_of_a_capacity_hold_the_entries_of_the_matrix(top_k: int | None) -> None:
    scores = torch.rand(9, 50, generator=torch.Generator().manual_seed(1)) - 0.6
    stored = rows_of_scores(scores, 64, top_k, 0.0)
    unpacked = unpack_capacity_rows(*stored[:4], capacity=64, vocab_size=50)
    expected = scores.clamp(min=0)
    if top_k == 3:
        heaviest = expected.topk(3, dim=1)
        expected = torch.zeros_like(expected).scatter(1, heaviest.indices, heaviest.values)
    rows, columns = expected.nonzero(as_tuple=True)
    assert torch.equal(unpacked.counts, rows.bincount(minlength=9))
    assert torch.equal(unpacked.columns.long(), columns)
    assert torch.equal(unpacked.values, expected[rows, columns])


def test_rows_above_their_capacity_raise() -> None:
    scores = torch.rand(9, 50, generator=torch.Generator().manual_seed(1)) - 0.6
    stored = rows_of_scores(scores, 4, None, 0.0)
    with pytest.raises(RowCapacityError):
        unpack_capacity_rows(*stored[:4], capacity=4, vocab_size=50)


def test_a_failed_capture_warns_once_and_runs_without_graphs(stock: Any) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = with_graphs(stock)
    model.encoding_graphs = EncodingGraphs(model, Failing)
    with pytest.warns(
        UserWarning,
        match="without CUDA graphs, which could not be captured: RuntimeError: operation",
    ):
        assert_same_outputs(model.encode(TEXT), stock.encode(TEXT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_outputs(model.encode(TEXT), stock.encode(TEXT))


def test_the_number_of_graphs_is_limited(stock: Any) -> None:
    model = with_graphs(stock)
    for top_k in range(1, MAX_GRAPHS + 6):
        encode_sparse(model, [TEXT], top_k=top_k)
    assert n_graphs(model) == MAX_GRAPHS


@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(lambda model: pickle.loads(pickle.dumps(model)), id="pickle"),  # noqa: S301 - our own bytes
        pytest.param(copy.deepcopy, id="deepcopy"),
    ],
)
def test_copies_of_a_model_begin_without_graphs(
    stock: Any,
    duplicate: Callable[[Any], Any],
) -> None:
    model = with_graphs(stock)
    model.encode(TEXT)
    duplicated = duplicate(model)
    assert duplicated.encoding_graphs.owner is duplicated
    assert n_graphs(duplicated) == 0
    assert_same_outputs(duplicated.encode(TEXT), model.encode(TEXT))


def test_a_model_on_a_cpu_has_no_cuda_graphs_and_restore_removes_them(stock: Any) -> None:
    model = copy.deepcopy(stock)
    accelerate(model)
    model.encode(TEXT)
    assert model.encoding_graphs._graph_factory is EncodingGraph
    assert n_graphs(model) == 0
    restore(model)
    assert "encoding_graphs" not in vars(model)


def test_warm_captures_all_graphs_for_short_texts(stock: Any) -> None:
    model = with_graphs(stock)
    model.encoding_graphs.capture_all_sizes(
        lambda texts: model.encode(texts, batch_size=64), longest=32
    )
    sizes = graph_sizes(model)
    assert sizes == {
        (n_texts, n_tokens)
        for n_texts in GRAPH_TEXT_COUNTS
        for n_tokens in GRAPH_TOKEN_COUNTS
        if 4 * n_texts <= n_tokens <= 32 * n_texts
    }
    for texts in (["a list"], ["x"] * 3, ["sum of numbers"] * 40):
        model.encode(texts, batch_size=64)
    assert n_graphs(model) == len(sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_threads_that_share_models_get_the_rows_of_their_texts(stock: Any, device: str) -> None:
    models = [with_graphs(stock, device) for _ in range(2)]
    add_to_bias_in_place(models[1])
    texts = ["a list", "sum of numbers", "word " * 20, "x"]
    expected = [[model.encode(text).to_dense() for text in texts] for model in models]
    mismatches: list[str] = []

    def encode_repeatedly(model: Any, rows: Sequence[Tensor]) -> None:
        for _ in range(3):
            for text, row in zip(texts, rows, strict=True):
                if not torch.equal(model.encode(text).to_dense(), row):
                    mismatches.append(text)

    threads = [
        threading.Thread(target=encode_repeatedly, args=(model, rows))
        for model, rows in zip(models, expected, strict=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mismatches


@pytest.mark.gpu
def test_a_model_that_leaves_the_gpu_and_returns_is_captured_again(stock: Any) -> None:
    model = with_graphs(stock, "cuda")
    expected = model.encode(TEXT).to_dense().cpu()
    model.to("cpu")
    torch.cuda.empty_cache()
    assert_same_outputs(model.encode(TEXT).to_dense(), expected)
    model.to("cuda")
    assert_same_outputs(model.encode(TEXT).to_dense().cpu(), expected)
    with torch.autocast("cuda", torch.bfloat16):
        rounded = model.encode(TEXT).to_dense().float().cpu()
    assert 0 < (rounded - expected).abs().max() < 0.05 * expected.abs().max()
    assert not model.encoding_graphs.failed
    assert n_graphs(model) == 2
