"""Encoders from records: stock modules where they exist, a Router where the sides differ, the same
vectors reloaded.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from tests.modules.batches import QUERIES, TEXTS, tiny_masked_lm
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, restore
from tilefold.modules import HeadPooling, StaticQuery, TokenWeights, load_encoder, to_stock
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


def built(base: str, *sides: EncoderSpec | None) -> SparseEncoder:
    """The query side and the document side; one side alone is shared."""
    query, document = sides if len(sides) == 2 else (None, sides[0])
    return build_encoder(query, document, Base(base, max_length=32, texts=TEXTS), device="cpu")


def vectors(model: SparseEncoder) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"convert_to_sparse_tensor": False, "show_progress_bar": False}
    return model.encode_query(QUERIES, **options), model.encode_document(TEXTS[:4], **options)


def reloaded(
    model: SparseEncoder,
    folder: Path,
    load: Any = load_encoder,
    **options: Any,
) -> SparseEncoder:
    """The model, loaded from what it saved, with the same vectors."""
    model.save_pretrained(str(folder))
    loaded: SparseEncoder = load(str(folder), device="cpu", **options)
    for got, expected in zip(vectors(loaded), vectors(model), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return loaded


@pytest.mark.parametrize(
    ("query", "document"),
    [
        (None, MlmSpec()),
        (None, MlmSpec(pooling="sum", activation="log1p_log1p_relu")),
        (BinarySpec(), MlmSpec()),
        (IdfSpec(), MlmSpec(activation="log1p_log1p_relu")),
        (MlmSpec(), MlmSpec()),
    ],
)
def test_stock_stays_stock(
    tiny_lm: str,
    tmp_path: Path,
    query: EncoderSpec | None,
    document: EncoderSpec,
) -> None:
    model = built(tiny_lm, query, document)
    reloaded(model, tmp_path, SparseEncoder)
    assert not any(
        "tilefold" in path.read_text() for path in tmp_path.rglob("*.json") if "config" in path.name
    )
    assert "tilefold" not in (tmp_path / "modules.json").read_text()
    if query is not None and query.kind == "mlm":  # networks of their own, which are equal
        ours, stock_result = (
            list(model[0].sub_modules[name][0].model.parameters()) for name in ("query", "document")
        )
        assert {id(p) for p in ours}.isdisjoint(id(p) for p in stock_result)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, stock_result, strict=True))


def test_a_shared_network_is_built_and_saved_once(tiny_lm: str, tmp_path: Path) -> None:
    model = built(
        tiny_lm,
        MlmSpec(normalize="l2", shared_network=True),
        MlmSpec(),
    )
    routes = model[0].sub_modules
    assert routes["query"][0] is routes["document"][0]
    loaded = reloaded(model, tmp_path)
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1
    assert loaded[0].sub_modules["query"][0] is loaded[0].sub_modules["document"][0]
    torch.testing.assert_close(vectors(loaded)[0].norm(dim=1), torch.ones(2))


def test_the_limit_of_epic_is_saved_and_its_loss_is_told(tiny_lm: str, tmp_path: Path) -> None:
    model = built(tiny_lm, MlmSpec(), EpicSpec(top_k=7))
    loaded = reloaded(model, tmp_path)
    assert loaded.max_active_dims == 7
    assert (vectors(loaded)[1] > 0).sum(dim=1).tolist() == [7] * 4

    config = tmp_path / "config_sentence_transformers.json"
    saved = json.loads(config.read_text())
    del saved["max_active_dims"]  # as sentence-transformers before 6.2 saved a model
    config.write_text(json.dumps(saved))
    with pytest.warns(UserWarning, match="the model has EpicPooling but no max_active_dims"):
        load_encoder(str(tmp_path), device="cpu")


def test_binary_queries_weigh_each_distinct_token_once(tiny_lm: str) -> None:
    for trainable, made in ((False, SparseStaticEmbedding), (True, StaticQuery)):
        model = built(
            tiny_lm,
            BinarySpec(scale=0.25, trainable=trainable),
            MlmSpec(),
        )
        assert type(model[0].sub_modules["query"][0]) is made
        weights, _ = vectors(model)
        ids = model.tokenizer("csv csv files", add_special_tokens=False)["input_ids"]
        assert weights[1].nonzero().flatten().tolist() == sorted(set(ids))
        assert weights[1].unique().tolist() == [0.0, 0.25]
        assert sum(p.requires_grad for p in model[0].sub_modules["query"].parameters()) == trainable


@pytest.mark.parametrize("trainable", [False, True])
def test_sides_without_a_network_have_the_length_of_the_other(
    tiny_lm: str,
    tmp_path: Path,
    trainable: bool,
) -> None:
    """The position table of 64 cuts the length of the network; a longer one on its other side would
    undo that.
    """
    base = Base(tiny_lm, max_length=256, texts=TEXTS)
    model = build_encoder(
        BinarySpec(trainable=trainable),
        MlmSpec(),
        base,
        device="cpu",
    )
    assert [route[0].max_seq_length for route in model[0].sub_modules.values()] == [64, 64]
    assert reloaded(model, tmp_path).max_seq_length == 64


def test_idf_is_that_of_bm25_over_the_sample(tiny_lm: str, tmp_path: Path) -> None:
    model = built(tiny_lm, IdfSpec(), MlmSpec())
    weight = model[0].sub_modules["query"][0].weight
    place = model.tokenizer.convert_tokens_to_ids
    n = len(TEXTS)
    for token, df in (("functions", n), ("zip", 1), ("submarine", 0)):
        assert weight[place(token)].item() == pytest.approx(
            math.log(1 + (n - df + 0.5) / (df + 0.5)),
            rel=1e-6,
        )
    listed = tmp_path / "idf.json"
    listed.write_text(json.dumps({"zip": 7.5, "csv": 0.0, "notatokenatall": 3.0}))
    read = built(tiny_lm, IdfSpec(idf=str(listed)), MlmSpec())[0].sub_modules["query"][0].weight
    assert [read[place(token)].item() for token in ("zip", "functions", "[UNK]")] == [7.5, 1.0, 1.0]


def test_a_trained_static_query_becomes_the_stock_module(tiny_lm: str, tmp_path: Path) -> None:
    query = built(tiny_lm, IdfSpec(trainable=True), MlmSpec())[0].sub_modules["query"][0]
    with torch.no_grad():
        query.weight.sub_(1.0)  # some become negative, which stock would return
    stock = query.stock()
    assert (query.weight < 0).any() and type(stock) is SparseStaticEmbedding
    features = query.preprocess(["functions that read zip archives"])
    torch.testing.assert_close(
        stock(dict(features))["sentence_embedding"],
        query(dict(features))["sentence_embedding"],
        rtol=0,
        atol=0,
    )
    query.vocab_size += 2
    refused(ValueError, "keep the StaticQuery", query.stock)


def test_token_weights_go_on_from_a_trained_model(tiny_lm: str, tmp_path: Path) -> None:
    first = built(tiny_lm, MlpSpec())
    with torch.no_grad():
        first[1].linear.weight.normal_()
    first.save_pretrained(str(tmp_path))
    again = built(str(tmp_path), MlpSpec())
    assert torch.equal(again[1].linear.weight, first[1].linear.weight)
    torch.testing.assert_close(vectors(again)[1], vectors(first)[1], rtol=0, atol=0)
    refused(
        ValueError, "set scale only if the base model", built, str(tmp_path), MlpSpec(scale=0.5)
    )


def test_what_stock_computes_becomes_stock(tiny_lm: str, tmp_path: Path) -> None:
    model = built(tiny_lm, BinarySpec(trainable=True), MlmSpec())
    routes = model[0].sub_modules
    routes["document"][1] = HeadPooling(activation="log1p_log1p_relu")
    expected = vectors(model)
    accelerate(model)
    refused(ValueError, r"call restore\(model\) first", to_stock, model)
    restore(model)
    assert to_stock(model) == 2 and to_stock(model) == 0
    assert {type(routes["query"][0]), type(routes["document"][1])} == {
        SparseStaticEmbedding,
        SpladePooling,
    }
    for got, value in zip(vectors(reloaded(model, tmp_path, SparseEncoder)), expected, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=0)
    ours = built(tiny_lm, MlmSpec(top_k=3))
    assert to_stock(ours) == 0 and type(ours[1]) is HeadPooling


def test_first_tokens_start_with_terms_to_learn_from() -> None:
    base = Base("minilm", max_length=32, texts=TEXTS)
    query, document = vectors(
        build_encoder(BinarySpec(), ClsMlmSpec(), base, device="cpu"),
    )
    assert ((document > 0).sum(1) > 100).all() and (query @ document.T).count_nonzero() > 0


def test_minilm_starts_every_kind_of_network_without_a_question_to_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sentence_transformers.util.load_file_path",
        lambda name, *_, **__: pytest.fail(name),
    )
    model = built("minilm", MlpSpec(), MlmSpec())
    assert isinstance(model[0], Router) and isinstance(
        model[0].sub_modules["document"][1],
        SpladePooling,
    )
    query, document = vectors(model)
    assert query.shape == (2, 30522) and document.shape == (4, 30522) and (document > 0).any()


def test_modernbert_starts_with_a_sixteenth_of_its_logits(tiny_lm: str, tmp_path: Path) -> None:
    tiny_masked_lm(tmp_path, "modernbert")
    model = built(str(tmp_path), MlmSpec())
    assert model[1].logit_scale == 1 / 16
    network = model[0].model
    assert (
        network.get_output_embeddings().weight is network.get_input_embeddings().weight
    )  # untouched
    full = built(str(tmp_path), MlmSpec(logit_scale=1.0))
    assert type(full[1]) is SpladePooling
    small, large = vectors(model)[1], vectors(full)[1]
    torch.testing.assert_close(small.expm1() * 16, large.expm1(), rtol=1e-4, atol=1e-5)
    assert built(tiny_lm, MlmSpec(top_k=2))[1].logit_scale == 1


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_side_can_keep_the_lowest_layers_alone(tmp_path: Path, kind: str) -> None:
    base = tiny_masked_lm(tmp_path / "base", kind)
    model = built(str(base), MlmSpec(layers=1), MlmSpec())
    networks = [model[0].sub_modules[name][0].model for name in ("query", "document")]
    assert [network.config.num_hidden_layers for network in networks] == [1, 2]
    reloaded(model, tmp_path / "saved")
    refused(
        ValueError,
        "layers: must not exceed the model's 2",
        built,
        str(base),
        MlmSpec(layers=3),
    )


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (partial(EncoderSpec.from_dict, {"kind": "spladd"}), "kind: expected one of"),
        (
            partial(EncoderSpec.from_dict, {"kind": "binary", "pooling": "max"}),
            "pooling: does not apply to an encoder of kind 'binary'",
        ),
        (partial(MlmSpec, logit_scale=-1.0), "logit_scale: expected a number greater than 0"),
        (partial(MlmSpec, top_k=0), "top_k: expected a whole number"),
        (partial(HeadPooling, "median"), "pooling must be one of"),
        (
            partial(HeadPooling, "cls", ignore_ids=[101]),
            "ignore_ids must be empty with pooling 'cls'",
        ),
        (partial(TokenWeights, 8, 9, activation="gelu"), "activation must be one of"),
        ((BinarySpec(),), "has no network, so it cannot encode both"),
        ((BinarySpec(), IdfSpec()), "must have a network, got kinds"),
        (
            (MlmSpec(), MlmSpec(shared_network=True)),
            "set shared_network on the query encoder instead",
        ),
        (
            (MlpSpec(shared_network=True), MlmSpec()),
            "a network for the task 'feature-extraction'",
        ),
    ],
)
def test_wrong_records_are_refused_by_name(tiny_lm: str, made: Any, said: str) -> None:
    refused(ValueError, said, *((built, tiny_lm, *made) if isinstance(made, tuple) else (made,)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a', "idf must name a JSON file of token -> weight, got .*: Unterminated string"),
        ("[1]", "idf must name a JSON file of token -> weight, got a list in"),
        ('{"a": NaN}', "idf: the weight of 'a' in .*: expected a number of at least 0, got nan"),
        ('{"a": "3"}', "idf: the weight of 'a' in .*: expected a number of at least 0, got '3'"),
        (
            '{"zzqq": 3}',
            "idf must name a JSON file of token -> weight, got no token of the model in",
        ),
    ],
)
def test_files_of_weights_that_belong_elsewhere_are_refused(
    tiny_lm: str,
    tmp_path: Path,
    text: str,
    said: str,
) -> None:
    (tmp_path / "idf.json").write_text(text)
    refused(
        ValueError,
        said,
        built,
        tiny_lm,
        IdfSpec(idf=str(tmp_path / "idf.json")),
        MlmSpec(),
    )


def test_document_frequencies_need_texts(tiny_lm: str) -> None:
    message, base = "counts document frequencies in sample texts", Base(tiny_lm, max_length=32)
    refused(ValueError, message, build_encoder, IdfSpec(), MlmSpec(), base)
