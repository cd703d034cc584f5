"""Stock models with alpha-entmax attention (BERT, RoBERTa, ModernBERT, GPT-2), and checkpoints that
remember it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests import programs
from tests.recipes.small import tiny_network
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

NAMES = ["bert", "roberta", "modernbert", "gpt2"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


def model(name: str, implementation: str = "entmax", **changes: Any) -> Any:
    options = {"attn_implementation": implementation, **changes}
    if name == "gpt2":
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            vocab_size=99,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **options,
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "modernbert":
        options |= {"local_attention": 8, "global_attn_every_n_layers": 2}
    return tiny_network(name, 99, **options).base_model.eval()


def sentence_model(tokenizer_folder: Path, folder: Path, **options: Any) -> Any:
    """A SentenceTransformer of a tiny BERT with the real tokenizer, by way of a checkpoint in
    `folder`.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tiny_network("bert").base_model.save_pretrained(str(folder))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    modules = [Transformer(str(folder), max_seq_length=32), Pooling(32)]
    return SentenceTransformer(modules=modules, device="cpu", **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 99, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 12:] = 0
    mask[2, 3:] = 0
    return tokens, mask


def output(made: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    result = made(input_ids=tokens, attention_mask=mask)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


@pytest.mark.parametrize("name", NAMES)
def test_alpha_one_is_the_models_own_softmax(name: str) -> None:
    tokens, mask = batch()
    stock, mine = model(name, "eager"), model(name, entmax_alpha=1.0)
    mine.load_state_dict(stock.state_dict())
    kept = mask.bool()
    found, expected = (output(made, tokens, mask)[kept] for made in (mine, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_attended_to_wherever_it_is_and_gradients_flow(name: str) -> None:
    tokens, mask = batch()
    made = model(name, entmax_alpha=2.0)
    alone = output(made, tokens[2:, :3], mask[2:, :3])
    torch.testing.assert_close(output(made, tokens, mask)[2:, :3], alone, rtol=1e-4, atol=1e-5)
    mask[0, :7] = 0  # left
    mask[1, 4:9] = 0  # a hole
    outputs = []
    for filler in (5, 7):
        changed = tokens.clone()
        changed[mask == 0] = filler
        outputs.append(output(made, changed, mask)[mask.bool()])
    assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())
    made.train()
    output(made, tokens, mask)[mask.bool()].sum().backward()
    grads = [p.grad for n, p in made.named_parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads)


def test_cross_attention_takes_the_mask_of_the_encoder() -> None:
    decoder: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
    stock, mine = model("bert", "eager", **decoder), model("bert", entmax_alpha=1.0, **decoder)
    mine.load_state_dict(stock.state_dict())
    tokens, mask = batch()
    keep = torch.ones(3, 11)
    keep[1, 5:] = keep[2, :4] = 0
    states = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(2))
    given = {
        "attention_mask": mask,
        "encoder_hidden_states": states,
        "encoder_attention_mask": keep,
    }
    found, expected = (
        m(input_ids=tokens, **given).last_hidden_state[mask.bool()] for m in (mine, stock)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_alpha_reaches_models_with_a_head_and_is_not_replaced_by_a_default() -> None:
    tokens, mask = batch()
    logits = {}
    for alpha in (1.5, 2.0):
        config = model("modernbert", entmax_alpha=alpha).config
        torch.manual_seed(1)
        kind = transformers.ModernBertForSequenceClassification
        made = kind._from_config(config, attn_implementation="entmax").eval()
        logits[alpha] = made(input_ids=tokens, attention_mask=mask).logits
    assert not torch.equal(logits[1.5], logits[2.0])
    set_alpha(made, 1.5)
    assert torch.equal(made(input_ids=tokens, attention_mask=mask).logits, logits[1.5])


def test_models_compile_whole() -> None:
    made = model("modernbert")
    tokens, mask = batch()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    kept = mask.bool()
    torch.testing.assert_close(
        output(compiled, tokens, mask)[kept],
        output(made, tokens, mask)[kept],
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["left", "none"])
def test_gpt2_generates_the_same_with_and_without_a_cache(side: str) -> None:
    made = model("gpt2")
    tokens, mask = batch()[0][:2, :6], torch.ones(2, 6, dtype=torch.long)
    if side == "left":
        mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cached = made.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, made.generate(tokens, use_cache=False, **options))


def test_alphas_by_configuration_by_layer_and_learned() -> None:
    tokens, mask = batch()
    kept = mask.bool()
    by_config = output(model("bert", entmax_alpha=[1.2, 2.0]), tokens, mask)
    made = model("bert")
    plain = output(made, tokens, mask)
    set_alpha(made, [1.2, 2.0])
    assert torch.equal(output(made, tokens, mask)[kept], by_config[kept]) and not torch.equal(
        plain,
        by_config,
    )
    alphas = learn_alpha(made, 1.5)
    torch.testing.assert_close(output(made, tokens, mask)[kept], plain[kept], rtol=1e-4, atol=1e-5)
    output(made, tokens, mask)[kept].square().sum().backward()
    assert len(alphas) == 2 and all(
        a.theta.grad is not None and (a.theta.grad != 0).all() for a in alphas
    )
    assert "encoder.layer.0.attention.self.entmax_alpha.theta" in made.state_dict()
    refused(ValueError, "alpha must be one number or 2", set_alpha, made, [1.5])


def test_what_is_not_supported_is_said() -> None:
    made = model("bert")
    tokens, _ = batch()
    with pytest.raises(ValueError, match=r"attention_mask must be a padding mask \[B, Nk\]"):
        made(input_ids=tokens, attention_mask=torch.ones(3, 1, 20, 20))
    decoder = model("gpt2")
    cache = transformers.StaticCache(config=decoder.config, max_cache_len=16)
    refused(
        ValueError,
        "use a dynamic cache",
        decoder,
        input_ids=tokens[:, :4],
        past_key_values=cache,
    )
    packs = torch.cat([torch.arange(12), torch.arange(8)])[None].expand(3, -1)
    with pytest.raises(
        ValueError,
        match="pass cu_seq_lens_q and cu_seq_lens_k for packed sequences",
    ):
        decoder(input_ids=tokens, position_ids=packs, use_cache=False)
    refused(ValueError, "must not contain 'flash'", register, "flash_entmax")
    unregister()
    refused(ValueError, "entmax", model, "bert")


def saved(made: Any, folder: Path) -> dict[str, Any]:
    made.save_pretrained(str(folder))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_runs_the_attention_and_the_alphas_that_it_was_saved_with(
    name: str,
    tmp_path: Path,
) -> None:
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
    assert {"attn_implementation", "entmax_alpha"} & set(
        saved(loaded, tmp_path / "softmax"),
    ) == set()
    assert torch.equal(output(loaded, tokens, mask), output(model(name, "eager"), tokens, mask))


def test_a_model_that_was_loaded_by_hand_is_remembered_once_it_ran_and_followed_everywhere(
    tmp_path: Path,
) -> None:
    made = model("bert")
    output(made, *batch())
    assert saved(made, tmp_path)["attn_implementation"] == "entmax"
    for asked, runs in (({}, "entmax"), ({"attn_implementation": "sdpa"}, "sdpa")):
        assert (
            transformers.AutoModel.from_pretrained(
                str(tmp_path),
                **asked,
            ).config._attn_implementation
            == runs
        )
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
    refused(ValueError, r"call load_alpha\(model, folder\)", output, loaded, tokens, mask)
    alphas = load_alpha(loaded, tmp_path)
    assert len(alphas) == 2 and all(alpha.theta.requires_grad for alpha in alphas)
    assert torch.equal(output(loaded, tokens, mask), expected)
    assert torch.equal(output(copy.deepcopy(loaded), tokens, mask), expected)
    set_alpha(loaded, 1.4)  # and back to numbers
    assert (
        not [key for key in loaded.state_dict() if "entmax_alpha" in key]
        and loaded.config.entmax_alpha == 1.4
    )


def test_learned_alphas_of_a_model_with_a_head_load_without_it_and_from_shards(
    tmp_path: Path,
) -> None:
    whole = transformers.BertForMaskedLM._from_config(
        model("bert").config,
        attn_implementation="entmax",
    )
    for alpha in learn_alpha(whole, [1.2, 1.8]):
        alpha.theta.data.add_(torch.arange(2))
    whole.save_pretrained(str(tmp_path), max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    right = [layer.attention.self.entmax_alpha.theta for layer in whole.bert.encoder.layer]
    for cls in (transformers.BertModel, transformers.BertForMaskedLM):
        pairs = zip(
            load_alpha(cls.from_pretrained(str(tmp_path)), str(tmp_path)),
            right,
            strict=True,
        )
        assert all(torch.equal(alpha.theta, theta) for alpha, theta in pairs)


def test_a_checkpoint_without_learned_alphas_is_refused_and_a_folder_without_one_too(
    tmp_path: Path,
) -> None:
    made = model("bert")
    made.save_pretrained(str(tmp_path))
    refused(
        ValueError,
        "must hold learned alphas of 2 attention layers, got 0",
        load_alpha,
        made,
        tmp_path,
    )
    (tmp_path / "empty").mkdir()
    refused(
        OSError,
        r"must hold one of model.safetensors.* got no such file",
        load_alpha,
        made,
        tmp_path / "empty",
    )


def test_a_model_whose_attention_cannot_be_chosen_is_refused() -> None:
    refused(ValueError, "model must have attention layers", use_entmax, torch.nn.Linear(2, 2))
    refused(ValueError, r"alpha must lie in \[1, 2\]", use_entmax, model("bert"), 2.5)

    class Fixed(transformers.DistilBertModel):
        _can_set_attn_implementation = classmethod(lambda cls: False)

    small = transformers.DistilBertModel.config_class(
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=16,
        vocab_size=20,
    )
    with pytest.raises(ValueError, match="model must support a choice of attention"):
        use_entmax(Fixed._from_config(small, attn_implementation="sdpa"))


TEXTS = [
    "a list of files",
    "read json",
    "threads and locks that wait for each other, one after the other",
]


@pytest.mark.parametrize("learned", [False, True])
def test_sentence_transformers_keep_the_attention(
    learned: bool,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    from sentence_transformers import SentenceTransformer

    made = sentence_model(tokenizer_folder, tmp_path / "parts").eval()
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
        assert any(
            key.endswith("entmax_alpha.theta") for key in load_file(folder / "model.safetensors")
        )
        refused(ValueError, "trust_remote_code", SentenceTransformer, str(folder), device="cpu")
    loaded = SentenceTransformer(
        str(folder),
        device="cpu",
        **({"trust_remote_code": True} if learned else {}),
    )
    assert (loaded.encode(TEXTS) == vectors).all()
    assert isinstance(loaded[0].model, transformers.PreTrainedModel)
    assert loaded[0].model.config.entmax_alpha == ("learned" if learned else [1.3, 2.0])
