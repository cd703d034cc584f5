"""Tests of transformers models with alpha-entmax attention, and of their checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from tests import programs
from tests.integrations.transformers.entmax_models import (
    NAMES,
    batch,
    output,
    registered,  # noqa: F401
    sentence_model,
    tiny_model,
)
from tests.refusals import refused
from tilefold.integrations.transformers import (
    learn_alpha,
    load_alpha,
    register,
    set_alpha,
    unregister,
    use_entmax,
    use_softmax,
)


@pytest.mark.parametrize("name", NAMES)
def test_alpha_1_is_the_softmax_attention_of_the_model(name: str) -> None:
    tokens, mask = batch()
    softmax_model = tiny_model(name, "eager")
    entmax_model = tiny_model(name, entmax_alpha=1.0)
    entmax_model.load_state_dict(softmax_model.state_dict())
    is_token = mask.bool()
    outputs = output(entmax_model, tokens, mask)[is_token]
    expected = output(softmax_model, tokens, mask)[is_token]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_text_has_the_output_of_the_text_without_padding(name: str) -> None:
    tokens, mask = batch()
    model = tiny_model(name, entmax_alpha=2.0)
    padded = output(model, tokens, mask)[2:, :3]
    unpadded = output(model, tokens[2:, :3], mask[2:, :3])
    torch.testing.assert_close(padded, unpadded, rtol=1e-4, atol=1e-5)


def mask_with_padding_everywhere() -> torch.Tensor:
    """Return a mask with padding on the left, in the middle and on the right, ``[3, 20]``."""
    _, mask = batch()
    mask[0, :7] = 0
    mask[1, 4:9] = 0
    return mask


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_do_not_change_the_output(name: str) -> None:
    tokens, _ = batch()
    mask = mask_with_padding_everywhere()
    model = tiny_model(name, entmax_alpha=2.0)
    outputs = []
    for filler in (5, 7):
        filled = tokens.masked_fill(mask == 0, filler)
        outputs.append(output(model, filled, mask)[mask.bool()])
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_padding_are_finite(name: str) -> None:
    tokens, _ = batch()
    mask = mask_with_padding_everywhere()
    model = tiny_model(name, entmax_alpha=2.0).train()
    output(model, tokens, mask)[mask.bool()].sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_cross_attention_takes_the_mask_of_the_encoder() -> None:
    decoder: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
    softmax_model = tiny_model("bert", "eager", **decoder)
    entmax_model = tiny_model("bert", entmax_alpha=1.0, **decoder)
    entmax_model.load_state_dict(softmax_model.state_dict())
    tokens, mask = batch()
    encoder_mask = torch.ones(3, 11)
    encoder_mask[1, 5:] = 0
    encoder_mask[2, :4] = 0
    encoder_states = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(2))

    def decode(model: Any) -> torch.Tensor:
        result = model(
            input_ids=tokens,
            attention_mask=mask,
            encoder_hidden_states=encoder_states,
            encoder_attention_mask=encoder_mask,
        )
        return result.last_hidden_state[mask.bool()]

    expected = decode(softmax_model)
    torch.testing.assert_close(decode(entmax_model), expected, rtol=1e-4, atol=1e-5)


def test_alpha_of_the_configuration_reaches_models_with_a_head() -> None:
    tokens, mask = batch()
    logits = {}
    for alpha in (1.5, 2.0):
        config = tiny_model("modernbert", entmax_alpha=alpha).config
        torch.manual_seed(1)
        model = transformers.ModernBertForSequenceClassification._from_config(
            config,
            attn_implementation="entmax",
        ).eval()
        logits[alpha] = output(model, tokens, mask)
    assert not torch.equal(logits[1.5], logits[2.0])
    set_alpha(model, 1.5)
    assert torch.equal(output(model, tokens, mask), logits[1.5])


def test_models_compile_without_graph_breaks() -> None:
    model = tiny_model("modernbert")
    tokens, mask = batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    is_token = mask.bool()
    expected = output(model, tokens, mask)[is_token]
    torch.testing.assert_close(output(compiled, tokens, mask)[is_token], expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("padding_side", ["left", "none"])
def test_gpt2_generates_the_same_with_and_without_a_cache(padding_side: str) -> None:
    model = tiny_model("gpt2")
    tokens = batch()[0][:2, :6]
    mask = torch.ones(2, 6, dtype=torch.long)
    if padding_side == "left":
        mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cached = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))


def test_set_alpha_has_the_effect_of_the_configuration() -> None:
    tokens, mask = batch()
    is_token = mask.bool()
    by_config = output(tiny_model("bert", entmax_alpha=[1.2, 2.0]), tokens, mask)
    model = tiny_model("bert")
    by_default = output(model, tokens, mask)
    set_alpha(model, [1.2, 2.0])
    assert torch.equal(output(model, tokens, mask)[is_token], by_config[is_token])
    assert not torch.equal(by_default, by_config)


def test_learned_alphas_start_at_the_given_alpha_and_have_gradients() -> None:
    tokens, mask = batch()
    is_token = mask.bool()
    model = tiny_model("bert")
    expected = output(model, tokens, mask)[is_token]  # the default is 1.5
    alphas = learn_alpha(model, 1.5)
    outputs = output(model, tokens, mask)[is_token]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    outputs.square().sum().backward()
    assert len(alphas) == 2
    for alpha in alphas:
        assert alpha.theta.grad is not None
        assert (alpha.theta.grad != 0).all()
    assert "encoder.layer.0.attention.self.entmax_alpha.theta" in model.state_dict()


def test_set_alpha_rejects_another_number_of_layers() -> None:
    model = tiny_model("bert")
    refused(ValueError, "alpha must be one number or 2", set_alpha, model, [1.5])


def test_a_mask_per_query_is_refused() -> None:
    tokens, _ = batch()
    model = tiny_model("bert")
    with pytest.raises(ValueError, match=r"attention_mask must be a padding mask \[B, Nk\]"):
        model(input_ids=tokens, attention_mask=torch.ones(3, 1, 20, 20))


def test_a_static_cache_is_refused() -> None:
    tokens, _ = batch()
    model = tiny_model("gpt2")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match="use a dynamic cache"):
        model(input_ids=tokens[:, :4], past_key_values=cache)


def test_packed_texts_without_their_lengths_are_refused() -> None:
    tokens, _ = batch()
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None].expand(3, -1)
    message = "pass cu_seq_lens_q and cu_seq_lens_k for packed sequences"
    with pytest.raises(ValueError, match=message):
        tiny_model("gpt2")(input_ids=tokens, position_ids=positions, use_cache=False)


def test_a_name_that_transformers_takes_for_flash_attention_is_refused() -> None:
    refused(ValueError, "must not contain 'flash'", register, "flash_entmax")


def test_after_unregister_models_with_entmax_cannot_be_built() -> None:
    unregister()
    refused(ValueError, "entmax", tiny_model, "bert")


def save_and_read_config(model: Any, folder: Path) -> dict[str, Any]:
    """Save a model, and return the configuration in its folder."""
    model.save_pretrained(str(folder))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_runs_the_attention_and_the_alphas_that_it_was_saved_with(
    name: str,
    tmp_path: Path,
) -> None:
    tokens, mask = batch()
    model = tiny_model(name, "eager")
    use_entmax(model, [1.3, 2.0])
    expected = output(model, tokens, mask)
    config = save_and_read_config(model, tmp_path)
    assert config["attn_implementation"] == "entmax"
    assert config["entmax_alpha"] == [1.3, 2.0]
    loaded = type(model).from_pretrained(str(tmp_path)).eval()
    assert loaded.config._attn_implementation == "entmax"
    assert torch.equal(output(loaded, tokens, mask), expected)
    config_of_loaded = save_and_read_config(loaded, tmp_path / "again")
    assert config_of_loaded["attn_implementation"] == "entmax"
    assert config_of_loaded["entmax_alpha"] == [1.3, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_use_softmax_removes_entmax_from_the_model_and_its_checkpoint(
    name: str,
    tmp_path: Path,
) -> None:
    tokens, mask = batch()
    model = tiny_model(name, "eager")
    use_entmax(model, [1.3, 2.0])
    model.save_pretrained(str(tmp_path / "entmax"))
    loaded = type(model).from_pretrained(str(tmp_path / "entmax")).eval()
    use_softmax(loaded, "eager")
    config = save_and_read_config(loaded, tmp_path / "softmax")
    assert "attn_implementation" not in config
    assert "entmax_alpha" not in config
    expected = output(tiny_model(name, "eager"), tokens, mask)
    assert torch.equal(output(loaded, tokens, mask), expected)


@pytest.fixture
def bert_checkpoint(tmp_path: Path) -> Path:
    """The checkpoint of a model that was built with entmax attention and has run."""
    model = tiny_model("bert")
    output(model, *batch())
    config = save_and_read_config(model, tmp_path)
    assert config["attn_implementation"] == "entmax"
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected_implementation"),
    [
        pytest.param({}, "entmax", id="of the checkpoint"),
        pytest.param({"attn_implementation": "sdpa"}, "sdpa", id="of the call"),
    ],
)
def test_auto_model_runs_the_attention_of_the_checkpoint_unless_the_call_names_another(
    bert_checkpoint: Path,
    options: dict[str, str],
    expected_implementation: str,
) -> None:
    loaded = transformers.AutoModel.from_pretrained(str(bert_checkpoint), **options)
    assert loaded.config._attn_implementation == expected_implementation


@pytest.mark.slow
def test_without_tilefold_a_checkpoint_with_entmax_does_not_load(bert_checkpoint: Path) -> None:
    # instead of running softmax
    code = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    process = programs.run("-c", code, bert_checkpoint)
    assert process.returncode != 0
    assert 'attn_implementation="entmax"` is not supported' in process.stderr


@pytest.mark.parametrize("name", NAMES)
def test_learned_alphas_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    tokens, mask = batch()
    model = tiny_model(name, "eager")
    use_entmax(model, 1.4, learn=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("entmax_alpha.theta"):
                parameter.normal_()
    expected = output(model, tokens, mask)
    assert save_and_read_config(model, tmp_path)["entmax_alpha"] == "learned"
    loaded = type(model).from_pretrained(str(tmp_path)).eval()
    refused(ValueError, r"call load_alpha\(model, folder\)", output, loaded, tokens, mask)
    alphas = load_alpha(loaded, tmp_path)
    assert len(alphas) == 2
    assert all(alpha.theta.requires_grad for alpha in alphas)
    assert torch.equal(output(loaded, tokens, mask), expected)
    assert torch.equal(output(copy.deepcopy(loaded), tokens, mask), expected)


@pytest.mark.parametrize("name", NAMES)
def test_set_alpha_replaces_learned_alphas_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, "eager")
    use_entmax(model, 1.4, learn=True)
    model.save_pretrained(str(tmp_path))
    loaded = type(model).from_pretrained(str(tmp_path))
    load_alpha(loaded, tmp_path)
    assert any("entmax_alpha" in key for key in loaded.state_dict())
    set_alpha(loaded, 1.4)
    assert not any("entmax_alpha" in key for key in loaded.state_dict())
    assert loaded.config.entmax_alpha == 1.4


@pytest.mark.parametrize(
    "model_class",
    [transformers.BertModel, transformers.BertForMaskedLM],
)
def test_learned_alphas_of_a_model_with_a_head_load_from_shards_with_and_without_the_head(
    tmp_path: Path,
    model_class: Any,
) -> None:
    model = transformers.BertForMaskedLM._from_config(
        tiny_model("bert").config,
        attn_implementation="entmax",
    )
    for alpha in learn_alpha(model, [1.2, 1.8]):
        alpha.theta.data.add_(torch.arange(2))
    model.save_pretrained(str(tmp_path), max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    alphas = load_alpha(model_class.from_pretrained(str(tmp_path)), str(tmp_path))
    expected = [layer.attention.self.entmax_alpha for layer in model.bert.encoder.layer]
    for alpha, saved_alpha in zip(alphas, expected, strict=True):
        assert torch.equal(alpha.theta, saved_alpha.theta)


def test_load_alpha_rejects_a_checkpoint_without_learned_alphas(tmp_path: Path) -> None:
    model = tiny_model("bert")
    model.save_pretrained(str(tmp_path))
    message = "must hold learned alphas of 2 attention layers, got 0"
    refused(ValueError, message, load_alpha, model, tmp_path)


def test_load_alpha_rejects_a_folder_without_weights(tmp_path: Path) -> None:
    message = r"must hold one of model.safetensors.* got no such file"
    refused(OSError, message, load_alpha, tiny_model("bert"), tmp_path)


def test_use_entmax_rejects_a_module_without_attention() -> None:
    refused(ValueError, "model must have attention layers", use_entmax, torch.nn.Linear(2, 2))


def test_use_entmax_rejects_an_alpha_above_2() -> None:
    refused(ValueError, r"alpha must lie in \[1, 2\]", use_entmax, tiny_model("bert"), 2.5)


class FixedAttentionModel(transformers.DistilBertModel):
    """A model whose attention cannot be chosen."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


def test_use_entmax_rejects_a_model_whose_attention_cannot_be_chosen() -> None:
    config = transformers.DistilBertModel.config_class(
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=16,
        vocab_size=20,
    )
    model = FixedAttentionModel._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="model must support choosing its attention"):
        use_entmax(model)


TEXTS = [
    "a list of files",
    "read json",
    "threads and locks that wait for each other, one after the other",
]


def test_a_sentence_transformer_saves_its_attention(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    model = sentence_model(tokenizer_folder, tmp_path / "parts").eval()
    softmax_vectors = model.encode(TEXTS)
    use_entmax(model, [1.3, 2.0])
    vectors = model.encode(TEXTS)
    assert abs(vectors - softmax_vectors).max() > 1e-4
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert (loaded.encode(TEXTS) == vectors).all()
    assert isinstance(loaded[0].model, transformers.PreTrainedModel)
    assert loaded[0].model.config.entmax_alpha == [1.3, 2.0]


def test_a_sentence_transformer_saves_learned_alphas(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    model = sentence_model(tokenizer_folder, tmp_path / "parts").eval()
    softmax_vectors = model.encode(TEXTS)
    use_entmax(model, 1.5, learn=True)
    for name, parameter in model.named_parameters():
        if name.endswith("theta"):
            parameter.data.add_(torch.tensor([0.5, -0.5]))
    vectors = model.encode(TEXTS)
    assert abs(vectors - softmax_vectors).max() > 1e-4
    folder = tmp_path / "saved"
    model.save_pretrained(str(folder))
    module_type = json.loads((folder / "modules.json").read_text())[0]["type"]
    assert module_type == "tilefold.integrations.sentence_transformers.entmax.EntmaxTransformer"
    weights = load_file(folder / "model.safetensors")
    assert any(name.endswith("entmax_alpha.theta") for name in weights)
    refused(ValueError, "trust_remote_code", SentenceTransformer, str(folder), device="cpu")
    loaded = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    assert (loaded.encode(TEXTS) == vectors).all()
    assert isinstance(loaded[0].model, transformers.PreTrainedModel)
    assert loaded[0].model.config.entmax_alpha == "learned"
