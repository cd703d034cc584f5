"""Models of our modules, accelerated: the same vectors, gradients and sparse rows; stock
afterwards.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from tokenizers.processors import TemplateProcessing

from tests.integrations.splade_models import without_dropout
from tests.modules.batches import QUERIES, TEXTS
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, is_accelerated
from tilefold.integrations.sentence_transformers.streaming.stream import as_csr
from tilefold.modules import HeadPooling, load_encoder
from tilefold.modules.fused_pooling import ScoreOptions
from tilefold.pipeline.rows import Batch, Window
from tilefold.recipes.encoders import (
    Base,
    BinarySpec,
    ClsMlmSpec,
    EncoderSpec,
    EpicSpec,
    IdfSpec,
    MlmSpec,
    MlpSpec,
    build_encoder,
)

SYSTEMS: dict[str, tuple[EncoderSpec | None, EncoderSpec]] = {
    "unicoil": (None, MlpSpec()),
    "deepimpact": (BinarySpec(trainable=True), MlpSpec()),
    "tilde": (BinarySpec(), ClsMlmSpec()),
    "splade": (None, MlmSpec(drop_special_tokens=True, logit_scale=0.5)),
    "qmlp": (MlpSpec(activation="log1p_relu"), MlmSpec()),
    "sums": (IdfSpec(), MlmSpec(pooling="sum", drop_special_tokens=True)),
    "epic": (MlpSpec(activation="log1p_softplus"), EpicSpec()),
    "windows": (
        MlmSpec(top_k=4, normalize="l2", shared_network=True),
        MlmSpec(top_k=8),
    ),
}
DENSE = {"convert_to_sparse_tensor": False, "show_progress_bar": False}


@pytest.fixture(scope="module", params=SYSTEMS)
def model(request: pytest.FixtureRequest, tiny_lm: str) -> SparseEncoder:
    query, document = SYSTEMS[request.param]
    return build_encoder(query, document, Base(tiny_lm, max_length=32, texts=TEXTS), device="cpu")


def vectors(model: SparseEncoder, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_query(QUERIES, **DENSE, **options), model.encode_document(
        TEXTS,
        **DENSE,
        **options,
    )


def trained_once(model: SparseEncoder) -> dict[str, torch.Tensor]:
    """Scores of queries and documents, and every gradient of a fixed sum of their products."""
    model.zero_grad()
    results: dict[str, torch.Tensor] = {}
    for task, texts in (("query", QUERIES), ("document", TEXTS[:2])):
        results[task] = model(model.preprocess(texts, task=task), task=task)["sentence_embedding"]
    weights = torch.rand(
        results["query"].shape, generator=torch.Generator().manual_seed(0)
    ).double()
    (
        (results["query"] * results["document"] * weights).sum() + (results["document"] ** 2).sum()
    ).backward()
    return results | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def test_vectors_and_gradients_are_the_same(model: SparseEncoder) -> None:
    plain, fused = (without_dropout(copy.deepcopy(model).double()) for _ in range(2))
    expected = trained_once(plain)
    with accelerate(fused):
        got = trained_once(fused)
    assert not is_accelerated(fused) and not any(
        "forward" in vars(module) for module in fused.modules()
    )
    assert got.keys() == expected.keys()
    assert all(
        name in got
        for name, p in model.named_parameters()
        if p.requires_grad and "pooler" not in name
    )
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_sparse_rows_and_saved_vectors_are_those_of_encode(
    model: SparseEncoder,
    tmp_path: Path,
) -> None:
    expected = vectors(model)
    few = vectors(model, max_active_dims=3)
    for place, (task, texts) in enumerate((("query", QUERIES), ("document", TEXTS))):
        rows = encode_sparse(model, texts, task=task, batch_size=5)
        torch.testing.assert_close(rows.to_dense(), expected[place], rtol=1e-5, atol=1e-6)
        best = encode_sparse(model, texts, task=task, top_k=3)
        torch.testing.assert_close(best.to_dense().sum(1), few[place].sum(1), rtol=1e-5, atol=1e-6)
        assert encode_sparse(model, [], task=task).shape == (0, expected[place].size(1))
        with accelerate(model):  # as collections and queries are encoded
            items = list(
                model.encode_sparse_batch.stream([Window(texts)], task=task, to_host=place > 0),
            )
        streamed = as_csr([item for item in items if isinstance(item, Batch)], len(texts))
        torch.testing.assert_close(streamed.to_dense(), expected[place], rtol=1e-5, atol=1e-6)
    assert not is_accelerated(model)
    with accelerate(model):
        model.save_pretrained(str(tmp_path))
    for got, value in zip(
        vectors(load_encoder(str(tmp_path), device="cpu")),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(got, value, rtol=0, atol=0)


def test_fp8_is_for_the_maximum_alone_and_what_cannot_be_fused_is_refused(tiny_lm: str) -> None:
    def built(document: EncoderSpec) -> SparseEncoder:
        return build_encoder(None, document, Base(tiny_lm, max_length=32), device="cpu")

    query, document = SYSTEMS["epic"]  # which keeps a thousand terms
    base = Base(tiny_lm, max_length=32, texts=TEXTS)
    assert build_encoder(query, document, base, device="cpu").max_active_dims == 1000
    few = build_encoder(query, EpicSpec(top_k=5), base, device="cpu")
    assert (few.encode_document(TEXTS, **DENSE) > 0).sum(1).tolist() == [5] * len(TEXTS)
    for spec in (ClsMlmSpec(), EpicSpec()):
        refused(
            ValueError,
            "quantize must be None for pooling",
            accelerate,
            built(spec),
            quantize="fp8",
        )
    with accelerate(built(MlmSpec(drop_special_tokens=True)), quantize="fp8") as model:
        rounded = model.encode(TEXTS, **DENSE)
    exact = model.encode(TEXTS, **DENSE)
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()
    sums = built(MlmSpec(pooling="sum", activation="log1p_softplus"))
    refused(ValueError, "log1p has to be taken of every token", accelerate, sums)
    assert not is_accelerated(sums)


def test_rows_are_pruned_after_what_follows_the_pooling(tiny_lm: str) -> None:
    """A module after the pooling reads whole rows, and nothing but the last one gives sparse ones."""
    base = build_encoder(None, MlmSpec(), Base(tiny_lm, max_length=32), device="cpu")

    class Double(HeadPooling):
        reads_logits = False

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            features["sentence_embedding"] = self.fused_scores(features, None, ScoreOptions())
            return features

        def fused_scores(
            self, features: dict[str, Any], head: Any, score_options: ScoreOptions
        ) -> torch.Tensor:
            rows: torch.Tensor = features["sentence_embedding"]
            assert rows.layout == torch.strided
            return rows / rows.sum(dim=1, keepdim=True)

    model = SparseEncoder(modules=[base[0], base[1], Double()], device="cpu")
    expected = model.encode(TEXTS, max_active_dims=3, **DENSE)
    torch.testing.assert_close(encode_sparse(model, TEXTS, top_k=3).to_dense(), expected)


def test_texts_without_tokens_have_the_same_rows_alone_and_in_a_batch(model: SparseEncoder) -> None:
    fused = copy.deepcopy(model)
    for module in fused.modules():
        tokenizer = getattr(module, "tokenizer", None)
        if tokenizer is not None:
            plain = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
            tokenizer.backend_tokenizer.post_processor = plain
    accelerate(fused)
    for task in ("query", "document"):
        together = encode_sparse(fused, [TEXTS[0], "", " "], task=task).to_dense()
        alone = encode_sparse(fused, [TEXTS[0], "", " "], task=task, batch_size=1).to_dense()
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
        assert together[0].any() and not together[1:].any()
