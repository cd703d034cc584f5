"""An accelerated SparseEncoder gives the scores and the gradients of the stock one; what cannot be
so is refused.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import (
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from torch import Tensor, nn

from tests.integrations.splade_models import (
    TEXTS,
    assert_close,
    assert_same_training,
    build_tiny_splade,
    fused_copy,
    scores_and_gradients,
    tiny_transformer,
    without_dropout,
)
from tests.recipes.small import VOCABULARY
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import (
    accelerate,
    encode_sparse,
    is_accelerated,
    restore,
)
from tilefold.modules import StaticQuery
from tilefold.recipes.backbone import minilm_splade


@pytest.mark.slow  # of real size; the tests below train tiny models
@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_minilm_trains_with_the_stock_scores_and_gradients(strategy: str, activation: str) -> None:
    stock: Any = minilm_splade(TEXTS, device="cpu")
    stock[1].pooling_strategy, stock[1].activation_function = strategy, activation
    assert_same_training(without_dropout(stock), without_dropout(fused_copy(stock)))


CAUSAL = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("granite", {"logits_scaling": 4.0}),
]
MODELS: list[Any] = [
    *(
        (kind, {}, pooling, {})
        for kind in (
            "bert",
            "distilbert",
            "roberta",
            "xlm-roberta",
            "modernbert",
            "mpnet",
            "albert",
        )
        for pooling in ({}, {"pooling_strategy": "sum"})
    ),
    ("bert", {}, {"activation_function": "log1p_relu"}, {}),
    ("bert", {}, {"chunk_size": 3}, {}),
    ("bert", {}, {}, {"impl": "reference"}),
    ("bert", {}, {}, {"impl": "tiled"}),
    ("modernbert", {"decoder_bias": False, "tie_word_embeddings": False}, {}, {}),
    *((kind, options, {}, {}) for kind, options in CAUSAL),
]


@pytest.mark.filterwarnings("ignore:MPNetForMaskedLM runs on padded batches")
@pytest.mark.parametrize(("kind", "options", "pooling", "how"), MODELS, ids=str)
def test_models_of_every_kind_train_as_stock(
    kind: str,
    options: dict[str, Any],
    pooling: dict[str, Any],
    how: dict[str, str],
    tokenizer_folder: Path,
) -> None:
    stock = build_tiny_splade(kind, tokenizer_folder, SpladePooling(**pooling), **options)
    if kind in ("llama", "granite"):  # padding on the left
        assert not stock.preprocess(TEXTS)["attention_mask"][:, 0].all()
    assert (stock.transformers_model.get_output_embeddings().bias is None) == (
        "decoder_bias" in options or kind in ("llama", "granite")
    )
    fused = fused_copy(stock, **how)
    assert fused.splade_pooling_chunk_size == stock.splade_pooling_chunk_size
    assert_same_training(without_dropout(stock), without_dropout(fused))
    assert "token_embeddings" not in fused(fused.preprocess(TEXTS))


def hooked(hidden: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    hidden.register_hook(change)
    return hidden


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one percent more": lambda hidden: hooked(hidden, lambda gradient: 1.01 * gradient),
    "without a token": lambda hidden: hooked(
        hidden,
        lambda gradient: gradient.index_fill(1, torch.tensor([2]), 0.0),
    ),
    "rounded": lambda hidden: hidden.bfloat16().to(hidden.dtype),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_fault_is_told_from_rounding(
    pooling: str,
    fault: Callable[[Tensor], Tensor],
    tokenizer_folder: Path,
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling))
    fused = fused_copy(stock)
    fused[0].register_forward_hook(
        lambda module, given, features: (
            features | {"token_embeddings": fault(features["token_embeddings"])}
        ),
    )
    refused(
        AssertionError,
        r"error .* allowed",
        assert_same_training,
        without_dropout(stock),
        without_dropout(fused),
    )


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_masks_with_left_padding_holes_and_empty_rows_mean_as_in_stock(
    pooling: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling)).eval()
    fused = fused_copy(stock)
    features = stock.preprocess(TEXTS)
    mask = torch.ones_like(features["attention_mask"])
    mask[0, :3] = 0
    mask[1, 2:5] = 0
    mask[2] = 0
    expected = stock({**features, "attention_mask": mask})["sentence_embedding"]
    got = fused({**features, "attention_mask": mask})["sentence_embedding"]
    assert got[2].count_nonzero() == 0
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_autocast_gives_the_dtypes_and_the_scores_of_stock(
    pooling: str,
    tokenizer_folder: Path,
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder, SpladePooling(pooling))
    fused = fused_copy(stock)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_gradients = scores_and_gradients(without_dropout(stock))
        got, gradients = scores_and_gradients(without_dropout(fused))
        assert_close(fused.encode(TEXTS).to_dense(), stock.encode(TEXTS).to_dense(), 2**-6)
    # the stock logits are rounded to 8 bits before they are compared: half a unit in the last
    # place, and of the sum
    assert_close(got, expected, 2**-6)
    assert all(
        gradients[name].dtype == expected_gradients[name].dtype for name in expected_gradients
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_may_change_its_dtype_after_it_was_accelerated(
    dtype: torch.dtype,
    tokenizer_folder: Path,
) -> None:
    stock = build_tiny_splade("bert", tokenizer_folder).eval()
    fused = fused_copy(stock)
    stock.to(dtype)
    fused.to(dtype)
    with torch.no_grad():
        expected = stock(stock.preprocess(TEXTS))["sentence_embedding"]
        got = fused(fused.preprocess(TEXTS))["sentence_embedding"]
    assert_close(got, expected, 1e-10 if dtype == torch.float64 else 2**-6)


# Which models are accelerated: every route with an LM head, a shared one once; others are refused
# with a remedy


def build(kind: str, folder: Path) -> SparseEncoder:
    document = tiny_transformer("bert", folder)
    if kind == "shared model":
        query = [document, SpladePooling("sum")]
    elif kind == "shared pooling":
        router = Router.for_query_document(query_modules=[document], document_modules=[document])
        return SparseEncoder(modules=[router, SpladePooling()], device="cpu")
    elif kind == "two models":
        query = [
            tiny_transformer("distilbert", folder),
            SpladePooling(activation_function="log1p_relu"),
        ]
    else:
        tokenizer = document.tokenizer
        query = [SparseStaticEmbedding(tokenizer, torch.rand(tokenizer.vocab_size))]
    router = Router.for_query_document(
        query_modules=query,
        document_modules=[document, SpladePooling()],
    )
    return SparseEncoder(modules=[router], device="cpu")


KINDS = {"shared model": 1, "shared pooling": 1, "two models": 2, "static queries": 1}


@pytest.mark.parametrize(("kind", "heads"), KINDS.items())
def test_both_routes_score_and_save_as_stock(
    kind: str,
    heads: int,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    stock = build(kind, tokenizer_folder)
    fused = copy.deepcopy(stock)
    assert accelerate(fused).heads == heads
    for encode in ("encode_query", "encode_document"):
        expected = getattr(stock, encode)(TEXTS).to_dense()
        assert (expected > 0).any()
        assert_close(getattr(fused, encode)(TEXTS).to_dense(), expected, 1e-5)
        few = getattr(stock, encode)(TEXTS, max_active_dims=3).to_dense()
        for model in (stock, fused):
            rows = encode_sparse(model, TEXTS, task=encode.removeprefix("encode_"), top_k=3)
            assert_close(rows.to_dense(), few, 1e-5)
    fused.save_pretrained(str(tmp_path), create_model_card=False)
    saved = SparseEncoder(str(tmp_path), device="cpu")
    assert not is_accelerated(saved) and torch.equal(
        saved.encode_document(TEXTS).to_dense(),
        expected,
    )
    restore(fused)
    assert torch.equal(fused.encode_document(TEXTS).to_dense(), expected)


@pytest.mark.parametrize("own", [False, True])
def test_a_padding_token_in_a_query_of_static_weights_counts_in_no_batch(
    own: bool,
    tokenizer_folder: Path,
) -> None:
    model = build("static queries", tokenizer_folder)
    if own:
        stock = model[0].sub_modules["query"][0]
        model[0].sub_modules["query"][0] = StaticQuery(
            stock.tokenizer,
            stock.weight.detach().clone(),
        )
    longer = "a much longer text than that one is, indeed"
    plain = model.encode_query(["quick fox", longer]).to_dense()
    accelerate(model)
    text = "[PAD][PAD] quick [PAD] fox"
    for rows in (
        torch.stack([model.encode_query(one).to_dense() for one in (text, longer)]),
        model.encode_query([text, longer]).to_dense(),
        model.encode_query([text, longer], batch_size=1).to_dense(),
        encode_sparse(model, [text, longer], task="query").to_dense(),
        encode_sparse(model, [text, longer], task="query", batch_size=1).to_dense(),
        model.encode_sparse_batch([text], task="query").to_dense(),
    ):
        assert_close(rows, plain[: len(rows)], 1e-6)
    restore(model)
    assert "forward" not in vars(model[0].sub_modules["query"][0])
    if own:
        assert_close(model.encode_query([text]).to_dense(), plain[:1], 1e-6)


def refuses(model: Any, error: type[Exception], message: str, **options: Any) -> None:
    refused(error, message, accelerate, model, **options)
    assert not is_accelerated(model)
    if isinstance(model, nn.Module):
        assert all(
            "forward" not in vars(module) or isinstance(module, Odd) for module in model.modules()
        )


class Odd(nn.Linear):
    """A linear layer with another forward, as quantised layers have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.0


def test_other_model_classes_are_refused() -> None:
    refuses(
        nn.Linear(2, 2),
        TypeError,
        r"SparseEncoder, MultiVectorEncoder or SentenceTransformer, got Linear; pass the whole model",
    )
    refuses("naver/splade-v3", TypeError, "got str")
    refused(TypeError, "pass the model, not its path", restore, "naver/splade-v3")


def test_a_sparse_autoencoder_has_no_head_to_fuse(tokenizer_folder: Path) -> None:
    folder = tokenizer_folder.parent / "trunk"
    tiny_transformer("bert", tokenizer_folder).model.base_model.save_pretrained(str(folder))
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    transformer = Transformer(str(folder))
    model = SparseEncoder(modules=[transformer, Pooling(32), SparseAutoEncoder(32)], device="cpu")
    refuses(
        model,
        ValueError,
        "SpladePooling after a Transformer.*got Transformer, Pooling, SparseAutoEncoder",
    )
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    refuses(model, ValueError, 'model must have an LM head.*transformer_task="fill-mask"')


def test_soft_capped_logits_are_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("gemma2", tokenizer_folder)
    refuses(model, ValueError, "got changed logits in Gemma2ForCausalLM .by soft-capping")


def test_a_causal_model_that_keeps_one_token_of_logits_is_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("llama", tokenizer_folder)
    model[0].processing_kwargs = {"text": {"logits_to_keep": 1}}
    refuses(model, ValueError, '"logits_to_keep": 0')


def test_heads_that_are_hooked_replaced_or_no_plain_linear_are_refused(
    model: SparseEncoder,
) -> None:
    refuses(model, ValueError, "impl must be one of 'auto'", impl="cuda")
    head = model.transformers_model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *_: None)
    refuses(model, ValueError, "must have no hooks")
    hook.remove()
    head.forward = lambda hidden: hidden
    refused(ValueError, "without device_map", accelerate, model)
    model.transformers_model.set_output_embeddings(Odd(32, VOCABULARY))
    refuses(
        model,
        ValueError,
        "the LM head must be a torch.nn.Linear.*got .*Odd; .*exclude the LM head from quantisation",
    )


def test_poolings_and_routes_that_do_not_fit_are_refused(tokenizer_folder: Path) -> None:
    class Halved(SpladePooling):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return super().forward(features)

    transformer, other = (
        tiny_transformer(kind, tokenizer_folder) for kind in ("bert", "distilbert")
    )
    between = Normalize(module_input_name="token_embeddings")
    unpooled = Router.for_query_document(
        [transformer, Pooling(VOCABULARY)],
        [transformer, SpladePooling()],
    )
    for modules, message in (
        ([transformer, Halved()], "SpladePooling must run its own forward, got Halved"),
        (
            [transformer, between, SpladePooling()],
            "directly follow a Transformer, .*got Transformer -> Normalize -> Spl",
        ),
        ([unpooled], "must feed a SpladePooling on every route"),
        (
            [Router.for_query_document([transformer], [other]), SpladePooling()],
            "give each route its own SpladePooling",
        ),
    ):
        refuses(SparseEncoder(modules=modules, device="cpu"), ValueError, message)


def test_a_model_that_cannot_run_where_it_lies_says_so_and_can_skip_the_check(
    model: SparseEncoder,
) -> None:
    encoder = model.transformers_model.bert.encoder

    def fail(*_: Any) -> None:
        raise RuntimeError("needs a GPU")

    hook = encoder.register_forward_pre_hook(fail)
    refused(
        RuntimeError,
        r"it raised RuntimeError: needs a GPU; move it .* check=False",
        accelerate,
        model,
    )
    assert not is_accelerated(model)
    accelerate(model, check=False)
    hook.remove()
    assert is_accelerated(model)
    model.encode(TEXTS)


def test_what_happens_to_an_accelerated_head_is_noticed(model: SparseEncoder) -> None:
    accelerate(model)
    model.transformers_model.set_output_embeddings(nn.Linear(32, VOCABULARY))
    refused(RuntimeError, r"call accelerate\(model\) again", model.encode, TEXTS)
    accelerate(model)
    model.encode(TEXTS)
    hidden, mask = torch.zeros(1, 2, 32, device="meta"), torch.ones(1, 2, device="meta")
    features = {"token_embeddings": hidden, "attention_mask": mask}
    refused(RuntimeError, r"DataParallel replicates modules.*torchrun", model[1], features)
