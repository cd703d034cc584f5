"""Checkpoints that remember their attention: transformers and sentence-transformers, alphas by number and learned."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, DistilBertModel, PreTrainedModel

from tests import programs
from tests.integrations.entmax_models import NAMES, batch, model, output, registered  # noqa: F401
from tilefold.integrations.transformers import (
    learn_alpha,
    load_alpha,
    set_alpha,
    use_entmax,
    use_softmax,
)


def saved(made: Any, folder: Path) -> dict[str, Any]:
    made.save_pretrained(str(folder))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_runs_the_attention_and_the_alphas_that_it_was_saved_with(name: str, tmp_path: Path) -> None:
    tokens, mask = batch()
    made = model(name, "eager")
    use_entmax(made, [1.3, 2.0])
    expected = output(made, tokens, mask)
    config = saved(made, tmp_path)
    assert (config["attn_implementation"], config["entmax_alpha"]) == ("entmax", [1.3, 2.0])
    loaded = type(made).from_pretrained(str(tmp_path)).eval()
    assert loaded.config._attn_implementation == "entmax"
    assert torch.equal(output(loaded, tokens, mask), expected)
    again = saved(loaded, tmp_path / "again")  # a model that was loaded remembers it too
    assert (again["attn_implementation"], again["entmax_alpha"]) == ("entmax", [1.3, 2.0])
    use_softmax(loaded, "eager")
    assert {"attn_implementation", "entmax_alpha"} & set(saved(loaded, tmp_path / "softmax")) == set()
    stock = model(name, "eager")
    assert torch.equal(output(loaded, tokens, mask), output(stock, tokens, mask))


def test_a_model_that_was_loaded_by_hand_is_remembered_once_it_ran_and_followed_everywhere(tmp_path: Path) -> None:
    made = model("bert")
    output(made, *batch())
    assert saved(made, tmp_path)["attn_implementation"] == "entmax"
    for asked, runs in (({}, "entmax"), ({"attn_implementation": "sdpa"}, "sdpa")):
        assert AutoModel.from_pretrained(str(tmp_path), **asked).config._attn_implementation == runs
    # without tilefold it raises instead of running softmax
    code = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    done = programs.run("-c", code, tmp_path)
    assert done.returncode != 0 and 'attn_implementation="entmax"` is not supported' in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_learned_alphas_are_saved_and_loaded(name: str, tmp_path: Path, caplog: Any) -> None:
    tokens, mask = batch()
    made = model(name, "eager")
    use_entmax(made, 1.4, learn=True)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if key.endswith("entmax_alpha.theta"):
                parameter.normal_()
    expected = output(made, tokens, mask)
    assert saved(made, tmp_path)["entmax_alpha"] == "learned"
    loaded = type(made).from_pretrained(str(tmp_path)).eval()
    with pytest.raises(ValueError, match=r"call load_alpha\(model, folder\)"):
        output(loaded, tokens, mask)
    alphas = load_alpha(loaded, tmp_path)
    assert len(alphas) == 2 and all(alpha.theta.requires_grad for alpha in alphas)
    assert torch.equal(output(loaded, tokens, mask), expected)
    twin = copy.deepcopy(loaded)
    assert torch.equal(output(twin, tokens, mask), expected)
    set_alpha(loaded, 1.4)  # and back to numbers
    assert not [key for key in loaded.state_dict() if "entmax_alpha" in key] and loaded.config.entmax_alpha == 1.4


def test_learned_alphas_of_a_model_with_a_head_load_without_it_and_from_shards(tmp_path: Path) -> None:
    whole = BertForMaskedLM._from_config(model("bert").config, attn_implementation="entmax")
    for alpha in learn_alpha(whole, [1.2, 1.8]):
        alpha.theta.data.add_(torch.arange(2))
    whole.save_pretrained(str(tmp_path), max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for cls in (BertModel, BertForMaskedLM):
        loaded = cls.from_pretrained(str(tmp_path))
        thetas = [alpha.theta for alpha in load_alpha(loaded, str(tmp_path))]
        assert all(
            torch.equal(mine, module.entmax_alpha.theta)
            for mine, module in zip(thetas, [layer.attention.self for layer in whole.bert.encoder.layer], strict=True)
        )


def test_a_checkpoint_without_learned_alphas_is_refused_and_a_folder_without_one_too(tmp_path: Path) -> None:
    made = model("bert")
    made.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="must hold learned alphas of 2 attention layers, got 0"):
        load_alpha(made, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"must hold one of model.safetensors.* got no such file"):
        load_alpha(made, tmp_path / "empty")


def test_a_model_whose_attention_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match="model must have attention layers"):
        use_entmax(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"alpha must lie in \[1, 2\]"):
        use_entmax(model("bert"), 2.5)

    class Fixed(DistilBertModel):
        _can_set_attn_implementation = classmethod(lambda cls: False)

    small = DistilBertModel.config_class(dim=16, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=20)
    with pytest.raises(ValueError, match="model must support a choice of attention"):
        use_entmax(Fixed._from_config(small, attn_implementation="sdpa"))


TEXTS = ["a list of files", "read json", "threads and locks that wait for each other, one after the other"]


@pytest.mark.parametrize("learned", [False, True])
def test_sentence_transformers_save_and_load_the_attention(
    learned: bool, tokenizer_folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    BertModel(config).save_pretrained(str(tmp_path / "parts"))
    shutil.copytree(tokenizer_folder, tmp_path / "parts", dirs_exist_ok=True)
    transformer = Transformer(str(tmp_path / "parts"), max_seq_length=32)
    made = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu").eval()
    before = made.encode(TEXTS)
    use_entmax(made, 1.5 if learned else [1.3, 2.0], learn=learned)
    for name, parameter in made.named_parameters():
        if name.endswith("theta"):
            parameter.data.add_(torch.tensor([0.5, -0.5]))
    vectors = made.encode(TEXTS)
    assert abs(vectors - before).max() > 1e-4
    folder = tmp_path / "saved"
    made.save_pretrained(str(folder))
    if learned:
        named = json.loads((folder / "modules.json").read_text())[0]["type"]
        assert named == "tilefold.integrations.sentence_transformers.entmax.EntmaxTransformer"
        assert any(key.endswith("entmax_alpha.theta") for key in load_file(folder / "model.safetensors"))
        with pytest.raises(ValueError, match="trust_remote_code"):
            SentenceTransformer(str(folder), device="cpu")
    loaded = SentenceTransformer(str(folder), device="cpu", **({"trust_remote_code": True} if learned else {}))
    assert (loaded.encode(TEXTS) == vectors).all()
    assert isinstance(loaded[0].model, PreTrainedModel)
    assert loaded[0].model.config.entmax_alpha == ("learned" if learned else [1.3, 2.0])
