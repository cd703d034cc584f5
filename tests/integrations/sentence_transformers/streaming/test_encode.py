"""``encode`` and ``encode_sparse`` of an accelerated model: the rows and vectors of the stock one."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder

from tests.integrations.splade_models import FP32_BUDGET, TEXTS, assert_close
from tests.kernels import NEEDS_INTERPRETER
from tests.processes import ROOT, environment
from tests.recipes.small import VOCABULARY, small_masked_lm
from tests.refusals import refused
from tests.sequences import LabelledSeries
from tilefold.integrations.sentence_transformers import (
    accelerate,
    encode_sparse,
    is_accelerated,
    restore,
)
from tilefold.integrations.sentence_transformers.packing.inputs import packed_inputs
from tilefold.integrations.sentence_transformers.streaming.stream import TextStream
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.retrieval import SparseVectors, vocabulary_fingerprint

MANY = [f"text number {i}: " + "cats sleep, dogs run. " * (i % 9) for i in range(46)] + ["", "!"]


@pytest.fixture(scope="module")
def late_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_masked_lm(tmp_path_factory.mktemp("late"))


@pytest.fixture(params=[False, True], ids=["packed", "expanded queries"])
def late(late_folder: Path, request: pytest.FixtureRequest) -> Any:
    recipe = ColbertRecipe(
        base_model=str(late_folder),
        dimension=16,
        max_length=24,
        expand_queries=request.param,
    )
    return recipe.build_model().to("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """The texts of a batch, at most, of each stream that runs."""
    recorded: list[int | None] = []
    call = TextStream.__call__

    def counted(self: TextStream, windows: Any) -> Any:
        recorded.append(self.batch_size)
        return call(self, windows)

    monkeypatch.setattr(TextStream, "__call__", counted)
    yield recorded


def test_rows_are_those_of_encode_in_the_order_of_the_texts(model: SparseEncoder) -> None:
    expected = model.encode(TEXTS).to_dense()
    got = encode_sparse(model, TEXTS, batch_size=3)
    assert got.layout == torch.sparse_csr and got.device.type == "cpu"
    assert_close(got.to_dense(), expected, 1e-5)
    assert not is_accelerated(model)
    with accelerate(model):
        assert torch.equal(encode_sparse(model, TEXTS, batch_size=3).to_dense(), got.to_dense())
        assert is_accelerated(model)


def test_rows_carry_the_vocabulary_into_vectors(model: SparseEncoder) -> None:
    vectors = SparseVectors.from_torch(
        [f"d{i}" for i in range(len(TEXTS))],
        encode_sparse(model, TEXTS),
    )
    assert vectors.fingerprint == vocabulary_fingerprint(model.tokenizer) is not None
    model.tokenizer.add_tokens(["entirely-new"])
    assert vocabulary_fingerprint(model.tokenizer) != vectors.fingerprint, (
        "remembered for as many tokens only"
    )


def test_an_accelerated_model_and_its_copies_carry_the_encoding_of_a_batch(
    model: SparseEncoder,
) -> None:
    accelerate(model)
    expected = model.encode_sparse_batch(TEXTS, task="document", top_k=8)
    # in another order of the texts, whose products may round otherwise
    assert_close(
        encode_sparse(model, TEXTS, task="document", top_k=8).to_dense(),
        expected.to_dense(),
        1e-5,
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformers_model.get_output_embeddings().bias.add_(1.0)
    assert (twin.encode_sparse_batch(TEXTS).values().sum() > expected.values().sum()).all()
    assert torch.equal(
        model.encode_sparse_batch(TEXTS, task="document", top_k=8).to_dense(),
        expected.to_dense(),
    )
    restore(model)
    assert not hasattr(model, "encode_sparse_batch")


def test_top_k_and_min_weight_prune_and_the_model_may_say_how_many(model: SparseEncoder) -> None:
    dense = model.encode(TEXTS).to_dense()
    got = encode_sparse(model, TEXTS, top_k=8)
    assert got.crow_indices().tolist() == [0, 8, 16, 24, 32]
    assert_close(got.to_dense(), model.encode(TEXTS, max_active_dims=8).to_dense(), 1e-5)
    threshold = float(dense.max()) / 2
    assert (encode_sparse(model, TEXTS, min_weight=threshold).values() > threshold).all()
    assert encode_sparse(model, []).shape == (0, VOCABULARY)
    model.max_active_dims = 5
    assert encode_sparse(model, TEXTS).crow_indices().diff().tolist() == [5] * 4


def test_prompts_are_those_of_encode(model: SparseEncoder) -> None:
    model.prompts = {"query": "find: ", "passage": "text: ", "other": "other: "}
    assert_close(
        encode_sparse(model, TEXTS, task="query").to_dense(),
        model.encode_query(TEXTS).to_dense(),
        1e-5,
    )
    assert_close(
        encode_sparse(model, TEXTS, task="document").to_dense(),
        model.encode_document(TEXTS).to_dense(),
        1e-5,
    )
    other = model.encode(TEXTS, prompt_name="other").to_dense()
    assert_close(encode_sparse(model, TEXTS, prompt_name="other").to_dense(), other, 1e-5)
    assert_close(encode_sparse(model, TEXTS, prompt="other: ").to_dense(), other, 1e-5)


@pytest.mark.parametrize("count", [6, 48], ids=["one batch", "a stream of batches"])
@pytest.mark.parametrize("accelerated", [False, True], ids=["stock", "accelerated"])
@pytest.mark.parametrize(
    "given_as",
    [
        pytest.param(lambda t: LabelledSeries(t, range(len(t))[::-1]), id="permuted labels"),
        pytest.param(lambda t: LabelledSeries(t, range(5, 5 + len(t))), id="labels with gaps"),
        pytest.param(np.array, id="array"),
        pytest.param(tuple, id="tuple"),
        pytest.param(iter, id="generator"),
        pytest.param(lambda t: dict(enumerate(t)).values(), id="values of a dictionary"),
    ],
)
def test_rows_follow_the_positions_of_any_sequence(
    model: SparseEncoder,
    given_as: Any,
    accelerated: bool,
    count: int,
) -> None:
    texts = MANY[:count]
    expected = encode_sparse(model, texts).to_dense()
    if accelerated:
        accelerate(model)
        assert_close(model.encode(given_as(texts)).to_dense(), expected, FP32_BUDGET)
        of_batch = model.encode_sparse_batch(given_as(texts)).to_dense()
        assert_close(of_batch, expected, FP32_BUDGET)
    assert_close(encode_sparse(model, given_as(texts)).to_dense(), expected, FP32_BUDGET)


def test_wrong_arguments_name_themselves(model: SparseEncoder) -> None:
    refused(
        TypeError, r"texts: .*got one string; pass \['one text'\]", encode_sparse, model, "one text"
    )
    refused(TypeError, "texts: .*got None .*position 1", encode_sparse, model, ["a", None])
    refused(
        TypeError, "model: expected SparseEncoder, got 'minilm'", encode_sparse, "minilm", TEXTS
    )
    refused(
        ValueError,
        "batch_size must be a positive integer, got 0",
        encode_sparse,
        model,
        TEXTS,
        batch_size=0,
    )
    with pytest.raises(ValueError, match=r"prompt_name must be one of .*got 'missing'"):
        encode_sparse(model, TEXTS, prompt_name="missing")


OF_ROWS: list[dict[str, Any]] = [
    {},
    {"batch_size": 5},
    {"max_active_dims": 6},
    {"convert_to_sparse_tensor": False},
    {"task": "document"},
    {"convert_to_tensor": False, "save_to_cpu": True},
    {"prompt": "find: ", "show_progress_bar": True},
]
OF_VECTORS: list[dict[str, Any]] = [
    {},
    {"batch_size": 5},
    {"convert_to_numpy": True},
    {"normalize_embeddings": True},
    {"prompt": "find: "},
]


@pytest.mark.parametrize("options", OF_ROWS, ids=str)
def test_encode_gives_what_stock_gives(
    model: SparseEncoder,
    streams: list[Any],
    options: dict[str, Any],
) -> None:
    expected = model.encode(MANY, **options)
    model.train()
    accelerate(model)
    got = model.encode(MANY, **options)
    assert len(streams) == 1 and not model.training, (
        "stock encode leaves the model in eval mode too"
    )
    if isinstance(expected, list):
        assert isinstance(got, list)
        expected, got = torch.stack(expected), torch.stack(got)
    for fact in ("layout", "dtype", "device", "shape"):
        assert getattr(got, fact) == getattr(expected, fact)
    assert_close(got.to_dense(), expected.to_dense(), FP32_BUDGET)


def test_what_the_stream_does_not_serve_is_stock(model: SparseEncoder, streams: list[Any]) -> None:
    accelerate(model)
    model.encode(MANY[:3])
    model.encode("one text")
    model.encode(MANY, processing_kwargs={"text": {"max_length": 8}})
    assert not streams
    model.encode_query(MANY)
    model.encode_document(MANY)
    assert len(streams) == 2
    with pytest.raises((TypeError, UnicodeError)) as alone:
        model.encode_sparse_batch(["cats \ud800"])
    with pytest.raises((TypeError, UnicodeError)) as among:
        encode_sparse(model, [*MANY, "cats \ud800"])
    assert (type(among.value), str(among.value)) == (type(alone.value), str(alone.value))


@pytest.mark.parametrize("padded", [False, True])
def test_every_size_of_batch_gives_the_same_rows(model: SparseEncoder, padded: bool) -> None:
    expected = model.encode(MANY).to_dense()
    with accelerate(model, packed=not padded):
        for options in (
            {"batch_tokens": 1},
            {"batch_tokens": 100, "batch_size": 3},
            {"batch_tokens": 10**6},
        ):
            with (
                pytest.warns(UserWarning, match="batch_tokens does nothing")
                if padded
                else nullcontext()
            ):
                rows = encode_sparse(model, MANY, **options)
            assert_close(rows.to_dense(), expected, FP32_BUDGET)


KERNELS = """
import tempfile, torch
from pathlib import Path
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tests.recipes.small import tiny_masked_lm
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.integrations.sentence_transformers.streaming import stream
texts = [" ".join(f"w{(3 * i + j) % 78}" for j in range(1 + i % 5)) for i in range(7)]
folder = tiny_masked_lm(Path(tempfile.mkdtemp()), texts, layers=1)
transformer = Transformer(str(folder), transformer_task="fill-mask")
transformer.max_seq_length = 16
model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
expected = model.encode(texts).to_dense()
accelerate(model, impl="triton", check=False)
again, launch_texts = [], stream.SparseStream._launch_texts
stream.SparseStream._launch_texts = lambda self, texts: (
    again.append(texts) or launch_texts(self, texts)
)
for capacity, top_k in ((1024, None), (4, None), (4, None), (1024, 5)):
    stream.CAPACITY = capacity
    again.clear()
    rows = encode_sparse(model, texts, batch_tokens=10, top_k=top_k)
    best = expected.topk(top_k or expected.size(1), dim=1)
    want = torch.zeros_like(expected).scatter_(1, best.indices, best.values)
    torch.testing.assert_close(rows.to_dense(), want, rtol=1e-5, atol=1e-5)
    print(capacity, top_k, bool(again))
"""


@pytest.mark.slow
@pytest.mark.skipif(NEEDS_INTERPRETER[0].args[0], reason="triton is not installed")
@pytest.mark.skipif(NEEDS_INTERPRETER[2].args[0], reason="numpy is too new for the interpreter")
def test_rows_of_fixed_capacity_are_those_of_stock_and_full_ones_are_encoded_again() -> None:
    given = environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "1024 None False",
        "4 None True",
        "4 None False",
        "1024 5 False",
    ]


@pytest.mark.parametrize("options", OF_VECTORS, ids=str)
@pytest.mark.parametrize("side", ["query", "document"])
def test_vectors_are_those_of_stock(
    late: Any,
    streams: list[Any],
    side: str,
    options: dict[str, Any],
) -> None:
    stock = copy.deepcopy(late)
    accelerate(late)
    name = f"encode_{side}"
    expected, got = getattr(stock, name)(MANY, **options), getattr(late, name)(MANY, **options)
    assert streams == [options.get("batch_size")]
    assert isinstance(got, list) and [type(one) for one in got] == [type(one) for one in expected]
    assert [one.shape for one in got] == [one.shape for one in expected]
    for one, right in zip(got, expected, strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(right), atol=2e-5)


def test_what_the_stream_of_vectors_does_not_serve_is_stock_until_it_is_gone(
    late: Any,
    streams: list[Any],
) -> None:
    handle = accelerate(late)
    assert late.encode_document("one text").dim() == 2
    assert len(late.encode_document(MANY[:3])) == 3
    assert isinstance(late.encode(MANY, output_value=None)[0], dict)
    refused(ValueError, "convert_to_tensor", late.encode, MANY, convert_to_tensor=True)
    assert streams == []
    again = copy.deepcopy(late)
    assert again.encode.owner is again
    with pytest.raises((TypeError, UnicodeError)):
        late.encode_document([*MANY, "cats \ud800"])
    handle.restore()
    assert "encode" not in vars(late)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_of_several_windows_stay_on_the_device(model: SparseEncoder, device: str) -> None:
    texts = MANY * 12
    model.to(device)
    for options in ({}, {"save_to_cpu": True}, {"max_active_dims": 3}):
        expected = model.encode(texts, **options)
        with accelerate(model):
            got = model.encode(texts, **options)
        assert (got.device, got.layout, got.dtype) == (
            expected.device,
            expected.layout,
            expected.dtype,
        )
        assert got.is_coalesced() and torch.equal(
            got.indices().cpu(),
            got.cpu().to_dense().nonzero().T,
        )
        if not options.get("max_active_dims"):  # of equal weights, which are kept is open
            assert_close(got.to_dense().cpu(), expected.to_dense().cpu(), FP32_BUDGET)


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("prompt", [None, "a question: "])
def test_expanded_queries_are_tokenised_as_stock_tokenises_them(
    late_folder: Path,
    attend: bool,
    prompt: str | None,
) -> None:
    recipe = ColbertRecipe(
        base_model=str(late_folder),
        dimension=16,
        max_length=24,
        expand_queries=True,
    )
    model = recipe.build_model().to("cpu")
    model[0].query_expansion |= {"attend": attend}
    accelerate(model)
    preprocess = model[0].preprocess
    for texts in (["cats"], ["", "dogs run. ", "a!"], ["cats sleep " * 40, "x"]):
        expected = type(model[0]).preprocess(model[0], texts, prompt=prompt, task="query")
        with packed_inputs():
            got = preprocess(texts, prompt=prompt, task="query")
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert (
                torch.equal(got[name], value)
                if isinstance(value, torch.Tensor)
                else got[name] == value
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_stay_on_the_gpu(late: Any, dtype: torch.dtype) -> None:
    late.to("cuda", dtype)
    expected = copy.deepcopy(late).encode_document(MANY)
    accelerate(late)
    got = late.encode_document(MANY)
    assert {(one.device.type, one.dtype) for one in got} == {("cuda", dtype)}
    for one, right in zip(got, expected, strict=True):
        torch.testing.assert_close(
            one,
            right,
            atol=5e-2 if dtype == torch.bfloat16 else 1e-3,
            rtol=0,
        )
