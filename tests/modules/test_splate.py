"""SPLATE: an adapter between a frozen ColBERT and a frozen MLM head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Transformer

from tests.integrations.splade_models import VOCABULARY, make_tokenizer_folder, tiny_network
from tests.modules.batches import same
from tests.modules.tiny import TEXTS, tiny_masked_lm
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.modules.splate import SplateHead
from tilefold.recipes.colbert import ColbertRecipe, load_base_model
from tilefold.recipes.splate import mlm_head, splate_encoder


@pytest.fixture
def colbert(tiny_lm: str) -> MultiVectorEncoder:
    return load_base_model(ColbertRecipe(tiny_lm, dimension=8, max_length=32, query_length=16))


def masked_lm(folder: str | Path) -> Transformer:
    return Transformer(str(folder), transformer_task="fill-mask", model_kwargs={"local_files_only": True})


def trained(model: SparseEncoder) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_untrained_it_is_the_mlm_head_on_colberts_states(colbert: MultiVectorEncoder, tiny_lm: str) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    features = model.preprocess(TEXTS)
    masked: Any = masked_lm(tiny_lm).model.eval()
    with torch.no_grad():
        logits = masked(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).logits
    expected = (logits.relu().log1p() * features["attention_mask"][:, :, None]).amax(1)
    got = model.encode(TEXTS, convert_to_sparse_tensor=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_formula_and_gradients_by_hand() -> None:
    torch.manual_seed(0)
    head = SplateHead(6, 9, adapter_size=4, activation="gelu", logit_scale=0.5).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    first, _, second = head.adapter
    inner = torch.nn.functional.gelu(hidden @ first.weight.T + first.bias)
    states = hidden + inner @ second.weight.T + second.bias
    states = torch.nn.functional.gelu(states @ head.transform.weight.T + head.transform.bias)
    states = torch.nn.functional.layer_norm(states, (6,), head.norm.weight, head.norm.bias, 1e-12)
    logits = 0.5 * (states @ head.decoder.weight.T + head.decoder.bias)
    expected = (logits.relu().log1p() * mask[:, :, None]).amax(1)
    got = head({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]
    same(got, expected, [hidden, *head.adapter.parameters()])


def test_only_the_adapter_trains_and_the_trunk_has_no_dropout(colbert: MultiVectorEncoder, tiny_lm: str) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    assert trained(model) == {f"1.adapter.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert "1.decoder.bias" in trained(splate_encoder(colbert, masked_lm(tiny_lm), train_bias=True, device="cpu"))
    model.train()
    assert model[0].training and not model[0].model.training
    first, second = (model(model.preprocess(TEXTS))["sentence_embedding"] for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None for p in model[1].adapter[2].parameters())


def test_it_reloads_fuses_and_encodes_sparse_rows(colbert: MultiVectorEncoder, tiny_lm: str, tmp_path: Path) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), adapter_size=8, device="cpu")
    torch.nn.init.normal_(model[1].adapter[2].weight)
    vectors = model.encode_query(TEXTS, convert_to_sparse_tensor=False)
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(again.encode_query(TEXTS, convert_to_sparse_tensor=False), vectors)
    assert trained(again) == trained(model) and again[0].query_length == 16
    with accelerate(again):
        torch.testing.assert_close(again.encode_query(TEXTS, convert_to_sparse_tensor=False), vectors)
    torch.testing.assert_close(encode_sparse(again, TEXTS, task="query").to_dense(), vectors, rtol=0, atol=1e-6)
    (tmp_path / "1_SplateHead" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1_SplateHead/model\.safetensors is missing"):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"])
def test_heads_of_masked_models_are_copied_exactly(kind: str) -> None:
    network = tiny_network(kind, vocab_size=120).eval()
    head = mlm_head(network)
    ids = torch.arange(5, 15).view(2, 5)
    states: list[torch.Tensor] = []
    trunk = network.base_model.register_forward_hook(lambda _, __, out: states.append(out[0]))
    with torch.no_grad():
        logits = network(input_ids=ids).logits
    trunk.remove()
    got = head({"token_embeddings": states[0], "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
    torch.testing.assert_close(got, logits.relu().log1p().amax(1), rtol=0, atol=1e-5)


def test_what_does_not_fit_together_is_refused(colbert: MultiVectorEncoder, tmp_path: Path) -> None:
    other = tiny_masked_lm(tmp_path / "other")
    make_tokenizer_folder(other, VOCABULARY)
    tiny_network("bert").save_pretrained(str(other))
    with pytest.raises(ValueError, match=r"masked_lm must have ColBERT's width 32 and its tokenizer of \d+ tokens"):
        splate_encoder(colbert, masked_lm(other))
    with pytest.raises(ValueError, match=r"masked_lm must have the MLM head of BERT, .* got LlamaForCausalLM"):
        mlm_head(tiny_network("llama"))
