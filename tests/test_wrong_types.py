"""Public functions and classes name an argument of a wrong type, in an error of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilefold import retrieval
from tilefold.losses import (
    AntiZeroLoss,
    DFFlopsLoss,
    GlobalFlopsLoss,
    L1Loss,
    RegularizerSum,
    WeightedLosses,
    activated_lm_loss,
    anti_zero,
    df_weights,
    flops,
)
from tilefold.modules import (
    EpicPooling,
    HeadPooling,
    SplateHead,
    StaticQuery,
    TokenWeights,
    load_encoder,
    to_stock,
)
from tilefold.modules.prosper import literal_residual
from tilefold.modules.window import keep_heaviest
from tilefold.recipes import minilm_splade
from tilefold.recipes._bge_m3 import load_sparse_linear
from tilefold.recipes._splate import splate_encoder
from tilefold.recipes.adaptation import pack_texts
from tilefold.recipes.adapters import check_trainable, merge_adapters, unfreeze_adapters
from tilefold.recipes.loading import load_saved, saved_kind
from tilefold.recipes.onnx_export import export_onnx
from tilefold.retrieval.encoding.on_ray import RayCluster, encode_on_ray
from tilefold.retrieval.encoding.sparse import (
    Output,
    SparseEncoding,
    encode_batch,
    encode_to_folder,
)
from tilefold.retrieval.encoding.tokens import TokenEncoding
from tilefold.retrieval.training_data.mining import FalseNegatives, Window
from tilefold.retrieval.training_data.passages import training_passages
from tilefold.retrieval.training_data.rows import TrainingRows
from tilefold.retrieval.training_data.teachers import with_relevant

SCORES = torch.rand(2, 5)
TOKEN_IDS = torch.tensor([[0, 1], [1, 0]])
FOLDER = Path(os.devnull) / "vectors"  # where nothing can be written
VECTORS = retrieval.SparseVectors.from_rows({"a": {1: 1.0}}, 5)
BATCH: dict[str, Any] = {"texts": ["a"], "kind": "document"}
ON_RAY: dict[str, Any] = {
    "load": dict,
    "texts": {"a": "text"},
    "output_dir": FOLDER,
    "encoding": SparseEncoding(),
}
LM_INPUTS: dict[str, Any] = {
    "hidden": torch.rand(2, 3),
    "weight": torch.rand(4, 3),
    "labels": torch.tensor([0, 1]),
}
COLUMNS: dict[str, Any] = {
    "queries": ["q"],
    "documents": ["a", "b"],
    "offsets": [0, 2],
    "document": [0, 1],
    "relevant": [True, False],
    "rank": [1, 2],
    "retrieved": [2.0, 1.0],
}


def small_collection() -> retrieval.Collection:
    documents = {"a": retrieval.Document("a", "", "one")}
    return retrieval.Collection("c", documents, {"q": "one"}, {"train": {"q": {"a": 1}}})


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        pytest.param(flops, {"scores": SCORES, "threshold": "1"}, "threshold", id="flops"),
        pytest.param(anti_zero, {"scores": SCORES, "epsilon": None}, "epsilon", id="anti-zero"),
        pytest.param(
            df_weights, {"document_frequency": SCORES[0], "alpha": "1"}, "alpha", id="df-alpha"
        ),
        pytest.param(
            df_weights, {"document_frequency": SCORES[0], "beta": None}, "beta", id="df-beta"
        ),
        pytest.param(
            activated_lm_loss, {**LM_INPUTS, "hidden": None}, "hidden", id="activated-hidden"
        ),
        pytest.param(
            activated_lm_loss, {**LM_INPUTS, "labels": [0]}, "labels", id="activated-labels"
        ),
        pytest.param(activated_lm_loss, {**LM_INPUTS, "chunk": "8"}, "chunk", id="activated-chunk"),
        pytest.param(GlobalFlopsLoss, {"threshold": "1"}, "threshold", id="flops-loss"),
        pytest.param(L1Loss, {"threshold": ["1"]}, "threshold", id="l1-loss"),
        pytest.param(DFFlopsLoss, {"threshold": "1"}, "threshold", id="df-flops-threshold"),
        pytest.param(DFFlopsLoss, {"alpha": "1"}, "alpha", id="df-flops-alpha"),
        pytest.param(AntiZeroLoss, {"epsilon": "1"}, "epsilon", id="anti-zero-loss"),
        pytest.param(WeightedLosses, {"terms": None}, "terms", id="losses-none"),
        pytest.param(RegularizerSum, {"terms": [L1Loss()]}, "terms", id="terms-without-weights"),
        pytest.param(RegularizerSum, {"terms": [(L1Loss(), "1")]}, "weight", id="weight-of-term"),
        pytest.param(HeadPooling, {"ignore_ids": None}, "ignore_ids", id="head-pooling"),
        pytest.param(HeadPooling, {"ignore_ids": ["cls"]}, "ignore_ids", id="token-as-text"),
        pytest.param(
            EpicPooling, {"hidden_size": 4, "ignore_ids": 0}, "ignore_ids", id="epic-ignore-ids"
        ),
        pytest.param(
            TokenWeights,
            {"hidden_size": 4, "vocab_size": 9, "scale": "1"},
            "scale",
            id="scale-of-token-weights",
        ),
        pytest.param(StaticQuery, {"tokenizer": "bert"}, "tokenizer", id="static-query"),
        pytest.param(keep_heaviest, {"rows": [[1.0]], "count": 1}, "rows", id="keep-heaviest"),
        pytest.param(load_encoder, {"name_or_path": None}, "name_or_path", id="load-encoder"),
        pytest.param(to_stock, {"model": "minilm"}, "model", id="to-stock"),
        pytest.param(
            minilm_splade,
            {"sample_texts": ["a"], "max_length": "x"},
            "max_length",
            id="length-of-minilm",
        ),
        pytest.param(
            minilm_splade, {"sample_texts": ["a"], "seed": "x"}, "seed", id="seed-of-minilm"
        ),
        pytest.param(
            load_saved, {"name_or_path": None, "kind": "sparse"}, "name_or_path", id="load-saved"
        ),
        pytest.param(saved_kind, {"name_or_path": None}, "name_or_path", id="saved-kind"),
        pytest.param(load_sparse_linear, {"path": None}, "path", id="sparse-linear"),
        pytest.param(
            export_onnx, {"model": "x", "output": FOLDER, "top_k": "8"}, "top_k", id="onnx-top-k"
        ),
        pytest.param(export_onnx, {"model": "x", "output": None}, "output", id="onnx-output"),
        pytest.param(merge_adapters, {"model": "x"}, "model", id="merge-adapters"),
        pytest.param(unfreeze_adapters, {"model": "x"}, "model", id="unfreeze-adapters"),
        pytest.param(check_trainable, {"model": "x"}, "model", id="check-trainable"),
        pytest.param(
            splate_encoder, {"colbert": "x", "masked_lm": "x"}, "colbert", id="splate-colbert"
        ),
        pytest.param(
            pack_texts,
            {"tokenizer": 5, "texts": ["a"], "length": 8},
            "tokenizer",
            id="tokenizer-of-packed-texts",
        ),
        pytest.param(
            literal_residual,
            {"pooled": None, "weight": SCORES, "input_ids": TOKEN_IDS},
            "pooled",
            id="residual-pooled",
        ),
        pytest.param(
            literal_residual,
            {"pooled": SCORES, "weight": [1.0], "input_ids": TOKEN_IDS},
            "weight",
            id="residual-weight",
        ),
        pytest.param(
            literal_residual,
            {"pooled": SCORES, "weight": SCORES, "input_ids": [[0]]},
            "input_ids",
            id="residual-input-ids",
        ),
        pytest.param(
            literal_residual,
            {"pooled": SCORES, "weight": SCORES, "input_ids": TOKEN_IDS, "ignore_ids": ["cls"]},
            "ignore_ids",
            id="residual-ignore-ids",
        ),
        pytest.param(Output, {"folder": "vectors"}, "folder", id="output-folder"),
        pytest.param(
            Output, {"folder": FOLDER, "shard_size": None}, "shard_size", id="output-shard-size"
        ),
        pytest.param(
            Output,
            {"folder": FOLDER, "save_minutes": None},
            "save_minutes",
            id="output-save-minutes",
        ),
        pytest.param(Output, {"folder": FOLDER, "progress": 5}, "progress", id="output-progress"),
        pytest.param(SparseEncoding, {"min_weight": None}, "min_weight", id="min-weight"),
        pytest.param(TokenEncoding, {"source": 5}, "source", id="source-of-tokens"),
        pytest.param(encode_batch, {"model": None, **BATCH}, "model", id="model-of-a-batch"),
        pytest.param(
            encode_to_folder,
            {"encoding": None, "model": None, "texts": {}, "output": None},
            "encoding",
            id="encoding-of-a-folder",
        ),
        pytest.param(
            encode_to_folder,
            {"encoding": SparseEncoding(), "model": None, "texts": {}, "output": "vectors"},
            "output",
            id="output-of-an-encoding",
        ),
        pytest.param(RayCluster, {"address": 5}, "address", id="ray-address"),
        pytest.param(RayCluster, {"patience": "x"}, "patience", id="ray-patience"),
        pytest.param(
            encode_on_ray, {**ON_RAY, "encoding": "sparse"}, "encoding", id="encoding-on-ray"
        ),
        pytest.param(encode_on_ray, {**ON_RAY, "load": "model"}, "load", id="load-on-ray"),
        pytest.param(encode_on_ray, {**ON_RAY, "cluster": "auto"}, "cluster", id="cluster-of-ray"),
        pytest.param(retrieval.DocumentFields, {"id": 5}, "id", id="field-of-ids"),
        pytest.param(retrieval.DocumentFields, {"text": ["body"]}, "text", id="field-of-texts"),
        pytest.param(
            retrieval.write_vectors,
            {"vectors": VECTORS, "path": FOLDER, "shard_size": None},
            "shard_size",
            id="shard-size-of-vectors",
        ),
        pytest.param(retrieval.interpolate, {"runs": [{}], "k": None}, "k", id="k-of-interpolate"),
        pytest.param(Window, {"first": "1", "last": 2, "count": 1}, "first", id="window-first"),
        pytest.param(Window, {"first": 1, "last": None, "count": 1}, "last", id="window-last"),
        pytest.param(Window, {"first": 1, "last": 2, "count": 1.5}, "count", id="window-count"),
        pytest.param(FalseNegatives, {"margin": "1"}, "margin", id="margin"),
        pytest.param(FalseNegatives, {"max_share": "1"}, "max_share", id="max-share"),
        pytest.param(TrainingRows, {**COLUMNS, "offsets": None}, "offsets", id="rows-offsets"),
        pytest.param(
            TrainingRows,
            {**COLUMNS, "document": 3},
            "document",
            id="rows-document",
        ),
        pytest.param(TrainingRows, {**COLUMNS, "rank": ["a", "b"]}, "rank", id="rows-rank"),
        pytest.param(TrainingRows, {**COLUMNS, "teachers": None}, "teachers", id="rows-teachers"),
        pytest.param(TrainingRows, {**COLUMNS, "made_by": "me"}, "made_by", id="rows-made-by"),
        pytest.param(
            with_relevant,
            {"rows": TrainingRows(**COLUMNS), "collection": "c", "split": "train"},
            "collection",
            id="with-relevant",
        ),
        pytest.param(
            training_passages,
            {"passages": 8, "collection": small_collection()},
            "passages",
            id="training-passages",
        ),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(
    function: Callable[..., object],
    arguments: dict[str, Any],
    name: str,
) -> None:
    with pytest.raises(TypeError, match=rf"\b{name}\b.* got "):
        function(**arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        pytest.param(
            EpicPooling, {"hidden_size": "4"}, "hidden_size", id="hidden-size-of-epic-pooling"
        ),
        pytest.param(
            TokenWeights,
            {"hidden_size": None, "vocab_size": 9},
            "hidden_size",
            id="hidden-size-of-token-weights",
        ),
        pytest.param(
            SplateHead, {"hidden_size": 4, "vocab_size": "9"}, "vocab_size", id="vocab-size"
        ),
        pytest.param(keep_heaviest, {"rows": SCORES, "count": "2"}, "count", id="count"),
        pytest.param(
            flops, {"scores": SCORES, "threshold": float("nan")}, "threshold", id="threshold-nan"
        ),
        pytest.param(AntiZeroLoss, {"epsilon": -1.0}, "epsilon", id="epsilon-below-0"),
        pytest.param(HeadPooling, {"ignore_ids": [-1]}, "ignore_ids", id="negative-token-id"),
        pytest.param(FalseNegatives, {"max_share": 1.5}, "max_share", id="share-above-1"),
        pytest.param(
            export_onnx,
            {"model": "x", "output": FOLDER, "quantize": ["int8"]},
            "quantize",
            id="quantize-as-a-list",
        ),
        pytest.param(
            load_saved, {"name_or_path": "x", "kind": "splade"}, "kind", id="kind-of-a-saved-model"
        ),
        pytest.param(Output, {"folder": FOLDER, "shard_size": 0}, "shard_size", id="shards-of-0"),
        pytest.param(RayCluster, {"patience": -1}, "patience", id="negative-patience"),
    ],
)
def test_a_size_or_a_number_out_of_range_is_named(
    function: Callable[..., object],
    arguments: dict[str, Any],
    name: str,
) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.* got "):
        function(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    assert Window(np.int64(1), np.int32(2), np.int64(1)).last == 2
    assert FalseNegatives(margin=np.float32(0.5), max_share=np.float64(0.9)).margin == 0.5
    assert HeadPooling(ignore_ids=np.array([3, 1, 3])).ignore_ids == [1, 3]
