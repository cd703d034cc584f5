"""``accelerate(trainer)``: stock losses in all kinds of trainings, and true words about its parts."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from sentence_transformers import (
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
)
from sentence_transformers.base.modules import Router
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorDistillKLDivLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.sparse_encoder.evaluation import SparseEmbeddingSimilarityEvaluator
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.integrations.multi_vector_models import POSITIVES, QUERIES, build_colbert
from tests.integrations.sentence_transformers.packing.test_packed_inputs import PAIRS, splade_loss
from tests.integrations.splade_models import (
    build_tiny_splade,
    five_steps,
    logged_losses,
    tiny_transformer,
    without_dropout,
)
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, is_accelerated, restore
from tilefold.integrations.sentence_transformers import multi_vector as fused_scores
from tilefold.integrations.sentence_transformers._trainer import (
    AHEAD_BATCHES,
    COMPILED_LAYERS,
    CUDA_GRAPHS,
    FUSED_SCORES,
    MIN_STEPS_TO_COMPILE,
    PACKED_TOKENS,
)

# Losses are logged with six digits, and the first steps of Adam amplify rounding.
ROUNDING = 1e-4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MORE_PAIRS = Dataset.from_dict(
    {
        "question": [f"how long is the {word}" for word in ("river", "road", "day", "list")],
        "answer": [f"the {word} is very long" for word in ("river", "road", "day", "list")],
    },
)


def make_model(folder: Path, device: str = "cpu") -> SparseEncoder:
    torch.manual_seed(0)
    return without_dropout(build_tiny_splade("bert", folder)).to(device)


def make_trainer(model: Any, folder: Path, data: Any = PAIRS, **settings: Any) -> Any:
    """Return a stock trainer of a SparseEncoder on the model's device."""
    on_cpu = model.device.type == "cpu"
    options = {key: settings.pop(key) for key in ("loss", "evaluator") if key in settings}
    if "eval_strategy" in settings and "evaluator" not in options:
        options["eval_dataset"] = PAIRS
    options.setdefault("loss", splade_loss(model))
    return SparseEncoderTrainer(
        model=model,
        args=five_steps(folder, **{"use_cpu": on_cpu, "max_steps": 8, **settings}),
        train_dataset=data,
        **options,
    )


def streamed_pairs() -> IterableDataset:
    """Return the pairs as a stream."""
    return PAIRS.to_iterable_dataset(num_shards=2)


def lora(model: SparseEncoder) -> SparseEncoder:
    """Add an adapter to the attention of a model."""
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("settings", "data", "change"),
    [
        pytest.param({}, lambda: PAIRS, None, id="plain"),
        pytest.param({}, streamed_pairs, None, id="stream"),
        pytest.param({}, lambda: {"a": PAIRS, "b": MORE_PAIRS}, None, id="two data sets"),
        pytest.param({"gradient_accumulation_steps": 4}, lambda: PAIRS, None, id="accumulation"),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 2},
            lambda: PAIRS,
            None,
            id="evaluation in between",
        ),
        pytest.param({"bf16": True}, lambda: PAIRS, None, id="bf16"),
        pytest.param({}, lambda: PAIRS, lora, id="lora"),
        pytest.param({"gradient_checkpointing": True}, lambda: PAIRS, None, id="checkpointing"),
        pytest.param(
            {"dataloader_num_workers": 1},
            lambda: PAIRS,
            None,
            id="worker",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_has_the_stock_losses(
    settings: dict[str, Any],
    data: Any,
    change: Any,
    device: str,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    losses = []
    for is_fused in (False, True):
        model = make_model(tokenizer_folder, device)
        if change is not None:
            change(model)
        trainer = make_trainer(model, tmp_path / str(is_fused), data(), **settings)
        if is_fused:
            accelerate(trainer)
        losses.append(logged_losses(trainer))
        if "eval_strategy" in settings:
            losses[-1] += [
                entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry
            ]
    # The stock side rounds its logits to bf16.
    tolerance = 2e-2 if "bf16" in settings else ROUNDING
    assert len(losses[0]) >= 8
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


def test_a_killed_training_resumes_with_the_stock_losses(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    losses = []
    for is_fused in (False, True):
        folder = tmp_path / str(is_fused)
        for max_steps in (4, 8):
            model = make_model(tokenizer_folder)
            trainer = make_trainer(
                model,
                folder,
                max_steps=max_steps,
                lr_scheduler_type="constant",
                save_strategy="steps",
                save_steps=4,
            )
            if is_fused:
                accelerate(trainer)
            trainer.train(resume_from_checkpoint=max_steps > 4)
        entries = trainer.state.log_history
        losses.append([entry["loss"] for entry in entries if "loss" in entry])
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)


def test_an_evaluator_and_an_evaluation_loss_are_the_stock_ones(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    results = []
    for is_fused in (False, True):
        model = make_model(tokenizer_folder)
        evaluator = SparseEmbeddingSimilarityEvaluator(
            PAIRS["anchor"],
            PAIRS["positive"],
            [i / len(PAIRS) for i in range(len(PAIRS))],
            write_csv=False,
        )
        trainer = make_trainer(
            model,
            tmp_path / str(is_fused),
            evaluator=evaluator,
            eval_strategy="steps",
            eval_steps=4,
        )
        if is_fused:
            accelerate(trainer)
        trainer.train()
        results.append(trainer.evaluate())
    names = [name for name in results[0] if "spearman" in name or "pearson" in name]
    assert names
    for name in names:
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-3)


def test_the_line_says_what_is_active_on_a_cpu_and_why_the_rest_is_not(
    tokenizer_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(make_model(tokenizer_folder), tmp_path)
    handle = accelerate(trainer)
    assert handle.active == (FUSED_SCORES, PACKED_TOKENS, AHEAD_BATCHES)
    assert str(handle) == (
        "tilefold: fused scores, packed tokens, batches made ahead active; not active: CUDA graphs "
        "(the model is on a CPU), compiled layers (only CUDA graphs use them)"
    )
    with caplog.at_level(logging.INFO, "tilefold"):
        trainer.train()
    lines = [record.getMessage() for record in caplog.records if "tilefold:" in record.getMessage()]
    assert lines == [str(handle)]


@pytest.mark.parametrize(
    ("settings", "part", "reason"),
    [
        pytest.param(
            {"dataloader_num_workers": 2},
            AHEAD_BATCHES,
            "2 workers of the data loader make them",
            id="workers",
        ),
        pytest.param(
            {"torch_compile": True},
            AHEAD_BATCHES,
            "torch_compile=True compiles the whole model",
            id="torch.compile",
        ),
    ],
)
def test_a_part_that_is_not_possible_has_a_reason(
    settings: dict[str, Any],
    part: str,
    reason: str,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    trainer = make_trainer(make_model(tokenizer_folder), tmp_path, **settings)
    collator = trainer.data_collator
    handle = accelerate(trainer)
    assert handle.inactive[part] == reason
    assert trainer.data_collator is collator


def add_hook(model: SparseEncoder) -> None:
    """Add a hook that does nothing to the first layer of a model."""
    model[0].model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        pytest.param(
            {"gradient_checkpointing": True},
            None,
            "gradient checkpointing runs layers again",
            id="checkpointing",
        ),
        pytest.param({}, add_hook, "hooks on layers run in each step", id="hook"),
        pytest.param({}, None, "the loss caches gradients", id="cached loss"),
        pytest.param({}, None, None, id="nothing"),
    ],
)
def test_what_keeps_graphs_from_a_training_on_a_gpu_is_named(
    settings: dict[str, Any],
    change: Any,
    reason: str | None,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(tokenizer_folder)
    if change is not None:
        change(model)
    trainer = make_trainer(model, tmp_path, **settings)
    if reason == "the loss caches gradients":
        trainer.loss = splade_loss(model, cached=True)
    handle = accelerate(trainer)
    monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
    assert handle.inactive.get(CUDA_GRAPHS) == reason


def test_an_encoder_that_stays_padded_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = build_tiny_splade("mpnet", tokenizer_folder)
    trainer = make_trainer(model, tmp_path)
    with pytest.warns(UserWarning, match="runs on padded batches"):
        handle = accelerate(trainer)
    assert handle.inactive[PACKED_TOKENS] == (
        "MPNetForMaskedLM runs on padded batches: the attention of MPNetForMaskedLM does not use "
        "transformers' AttentionInterface"
    )
    assert FUSED_SCORES in handle.active


def test_a_model_of_two_encoders_trains_with_the_stock_losses(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    losses = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        router = Router.for_query_document(
            query_modules=[tiny_transformer("distilbert", tokenizer_folder), SpladePooling()],
            document_modules=[tiny_transformer("bert", tokenizer_folder), SpladePooling("sum")],
        )
        model = without_dropout(SparseEncoder(modules=[router], device="cpu"))
        trainer = make_trainer(
            model,
            tmp_path / str(is_fused),
            router_mapping={"anchor": "query", "positive": "document"},
        )
        if is_fused:
            assert accelerate(trainer).active == (FUSED_SCORES, PACKED_TOKENS, AHEAD_BATCHES)
        losses.append(logged_losses(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)


def test_restore_undoes_everything(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = make_model(tokenizer_folder)
    trainer = make_trainer(model, tmp_path, streamed_pairs(), logging_nan_inf_filter=True)
    collator = trainer.data_collator
    callbacks = list(trainer.callback_handler.callbacks)
    accelerate(trainer)
    assert vars(trainer.accelerator.dataloader_config)["dispatch_batches"] is False
    accelerate(trainer)  # starts over
    assert len(trainer.callback_handler.callbacks) == len(callbacks) + 1
    restore(trainer)
    assert not is_accelerated(model)
    assert trainer.data_collator is collator
    assert trainer.args.logging_nan_inf_filter
    assert vars(trainer.accelerator.dataloader_config)["dispatch_batches"] is None
    assert trainer.callback_handler.callbacks == callbacks
    restore(trainer)  # does nothing
    with accelerate(trainer) as accelerated_trainer:
        assert accelerated_trainer is trainer
        assert is_accelerated(accelerated_trainer.model)
    assert not is_accelerated(model)


def test_a_model_that_is_accelerated_already_stays_as_it_is(
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    model = make_model(tokenizer_folder)
    accelerate(model, packed=False)
    trainer = make_trainer(model, tmp_path)
    handle = accelerate(trainer)
    assert PACKED_TOKENS in handle.inactive
    handle.restore()
    assert is_accelerated(model)
    assert PACKED_TOKENS in accelerate(trainer, screen=False).active


def test_the_handle_of_a_restored_trainer_says_so(tokenizer_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_model(tokenizer_folder), tmp_path)
    handle = accelerate(trainer)
    assert handle.active
    restore(trainer)
    assert str(handle) == "tilefold: nothing active, because the trainer was restored"
    assert handle.active == ()
    assert set(handle.inactive.values()) == {"the trainer was restored"}
    assert accelerate(trainer).active


def test_an_error_leaves_the_trainer_as_it_was(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = make_model(tokenizer_folder)
    trainer = make_trainer(model, tmp_path)
    collator = trainer.data_collator
    refused(ValueError, "got True, but the model is on a CPU", accelerate, trainer, graphs=True)
    refused(ValueError, "without graphs", accelerate, trainer, graphs=False, compiled=True)
    assert not is_accelerated(model)
    assert trainer.data_collator is collator
    refused(ValueError, "compiled must be None or False for a model", accelerate, model, compiled=1)


def test_a_trainer_that_makes_its_model_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    trainer = SparseEncoderTrainer(
        model_init=lambda: make_model(tokenizer_folder),
        args=five_steps(tmp_path),
        train_dataset=PAIRS,
        loss=splade_loss,
    )
    refused(ValueError, "model_init", accelerate, trainer)


@pytest.mark.filterwarnings("ignore:TILEFOLD_DISABLE is set")
def test_nothing_is_accelerated_if_tilefold_is_switched_off(
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEFOLD_DISABLE", "1")
    model = make_model(tokenizer_folder)
    trainer = make_trainer(model, tmp_path)
    assert accelerate(trainer).active == ()
    assert not is_accelerated(model)


COLUMNS = {"query": QUERIES, "positive": POSITIVES}


def colbert_trainer(model: Any, loss: Any, folder: Path, **settings: Any) -> Any:
    """Return a stock trainer of a MultiVectorEncoder on the CPU."""
    arguments = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        **settings,
    }
    pairs = Dataset.from_dict(COLUMNS)
    return MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(str(folder), **arguments),
        train_dataset=dict.fromkeys(loss, pairs) if isinstance(loss, dict) else pairs,
        loss=loss,
    )


def test_a_colbert_training_has_the_stock_losses_with_the_fused_similarity(tmp_path: Path) -> None:
    losses = []
    for is_fused in (False, True):
        model = without_dropout(build_colbert())
        loss = MultiVectorMultipleNegativesRankingLoss(model)
        trainer = colbert_trainer(model, loss, tmp_path / str(is_fused))
        if is_fused:
            assert accelerate(trainer).active == (FUSED_SCORES, PACKED_TOKENS, AHEAD_BATCHES)
            assert loss.similarity_fct is fused_scores.colbert_scores
        losses.append(logged_losses(trainer))
        restore(trainer)
        assert loss.similarity_fct is scoring.colbert_scores
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        pytest.param(None, fused_scores.colbert_kd_scores, id="default"),
        pytest.param(
            scoring.mean_colbert_kd_scores,
            fused_scores.mean_colbert_kd_scores,
            id="mean",
        ),
        pytest.param(fused_scores.xtr_kd_scores, fused_scores.xtr_kd_scores, id="fused already"),
    ],
)
def test_a_similarity_of_sentence_transformers_is_replaced(
    similarity: Any,
    expected: Any,
    tmp_path: Path,
) -> None:
    model = build_colbert()
    loss = MultiVectorDistillKLDivLoss(model, similarity_fct=similarity)
    handle = accelerate(colbert_trainer(model, {"a": loss}, tmp_path))
    assert loss.similarity_fct is expected
    assert FUSED_SCORES in handle.active


def test_options_of_a_similarity_are_kept(tmp_path: Path) -> None:
    model = build_colbert()
    chunked = functools.partial(scoring.colbert_scores, chunk_elements=100)
    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=chunked)
    xtr_loss = MultiVectorDistillKLDivLoss(model, similarity_fct=scoring.XTRKDScores(top_k=7))
    accelerate(colbert_trainer(model, {"a": loss, "b": xtr_loss}, tmp_path))
    assert loss.similarity_fct.func is fused_scores.colbert_scores
    assert loss.similarity_fct.keywords == {"chunk_elements": 100}
    assert type(xtr_loss.similarity_fct) is fused_scores.XTRKDScores
    assert xtr_loss.similarity_fct.top_k == 7


def test_a_similarity_of_the_user_stays_and_is_named(tmp_path: Path) -> None:
    def my_scores(*args: Any, **kwargs: Any) -> torch.Tensor:
        return scoring.colbert_scores(*args, **kwargs)

    model = build_colbert()
    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=my_scores)
    handle = accelerate(colbert_trainer(model, loss, tmp_path))
    assert loss.similarity_fct is my_scores
    assert handle.inactive[FUSED_SCORES] == "the loss scores with my_scores"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.gpu
@pytest.mark.parametrize("max_steps", [8, MIN_STEPS_TO_COMPILE])
def test_long_trainings_in_16_bits_on_a_gpu_compile_their_layers(
    max_steps: int,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    model = make_model(tokenizer_folder, "cuda")
    trainer = make_trainer(model, tmp_path, max_steps=max_steps, bf16=True, logging_steps=50)
    handle = accelerate(trainer)
    assert CUDA_GRAPHS in handle.active
    assert handle.inactive == {COMPILED_LAYERS: "decided when the training begins"}
    trainer.train()
    is_long = max_steps >= MIN_STEPS_TO_COMPILE
    assert (COMPILED_LAYERS in handle.active) == is_long
    assert (model[0].forward.graphs.compiled, bool(model[0].forward.graphs.graphs)) == (
        is_long,
        True,
    )
    restore(trainer)
    assert not is_accelerated(model)
