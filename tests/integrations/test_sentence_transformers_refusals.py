"""What cannot be fused is refused before anything changes, with a reason and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling
from torch import nn

from tests.integrations.splade_models import (
    TEXTS,
    VOCABULARY,
    build_tiny_splade,
    needs_all_causal_logits,
    tiny_transformer,
)
from tilefold.integrations.sentence_transformers import accelerate, is_accelerated, restore


def refuses(model: Any, error: type[Exception], message: str, **options: Any) -> None:
    with pytest.raises(error, match=message):
        accelerate(model, **options)
    assert not is_accelerated(model)
    if isinstance(model, nn.Module):
        assert all("forward" not in vars(module) or isinstance(module, Odd) for module in model.modules())


class Odd(nn.Linear):
    """A linear layer with another forward, as quantised layers have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.0


def test_other_model_classes_are_refused(tokenizer_folder: Path) -> None:
    transformer = tiny_transformer("bert", tokenizer_folder)
    dense = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    refuses(dense, TypeError, r"SparseEncoder or MultiVectorEncoder, got SentenceTransformer; other")
    refuses("naver/splade-v3", TypeError, "got str")
    with pytest.raises(TypeError, match="pass the model, not its path"):
        restore("naver/splade-v3")


def test_an_unknown_implementation_is_refused(tiny_folder: Path) -> None:
    refuses(SparseEncoder(str(tiny_folder), device="cpu"), ValueError, "impl must be one of 'auto'", impl="cuda")


def test_a_sparse_autoencoder_has_no_head_to_fuse(tokenizer_folder: Path) -> None:
    trunk = tiny_transformer("bert", tokenizer_folder).model.base_model
    trunk.save_pretrained(str(tokenizer_folder.parent / "trunk"))
    (tokenizer_folder.parent / "trunk" / "tokenizer.json").write_bytes(
        (tokenizer_folder / "tokenizer.json").read_bytes()
    )
    transformer = Transformer(str(tokenizer_folder.parent / "trunk"))
    model = SparseEncoder(modules=[transformer, Pooling(32), SparseAutoEncoder(32)], device="cpu")
    refuses(model, ValueError, "SpladePooling after a Transformer.*got Transformer, Pooling, SparseAutoEncoder")
    model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
    refuses(model, ValueError, 'model must have an LM head.*transformer_task="fill-mask"')


def test_a_module_between_the_head_and_the_pooling_is_refused(tokenizer_folder: Path) -> None:
    transformer = tiny_transformer("bert", tokenizer_folder)
    between = Normalize(module_input_name="token_embeddings")
    model = SparseEncoder(modules=[transformer, between, SpladePooling()], device="cpu")
    refuses(model, ValueError, "directly follow a Transformer, got Transformer -> Normalize -> SpladePooling")


@needs_all_causal_logits
def test_soft_capped_logits_are_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("gemma2", tokenizer_folder)
    refuses(model, ValueError, "got changed ones in Gemma2ForCausalLM .soft-capping")


def test_a_causal_model_that_keeps_one_token_of_logits_is_refused(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("llama", tokenizer_folder)
    model[0].processing_kwargs = {"text": {"logits_to_keep": 1}}
    refuses(model, ValueError, '"logits_to_keep": 0.*needs sentence-transformers 6.2')


def test_layers_that_are_no_plain_linear_are_refused(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    model.transformers_model.set_output_embeddings(Odd(32, VOCABULARY))
    refuses(model, ValueError, "the LM head must be a torch.nn.Linear.*got .*Odd; keep the LM head out of quantisation")


def test_hooks_and_replaced_forwards_on_the_head_are_refused(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    head = model.transformers_model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *_: None)
    refuses(model, ValueError, "must have no hooks")
    hook.remove()
    head.forward = lambda hidden: hidden
    with pytest.raises(ValueError, match="without device_map"):
        accelerate(model)


def test_a_pooling_subclass_with_its_own_forward_is_refused(tokenizer_folder: Path) -> None:
    class Halved(SpladePooling):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return super().forward(features)

    model = build_tiny_splade("bert", tokenizer_folder, Halved())
    refuses(model, ValueError, "SpladePooling must run its own forward, got Halved")


def test_routes_that_share_a_head_without_pooling_it_are_refused(tokenizer_folder: Path) -> None:
    transformer = tiny_transformer("bert", tokenizer_folder)
    router = Router.for_query_document(
        query_modules=[transformer, Pooling(VOCABULARY)], document_modules=[transformer, SpladePooling()]
    )
    refuses(SparseEncoder(modules=[router], device="cpu"), ValueError, "must feed SpladePooling on every route")


def test_one_pooling_after_two_models_is_refused(tokenizer_folder: Path) -> None:
    router = Router.for_query_document(
        query_modules=[tiny_transformer("bert", tokenizer_folder)],
        document_modules=[tiny_transformer("distilbert", tokenizer_folder)],
    )
    model = SparseEncoder(modules=[router, SpladePooling()], device="cpu")
    refuses(model, ValueError, "give each route its own SpladePooling")


def test_a_model_that_cannot_run_where_it_lies_says_so_and_can_skip_the_check(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    encoder = model.transformers_model.bert.encoder

    def fail(*_: Any) -> None:
        raise RuntimeError("needs a GPU")

    hook = encoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"it raised RuntimeError: needs a GPU; move it .* check=False"):
        accelerate(model)
    assert not is_accelerated(model)
    accelerate(model, check=False)
    hook.remove()
    assert is_accelerated(model)
    model.encode(TEXTS)


def test_a_head_replaced_afterwards_is_noticed(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    accelerate(model)
    model.transformers_model.set_output_embeddings(nn.Linear(32, VOCABULARY))
    with pytest.raises(RuntimeError, match=r"call accelerate\(model\) again"):
        model.encode(TEXTS)
    accelerate(model)
    model.encode(TEXTS)


def test_a_weight_on_another_device_names_data_parallel(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    accelerate(model)
    hidden = torch.zeros(1, 2, 32, device="meta")
    with pytest.raises(RuntimeError, match=r"DataParallel replicates modules.*torchrun"):
        model[1]({"token_embeddings": hidden, "attention_mask": torch.ones(1, 2, device="meta")})
