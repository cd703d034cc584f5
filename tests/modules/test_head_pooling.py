"""HeadPooling beside formulas written by hand: plain, fused, padded on either side and packed, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from torch.nn.functional import softplus

from tests.modules.batches import IGNORED, Batch, batch, same
from tilefold.modules import HeadPooling
from tilefold.modules.fused_pooling import Head, SparseOptions

ACT = {
    "log1p_relu": lambda x: torch.log(1 + x.clamp(min=0)),
    "log1p_log1p_relu": lambda x: torch.log(1 + torch.log(1 + x.clamp(min=0))),
    "relu": lambda x: x.clamp(min=0),
    "softplus": softplus,
    "log1p_softplus": lambda x: torch.log(1 + softplus(x)),
    "none": lambda x: x,
}

POOL = {
    "max": lambda x: x.max(dim=0).values,
    "sum": lambda x: x.sum(dim=0),
    "mean": lambda x: x.mean(dim=0),
    "cls": lambda x: x[0],
    "last": lambda x: x[-1],
}


def by_hand(case: Batch, pooling: str, activation: str, scale: float, ignored: tuple[int, ...]) -> Tensor:
    """One text and one formula at a time."""
    rows = []
    for b in range(len(case.mask)):
        places = [s for s in range(case.mask.size(1)) if case.mask[b, s] and int(case.ids[b, s]) not in ignored]
        if not places:
            rows.append(torch.zeros(case.weight.size(0), dtype=torch.float64))
            continue
        logits = scale * case.logits()[b, places]
        values = ACT[activation](logits)
        rows.append(POOL[pooling](values))
    return torch.stack(rows)


def plain(module: HeadPooling, features: dict[str, Any]) -> Tensor:
    return module(features)["sentence_embedding"]


def fused(module: HeadPooling, features: dict[str, Any], case: Batch, **options: Any) -> Tensor:
    hidden = features.pop("token_embeddings")
    hidden = hidden.squeeze(0) if "cu_seq_lens_q" in features else hidden
    asked = {"out_dtype": None, "impl": "auto", "sparse": None} | options
    return module.fused_scores(features, Head(hidden, case.weight, case.bias), **asked)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("activation", ACT)
@pytest.mark.parametrize("pooling", ["max", "sum", "mean", "cls", "last"])
def test_every_pooling_and_activation_is_its_formula(pooling: str, activation: str, left: bool) -> None:
    case = batch(left=left)
    ignored = () if pooling == "cls" else IGNORED  # the last text has special tokens alone
    module = HeadPooling(pooling, activation, 0.25, ignored)
    expected = by_hand(case, pooling, activation, 0.25, ignored)
    same(plain(module, case.features(case.logits())), expected, case.leaves)
    same(plain(module, case.packed(case.logits())), expected, case.leaves)
    if activation == "log1p_softplus" and pooling in ("sum", "mean"):
        with pytest.raises(ValueError, match="log1p has to be taken of every token"):
            module.check_fusable()
        return
    module.check_fusable()
    same(fused(module, case.features(case.hidden), case), expected, case.leaves)
    same(fused(module, case.packed(case.hidden), case), expected, case.leaves)


@pytest.mark.parametrize("activation", ["log1p_relu", "log1p_log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_the_options_of_stock_give_what_stock_gives(pooling: str, activation: str) -> None:
    case = batch()
    stock = SpladePooling(pooling, {"log1p_relu": "relu", "log1p_log1p_relu": "log1p_relu"}[activation])
    expected = stock(case.features(case.logits()))["sentence_embedding"]
    same(plain(HeadPooling(pooling, activation), case.features(case.logits())), expected, case.leaves)


def test_the_window_is_for_longer_rows_alone_and_comes_before_the_length() -> None:
    case = batch()
    free = plain(HeadPooling(ignore_ids=IGNORED), case.features(case.logits()))
    for k in (3, 12):
        module = HeadPooling(ignore_ids=IGNORED, top_k=k, normalize="l2")
        rows = []
        for row in free:
            kept = row.where(row >= row.sort(descending=True).values[k - 1], 0) if (row > 0).sum() > k else row
            rows.append(kept / kept.norm() if kept.any() else kept)
        expected = torch.stack(rows)
        same(plain(module, case.features(case.logits())), expected, case.leaves)
        same(fused(module, case.features(case.hidden), case), expected, case.leaves)
    assert not free[3].any()  # and a text without a token stays 0


def test_sparse_rows_are_the_dense_ones_without_what_is_asked_to_go() -> None:
    case = batch()
    module = HeadPooling(top_k=8)
    dense = plain(module, case.features(case.logits())).detach()
    for top_k, least in ((None, 0.0), (3, 0.0), (None, 1.0), (20, 0.0)):
        rows = fused(module, case.features(case.hidden), case, sparse=SparseOptions(top_k, least))
        assert rows.layout == torch.sparse_csr
        expected = dense.where(dense > least, 0)
        if top_k == 3:
            expected = expected.where(expected >= expected.sort(descending=True).values[:, 2:3], 0)
        torch.testing.assert_close(rows.to_dense(), expected, rtol=1e-12, atol=0)
    unit = HeadPooling(normalize="l2")
    rows = fused(unit, case.features(case.hidden), case, sparse=SparseOptions(3, 0.0))
    assert rows.layout == torch.strided  # its length is that of the whole row: the caller prunes


@pytest.mark.parametrize("form", ["features", "packed"])
def test_a_mask_from_an_earlier_module_confines_the_pooling(form: str) -> None:
    case = batch()
    only = case.mask.clone()
    only[:, :2] = 0  # the last text has nothing left
    module = HeadPooling("mean", "softplus")
    expected = by_hand(case._replace(mask=only), "mean", "softplus", 1.0, ())
    same(plain(module, getattr(case, form)(case.logits(), pooling_mask=only)), expected, case.leaves)
    same(fused(module, getattr(case, form)(case.hidden, pooling_mask=only), case), expected, case.leaves)


def test_an_empty_batch_and_empty_texts_are_zero() -> None:
    module = HeadPooling()
    none = {"token_embeddings": torch.zeros(2, 0, 5), "attention_mask": torch.zeros(2, 0)}
    assert torch.equal(plain(module, none), torch.zeros(2, 5))
    packed = {"token_embeddings": torch.zeros(1, 0, 5), "cu_seq_lens_q": torch.zeros(1, dtype=torch.int32)}
    assert plain(module, packed).shape == (0, 5)


def test_under_autocast_scores_are_fp32_on_both_ways() -> None:
    case = batch()
    hidden, weight, bias = (leaf.detach().float() for leaf in case.leaves)
    module = HeadPooling(activation="softplus", logit_scale=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        unfused = plain(module, case.features(logits))
        other = case._replace(weight=weight, bias=bias)
        together = fused(module, case.features(hidden), other)
    assert unfused.dtype == together.dtype == torch.float32
    torch.testing.assert_close(unfused, together, rtol=0.03, atol=0.03)  # bf16 logits
