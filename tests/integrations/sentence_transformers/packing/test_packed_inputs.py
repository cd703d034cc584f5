"""Packed inputs of accelerated models: the tokens, losses and gradients of padded ones, under the
stock trainers.
"""

from __future__ import annotations

import copy
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.integrations.multi_vector_models import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    build_colbert,
)
from tests.integrations.splade_models import (
    TEXTS,
    assert_close,
    build_tiny_splade,
    five_steps,
    fused_copy,
    logged_losses,
    tiny_transformer,
    without_dropout,
)
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores
from tilefold.integrations.sentence_transformers.packing import accelerate as packing
from tilefold.integrations.sentence_transformers.packing.collator import AheadCollator, PendingBatch
from tilefold.integrations.sentence_transformers.packing.inputs import pack_features, packed_inputs
from tilefold.integrations.transformers.packed import padding_position
from tilefold.losses.base_splade import JoinedSpladeLoss

KINDS = ["bert", "roberta", "distilbert", "modernbert"]
WORDS = ["length", "order", "first", "last", "sum", "copy", "size", "type"]
PAIRS = Dataset.from_dict(
    {
        "anchor": [f"what is the {word} of a list" for word in WORDS],
        "positive": [
            f"a function gives the {word}" + " of a long list" * steps
            for steps, word in enumerate(WORDS)
        ],
    },
)
# without padding in a column
EQUAL = Dataset.from_dict(
    {"anchor": PAIRS["anchor"], "positive": [f"a function gives the {word}" for word in WORDS]},
)
# Of the largest gradient, in fp64. Without padding sums run in another order, and what cancels in
# them (the gradient of token types adds up those of all tokens) is some hundred roundings off, up
# to 8e-14.
ROUNDING = 1e-10


def splade_loss(model: Any, cached: bool = False, kind: Any = None, **options: Any) -> Any:
    kind = kind or (CachedSpladeLoss if cached else SpladeLoss)
    ranking = SparseMultipleNegativesRankingLoss(model=model)
    return kind(
        model=model,
        loss=ranking,
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
        **options,
    )


def gradients_of(
    model: Any,
    loss: Any,
    columns: list[dict[str, Any]],
) -> tuple[float, dict[str, torch.Tensor]]:
    model.double().train()
    model.zero_grad(set_to_none=True)
    value = loss.train()(columns, None)
    total = sum(value.values()) if isinstance(value, dict) else value
    total.backward()
    return total.item(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def joined(model: Any, texts: list[list[str]]) -> list[dict[str, Any]]:
    """Features of columns as the trainer's collator and loader make them."""
    collator = AheadCollator(SparseEncoderDataCollator(preprocess_fn=model.preprocess), join=True)
    names = "abc"[: len(texts)]
    batch = collator([dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True)]).to(
        "cpu",
    )
    return [
        {key[2:]: value for key, value in batch.items() if key.startswith(f"{name}_")}
        for name in names
    ]


def assert_same(got: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=ROUNDING)
    assert got[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((got[1][name] - gradient).abs().max()) <= ROUNDING * largest, name


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_packed_ids_are_those_of_the_stock_preprocess(kind: str, tokenizer_folder: Path) -> None:
    model = build_tiny_splade(kind, tokenizer_folder)
    assert accelerate(model).padded == {}
    model.max_seq_length = 20
    texts = ["", "one", "[PAD] in a text [MASK]", "a long text " * 20, "\u00e9t\u00e9 \u4e2d\u6587"]
    shorter = {"processing_kwargs": {"text": {"max_length": 7}}}
    for options in ({}, {"prompt": "query: "}, {"task": "document"}, shorter):
        expected = pack_features(
            stock_features(model, texts, **options),
            padding_position(model[0].model),
        )
        for _ in range(2):  # the first call plans, the second repeats
            with packed_inputs():
                got = model.preprocess(texts, **options)
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert (
                    torch.equal(got[key], value)
                    if isinstance(value, torch.Tensor)
                    else got[key] == value
                ), key
    model.max_seq_length = 9
    with packed_inputs():
        assert model.preprocess(texts)["max_length_q"] == 9
        pairs = model.preprocess([("a first text", "a second one"), ("a", "b")])
    assert (
        pairs["token_type_ids"].any()
        and pairs["cu_seq_lens_q"].tolist()[1] == pairs["max_length_q"]
    )


def stock_features(model: Any, texts: list[Any], **options: Any) -> dict[str, Any]:
    """Features of texts by the method of sentence-transformers."""
    return type(model[0]).preprocess(model[0], texts, **options)


def test_threads_see_the_padding_position_of_a_network(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade("roberta", tokenizer_folder).eval()
    features = model.preprocess(TEXTS)
    with torch.no_grad():
        expected = model(dict(features))["sentence_embedding"]
    accelerate(model, check=False)
    main_thread = threading.current_thread()

    def encode() -> torch.Tensor:
        with torch.no_grad():
            return model(dict(features))["sentence_embedding"]

    with ThreadPoolExecutor(1) as other_thread:
        scores_of_other_thread = []

        def interrupted(network: Any) -> int | None:
            """Examine a network, while another thread encodes."""
            if threading.current_thread() is main_thread:
                scores_of_other_thread.append(other_thread.submit(encode).result())
            return padding_position(network)

        monkeypatch.setattr(packing, "padding_position", interrupted)
        scores = encode()
    for result in (scores, *scores_of_other_thread):
        torch.testing.assert_close(result, expected)
    assert len(scores_of_other_thread) == 1


def assert_equal_features(features: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, order, dtypes and values must be equal."""
    assert list(features) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert features[name].dtype == value.dtype, name
            assert torch.equal(features[name], value), name
        else:
            assert features[name] == value, name


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_padded_features_are_those_of_the_stock_preprocess(
    kind: str,
    padding_side: str,
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade(kind, tokenizer_folder)
    accelerate(model)
    model.tokenizer.padding_side = padding_side
    model.max_seq_length = 20
    batches: list[list[Any]] = [
        ["", "one", "[PAD] in a text [MASK]", "a long text " * 20, "\u00e9t\u00e9 \u4e2d\u6587"],
        ["one"],
        [""],
        [],
        [("a first text", "a second one"), ("a", "b")],
    ]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt": {"prompt": "query: "},
        "task": {"task": "document"},
        "shorter": {"max_length": 7},
        "of one call": {"processing_kwargs": {"text": {"pad_to_multiple_of": 4}}},
    }
    for arguments in options.values():
        for texts in batches:
            expected = stock_features(model, texts, **arguments)
            assert_equal_features(model[0].preprocess(texts, **arguments), expected)


@pytest.mark.parametrize(
    "setting",
    [
        {"pad_to_multiple_of": 4},
        {"padding": "max_length"},
        {"padding": "max_length", "max_length": 9},
    ],
)
def test_padding_that_a_model_asks_for_is_that_of_the_stock_preprocess(
    setting: dict[str, Any],
    tokenizer_folder: Path,
) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    model.max_seq_length = 16
    model[0].processing_kwargs = {"text": setting}
    accelerate(model)
    for texts in (["one", "two words"], ["a long text " * 20, "short"]):
        assert_equal_features(model[0].preprocess(texts), stock_features(model, texts))


def router_of(folder: Path) -> SparseEncoder:
    router = Router.for_query_document(
        query_modules=[tiny_transformer("distilbert", folder), SpladePooling()],
        document_modules=[tiny_transformer("bert", folder), SpladePooling("sum")],
    )
    return without_dropout(SparseEncoder(modules=[router], device="cpu"))


CACHED = [{"mini_batch_size": 3}, {"mini_batch_num_tokens": 40}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in [*KINDS, "router"]), *(("bert", options) for options in CACHED)],
)
def test_losses_and_gradients_are_those_of_padding(
    kind: str,
    options: dict[str, int],
    tokenizer_folder: Path,
) -> None:
    routed = kind == "router"
    stock = (
        router_of(tokenizer_folder)
        if routed
        else without_dropout(build_tiny_splade(kind, tokenizer_folder))
    )
    packed = copy.deepcopy(stock)
    assert accelerate(packed).padded == {}
    results = []
    for model in (stock, packed):
        columns = [
            model.preprocess(list(PAIRS[name]), **({"task": task} if routed else {}))
            for name, task in (("anchor", "query"), ("positive", "document"))
        ]
        results.append(
            gradients_of(model, splade_loss(model, cached=bool(options), **options), columns),
        )
    assert options or ("cu_seq_lens_q" in columns[0] and columns[0].get("task", "query") == "query")
    assert_same(results[1], results[0])


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_multi_vector_training_is_that_of_the_padded_model(cached: bool) -> None:
    from sentence_transformers.multi_vector_encoder import losses

    name = "Cached" * cached + "MultiVectorMultipleNegativesRankingLoss"
    results = []
    for fused in (False, True):
        model = build_colbert()
        if fused:
            assert accelerate(model).padded == {}
        options = {"mini_batch_size": 3} if cached else {}
        loss = getattr(losses, name)(model, similarity_fct=colbert_scores, **options)
        tasks = ["query", "document", "document"]
        texts = zip((QUERIES, POSITIVES, NEGATIVES), tasks, strict=True)
        columns = [{**model.preprocess(column, task=task), "task": task} for column, task in texts]
        assert ("cu_seq_lens_q" in model[0](dict(columns[1]))) == fused
        results.append(gradients_of(without_dropout(model), loss, columns))
    assert_same(results[1], results[0])


def train(
    model: SparseEncoder,
    folder: Path,
    ahead: bool,
    data: Dataset = PAIRS,
    **options: Any,
) -> list[float]:
    arguments = {"args": five_steps(folder, **options), "train_dataset": data, "eval_dataset": data}
    trainer = SparseEncoderTrainer(model, loss=splade_loss(model), **arguments)
    if ahead:
        collate_ahead(trainer)
        collate_ahead(trainer)
        assert isinstance(trainer.data_collator, AheadCollator)
        assert not isinstance(trainer.data_collator.collator, AheadCollator)
        assert trainer.data_collator.join == (len(model) == 2)  # a Router may have several encoders
    return [*logged_losses(trainer), trainer.evaluate()["eval_loss"]]


def test_a_loss_that_is_nan_is_logged_as_nan_and_nobody_waits_for_it(
    tiny: SparseEncoder,
    tmp_path: Path,
) -> None:
    accelerate(tiny)
    loss = splade_loss(tiny)
    loss.register_forward_hook(
        lambda _, __, out: {name: value * float("nan") for name, value in out.items()},
    )
    arguments = five_steps(tmp_path, max_steps=1, logging_nan_inf_filter=True)
    trainer = SparseEncoderTrainer(tiny, args=arguments, train_dataset=PAIRS, loss=loss)
    collate_ahead(trainer)
    assert math.isnan(logged_losses(trainer)[0]) and not trainer.args.logging_nan_inf_filter


RUNS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": True},
    {"gradient_accumulation_steps": 2},
    {"data": EQUAL},
]


@pytest.mark.parametrize("options", [*RUNS, {"data": EQUAL, "bf16": True}])
def test_a_training_run_has_the_stock_losses(
    options: dict[str, Any],
    tiny: SparseEncoder,
    tmp_path: Path,
) -> None:
    expected = train(copy.deepcopy(tiny), tmp_path / "stock", ahead=False, **options)
    runs = []
    for name in ("packed", *(() if options else ("again",))):
        packed = fused_copy(tiny)
        runs.append(train(packed, tmp_path / name, ahead=True, **options))
    # in bf16 the stock side rounds its logits to 8 bits, and a step hands the difference on to the
    # next
    tolerance, rounding = (2e-2, 2**-6) if "bf16" in options else (1e-4, 1e-5)
    assert (
        len(runs[0]) == 6
        and runs[0] == pytest.approx(expected, rel=tolerance)
        and runs[-1] == runs[0]
    )
    packed.save_pretrained(str(tmp_path / "saved"))
    assert "tilefold" not in (tmp_path / "saved" / "config.json").read_text()
    again = SparseEncoder(str(tmp_path / "saved"), device="cpu")
    assert_close(packed.encode(TEXTS).to_dense(), again.encode(TEXTS).to_dense(), rounding)


def test_all_columns_go_through_the_encoder_together(tiny: SparseEncoder) -> None:
    stock, packed = tiny, fused_copy(tiny)
    texts = [list(PAIRS["anchor"]), list(PAIRS["positive"]), list(reversed(PAIRS["positive"]))]
    expected = gradients_of(
        stock,
        splade_loss(stock),
        [stock.preprocess(column) for column in texts],
    )
    runs = []
    packed[0].model.bert.register_forward_hook(lambda *_: runs.append(1))
    columns = joined(packed, texts)
    assert_same(
        gradients_of(packed, splade_loss(packed), [dict(column) for column in columns]),
        expected,
    )
    assert len(runs) == 1
    # again, in another mode, one column alone, and in parts
    with torch.no_grad():
        alone = [stock(stock.preprocess(column))["sentence_embedding"] for column in texts]
        for index in (2, 0, 1, 1):
            assert_close(packed(dict(columns[index]))["sentence_embedding"], alone[index], 1e-5)
    assert len(runs) == 3
    cached = gradients_of(
        stock,
        splade_loss(stock, cached=True, mini_batch_size=8),
        list(map(stock.preprocess, texts)),
    )
    again = splade_loss(packed, cached=True, mini_batch_size=8)
    assert_same(gradients_of(packed, again, [dict(column) for column in columns]), cached)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [3, 8])
def test_mini_batches_of_all_columns_have_the_gradients_of_the_whole_batch(
    size: int,
    count: int,
    tiny: SparseEncoder,
) -> None:
    stock, packed = tiny, fused_copy(tiny)
    texts = [list(PAIRS["anchor"]), list(PAIRS["positive"]), list(reversed(PAIRS["positive"]))][
        :count
    ]
    expected = gradients_of(
        stock,
        splade_loss(stock),
        [stock.preprocess(column) for column in texts],
    )
    runs = []
    packed[0].model.bert.register_forward_hook(lambda *_: runs.append(1))
    loss, columns = (
        splade_loss(packed, kind=JoinedSpladeLoss, mini_batch_size=size),
        joined(packed, texts),
    )
    assert_same(gradients_of(packed, loss, list(map(dict, columns))), expected)
    assert len(runs) == 2 * math.ceil(8 / size) and loss.mini_batch_size == size
    with torch.no_grad():
        assert sum(loss(list(map(dict, columns)), None).values()).item() == pytest.approx(
            expected[0],
        )
    columns[0]["task"] = "query"  # another kind than the others: mini-batches of one column
    for features in (columns, [stock.preprocess(column) for column in texts]):
        assert_same(gradients_of(packed, loss, features), expected)


def test_a_mini_batch_has_the_same_dropout_both_times(model: SparseEncoder) -> None:
    packed = fused_copy(model)
    loss, recorded = splade_loss(packed, kind=JoinedSpladeLoss, mini_batch_size=3), []
    stock = loss.embed_minibatch

    def embedded(*args: Any, **more: Any) -> Any:
        recorded.append(stock(*args, **more))
        return recorded[-1]

    loss.embed_minibatch = embedded
    for _ in range(2):
        gradients_of(packed, loss, joined(packed, [list(PAIRS["anchor"]), list(PAIRS["positive"])]))
    vectors = [vector for vector, _ in recorded]
    for first in (0, 6):
        assert all(map(torch.equal, vectors[first : first + 3], vectors[first + 3 : first + 6]))
    assert not torch.equal(vectors[0], vectors[6])


def test_columns_of_several_encoders_are_not_joined(tokenizer_folder: Path, tmp_path: Path) -> None:
    stock = router_of(tokenizer_folder)
    packed = fused_copy(stock)
    options = {"router_mapping": {"anchor": "query", "positive": "document"}}
    expected = train(stock, tmp_path / "stock", ahead=False, **options)
    assert train(packed, tmp_path / "packed", ahead=True, **options) == pytest.approx(
        expected,
        rel=1e-4,
    )


def test_batches_are_made_in_a_thread_and_their_errors_come_out() -> None:
    recorded = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        recorded.append(threading.current_thread().name)
        if not rows:
            raise ValueError("no rows")
        return {"x_input_ids": torch.tensor([row["x"] for row in rows]), "dataset_name": "a"}

    pickle.loads(pickle.dumps(AheadCollator(len)))  # noqa: S301 - of our own making
    ahead = AheadCollator(collate)
    batch = ahead([{"x": 1}, {"x": 2}])
    assert isinstance(batch, PendingBatch)
    made = batch.to("cpu", non_blocking=True)
    assert made["x_input_ids"].tolist() == [1, 2] and made["dataset_name"] == "a"
    assert recorded[0].startswith("tilefold-collate")
    refused(ValueError, "no rows", ahead([]).to, "cpu")
    refused(TypeError, "must be a trainer of sentence-transformers", collate_ahead, object())


def test_a_larger_vocabulary_of_the_tokenizer_is_seen(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model)
    with packed_inputs():
        before = model.preprocess(["tilefolding"])["input_ids"]
        model.tokenizer.add_tokens(["tilefolding"])
        after = model.preprocess(["tilefolding"])["input_ids"]
    assert before.numel() > 3 and after.numel() == 3


def test_what_stays_padded_is_told(tokenizer_folder: Path) -> None:
    mpnet = build_tiny_splade("mpnet", tokenizer_folder)
    with pytest.warns(
        UserWarning,
        match="MPNetForMaskedLM runs on padded batches: the attention of",
    ):
        handle = accelerate(mpnet)
    assert set(handle.padded) == {"MPNetForMaskedLM"} and "attention_mask" in mpnet(
        mpnet.preprocess(TEXTS),
    )
    chosen = build_tiny_splade("bert", tokenizer_folder)
    chosen[0].unpad_inputs = False
    assert accelerate(chosen).padded == {"BertForMaskedLM": "unpad_inputs=False was chosen"}
