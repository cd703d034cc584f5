"""HeadPooling, EpicPooling, TokenWeights and SPLATE, compared with their formulas.

They are computed plain and fused, from padded and packed batches, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor
from torch.nn.functional import linear, softplus

from tests.modules.batches import IGNORED, TEXTS, Batch, batch, same, tiny_masked_lm
from tests.recipes.small import VOCABULARY, make_tokenizer_folder, tiny_network
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.losses import TermRecallLoss
from tilefold.modules import EpicPooling, HeadPooling, TokenWeights
from tilefold.modules.fused_pooling import Head, ScoreOptions, SparseOptions
from tilefold.modules.splate import SplateHead
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.encoders import mlm_head, splate_encoder


def log1p_softplus(x: Tensor) -> Tensor:
    return torch.log(1 + softplus(x))


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def log1p_relu(x: Tensor) -> Tensor:
    return torch.log(1 + relu(x))


def log1p_log1p_relu(x: Tensor) -> Tensor:
    return torch.log(1 + log1p_relu(x))


def unchanged(x: Tensor) -> Tensor:
    return x


def largest(rows: Tensor) -> Tensor:
    return rows.max(dim=0).values


def first_row(rows: Tensor) -> Tensor:
    return rows[0]


def last_row(rows: Tensor) -> Tensor:
    return rows[-1]


def sum_of_rows(rows: Tensor) -> Tensor:
    return rows.sum(dim=0)


def mean_of_rows(rows: Tensor) -> Tensor:
    return rows.mean(dim=0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log1p_relu": log1p_relu,
    "log1p_log1p_relu": log1p_log1p_relu,
    "relu": relu,
    "softplus": softplus,
    "log1p_softplus": log1p_softplus,
    "none": unchanged,
}
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": largest,
    "sum": sum_of_rows,
    "mean": mean_of_rows,
    "cls": first_row,
    "last": last_row,
}
FORMS = ("features", "packed")
every_form = pytest.mark.parametrize("form", FORMS)


def plain(module: Any, features: dict[str, Any]) -> Tensor:
    """Scores of a module that is called with logits."""
    return module(features)["sentence_embedding"]


def fused(
    module: Any,
    features: dict[str, Any],
    case: Batch,
    bias: bool = True,
    **options: Any,
) -> Tensor:
    """Scores of a module that computes the logits itself.

    Args:
        module: The module.
        features: Features whose ``token_embeddings`` are hidden states.
        case: The batch, for its weight and bias.
        bias: Whether the head has a bias.
        options: Fields of :class:`ScoreOptions`.
    """
    hidden = features.pop("token_embeddings")
    if "cu_seq_lens_q" in features:
        hidden = hidden.squeeze(0)
    head = Head(hidden, case.weight, case.bias if bias else None)
    return module.fused_scores(features, head, ScoreOptions(**options))


# HeadPooling


def pooled_by_hand(
    case: Batch,
    pooling: str,
    activation: str,
    scale: float,
    ignored: tuple[int, ...],
) -> Tensor:
    """Pool one text and apply one formula at a time."""
    rows = []
    for logits, ids, mask in zip(case.logits(), case.ids, case.mask, strict=True):
        counts = mask.bool() & ~torch.isin(ids, torch.tensor(ignored, dtype=torch.int64))
        if counts.any():
            scores = ACTIVATIONS[activation](scale * logits[counts])
            rows.append(POOLINGS[pooling](scores))
        else:
            rows.append(logits.new_zeros(case.weight.size(0)))
    return torch.stack(rows)


def needs_log1p_per_token(pooling: str, activation: str) -> bool:
    """Whether a pooling cannot be fused, since log1p and it cannot change places."""
    return activation == "log1p_softplus" and pooling in ("sum", "mean")


@every_form
@pytest.mark.parametrize("left", [False, True], ids=["padding right", "padding left"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_and_activation_follows_its_formula(
    pooling: str,
    activation: str,
    left: bool,
    form: str,
) -> None:
    case = batch(left=left)
    ignored = () if pooling == "cls" else IGNORED  # the last text has special tokens only
    module = HeadPooling(pooling, activation, 0.25, ignored)
    expected = pooled_by_hand(case, pooling, activation, 0.25, ignored)
    features = getattr(case, form)
    same(plain(module, features(case.logits())), expected, case.leaves)
    if not needs_log1p_per_token(pooling, activation):
        module.check_fusable()
        same(fused(module, features(case.hidden), case), expected, case.leaves)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_log1p_of_every_token_cannot_be_fused(pooling: str) -> None:
    module = HeadPooling(pooling, "log1p_softplus", 0.25, IGNORED)
    with pytest.raises(ValueError, match="log1p has to be taken of every token"):
        module.check_fusable()


@pytest.mark.parametrize(
    ("stock_activation", "activation"),
    [("relu", "log1p_relu"), ("log1p_relu", "log1p_log1p_relu")],
)
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_options_of_splade_pooling_give_its_results(
    pooling: str,
    stock_activation: str,
    activation: str,
) -> None:
    case = batch()
    features = case.features(case.logits())
    expected = plain(SpladePooling(pooling, stock_activation), dict(features))
    same(plain(HeadPooling(pooling, activation), dict(features)), expected, case.leaves)


def windowed_unit_row(row: Tensor, top_k: int) -> Tensor:
    """Keep the ``top_k`` heaviest terms of a row, and divide it by its norm."""
    if (row > 0).sum() > top_k:
        least = row.sort(descending=True).values[top_k - 1]
        row = row.where(row >= least, 0)
    return row / row.norm() if row.any() else row


@pytest.mark.parametrize("top_k", [3, 12])
def test_a_window_is_applied_before_the_norm(top_k: int) -> None:
    case = batch()
    all_terms = plain(HeadPooling(ignore_ids=IGNORED), case.features(case.logits()))
    assert not all_terms[3].any()  # a text without a token stays 0
    expected = torch.stack([windowed_unit_row(row, top_k) for row in all_terms])
    module = HeadPooling(ignore_ids=IGNORED, top_k=top_k, normalize="l2")
    same(plain(module, case.features(case.logits())), expected, case.leaves)
    same(fused(module, case.features(case.hidden), case), expected, case.leaves)


@pytest.mark.parametrize(
    ("top_k", "least"),
    [
        pytest.param(None, 0.0, id="all terms"),
        pytest.param(3, 0.0, id="3 terms"),
        pytest.param(None, 1.0, id="weights over 1"),
        pytest.param(20, 0.0, id="more than there are"),
    ],
)
def test_sparse_rows_are_the_pruned_dense_ones(top_k: int | None, least: float) -> None:
    case = batch()
    module = HeadPooling(top_k=8)
    dense = plain(module, case.features(case.logits())).detach()
    rows = fused(module, case.features(case.hidden), case, sparse=SparseOptions(top_k, least))
    assert rows.layout == torch.sparse_csr
    expected = dense.where(dense > least, 0)
    if top_k == 3:
        third_weights = expected.sort(descending=True).values[:, 2:3]
        expected = expected.where(expected >= third_weights, 0)
    torch.testing.assert_close(rows.to_dense(), expected, rtol=1e-12, atol=0)


def test_normalised_rows_are_dense_since_the_norm_needs_all_terms() -> None:
    case = batch()
    module = HeadPooling(normalize="l2")
    rows = fused(module, case.features(case.hidden), case, sparse=SparseOptions(3, 0.0))
    assert rows.layout == torch.strided


@every_form
def test_a_mask_from_an_earlier_module_confines_the_pooling(form: str) -> None:
    case = batch()
    features = getattr(case, form)
    pooling_mask = case.mask.clone()
    pooling_mask[:, :2] = 0  # the last text has nothing left
    module = HeadPooling("mean", "softplus")
    expected = pooled_by_hand(case._replace(mask=pooling_mask), "mean", "softplus", 1.0, ())
    logit_features = features(case.logits(), pooling_mask=pooling_mask)
    same(plain(module, logit_features), expected, case.leaves)
    hidden_features = features(case.hidden, pooling_mask=pooling_mask)
    same(fused(module, hidden_features, case), expected, case.leaves)


def test_an_empty_batch_and_empty_texts_are_zero() -> None:
    module = HeadPooling()
    empty_texts = {"token_embeddings": torch.zeros(2, 0, 5), "attention_mask": torch.zeros(2, 0)}
    assert torch.equal(plain(module, empty_texts), torch.zeros(2, 5))
    empty_batch = {
        "token_embeddings": torch.zeros(1, 0, 5),
        "cu_seq_lens_q": torch.zeros(1, dtype=torch.int32),
    }
    assert plain(module, empty_batch).shape == (0, 5)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(HeadPooling(activation="softplus", logit_scale=0.5), id="head"),
        pytest.param(EpicPooling(6, IGNORED), id="epic"),
    ],
)
def test_scores_are_fp32_under_autocast_plain_and_fused(module: HeadPooling | EpicPooling) -> None:
    case = batch()
    hidden, weight, bias = (leaf.detach().float() for leaf in case.leaves)
    states = {"all_layer_embeddings": (torch.randn(hidden.shape),)}
    float_case = case._replace(weight=weight, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_scores = plain(module, case.features(linear(hidden, weight, bias)) | states)
        fused_scores = fused(module, case.features(hidden) | states, float_case)
    assert plain_scores.dtype == fused_scores.dtype == torch.float32
    torch.testing.assert_close(plain_scores, fused_scores, rtol=0.03, atol=0.03)  # bf16 logits


def test_epic_scores_of_texts_without_a_token_are_zero() -> None:
    logits = torch.zeros(2, 0, 9, requires_grad=True)
    features = {
        "token_embeddings": logits,
        "attention_mask": torch.zeros(2, 0),
        "all_layer_embeddings": [torch.zeros(2, 0, 6)],
    }
    scores = EpicPooling(6)(features)["sentence_embedding"]
    scores.sum().backward()
    assert torch.equal(scores, torch.zeros(2, 9))


# EpicPooling, in the order of the framework


def epic_by_hand(case: Batch, module: EpicPooling, states: Tensor, bias: bool = True) -> Tensor:
    """EPIC's formula, in the order of the framework.

    Logits are multiplied by the importance of their token, or by 0 if it is masked or special.
    Softplus, log1p and the maximum over all positions follow. The quality multiplies the result.
    """
    rows = []
    for b in range(len(case.mask)):
        token_scores = []
        for s in range(case.mask.size(1)):
            logits = case.weight @ case.hidden[b, s]
            if bias:
                logits = logits + case.bias
            inner = softplus(module.importance.weight[0] @ states[b, s] + module.importance.bias[0])
            importance = torch.log(1 + inner)
            counts = bool(case.mask[b, s]) and int(case.ids[b, s]) not in IGNORED
            weighted = logits * importance if counts else torch.zeros_like(logits)
            token_scores.append(log1p_softplus(weighted))
        first = int(case.mask[b].nonzero()[0])
        quality = torch.sigmoid(
            module.quality.weight[0] @ states[b, first] + module.quality.bias[0],
        )
        rows.append(largest(torch.stack(token_scores)) * quality)
    return torch.stack(rows)


@pytest.mark.parametrize("left", [False, True], ids=["padding right", "padding left"])
@every_form
def test_epic_follows_its_formula_plain_and_fused(form: str, left: bool) -> None:
    torch.manual_seed(3)
    module = EpicPooling(6, IGNORED).double()
    case = batch(left=left)
    states = torch.randn(case.hidden.shape, dtype=torch.float64, requires_grad=True)
    leaves = [*case.leaves, states, *module.parameters()]

    def features(tokens: Tensor) -> dict[str, Any]:
        inputs: dict[str, Any] = getattr(case, form)(tokens, states=states)
        inputs["all_layer_embeddings"] = (None, inputs["states"])
        return inputs

    expected = epic_by_hand(case, module, states)
    # A masked token scores log(1 + softplus(0)) = 0.5266.
    assert (expected >= 0.5265 * torch.sigmoid(module.quality(states)).min()).all()
    same(plain(module, features(case.logits())), expected, leaves)
    same(fused(module, features(case.hidden), case), expected, leaves)
    without_bias = epic_by_hand(case, module, states, bias=False)
    same(fused(module, features(case.hidden), case, bias=False), without_bias, leaves)


def test_epic_needs_the_states_of_all_layers() -> None:
    case = batch()
    message = (
        r"got \['attention_mask', .*'token_embeddings'.*\]; .*"
        r'config_kwargs=\{"output_hidden_states": True\}'
    )
    with pytest.raises(ValueError, match=message):
        EpicPooling(6, IGNORED).double()(case.features(case.logits()))


def test_a_saturated_quality_of_epic_keeps_its_gradient() -> None:
    torch.manual_seed(3)
    module = EpicPooling(6, IGNORED)
    case = batch()
    with torch.no_grad():
        module.quality.weight.zero_()
        module.quality.bias.fill_(20.0)
    features = case.features(case.logits().float())
    features["all_layer_embeddings"] = (torch.randn(case.hidden.shape),)
    scores = plain(module, features)
    scores.sum().backward()
    slope = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64)).item()
    expected = slope * scores.sum().item()  # the quality itself is 1 in fp32
    assert module.quality.bias.grad.item() == pytest.approx(expected, rel=1e-5, abs=0)


# TokenWeights


def batch_with_a_repeated_term() -> Batch:
    """A batch in which a term occurs three times in a text."""
    case = batch(vocab=19)
    case.ids[2, 1:4] = 7
    return case


def sparse_rows(module: TokenWeights, features: dict[str, Any]) -> Tensor:
    """The sparse scores of a module, as a dense tensor."""
    rows = module.fused_scores(features, None, ScoreOptions(sparse=SparseOptions(None, 0.0)))
    assert rows.layout == torch.sparse_csr
    return rows.to_dense()


def weighed_by_hand(case: Batch, module: TokenWeights, activation: str) -> Tensor:
    """The largest weight of each term's tokens, which may be negative.

    A term that is not in the text weighs 0.
    """
    vocab_size = 19
    rows = []
    for hidden, ids, mask in zip(case.hidden, case.ids, case.mask, strict=True):
        row = [torch.zeros((), dtype=torch.float64)] * vocab_size
        for term in set(ids.tolist()) - set(IGNORED):
            states = hidden[mask.bool() & (ids == term)]
            linear_weights = states @ module.linear.weight[0] + module.linear.bias[0]
            weights = ACTIVATIONS[activation](linear_weights)
            if module.scale is not None:
                weights = weights * module.scale[0]
            row[term] = weights.max()
        rows.append(torch.stack(row))
    return torch.stack(rows)


@every_form
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_term_has_the_largest_weight_of_its_tokens(
    activation: str,
    scale: float | None,
    form: str,
) -> None:
    case = batch_with_a_repeated_term()
    inputs = getattr(case, form)
    module = TokenWeights(6, 19, activation, scale, IGNORED).double().eval()
    expected = weighed_by_hand(case, module, activation).clamp(min=0)
    assert (expected != 0).any()
    assert not expected[:, list(IGNORED)].any()
    features: dict[str, Any] = module(inputs(case.hidden))
    same(features["sentence_embedding"], expected, [case.hidden, *module.parameters()])
    n_tokens = int(case.mask.sum())
    weights_shape = case.mask.shape if form == "features" else (n_tokens,)
    assert features["token_weights"].shape == weights_shape
    rows = sparse_rows(module, inputs(case.hidden))
    torch.testing.assert_close(rows, expected.detach(), rtol=1e-12, atol=0)


@every_form
def test_more_special_tokens_than_the_operator_compares_with(form: str) -> None:
    case = batch(vocab=19)
    inputs = getattr(case, form)
    few = TokenWeights(6, 19, "softplus", ignore_ids=IGNORED).double()
    many = TokenWeights(6, 19, "softplus", ignore_ids=[*IGNORED, *range(100, 180)]).double()
    many.load_state_dict(few.state_dict())
    same(plain(many, inputs(case.hidden)), plain(few, inputs(case.hidden)), [case.hidden])


@every_form
def test_negative_weights_keep_their_gradient_in_training_only(form: str) -> None:
    case = batch_with_a_repeated_term()
    inputs = getattr(case, form)
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    expected = weighed_by_hand(case, module, "none")
    assert (expected < 0).any()
    assert (expected > 0).any()
    leaves = [case.hidden, *module.parameters()]
    same(plain(module, inputs(case.hidden)), expected, leaves)
    evaluated = plain(module.eval(), inputs(case.hidden))
    torch.testing.assert_close(evaluated, expected.clamp(min=0))


@every_form
def test_weights_saturate_like_frequencies_of_bm25_except_in_training(form: str) -> None:
    case = batch_with_a_repeated_term()
    inputs = getattr(case, form)
    unsaturated = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED, saturation=0.1).double()
    module.load_state_dict(unsaturated.state_dict())
    same(plain(module, inputs(case.hidden)), plain(unsaturated, inputs(case.hidden)), [case.hidden])
    # BM25 without length normalisation, for k1 = 10 and frequencies of 100 times the weight.
    k1 = 10.0
    frequency = 100 * plain(unsaturated.eval(), inputs(case.hidden))
    weights = plain(module.eval(), inputs(case.hidden))
    bm25 = frequency * (k1 + 1) / (frequency + k1)
    torch.testing.assert_close(weights * (k1 + 1), bm25)
    assert 0 < (weights > 0).sum() < case.hidden.size(0) * 19
    assert weights.max() < 1
    torch.testing.assert_close(sparse_rows(module, inputs(case.hidden)), weights)


def test_saturation_must_be_positive() -> None:
    with pytest.raises(
        ValueError,
        match="saturation must be a finite number above 0 or None, got 0",
    ):
        TokenWeights(6, 19, saturation=0)


def test_the_loss_of_deepct_reaches_terms_below_zero() -> None:
    case = batch(vocab=19)
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    weight = -0.5
    with torch.no_grad():
        module.linear.weight.zero_()
        module.linear.bias.fill_(weight)
    documents = plain(module, case.features(case.hidden))
    queries = torch.zeros(4, 19, dtype=torch.float64)
    queries[0, case.ids[0, 1]] = 1.0
    loss = TermRecallLoss().compute_loss_from_embeddings([queries, documents])
    # One term of all should weigh 1, the others 0.
    n_terms = int((documents != 0).sum())
    squares = (weight - 0) ** 2 * (n_terms - 1) + (weight - 1) ** 2
    assert loss.item() == pytest.approx(squares / n_terms)
    loss.backward()
    slopes = 2 * (weight - 0) * (n_terms - 1) + 2 * (weight - 1)
    assert module.linear.bias.grad.item() == pytest.approx(slopes / n_terms)


# SPLATE: an adapter between a frozen ColBERT and a frozen MLM head


@pytest.fixture
def colbert(tiny_lm: str) -> MultiVectorEncoder:
    return ColbertRecipe(tiny_lm, dimension=8, max_length=32, query_length=16).build_model()


def masked_lm(folder: str | Path) -> Transformer:
    """Load a masked language model from a folder."""
    return Transformer(
        str(folder),
        transformer_task="fill-mask",
        model_kwargs={"local_files_only": True},
    )


def trainable(model: SparseEncoder) -> set[str]:
    """Names of the parameters that training changes."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def encoded_queries(model: SparseEncoder) -> Tensor:
    """Dense query vectors of the texts."""
    return model.encode_query(TEXTS, convert_to_sparse_tensor=False)


def test_untrained_splate_is_the_mlm_head_on_colberts_states(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    features = model.preprocess(TEXTS)
    network: Any = masked_lm(tiny_lm).model.eval()
    with torch.no_grad():
        output = network(
            input_ids=features["input_ids"],
            attention_mask=features["attention_mask"],
        )
    expected = (output.logits.relu().log1p() * features["attention_mask"][:, :, None]).amax(1)
    vectors = model.encode(TEXTS, convert_to_sparse_tensor=False)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


def test_splate_follows_its_formula_forward_and_backward() -> None:
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
    scores = plain(head, {"token_embeddings": hidden, "attention_mask": mask})
    same(scores, expected, [hidden, *head.adapter.parameters()])


def test_only_the_adapter_of_splate_is_trainable(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    assert trainable(model) == {
        "1.adapter.0.weight",
        "1.adapter.0.bias",
        "1.adapter.2.weight",
        "1.adapter.2.bias",
    }
    with_bias = splate_encoder(colbert, masked_lm(tiny_lm), train_bias=True, device="cpu")
    assert "1.decoder.bias" in trainable(with_bias)


def test_the_frozen_backbone_of_splate_has_no_dropout_in_training(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu").train()
    assert model[0].training
    assert not model[0].model.training
    first = model(model.preprocess(TEXTS))["sentence_embedding"]
    second = model(model.preprocess(TEXTS))["sentence_embedding"]
    assert torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None for p in model[1].adapter[2].parameters())


@pytest.fixture
def splate(colbert: MultiVectorEncoder, tiny_lm: str) -> SparseEncoder:
    """A SPLATE model whose adapter has an effect, as after training."""
    model = splate_encoder(colbert, masked_lm(tiny_lm), adapter_size=8, device="cpu")
    torch.nn.init.normal_(model[1].adapter[2].weight)
    return model


def test_a_reloaded_splate_encodes_the_same_plain_fused_and_sparse(
    splate: SparseEncoder,
    tmp_path: Path,
) -> None:
    vectors = encoded_queries(splate)
    splate.save_pretrained(str(tmp_path))
    reloaded = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(encoded_queries(reloaded), vectors)
    assert trainable(reloaded) == trainable(splate)
    assert reloaded[0].query_length == 16
    with accelerate(reloaded):
        torch.testing.assert_close(encoded_queries(reloaded), vectors)
    sparse = encode_sparse(reloaded, TEXTS, task="query").to_dense()
    torch.testing.assert_close(sparse, vectors, rtol=0, atol=1e-6)


def test_a_splate_folder_without_weights_is_refused(splate: SparseEncoder, tmp_path: Path) -> None:
    splate.save_pretrained(str(tmp_path))
    (tmp_path / "1_SplateHead" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"Could not find 'model\.safetensors'"):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)


def test_splate_loads_weights_that_were_saved_by_torch(
    splate: SparseEncoder,
    tmp_path: Path,
) -> None:
    splate.save_pretrained(str(tmp_path))
    (tmp_path / "1_SplateHead" / "model.safetensors").unlink()
    splate[1].save(str(tmp_path / "1_SplateHead"), safe_serialization=False)
    reloaded = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(encoded_queries(reloaded), encoded_queries(splate))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            None,
            r"config\.json must have options of HeadPooling, got none. Download the complete checkpoint",
            id="no file",
        ),
        pytest.param(
            '{"pooling": "cl',
            r"config\.json must be JSON, got an error: Unterminated",
            id="truncated file",
        ),
        pytest.param(
            "[1]",
            r"config\.json must have options of HeadPooling, got \[1\]",
            id="list",
        ),
        pytest.param(
            '{"pooling": "cls", "later": 1}',
            "got later of a newer release: pip install -U tilefold",
            id="unknown option",
        ),
        pytest.param('{"pooling": "clz"}', "pooling must be one of", id="unknown pooling"),
    ],
)
def test_a_module_without_its_options_is_refused_and_does_not_take_the_defaults(
    tmp_path: Path,
    text: str | None,
    message: str,
) -> None:
    HeadPooling("cls", logit_scale=1 / 16).save(str(tmp_path))
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        HeadPooling.load(str(tmp_path))


def test_half_precision_keeps_small_weights_next_to_large_negative_ones_in_training() -> None:
    module = TokenWeights(1, 9, activation="none").bfloat16()
    torch.nn.init.ones_(module.linear.weight)
    torch.nn.init.zeros_(module.linear.bias)
    features = {
        "token_embeddings": torch.tensor([[[-40.0], [0.03125], [0.5]]], dtype=torch.bfloat16),
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(1, 3),
    }
    scores = plain(module.train(), features)
    assert scores.dtype == torch.bfloat16
    assert scores[0, 5:8].tolist() == [-40.0, 0.03125, 0.5]


@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"],
)
def test_heads_of_masked_models_are_copied_exactly(kind: str) -> None:
    network = tiny_network(kind, vocab_size=120).eval()
    head = mlm_head(network)
    ids = torch.arange(5, 15).view(2, 5)
    states: list[Tensor] = []

    def record_states(backbone: Any, inputs: Any, output: Any) -> None:
        states.append(output[0])

    hook = network.base_model.register_forward_hook(record_states)
    with torch.no_grad():
        logits = network(input_ids=ids).logits
    hook.remove()
    features = {"token_embeddings": states[0], "attention_mask": torch.ones_like(ids)}
    expected = logits.relu().log1p().amax(1)
    torch.testing.assert_close(plain(head, features), expected, rtol=0, atol=1e-5)


def test_a_masked_lm_of_another_width_or_tokenizer_is_refused(
    colbert: MultiVectorEncoder,
    tmp_path: Path,
) -> None:
    folder = tiny_masked_lm(tmp_path / "other")
    make_tokenizer_folder(folder, VOCABULARY)
    tiny_network("bert").save_pretrained(str(folder))
    with pytest.raises(
        ValueError,
        match=r"masked_lm must have ColBERT's width 32 and its tokenizer of \d+ tokens",
    ):
        splate_encoder(colbert, masked_lm(folder))


def test_a_model_without_an_mlm_head_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"masked_lm must have the MLM head of BERT, .* got LlamaForCausalLM",
    ):
        mlm_head(tiny_network("llama"))
