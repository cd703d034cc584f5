"""Batches on their way from a data loader to an accelerated model: streamed, cut, merged, counted
in model cards.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer
from sentence_transformers.sparse_encoder.losses import SparseMarginMSELoss, SpladeLoss
from tokenizers.processors import TemplateProcessing

from tests.integrations.multi_vector_models import POSITIVES, build_colbert
from tests.integrations.sentence_transformers.packing.test_packed_inputs import (
    PAIRS,
    assert_same,
    gradients_of,
    splade_loss,
)
from tests.integrations.splade_models import (
    TEXTS,
    assert_close,
    build_tiny_splade,
    five_steps,
    logged_losses,
    without_dropout,
)
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead, encode_sparse
from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores
from tilefold.integrations.sentence_transformers.packing.inputs import pack_features, packed_inputs

FIVE = PAIRS.select(range(5))  # a batch of 4, and one of 1
LABELLED = FIVE.add_column("negative", [f"no {text}" for text in FIVE["anchor"]]).add_column(
    "label",
    [0.1, 1, 2, 3, 4],
)


def forwards_of(model: Any) -> list[int]:
    """Grows with every forward of the encoder, by the number of its rows: 1 where tokens are
    packed.
    """
    runs: list[int] = []
    model[0].model.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: runs.append(ids[0].size(0)),
    )
    return runs


@pytest.mark.parametrize(
    ("dispatch", "split", "streamed", "data"),
    [
        (
            None,
            False,
            True,
            FIVE,
        ),  # the default: Hugging Face's accelerate cuts the batches of a stream
        (None, False, True, LABELLED),
        (None, True, True, FIVE),
        (True, False, False, FIVE),
        (False, False, True, FIVE),
    ],
)
def test_batches_that_a_loader_cuts_give_the_losses_of_the_stock_model(
    dispatch: bool | None,
    split: bool,
    streamed: bool,
    data: Dataset,
    tiny: SparseEncoder,
    tmp_path: Path,
) -> None:
    results, runs = [], []
    for fused in (False, True):
        model = copy.deepcopy(tiny)
        if fused:
            assert accelerate(model).padded == {}
            runs = forwards_of(model)
        how = {"dispatch_batches": dispatch, "split_batches": split}
        loss = splade_loss(model)
        if data is LABELLED:
            loss = SpladeLoss(model, SparseMarginMSELoss(model), 3e-3, 5e-3)
        given = data.to_iterable_dataset() if streamed else data
        arguments = five_steps(tmp_path, max_steps=3, accelerator_config=how)
        trainer = SparseEncoderTrainer(
            model,
            args=arguments,
            train_dataset=given,
            eval_dataset=given,
            loss=loss,
        )
        results.append([*logged_losses(trainer), trainer.evaluate()["eval_loss"]])
    assert len(results[1]) == 4 and results[1] == pytest.approx(results[0], rel=1e-4)
    assert set(runs) == {1}


def test_packed_features_are_not_cut_and_trainers_that_cut_collate_nothing(
    tiny: SparseEncoder,
    tmp_path: Path,
) -> None:
    accelerate(tiny)
    with packed_inputs():
        full = tiny.preprocess(TEXTS)
    cut = {
        key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in full.items()
    }
    refused(ValueError, "tokens, which do not fit into 0 sequences", tiny, cut)
    arguments = five_steps(tmp_path, accelerator_config={"dispatch_batches": True})
    trainer = SparseEncoderTrainer(
        tiny,
        args=arguments,
        train_dataset=PAIRS,
        loss=splade_loss(tiny),
    )
    refused(ValueError, "dispatch_batches must not be True", collate_ahead, trainer)


@pytest.mark.parametrize("captured", [False, True])
def test_holes_and_captures_run_padded(
    captured: bool,
    tiny: SparseEncoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.eval()
    features = model.preprocess(TEXTS)
    if not captured:
        features["attention_mask"][1, 3] = 0
    expected = model(dict(features))["sentence_embedding"]
    accelerate(model)
    runs = forwards_of(model)
    if captured:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert_close(model(dict(features))["sentence_embedding"], expected, 1e-5)
    assert runs == [len(TEXTS)]


MASKS = {
    "right": [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "left": [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]],
    "both, and rows without tokens": [[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    "no tokens": [[0, 0], [0, 0]],
}


@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS)
def test_padding_is_taken_out_with_one_answer_from_the_device(rows: list[list[int]]) -> None:
    mask = torch.tensor(rows)
    ids = torch.arange(mask.numel()).view_as(mask) + 7
    types = ids % 2
    with torch.profiler.profile() as ran:
        actual = pack_features(
            {"input_ids": ids, "attention_mask": mask, "token_type_ids": types},
            None,
        )
    assert actual["input_ids"].tolist() == [ids[mask == 1].tolist()]
    assert actual["cu_seq_lens_q"].tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert actual["max_length_q"] == mask.sum(1).max()
    assert actual["token_type_ids"].tolist() == [types[mask == 1].tolist()]
    # the size of what these give is known on the device alone; on a GPU each waits for it
    waits = {"nonzero", "masked_select", "_local_scalar_dense", "item", "repeat_interleave"}
    names = {event.key.removeprefix("aten::") for event in ran.key_averages()}
    assert "cumsum" in names and not names & waits


@pytest.mark.parametrize("cached", [False, True])
def test_columns_of_documents_go_through_the_encoder_together(
    cached: bool,
    tiny: SparseEncoder,
) -> None:
    documents = [[f"{text} {place}" for text in PAIRS["positive"]] for place in "abcd"]
    results, counts = [], []
    for fused in (False, True):
        model = copy.deepcopy(tiny)
        if fused:
            accelerate(model)
        runs = forwards_of(model)
        columns = [model.preprocess(list(texts)) for texts in (PAIRS["anchor"], *documents)]
        results.append(gradients_of(model, splade_loss(model, cached=cached), columns))
        counts.append(len(runs))
    assert_same(results[1], results[0])
    assert counts[1] == counts[0] and (cached or counts == [2, 2])


def test_a_model_card_counts_tokens(tiny: SparseEncoder) -> None:
    tiny.model_card_data.register_model(tiny)
    stock = tiny.model_card_data._compute_column_stats(PAIRS, "anchor")
    accelerate(tiny)
    assert tiny.model_card_data._compute_column_stats(PAIRS, "anchor") == stock
    assert stock["data"]["min"].endswith("tokens")


def test_a_multi_vector_model_without_its_mask_module_stays_padded_with_a_reason() -> None:
    from sentence_transformers import MultiVectorEncoder

    full = build_colbert()
    model = MultiVectorEncoder(modules=[full[0], full[1], full[3]], device="cpu")
    expected = model.encode_document(POSITIVES)
    for check in (True, False):
        with pytest.warns(UserWarning, match="takes packed tokens with a MultiVectorMask only"):
            assert accelerate(model, check=check).padded.keys() == {"BertModel"}
    for got, right in zip(model.encode_document(POSITIVES), expected, strict=True):
        assert_close(torch.as_tensor(got), torch.as_tensor(right), 1e-5)


def test_a_short_limit_hides_no_disagreement_from_the_check(tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    model.tokenizer.padding_side = "left"  # positions of a padded batch then begin anywhere
    model.max_seq_length = 3
    expected = model.encode(TEXTS).to_dense()
    files = model.tokenizer.backend_tokenizer.to_str()
    with pytest.warns(UserWarning, match="disagree by"):
        assert accelerate(model).padded.keys() == {"BertForMaskedLM"}
    assert model.tokenizer.backend_tokenizer.to_str() == files and model.max_seq_length == 3
    assert_close(model.encode(TEXTS).to_dense(), expected, 1e-5)


def without_special_tokens(model: Any) -> Any:
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A",
        pair="$A $B",
        special_tokens=[],
    )
    return model


@pytest.mark.filterwarnings("ignore:MPNetForMaskedLM runs on padded")
@pytest.mark.parametrize("kind", ["roberta", "mpnet"])  # packed, padded
def test_texts_without_tokens_have_rows_of_zeros_and_gradients(
    kind: str,
    tokenizer_folder: Path,
) -> None:
    model = without_special_tokens(without_dropout(build_tiny_splade(kind, tokenizer_folder)))
    texts = ["fox fox", " ", "", "a"]
    full = model.encode(["fox fox", "a"]).to_dense()
    accelerate(model)
    actual = [
        model.encode(texts, batch_size=2).to_dense(),
        encode_sparse(model, texts, batch_size=1).to_dense(),
    ]
    if kind == "roberta":
        actual.append(torch.stack([model.encode(text).to_dense() for text in texts]))
        actual.append(encode_sparse(model, texts * 9).to_dense()[:4])
        columns = [model.preprocess(column) for column in (["", " "], ["a list", "b"])]
        value, gradients = gradients_of(model, splade_loss(model), columns)
        assert 0 < value < float("inf") and all(
            gradient.isfinite().all() for gradient in gradients.values()
        )
    for rows in actual:
        assert_close(rows[[0, 3]], full, 1e-5)
        assert not rows[1:3].any()


def test_texts_without_tokens_have_no_vectors() -> None:
    from sentence_transformers.multi_vector_encoder.losses import (
        MultiVectorMultipleNegativesRankingLoss,
    )

    model = without_special_tokens(build_colbert())
    accelerate(model)
    texts = ["fox fox", " ", "", "a"]
    for size in (1, 2, 3, 4):
        assert [len(actual) for actual in model.encode_document(texts, batch_size=size)] == [
            2,
            0,
            0,
            1,
        ]
    assert model.encode_query([""])[0].shape == (0, 48)
    columns = [
        model.preprocess(column, task=task)
        for column, task in ((["a", "b"], "query"), (["", ""], "document"))
    ]
    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=colbert_scores)(
        columns,
        None,
    )
    loss.backward()
    assert loss.isfinite()
