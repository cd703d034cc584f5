"""The fields of every recipe: wrong values are refused by name, dictionaries come back, and steps follow epochs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tilefold.recipes import ColbertRecipe, EncoderSpec, LsrRecipe, RegularizerSpec, SpladeRecipe, TrainingSettings
from tilefold.recipes._training import total_steps
from tilefold.recipes.adaptation import AdaptationRecipe

EVERY = (SpladeRecipe, ColbertRecipe, LsrRecipe)
# fields of all recipes; a value, and what it must be
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"base_model": ""}, "base_model must be 'minilm', a folder or a model name, got ''"),
    ({"max_steps": -1}, "max_steps must be a whole number of at least 0 or None, got -1"),
    ({"batch_size": 2.5}, "batch_size must be a whole number of at least 2, got 2.5"),
    ({"batch_size": 1}, "batch_size must be a whole number of at least 2, got 1"),
    ({"epochs": float("nan")}, "epochs must be a number greater than 0, got nan"),
    ({"learning_rate": -1.0}, "learning_rate must be a number greater than 0"),
    ({"similarity_scale": float("inf")}, "similarity_scale must be a number greater than 0"),
    ({"warmup_ratio": 1.0}, r"warmup_ratio must be a number in \[0, 1\)"),
    ({"train_max_length": 512}, r"train_max_length must not exceed max_length \(\d+\), got 512"),
    ({"max_length": 0}, "max_length must be a whole number of at least 1"),
    ({"bf16": "yes"}, "bf16 must be True, False or None"),
    ({"graphs": 1}, "graphs must be True or False, got 1"),
    ({"graphs": True, "fused": False}, "graphs must be False without fused, got True"),
    ({"save_steps": True}, "save_steps must be a whole number"),
    ({"save_minutes": -1}, "save_minutes must be a number of at least 0"),
    ({"seed": 2**32}, r"seed must be a whole number of at least 0 and below 2\^32"),
    ({"attention": "sparse"}, "attention must be 'softmax', 'entmax' or None, got 'sparse'"),
    ({"attention": "entmax", "alpha": 2.5}, r"alpha must be a number in \[1, 2\]"),
    ({"attention": "entmax", "anneal_alpha": -0.1}, r"anneal_alpha must be a number in \[0, 1\]"),
    ({"alpha": 1.5}, "alpha must be left out without attention='entmax'"),
    ({"attention": "softmax", "anneal_alpha": 0.5}, "anneal_alpha must be left out"),
]
OWN: list[tuple[Any, dict[str, Any], str]] = [
    (SpladeRecipe, {"document_regularizer": -1e-3}, "document_regularizer must be a number 0 or more"),
    (SpladeRecipe, {"regularizer_warmup_ratio": 0}, "regularizer_warmup_ratio must"),
    (SpladeRecipe, {"frozen_layers": -1}, "frozen_layers must be a whole number"),
    (SpladeRecipe, {"frozen_layers": 1.5}, "frozen_layers must be a whole number"),
    (SpladeRecipe, {"start_percentile": 100}, r"start_percentile must be a number in \(0, 100\)"),
    (LsrRecipe, {"start_deviations": -1}, "start_deviations must be a number 0 or more, or None"),
    (LsrRecipe, {"group_by_length": 1}, "group_by_length must be True or False"),
    (ColbertRecipe, {"dimension": 12}, "dimension must be a multiple of 8 up to 4096 or None, got 12"),
    (ColbertRecipe, {"dimension": 8192}, "dimension must be a multiple"),
    (ColbertRecipe, {"query_length": 0}, "query_length must be a whole number of at least 1"),
    (ColbertRecipe, {"expand_queries": "yes"}, "expand_queries must be True or False"),
    (LsrRecipe, {"loss": {"hinge": 1.0}}, "loss must map names out of infonce, kl"),
    (LsrRecipe, {"loss": {}}, "loss must map names"),
    (LsrRecipe, {"loss": {"kl": 1.0}}, "negatives must be at least 1 for a loss that compares documents with a"),
    (LsrRecipe, {"loss": {"pairwise_softmax": 1.0}}, "negatives must be at least 1 for the loss pairwise_softmax"),
    (LsrRecipe, {"loss": {"infonce": 0}}, r"loss\['infonce'\] must be a number greater than 0"),
    (LsrRecipe, {"query": {"kind": "word2vec"}}, "query: kind must be one of"),
    (LsrRecipe, {"document_regularizer": {"kind": "l0"}}, "document_regularizer: kind must be one of flops, l1"),
    (RegularizerSpec, {"kind": "df_flops", "per_position": True}, "per_position must be False for kind 'df_flops'"),
    (LsrRecipe, {"query_regularizer": {"per_position": True}}, "query_regularizer: per_position must be False"),
    (LsrRecipe, {"document": None}, "document must be an instance of EncoderSpec, got None"),
    (LsrRecipe, {"negatives": -1}, "negatives must be a whole number of at least 0"),
    (LsrRecipe, {"idf_learning_rate": 0}, "idf_learning_rate must be a number greater than 0"),
    (EncoderSpec, {"kind": "mlm", "lora": 4}, "lora does not apply to an encoder of kind 'mlm'"),
    (EncoderSpec, {"kind": "echo", "literal_residual": True}, "literal_residual does not apply"),
    (EncoderSpec, {"kind": "bge_m3", "top_k": 3}, "top_k does not apply"),
    (EncoderSpec, {"kind": "mlm", "trainable": 1}, "trainable does not apply"),
    (EncoderSpec, {"kind": "idf", "trainable": 1}, "trainable must be True or False, got 1"),
    (AdaptationRecipe, {"length": 1}, "length must be a whole number of at least 2, got 1"),
    (AdaptationRecipe, {"activated_weight": -1}, "activated_weight must be a number of at least 0"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "text"), [*((kind, fields, text) for kind in EVERY for fields, text in COMMON), *OWN]
)
def test_a_recipe_names_the_field_that_is_wrong(kind: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        kind(**fields)


@pytest.mark.parametrize(
    "recipe",
    [
        SpladeRecipe("folder", epochs=2, seed=3),
        ColbertRecipe("folder", epochs=2, seed=3, dimension=None),
        LsrRecipe(
            "named",
            "folder",
            EncoderSpec("idf", trainable=True),
            loss={"kl": 1.0, "margin_mse": 0.05},
            negatives=8,
            document_regularizer=RegularizerSpec("df_flops", 0.3, threshold=20),
        ),
        EncoderSpec("mlm", pooling="sum", logit_scale=0.5),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_recipe_survives_json_and_refuses_unknown_fields(recipe: Any) -> None:
    kind = type(recipe)
    assert kind.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.base_model == ("folder" if isinstance(recipe, TrainingSettings) else None)
    with pytest.raises(ValueError, match="unknown recipe fields"):
        kind.from_dict({"temperature": 1})


def test_steps_follow_epochs_unless_they_are_given() -> None:
    assert total_steps(SpladeRecipe(epochs=2, batch_size=4), 10) == 6
    assert total_steps(SpladeRecipe(max_steps=7), 10) == 7
