"""Encoders of causal language models, with and without LoRA, and their adaptation; PROSPER, BGE-M3
and SPLATE.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder

from tests.modules import batches
from tests.modules.batches import QUERIES
from tests.recipes.small import FAMILIES, TEXTS, causal_splade, dense, tiny_causal_lm
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.modules import (
    EchoTransformer,
    HeadPooling,
    LexicalWindow,
    ProsperTransformer,
    SplateHead,
    StaticQuery,
    TokenWeights,
    load_encoder,
)
from tilefold.recipes import LsrRecipe, train
from tilefold.recipes._training import use_fp32_weights
from tilefold.recipes.adaptation import AdaptationRecipe, adapt, pack_texts
from tilefold.recipes.adapters import merge_adapters
from tilefold.recipes.decoders import VARIANTS, add_lora, check_bidirectional
from tilefold.recipes.encoders import (
    Base,
    BgeM3Spec,
    BidirectionalSpec,
    BinarySpec,
    CausalSpec,
    ClsMlmSpec,
    EchoSpec,
    EncoderSpec,
    IdfSpec,
    MlmSpec,
    MlpSpec,
    ProsperSpec,
    SplateSpec,
    build_encoder,
    load_sparse_linear,
)
from tilefold.retrieval.data.collection import Collection

SMALL: dict[str, Any] = {
    "batch_size": 2,
    "length": 16,
    "warmup_steps": 0,
    "chunk": 8,
    "bf16": False,
}
RUN: dict[str, Any] = {
    "max_steps": 3,
    "batch_size": 4,
    "max_length": 48,
    "bf16": False,
    "save_steps": 1,
    "learning_rate": 1e-2,
}


def load(folder: str) -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True),
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True),
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bases")
    made = {family: tiny_causal_lm(folder / family, family) for family in FAMILIES}
    made["causal"] = tiny_causal_lm(folder / "causal", texts=[*batches.TEXTS, *QUERIES])
    made["masked"] = batches.tiny_masked_lm(folder / "masked")
    return {name: str(path) for name, path in made.items()}


def reload(model: SparseEncoder, folder: Path) -> SparseEncoder:
    model.save_pretrained(str(folder))
    return SparseEncoder(str(folder), device="cpu", trust_remote_code=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_saving_fusing_change_nothing(
    bases: dict[str, str],
    family: str,
    variant: str,
    tmp_path: Path,
) -> None:
    model = causal_splade(bases[family], variant, max_length=64, device="cpu")
    vectors = dense(model, TEXTS)
    torch.testing.assert_close(
        vectors,
        torch.cat([dense(model, [text]) for text in TEXTS]),
        rtol=0,
        atol=1e-6,
    )
    assert (vectors > 0).any(dim=1).all()
    again = reload(model, tmp_path / "model")
    assert torch.equal(dense(again, TEXTS), vectors)
    with accelerate(again):
        torch.testing.assert_close(dense(again, TEXTS), vectors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["causal", "bidirectional"])
def test_a_bidirectional_first_token_sees_the_last(
    bases: Any,
    variant: str,
    attention: str,
    tmp_path: Path,
) -> None:
    options = {"attn_implementation": attention}
    model = causal_splade(bases["qwen2"], variant, device="cpu", model_kwargs=options)
    model.save_pretrained(str(tmp_path))
    for one in (model, SparseEncoder(str(tmp_path), device="cpu", model_kwargs=options)):
        network: Any = one[0].model.eval()
        assert network.config._attn_implementation == attention
        ids = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 9, 0, 0], [5, 6, 7, 8, 4, 3]])
        mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 3)
        first = network.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        assert torch.equal(first[0], first[1]) is (variant == "causal")
        assert torch.equal(first[0], first[2])  # what is masked is not seen


def test_tied_and_untied_heads_score_with_their_own_matrix(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tiny_causal_lm(tmp_path / str(tied), "qwen2", tie_word_embeddings=tied)
        model = causal_splade(folder, device="cpu")
        network = model[0].model
        assert (
            network.get_output_embeddings().weight is network.get_input_embeddings().weight
        ) is tied
        hidden = network.base_model(
            input_ids=model.preprocess(TEXTS[:1])["input_ids"],
        ).last_hidden_state[0]
        expected = (hidden @ network.lm_head.weight.T).amax(0).relu().log1p()
        torch.testing.assert_close(dense(model, TEXTS[:1])[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_trains_its_own_weights_and_is_merged_into_it(
    bases: dict[str, str],
    variant: str,
    tmp_path: Path,
) -> None:
    model = causal_splade(bases["qwen2"], variant, max_length=64, device="cpu")
    assert add_lora(model[0], rank=4, alpha=8, dropout=0.0)[0] == "q_proj"
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name in trained:
            torch.nn.init.normal_(parameter, std=0.1)
    with accelerate(model):
        model.train()
        model(model.preprocess(TEXTS))["sentence_embedding"].sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name in trained)
    model.eval()
    expected = dense(model, TEXTS)
    assert merge_adapters(model) == 14
    torch.testing.assert_close(dense(model, TEXTS), expected, rtol=0, atol=1e-5)
    assert all(p.requires_grad for p in model.parameters())
    again = reload(model, tmp_path / "merged")
    assert not any("lora" in name for name, _ in again.named_parameters())
    torch.testing.assert_close(dense(again, TEXTS), expected, rtol=0, atol=1e-5)
    if variant == "bidirectional":
        assert again[0].model.config.is_causal is False


@pytest.mark.parametrize(
    ("bf16", "lora", "tolerance", "saved_dtype"),
    [
        pytest.param(False, None, 1e-6, torch.float32, id="all weights in fp32"),
        # Updates are drawn in the dtype of the checkpoint.
        pytest.param(False, 2, 1e-3, torch.float32, id="LoRA in fp32", marks=pytest.mark.slow),
        pytest.param(
            True, None, 1e-6, torch.float32, id="all weights with autocast", marks=pytest.mark.slow
        ),
        # Frozen weights stay in bf16, in which they compute.
        pytest.param(
            True, 2, 1e-2, torch.bfloat16, id="LoRA with autocast", marks=pytest.mark.slow
        ),
    ],
)
def test_a_checkpoint_in_bf16_is_trained_in_fp32(
    bases: dict[str, str],
    collection: Collection,
    tmp_path: Path,
    bf16: bool,
    lora: int | None,
    tolerance: float,
    saved_dtype: torch.dtype,
) -> None:
    network, tokenizer = load(bases["causal"])
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        network.to(torch.bfloat16).to(dtype).save_pretrained(str(tmp_path / name))
        tokenizer.save_pretrained(str(tmp_path / name))
    runs = {}
    for name in ("bf16", "fp32"):
        recipe = LsrRecipe(
            base_model=str(tmp_path / name),
            document=CausalSpec(lora=lora),
            **{**RUN, "bf16": bf16},
        )
        runs[name] = train(recipe, collection, tmp_path / f"trained-{name}")
    assert runs["bf16"].loss == pytest.approx(runs["fp32"].loss, rel=tolerance)
    trained = SparseEncoder(str(tmp_path / "trained-bf16"), device="cpu")
    assert {parameter.dtype for parameter in trained.parameters()} == {saved_dtype}


def test_lora_on_frozen_weights_in_bf16_is_trained_in_fp32(
    bases: dict[str, str],
    tmp_path: Path,
) -> None:
    network, tokenizer = load(bases["causal"])
    network.to(torch.bfloat16).save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    model = causal_splade(str(tmp_path), device="cpu")
    add_lora(model[0], rank=2, alpha=4)
    use_fp32_weights(model, frozen=False)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_gradient_checkpointing_runs_layers_again_and_has_the_same_losses(
    bases: dict[str, str],
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = LsrRecipe(
        base_model=bases["causal"],
        document=CausalSpec(),
        gradient_checkpointing=True,
        **RUN,
    )
    mlp_class = transformers.models.qwen2.modeling_qwen2.Qwen2MLP  # runs once in a layer
    losses, n_forwards = [], []
    for is_recomputed in (False, True):
        run = replace(recipe, gradient_checkpointing=is_recomputed)
        with mock.patch.object(
            mlp_class,
            "forward",
            autospec=True,
            side_effect=mlp_class.forward,
        ) as forward:
            result = train(run, collection, tmp_path / str(is_recomputed))
        losses.append(result.loss)
        n_forwards.append(forward.call_count)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    n_layers, n_steps = 2, RUN["max_steps"]
    assert n_forwards[1] - n_forwards[0] == n_layers * n_steps


def test_texts_are_packed_with_an_end_token_between_them(bases: dict[str, str]) -> None:
    tokenizer = load(bases["qwen2"])[1]
    blocks = pack_texts(tokenizer, TEXTS, 8)
    assert all(len(block) == 8 for block in blocks)
    stream = [token for block in blocks for token in block]
    first = tokenizer(TEXTS[0])["input_ids"]
    assert stream[: len(first) + 1] == [*first, tokenizer.eos_token_id]
    refused(
        ValueError,
        "texts must fill at least one block of 4096 tokens",
        pack_texts,
        tokenizer,
        TEXTS,
        4096,
    )


def test_a_dying_head_comes_back_to_life(bases: dict[str, str]) -> None:
    torch.manual_seed(0)
    network, tokenizer = load(bases["qwen2"])
    # a head whose bias is far below 0: all logits are negative
    head = torch.nn.Linear(32, network.config.vocab_size, bias=True)
    torch.nn.init.normal_(head.weight, std=0.01)
    torch.nn.init.constant_(head.bias, -1.0)
    network.config.tie_word_embeddings = False
    network.lm_head = head
    recipe = AdaptationRecipe(steps=12, learning_rate=2e-2, **SMALL)
    recorded: list[tuple[int, int]] = []
    result = adapt(
        network,
        tokenizer,
        TEXTS * 4,
        recipe,
        progress=lambda step, steps, loss: recorded.append((step, steps)),
    )
    assert result.first_alive_share == 0.0
    assert not result.dying
    assert result.alive_share > 0.9
    assert (
        result.plain_loss < result.first_plain_loss
        and result.activated_loss < result.first_activated_loss
    )
    assert recorded == [(step, 12) for step in range(1, 13)]
    assert result.steps == 12


def test_adaptation_reports_the_blocks_that_its_steps_trained_with(
    bases: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    network, tokenizer = load(bases["qwen2"])
    recipe = AdaptationRecipe(steps=3, batch_size=4, length=16, warmup_steps=0, chunk=8, bf16=False)
    n_blocks = 6  # an epoch has a step of 4 blocks and one of 2
    stream = [token for block in pack_texts(tokenizer, TEXTS * 8, 16) for token in block]
    texts = [tokenizer.decode(stream[: 16 * n_blocks])]
    result = adapt(network, tokenizer, texts, recipe)
    assert result.text_blocks == len(pack_texts(tokenizer, texts, 16)) == n_blocks
    assert (result.steps, result.planned_blocks) == (3, 12)
    assert (result.most_blocks, result.fewest_blocks, result.trained_blocks) == (4, 2, 10)
    assert "3 steps of 2 to 4 blocks, 10 in all (12 in full steps; the texts fill 6)" in str(result)
    assert "the adaptation had 3 steps, which hardly change a model" in result.warnings[0]
    assert capsys.readouterr().out == ""


def test_adaptation_warns_when_the_texts_fill_no_step(bases: dict[str, str]) -> None:
    network, tokenizer = load(bases["qwen2"])
    recipe = AdaptationRecipe(
        steps=1, batch_size=500, length=16, warmup_steps=0, chunk=8, bf16=False
    )
    result = adapt(network, tokenizer, TEXTS, recipe)
    assert result.most_blocks == result.text_blocks < 500
    assert "blocks, fewer than batch_size (500), so no step was full" in result.warnings[-1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"network": "qwen2"}, "network: expected PreTrainedModel, got 'qwen2'", id="network"
        ),
        pytest.param({"tokenizer": None}, "tokenizer: expected a tokenizer", id="tokenizer"),
        pytest.param({"texts": "one text"}, "texts: expected a list, got one string", id="texts"),
        pytest.param({"recipe": "paper"}, "recipe: expected AdaptationRecipe", id="recipe"),
    ],
)
def test_adaptation_names_an_argument_of_a_wrong_type(
    changed: dict[str, Any],
    message: str,
    bases: dict[str, str],
) -> None:
    network, tokenizer = load(bases["qwen2"])
    arguments = {"network": network, "tokenizer": tokenizer, "texts": TEXTS, "recipe": None}
    arguments |= changed
    with pytest.raises(TypeError, match=re.escape(message)):
        adapt(**arguments)


def test_what_cannot_be_built_or_adapted_is_refused(bases: dict[str, str]) -> None:
    refused(
        ValueError,
        "variant must be one of causal, bidirectional, echo, got 'both'",
        causal_splade,
        "m",
        "both",
    )
    message = r"base_model must have a causal LM head, got .*BertForMaskedLM"
    refused(ValueError, message, causal_splade, bases["masked"])
    model = causal_splade(bases["llama"], "causal", device="cpu")
    message = r"needs a model whose attention reads config\.is_causal, got LlamaForCausal"
    refused(ValueError, message, check_bidirectional, model[0].model)
    network, tokenizer = load(bases["qwen2"])
    network.config.is_causal = False
    recipe = AdaptationRecipe(steps=1, **SMALL)
    refused(
        ValueError,
        "network must be causal for next-token prediction",
        adapt,
        network,
        tokenizer,
        TEXTS,
        recipe,
    )
    config = transformers.Gemma2Config(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        final_logit_softcapping=0.05,
    )
    message = "logits must be the outputs of the LM head, but Gemma2ForCausalLM changes them"
    refused(
        ValueError,
        message,
        adapt,
        transformers.Gemma2ForCausalLM(config),
        tokenizer,
        TEXTS,
        recipe,
    )


def built(base: str, document: EncoderSpec, query: EncoderSpec | None = None) -> Any:
    return build_encoder(
        query,
        document,
        Base(base, max_length=48, texts=batches.TEXTS),
        device="cpu",
    )


def vectors(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"convert_to_sparse_tensor": False, "show_progress_bar": False}
    return model.encode_query(QUERIES, **options), model.encode_document(
        batches.TEXTS[:4],
        **options,
    )


WINDOWS = {"top_k": 8, "normalize": "l2", "shared_network": True}


@pytest.mark.parametrize(
    ("base", "document", "query", "made"),
    [
        ("causal", CausalSpec(pooling="last"), None, None),
        ("causal", BidirectionalSpec(logit_scale=0.5, top_k=16), None, None),
        (
            "causal",
            EchoSpec(),
            EchoSpec(pooling="last", shared_network=True),
            EchoTransformer,
        ),
        (
            "causal",
            ProsperSpec(top_k=16),
            ProsperSpec(**WINDOWS),
            ProsperTransformer,
        ),
        (
            "masked",
            ProsperSpec(pooling="cls", literal_residual=False),
            None,
            LexicalWindow,
        ),
        ("masked", BgeM3Spec(), None, TokenWeights),
        ("masked", SplateSpec(), None, SplateHead),
        ("masked", MlpSpec(), None, TokenWeights),
        (
            "masked",
            MlpSpec(activation="none", scale=0.5, drop_special_tokens=False),
            None,
            TokenWeights,
        ),
        ("masked", MlpSpec(), BinarySpec(trainable=True), StaticQuery),
        (
            "masked",
            MlmSpec(drop_special_tokens=True),
            IdfSpec(trainable=True),
            StaticQuery,
        ),
        ("masked", ClsMlmSpec(), None, HeadPooling),
        (
            "masked",
            MlmSpec(pooling="mean", activation="log1p_softplus", logit_scale=0.25),
            MlmSpec(top_k=4, normalize="l2", shared_network=True),
            HeadPooling,
        ),
    ],
)
def test_every_kind_is_built_and_reloads(
    bases: dict[str, str],
    base: str,
    document: EncoderSpec,
    query: EncoderSpec | None,
    made: Any,
    tmp_path: Path,
) -> None:
    if document.kind == "splate":
        document = SplateSpec(head_model=bases[base])
    model = built(bases[base], document, query)
    assert made is None or any(isinstance(module, made) for module in model.modules())
    actual = vectors(model)
    assert all((rows > 0).any(dim=1).all() and torch.isfinite(rows).all() for rows in actual)
    model.save_pretrained(str(tmp_path))
    assert not list(tmp_path.rglob("*.bin"))
    if made is not None:
        refused(ValueError, "trust_remote_code", SparseEncoder, str(tmp_path), device="cpu")
    trusted = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    for loaded in (load_encoder(str(tmp_path), device="cpu"), trusted):
        assert all(map(torch.equal, vectors(loaded), actual))
    assert EncoderSpec.from_dict(document.to_dict()) == document


def test_training_reads_queries_as_encode_query_gives_them(
    bases: dict[str, str],
    collection: Collection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: set[tuple[str | None, bool]] = set()
    stock = EchoTransformer.preprocess

    def preprocess(self: Any, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        recorded.add(
            (kwargs.get("task"), all(text in collection.queries.values() for text in inputs))
        )
        return stock(self, inputs, prompt, **kwargs)

    monkeypatch.setattr(EchoTransformer, "preprocess", preprocess)
    recipe = LsrRecipe(
        "echo",
        bases["causal"],
        document=EchoSpec(lora=2),
        **RUN | {"fused": False},
    )
    train(replace(recipe, max_steps=1), collection, tmp_path / "model")
    assert {("query", True), ("document", False)} <= recorded and not {
        ("query", False),
        ("document", True),
    } & recorded
    assert not any(
        "lora" in name
        for name, _ in load_encoder(str(tmp_path / "model"), device="cpu").named_parameters()
    )


def test_seeds_make_the_literal_matrix_and_lora_trains_alone(bases: dict[str, str]) -> None:
    first, second = (vectors(built(bases["masked"], ProsperSpec()))[1] for _ in range(2))
    assert torch.equal(first, second)
    model = built(bases["causal"], BidirectionalSpec(lora=2))
    assert {
        "lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad
    } == {True}


def test_bge_m3_reads_its_published_head_and_weighs_tokens_by_hand(tmp_path: Path) -> None:
    base = batches.tiny_masked_lm(tmp_path / "base")
    torch.manual_seed(0)
    state = {"weight": torch.randn(1, 32), "bias": torch.tensor([0.3])}
    torch.save(state, base / "sparse_linear.pt")
    model: Any = built(str(base), BgeM3Spec())
    assert torch.equal(model[1].linear.weight, state["weight"])
    features = model.preprocess(batches.TEXTS[:2])
    weights = (model[0](dict(features))["token_embeddings"] @ state["weight"][0] + 0.3).relu()
    expected = torch.zeros(2, model[1].vocab_size)
    for row, column in torch.nonzero(features["attention_mask"]).tolist():
        token = int(features["input_ids"][row, column])
        if token not in model.tokenizer.all_special_ids:
            expected[row, token] = max(
                float(expected[row, token]),
                float(weights[row, column].detach()),
            )
    got = model.encode(batches.TEXTS[:2], convert_to_sparse_tensor=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    (base / "sparse_linear.pt").unlink()
    save_file(
        {"weight": torch.ones(1, 5), "bias": torch.ones(1)},
        base / "sparse_linear.safetensors",
    )
    refused(
        ValueError,
        r"weight of shape \[1, 5\], expected \[1, 32\]",
        built,
        str(base),
        BgeM3Spec(),
    )


def test_bge_m3_holds_a_vocabulary_of_xlm_r() -> None:
    head = TokenWeights(8, 250_002, ignore_ids=[0, 1, 2, 3])
    ids = torch.tensor([[0, 250_001, 2], [0, 7, 249_999]])
    features = {
        "token_embeddings": torch.randn(2, 3, 8),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }
    rows = head(features)["sentence_embedding"]
    assert rows.shape == (2, 250_002) and not rows[:, [0, 1, 2, 3]].any()
    rows.sum().backward()


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def test_a_pickle_of_more_than_tensors_is_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sparse_linear.pt"
    torch.save({"weight": Harmful()}, path)
    message = r"must hold only tensors, .* no code in it was run\. If you trust the file, load it"
    refused(ValueError, message, load_sparse_linear, path)
    path.write_bytes(pickle.dumps(Harmful(), protocol=2))
    refused(ValueError, "must hold only tensors", load_sparse_linear, path)
    assert not (tmp_path / "harmed").exists()
    torch.save({"weight": torch.full((1, 4), torch.nan), "bias": torch.zeros(1)}, path)
    refused(ValueError, "must hold finite numbers, got NaN", load_sparse_linear, path)
    torch.save({"weight": 1, "bias": 2}, path)
    refused(ValueError, r"must hold `weight` \[1, D\] and `bias` \[1\]", load_sparse_linear, path)
    torch.save(torch.nn.Linear(4, 2).state_dict(), path)
    refused(ValueError, r"must hold `weight` \[1, D\] and `bias` \[1\]", load_sparse_linear, path)


@pytest.mark.slow
def test_an_interrupted_run_of_adapters_goes_on(
    bases: dict[str, str],
    collection: Collection,
    tmp_path: Path,
) -> None:
    recipe = LsrRecipe(
        "causal-splade",
        bases["causal"],
        document=BidirectionalSpec(lora=2),
        **RUN,
    )

    def stop(step: int, steps: int, loss: float | None) -> None:
        if step == 2:
            raise RuntimeError("stopped")

    train(recipe, collection, tmp_path / "whole")
    refused(RuntimeError, "stopped", train, recipe, collection, tmp_path / "parts", progress=stop)
    assert train(recipe, collection, tmp_path / "parts").resumed_from > 0
    full, parts = (
        vectors(load_encoder(str(tmp_path / name), device="cpu")) for name in ("whole", "parts")
    )
    for got, expected in zip(parts, full, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert load_encoder(str(tmp_path / "parts"), device="cpu")[0].model.config.is_causal is False


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("prosper", {"literal_residual": False}),
        ("prosper", {"pooling": "cls"}),
        ("causal", {"lora": 2}),
        ("causal", {"base_model": "folder"}),
        ("mlm", {"layers": 2}),
    ],
)
def test_options_of_a_shared_network_stand_on_the_document_side(
    kind: str,
    options: Any,
) -> None:
    values = {"kind": kind, "shared_network": True, **options}
    refused(ValueError, "set it on the document encoder", EncoderSpec.from_dict, values)
