"""HeadPooling, EpicPooling, TokenWeights and SPLATE beside formulas by hand: plain, fused, padded,
packed, trained.
"""

from __future__ import annotations

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
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.losses import TermRecallLoss
from tilefold.modules import EpicPooling, HeadPooling, TokenWeights
from tilefold.modules.fused_pooling import Head, ScoreOptions, SparseOptions
from tilefold.modules.splate import SplateHead
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.encoders import mlm_head, splate_encoder

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
FORMS = ("features", "packed")
every_form = pytest.mark.parametrize("form", FORMS)


def plain(module: Any, features: dict[str, Any]) -> Tensor:
    return module(features)["sentence_embedding"]


def fused(
    module: Any,
    features: dict[str, Any],
    case: Batch,
    bias: bool = True,
    **options: Any,
) -> Tensor:
    hidden = features.pop("token_embeddings")
    head = Head(
        hidden.squeeze(0) if "cu_seq_lens_q" in features else hidden,
        case.weight,
        case.bias if bias else None,
    )
    return module.fused_scores(features, head, ScoreOptions(**options))


# HeadPooling


def pooled_by_hand(
    case: Batch,
    pooling: str,
    activation: str,
    scale: float,
    ignored: tuple[int, ...],
) -> Tensor:
    """One text and one formula at a time."""
    rows = []
    for b in range(len(case.mask)):
        places = [
            s
            for s in range(case.mask.size(1))
            if case.mask[b, s] and int(case.ids[b, s]) not in ignored
        ]
        logits = scale * case.logits()[b, places]
        rows.append(
            POOL[pooling](ACT[activation](logits))
            if places
            else logits.new_zeros(case.weight.size(0)),
        )
    return torch.stack(rows)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("activation", ACT)
@pytest.mark.parametrize("pooling", POOL)
def test_every_pooling_and_activation_is_its_formula(
    pooling: str,
    activation: str,
    left: bool,
) -> None:
    case = batch(left=left)
    ignored = () if pooling == "cls" else IGNORED  # the last text has special tokens alone
    module = HeadPooling(pooling, activation, 0.25, ignored)
    expected = pooled_by_hand(case, pooling, activation, 0.25, ignored)
    for features in (case.features, case.packed):
        same(plain(module, features(case.logits())), expected, case.leaves)
    if activation == "log1p_softplus" and pooling in ("sum", "mean"):
        refused(ValueError, "log1p has to be taken of every token", module.check_fusable)
        return
    module.check_fusable()
    for features in (case.features, case.packed):
        same(fused(module, features(case.hidden), case), expected, case.leaves)


@pytest.mark.parametrize(
    ("stock", "activation"),
    [("relu", "log1p_relu"), ("log1p_relu", "log1p_log1p_relu")],
)
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_the_options_of_stock_give_what_stock_gives(
    pooling: str,
    stock: str,
    activation: str,
) -> None:
    case = batch()
    expected = plain(SpladePooling(pooling, stock), case.features(case.logits()))
    same(
        plain(HeadPooling(pooling, activation), case.features(case.logits())),
        expected,
        case.leaves,
    )


def test_the_window_is_for_longer_rows_alone_and_comes_before_the_length() -> None:
    case = batch()
    free = plain(HeadPooling(ignore_ids=IGNORED), case.features(case.logits()))
    for k in (3, 12):
        module = HeadPooling(ignore_ids=IGNORED, top_k=k, normalize="l2")
        rows = []
        for row in free:
            kept = (
                row.where(row >= row.sort(descending=True).values[k - 1], 0)
                if (row > 0).sum() > k
                else row
            )
            rows.append(kept / kept.norm() if kept.any() else kept)
        same(plain(module, case.features(case.logits())), torch.stack(rows), case.leaves)
        same(fused(module, case.features(case.hidden), case), torch.stack(rows), case.leaves)
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
    rows = fused(
        HeadPooling(normalize="l2"),
        case.features(case.hidden),
        case,
        sparse=SparseOptions(3, 0.0),
    )
    assert rows.layout == torch.strided  # its length is that of the whole row: the caller prunes


@every_form
def test_a_mask_from_an_earlier_module_confines_the_pooling(form: str) -> None:
    case = batch()
    only = case.mask.clone()
    only[:, :2] = 0  # the last text has nothing left
    module = HeadPooling("mean", "softplus")
    expected = pooled_by_hand(case._replace(mask=only), "mean", "softplus", 1.0, ())
    same(
        plain(module, getattr(case, form)(case.logits(), pooling_mask=only)),
        expected,
        case.leaves,
    )
    same(
        fused(module, getattr(case, form)(case.hidden, pooling_mask=only), case),
        expected,
        case.leaves,
    )


def test_an_empty_batch_and_empty_texts_are_zero() -> None:
    module = HeadPooling()
    none = {"token_embeddings": torch.zeros(2, 0, 5), "attention_mask": torch.zeros(2, 0)}
    assert torch.equal(plain(module, none), torch.zeros(2, 5))
    packed = {
        "token_embeddings": torch.zeros(1, 0, 5),
        "cu_seq_lens_q": torch.zeros(1, dtype=torch.int32),
    }
    assert plain(module, packed).shape == (0, 5)


@pytest.mark.parametrize(
    "module",
    [HeadPooling(activation="softplus", logit_scale=0.5), EpicPooling(6, IGNORED)],
)
def test_under_autocast_scores_are_fp32_on_both_ways(module: HeadPooling | EpicPooling) -> None:
    case = batch()
    hidden, weight, bias = (leaf.detach().float() for leaf in case.leaves)
    states = {"all_layer_embeddings": (torch.randn(hidden.shape),)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        unfused = plain(module, case.features(linear(hidden, weight, bias)) | states)
        together = fused(
            module,
            case.features(hidden) | states,
            case._replace(weight=weight, bias=bias),
        )
    assert unfused.dtype == together.dtype == torch.float32
    torch.testing.assert_close(unfused, together, rtol=0.03, atol=0.03)  # bf16 logits


def test_epic_scores_of_texts_without_a_place_are_zero() -> None:
    logits, states = torch.zeros(2, 0, 9, requires_grad=True), torch.zeros(2, 0, 6)
    features = {
        "token_embeddings": logits,
        "attention_mask": torch.zeros(2, 0),
        "all_layer_embeddings": [states],
    }
    scores = EpicPooling(6)(features)["sentence_embedding"]
    scores.sum().backward()
    assert torch.equal(scores, torch.zeros(2, 9))


# EpicPooling, in the order of the framework


def epic_by_hand(case: Batch, module: EpicPooling, states: Tensor, bias: bool = True) -> Tensor:
    """Logits times importance, softplus and log1p, the maximum over all positions, masked ones 0;
    then the quality.
    """
    rows = []
    for b in range(len(case.mask)):
        values = []
        for s in range(case.mask.size(1)):
            logit = case.weight @ case.hidden[b, s] + (case.bias if bias else 0)
            inner = softplus(module.importance.weight[0] @ states[b, s] + module.importance.bias[0])
            counts = bool(case.mask[b, s]) and int(case.ids[b, s]) not in IGNORED
            logit = logit * torch.log(1 + inner) if counts else torch.zeros_like(logit)
            values.append(torch.log(1 + softplus(logit)))
        first = int(case.mask[b].nonzero()[0])
        quality = torch.sigmoid(
            module.quality.weight[0] @ states[b, first] + module.quality.bias[0],
        )
        rows.append(torch.stack(values).max(dim=0).values * quality)
    return torch.stack(rows)


@pytest.mark.parametrize("left", [False, True])
@every_form
def test_epic_is_its_formula_plain_and_fused_with_a_bias_and_without(form: str, left: bool) -> None:
    torch.manual_seed(3)
    module, case = EpicPooling(6, IGNORED).double(), batch(left=left)
    states = torch.randn(case.hidden.shape, dtype=torch.float64, requires_grad=True)
    leaves = [*case.leaves, states, *module.parameters()]
    expected = epic_by_hand(case, module, states)
    assert (expected >= 0.5265 * torch.sigmoid(module.quality(states)).min()).all()

    def features(tokens: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = getattr(case, form)(tokens, states=states)
        return given | {"all_layer_embeddings": (None, given["states"])}

    same(plain(module, features(case.logits())), expected, leaves)
    same(fused(module, features(case.hidden), case), expected, leaves)
    same(
        fused(module, features(case.hidden), case, bias=False),
        epic_by_hand(case, module, states, bias=False),
        leaves,
    )
    asked = (
        r"got \['attention_mask', .*'token_embeddings'.*\]; .*"
        r'config_kwargs=\{"output_hidden_states": True\}'
    )
    refused(ValueError, asked, module, case.features(case.logits()))


def test_a_saturated_quality_of_epic_keeps_its_gradient() -> None:
    torch.manual_seed(3)
    module, case = EpicPooling(6, IGNORED), batch()
    with torch.no_grad():
        module.quality.weight.zero_()
        module.quality.bias.fill_(20.0)
    features = case.features(case.logits().float())
    states = torch.randn(case.hidden.shape)
    scores = module(features | {"all_layer_embeddings": (states,)})["sentence_embedding"]
    scores.sum().backward()
    slope = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64)).item()
    expected = slope * scores.sum().item()  # the quality itself is 1 in fp32
    assert module.quality.bias.grad.item() == pytest.approx(expected, rel=1e-5, abs=0)


# TokenWeights


def repeated() -> Batch:
    """A batch in which a term stands three times in a text."""
    case = batch(vocab=19)
    case.ids[2, 1:4] = 7
    return case


def sparse_rows(module: TokenWeights, features: dict[str, Any]) -> Tensor:
    rows = module.fused_scores(features, None, ScoreOptions(sparse=SparseOptions(None, 0.0)))
    assert rows.layout == torch.sparse_csr
    return rows.to_dense()


def weighed_by_hand(case: Batch, module: TokenWeights, activation: str) -> Tensor:
    """The largest weight of each term's tokens, which may be negative; 0 for a term that does not
    stand in the text.
    """
    rows = []
    for b in range(len(case.mask)):
        row = [torch.zeros((), dtype=torch.float64)] * 19
        for v in set(case.ids[b].tolist()) - set(IGNORED):
            found = case.hidden[b][case.mask[b].bool() & (case.ids[b] == v)]
            weights = ACT[activation](found @ module.linear.weight[0] + module.linear.bias[0])
            row[v] = (weights if module.scale is None else weights * module.scale[0]).max()
        rows.append(torch.stack(row))
    return torch.stack(rows)


@every_form
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("activation", ACT)
def test_a_term_has_the_largest_weight_of_its_tokens(
    activation: str,
    scale: float | None,
    form: str,
) -> None:
    case = repeated()
    module = TokenWeights(6, 19, activation, scale, IGNORED).double().eval()
    expected = weighed_by_hand(case, module, activation).clamp(min=0)
    assert (expected != 0).any() and not expected[:, list(IGNORED)].any()
    features: dict[str, Any] = module(getattr(case, form)(case.hidden))
    same(features["sentence_embedding"], expected, [case.hidden, *module.parameters()])
    assert features["token_weights"].shape == (
        case.mask.shape if form == "features" else (int(case.mask.sum()),)
    )
    rows = sparse_rows(module, getattr(case, form)(case.hidden))
    torch.testing.assert_close(rows, expected.detach(), rtol=1e-12, atol=0)


def test_more_special_tokens_than_the_operator_compares_with() -> None:
    case = batch(vocab=19)
    few, many = (
        TokenWeights(6, 19, "softplus", ignore_ids=ids)
        for ids in (IGNORED, [*IGNORED, *range(100, 180)])
    )
    many.load_state_dict(few.state_dict())
    for form in FORMS:
        got, expected = (
            plain(module.double(), getattr(case, form)(case.hidden)) for module in (many, few)
        )
        same(got, expected, [case.hidden])


@every_form
def test_negative_weights_keep_their_gradient_while_training(form: str) -> None:
    case = repeated()
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    expected = weighed_by_hand(case, module, "none")
    assert (expected < 0).any() and (expected > 0).any()
    same(
        plain(module, getattr(case, form)(case.hidden)),
        expected,
        [case.hidden, *module.parameters()],
    )
    torch.testing.assert_close(
        plain(module.eval(), getattr(case, form)(case.hidden)),
        expected.clamp(min=0),
    )


@every_form
def test_weights_saturate_as_frequencies_do_in_bm25_and_train_as_they_are(form: str) -> None:
    case = repeated()
    unsaturated, module = (
        TokenWeights(6, 19, "none", ignore_ids=IGNORED, saturation=c).double() for c in (None, 0.1)
    )
    module.load_state_dict(unsaturated.state_dict())
    inputs = getattr(case, form)
    same(plain(module, inputs(case.hidden)), plain(unsaturated, inputs(case.hidden)), [case.hidden])
    k1, frequency = 10.0, 100 * plain(unsaturated.eval(), inputs(case.hidden))
    weights = plain(module.eval(), inputs(case.hidden))
    torch.testing.assert_close(
        weights * (k1 + 1),
        frequency * (k1 + 1) / (frequency + k1),
    )  # without length norm
    assert 0 < (weights > 0).sum() < (case.hidden.size(0) * 19) and weights.max() < 1
    torch.testing.assert_close(sparse_rows(module, inputs(case.hidden)), weights)
    refused(
        ValueError,
        "saturation must be a finite number above 0 or None, got 0",
        TokenWeights,
        6,
        19,
        saturation=0,
    )


def test_the_loss_of_deepct_reaches_terms_below_zero() -> None:
    case = batch(vocab=19)
    module = TokenWeights(6, 19, "none", ignore_ids=IGNORED).double()
    with torch.no_grad():
        module.linear.weight.zero_()
        module.linear.bias.fill_(-0.5)
    documents = plain(module, case.features(case.hidden))
    queries = torch.zeros(4, 19, dtype=torch.float64)
    queries[0, case.ids[0, 1]] = 1.0
    loss = TermRecallLoss().compute_loss_from_embeddings([queries, documents])
    terms = int((documents != 0).sum())
    assert loss.item() == pytest.approx(
        (0.25 * (terms - 1) + 2.25) / terms,
    )  # (-.5 - 0)^2, once (-.5 - 1)^2
    loss.backward()
    assert module.linear.bias.grad.item() == pytest.approx((-1.0 * (terms - 1) - 3.0) / terms)


# SPLATE: an adapter between a frozen ColBERT and a frozen MLM head


@pytest.fixture
def colbert(tiny_lm: str) -> MultiVectorEncoder:
    return ColbertRecipe(tiny_lm, dimension=8, max_length=32, query_length=16).start()


def masked_lm(folder: str | Path) -> Transformer:
    return Transformer(
        str(folder),
        transformer_task="fill-mask",
        model_kwargs={"local_files_only": True},
    )


def trained(model: SparseEncoder) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_untrained_it_is_the_mlm_head_on_colberts_states(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    features = model.preprocess(TEXTS)
    masked: Any = masked_lm(tiny_lm).model.eval()
    with torch.no_grad():
        logits = masked(
            input_ids=features["input_ids"],
            attention_mask=features["attention_mask"],
        ).logits
    expected = (logits.relu().log1p() * features["attention_mask"][:, :, None]).amax(1)
    torch.testing.assert_close(
        model.encode(TEXTS, convert_to_sparse_tensor=False),
        expected,
        rtol=0,
        atol=1e-5,
    )


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


def test_only_the_adapter_trains_and_the_trunk_has_no_dropout(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), device="cpu")
    assert trained(model) == {
        f"1.adapter.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
    }
    assert "1.decoder.bias" in trained(
        splate_encoder(colbert, masked_lm(tiny_lm), train_bias=True, device="cpu"),
    )
    model.train()
    assert model[0].training and not model[0].model.training
    first, second = (model(model.preprocess(TEXTS))["sentence_embedding"] for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None for p in model[1].adapter[2].parameters())


def test_it_reloads_fuses_and_encodes_sparse_rows(
    colbert: MultiVectorEncoder,
    tiny_lm: str,
    tmp_path: Path,
) -> None:
    model = splate_encoder(colbert, masked_lm(tiny_lm), adapter_size=8, device="cpu")
    torch.nn.init.normal_(model[1].adapter[2].weight)
    vectors = model.encode_query(TEXTS, convert_to_sparse_tensor=False)
    model.save_pretrained(str(tmp_path))
    again = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(again.encode_query(TEXTS, convert_to_sparse_tensor=False), vectors)
    assert trained(again) == trained(model) and again[0].query_length == 16
    with accelerate(again):
        torch.testing.assert_close(
            again.encode_query(TEXTS, convert_to_sparse_tensor=False),
            vectors,
        )
    torch.testing.assert_close(
        encode_sparse(again, TEXTS, task="query").to_dense(),
        vectors,
        rtol=0,
        atol=1e-6,
    )
    (tmp_path / "1_SplateHead" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"Could not find 'model\.safetensors'"):
        SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    again[1].save(str(tmp_path / "1_SplateHead"), safe_serialization=False)
    pickled = SparseEncoder(str(tmp_path), device="cpu", trust_remote_code=True)
    assert torch.equal(pickled.encode_query(TEXTS, convert_to_sparse_tensor=False), vectors)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            None,
            r"config\.json must have options of HeadPooling, got none. Fetch the checkpoint whole",
        ),
        (
            '{"pooling": "cl',
            r"config\.json must have options of HeadPooling, got no JSON: Unterminated",
        ),
        ("[1]", r"config\.json must have options of HeadPooling, got \[1\]"),
        ('{"pooling": "cls", "later": 1}', "got later of a newer release: pip install -U tilefold"),
        ('{"pooling": "clz"}', "pooling must be one of"),
    ],
)
def test_a_module_without_its_options_is_refused_and_does_not_take_the_defaults(
    tmp_path: Path,
    text: str | None,
    said: str,
) -> None:
    HeadPooling("cls", logit_scale=1 / 16).save(str(tmp_path))
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refused(ValueError, said, HeadPooling.load, str(tmp_path))


def test_half_precision_keeps_small_weights_beside_large_negative_ones_in_training() -> None:
    module = TokenWeights(1, 9, activation="none").bfloat16()
    torch.nn.init.ones_(module.linear.weight)
    torch.nn.init.zeros_(module.linear.bias)
    hidden = torch.tensor([[[-40.0], [0.03125], [0.5]]], dtype=torch.bfloat16)
    features = {
        "token_embeddings": hidden,
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(1, 3),
    }
    scores = module.train()(features)["sentence_embedding"]
    assert scores.dtype == torch.bfloat16 and scores[0, 5:8].tolist() == [-40.0, 0.03125, 0.5]


@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"],
)
def test_heads_of_masked_models_are_copied_exactly(kind: str) -> None:
    network = tiny_network(kind, vocab_size=120).eval()
    head = mlm_head(network)
    ids = torch.arange(5, 15).view(2, 5)
    states: list[torch.Tensor] = []
    trunk = network.base_model.register_forward_hook(lambda _, __, out: states.append(out[0]))
    with torch.no_grad():
        logits = network(input_ids=ids).logits
    trunk.remove()
    got = head({"token_embeddings": states[0], "attention_mask": torch.ones_like(ids)})[
        "sentence_embedding"
    ]
    torch.testing.assert_close(got, logits.relu().log1p().amax(1), rtol=0, atol=1e-5)


def test_what_does_not_fit_together_is_refused(colbert: MultiVectorEncoder, tmp_path: Path) -> None:
    other = tiny_masked_lm(tmp_path / "other")
    make_tokenizer_folder(other, VOCABULARY)
    tiny_network("bert").save_pretrained(str(other))
    with pytest.raises(
        ValueError,
        match=r"masked_lm must have ColBERT's width 32 and its tokenizer of \d+ tokens",
    ):
        splate_encoder(colbert, masked_lm(other))
    with pytest.raises(
        ValueError,
        match=r"masked_lm must have the MLM head of BERT, .* got LlamaForCausalLM",
    ):
        mlm_head(tiny_network("llama"))
