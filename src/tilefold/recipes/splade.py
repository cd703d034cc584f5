"""Train a SPLADE encoder with the stock trainer, loss and checkpoints of sentence-transformers.

The loss is ``SpladeLoss`` (FLOPS regularisers, arXiv 2004.05665 and 2107.05720) over in-batch negatives; only the LM
head is replaced while training runs, so that the ``[B, S, V]`` logits never exist. What is saved is stock.
"""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported by the functions that need them

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.recipes import _run
from tilefold.recipes._attention import AttentionChoice, attention_callbacks
from tilefold.recipes._cheaper import freeze_lower_layers, length_grouped_batches
from tilefold.recipes._checks import check_count, check_number, check_seed
from tilefold.recipes._fields import Fields
from tilefold.recipes._training import Progress, TrainResult, run_training, total_steps
from tilefold.recipes.precision import supports_bf16

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.collection import Collection

__all__ = ["SpladeRecipe", "TrainResult", "load_base_model", "supports_bf16", "train"]


@dataclass(frozen=True)
class SpladeRecipe(AttentionChoice, Fields):
    """Configuration of a SPLADE training run; every field is checked on construction.

    Attributes:
        base_model: ``"minilm"`` for the packaged MiniLM, else a folder or a Hugging Face name of a masked LM.
        max_steps: optimiser steps; ``None`` uses ``epochs``.
        epochs: passes over the training pairs when ``max_steps`` is ``None``.
        batch_size: pairs per step; every other document of a batch is a negative.
        learning_rate: peak of the linear schedule.
        warmup_ratio: share of the steps over which the learning rate rises.
        query_regularizer, document_regularizer: weights of the FLOPS terms.
        regularizer_warmup_ratio: share of the steps over which those weights rise, quadratically.
        similarity_scale: factor on the dot products before the softmax.
        max_length: maximum tokens per text of the saved model.
        train_max_length: the same while training; ``None`` takes ``max_length``.
        start_deviations: initial decoder bias of ``"minilm"``, a value per term; ``None`` gives all terms the same,
            from `start_percentile`.
        start_percentile: initial decoder bias of ``"minilm"``, see :func:`minilm_splade`.
        frozen_layers: number of lowest encoder layers that are frozen, together with the embeddings (and a decoder tied
            to them); they have no backward pass. 0 trains everything.
        group_by_length: batches of documents of similar length, with little padding.
        bf16: bf16 autocast; ``None`` uses it where the hardware has it.
        fused: train with the fused head.
        save_steps: steps between checkpoints, from which an interrupted run is resumed.
        seed: of the data order, dropout and the sample for the decoder bias.
        attention, alpha, anneal_alpha: see :class:`AttentionChoice`.
    """

    base_model: str = "minilm"
    max_steps: int | None = None
    epochs: float = 4.0
    batch_size: int = 64
    learning_rate: float = 2e-4
    warmup_ratio: float = 0.1
    query_regularizer: float = 1e-2
    document_regularizer: float = 1e-2
    regularizer_warmup_ratio: float = 1 / 3
    similarity_scale: float = 1.0
    max_length: int = 128
    train_max_length: int | None = None
    start_percentile: float = 99.95
    start_deviations: float | None = None
    frozen_layers: int = 0
    group_by_length: bool = False
    bf16: bool | None = None
    fused: bool = True
    save_steps: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_attention()
        if not isinstance(self.base_model, str) or not self.base_model:
            raise ValueError(f"base_model must be 'minilm', a folder or a model name, got {self.base_model!r}.")
        for name in ("max_steps", "batch_size", "max_length", "train_max_length", "save_steps"):
            check_count(name, getattr(self, name), optional=name in ("max_steps", "train_max_length"))
        for name in ("epochs", "learning_rate", "similarity_scale"):
            check_number(name, getattr(self, name), lambda value: value > 0, "greater than 0")
        for name in ("query_regularizer", "document_regularizer"):
            check_number(name, getattr(self, name), lambda value: value >= 0, "0 or more")
        check_seed(self.seed)
        check_number("warmup_ratio", self.warmup_ratio, lambda value: 0 <= value < 1, "in [0, 1)")
        check_number(
            "regularizer_warmup_ratio", self.regularizer_warmup_ratio, lambda value: 0 < value <= 1, "in (0, 1]"
        )
        check_number("start_percentile", self.start_percentile, lambda value: 0 < value < 100, "in (0, 100)")
        if self.start_deviations is not None:
            check_number("start_deviations", self.start_deviations, lambda value: value >= 0, "0 or more, or None")
        if self.train_max_length is not None and self.train_max_length > self.max_length:
            raise ValueError(
                f"train_max_length must not exceed max_length ({self.max_length}), got {self.train_max_length}."
            )
        if self.frozen_layers != 0:
            check_count("frozen_layers", self.frozen_layers, optional=False)
        if not isinstance(self.group_by_length, bool):
            raise ValueError(f"group_by_length must be True or False, got {self.group_by_length!r}.")
        if self.bf16 not in (None, True, False):
            raise ValueError(f"bf16 must be True, False or None (by hardware), got {self.bf16!r}.")


def train(
    recipe: SpladeRecipe,
    collection: Collection,
    output_dir: str | Path,
    *,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
) -> TrainResult:
    """Train on the pairs of the collection's ``"train"`` split and save a stock SparseEncoder in `output_dir`.

    Checkpoints lie in ``<output_dir>.training`` until the end; the finished model is moved into place atomically. An
    interrupted run is resumed from its last complete checkpoint by the same call (recipe and data), and a finished run
    is returned unchanged. Equal recipes, data and machines give equal models.

    Args:
        resume: resume or return an earlier run; with False, its checkpoints are discarded.
        overwrite: replace a finished model in `output_dir`.
        progress: called as ``progress(step, steps, loss)`` after every step; loss is ``None`` until it is known.
        verbose: let the libraries log.

    Raises:
        ValueError: for a collection without training pairs, or checkpoints of another recipe or data.
        FileExistsError: if `output_dir` holds something other than a model of this recipe and data.
        MissingPackageError: if sentence-transformers or the packaged model is not installed.
    """

    def load() -> SparseEncoder:
        return load_base_model(recipe, [document.contents for document in collection.documents.values()])

    def fit(model: Any, pairs: Any, run: _run.TrainingRun, checkpoint: Any, bf16: bool) -> float | None:
        return _fit(recipe, model, pairs, run, checkpoint, bf16, progress, verbose)

    return run_training(
        recipe, collection, output_dir, resume=resume, overwrite=overwrite, verbose=verbose, load=load, fit=fit
    )


def load_base_model(recipe: SpladeRecipe, sample_texts: list[str]) -> SparseEncoder:
    """The stock SparseEncoder that a recipe starts from."""
    if recipe.base_model == "minilm":
        from tilefold.recipes.backbone import minilm_splade

        return minilm_splade(
            sample_texts,
            percentile=recipe.start_percentile,
            deviations=recipe.start_deviations,
            max_length=recipe.max_length,
            seed=recipe.seed,
        )
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(recipe.base_model, trust_remote_code=False)
    model.max_seq_length = min(recipe.max_length, model.max_seq_length or recipe.max_length)
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    return model


def make_loss(model: SparseEncoder, recipe: SpladeRecipe) -> Any:
    """The stock loss of a recipe: in-batch negatives with FLOPS regularisers."""
    from sentence_transformers.sparse_encoder import losses

    return losses.SpladeLoss(
        model,
        loss=losses.SparseMultipleNegativesRankingLoss(model, scale=recipe.similarity_scale),
        document_regularizer_weight=recipe.document_regularizer,
        query_regularizer_weight=recipe.query_regularizer,
    )


def _fit(
    recipe: SpladeRecipe,
    model: SparseEncoder,
    pairs: list[tuple[str, str]],
    run: _run.TrainingRun,
    checkpoint: _run.Checkpoint | None,
    bf16: bool,
    progress: Progress | None,
    verbose: bool,
) -> float | None:
    """Train `model` in place with the stock trainer; return the mean loss that it logged last."""
    from datasets import Dataset
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer
    from transformers.trainer_callback import PrinterCallback

    model.model_card_data.widget = model.model_card_data.widget or [{"text": pairs[0][0]}]  # else it draws a bar
    if recipe.frozen_layers:
        freeze_lower_layers(model, recipe.frozen_layers)
    length = model.max_seq_length
    model.max_seq_length = min(length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe)
    watcher = _run.make_watcher(progress, run)
    dataset = Dataset.from_dict({"query": [query for query, _ in pairs], "document": [text for _, text in pairs]})
    with _head(model, recipe.fused):
        trainer = SparseEncoderTrainer(
            model=model,
            args=_arguments(recipe, run, len(pairs), bf16, verbose),
            train_dataset=dataset,
            loss=loss,
            callbacks=[_regularizer_schedule(recipe, loss), *attention_callbacks(recipe), watcher],
        )
        if not verbose:
            trainer.remove_callback(PrinterCallback)
        with _run.heeding_interrupts(watcher):
            trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    model.max_seq_length = length
    last: float | None = watcher.loss
    return last


def _head(model: SparseEncoder, fused: bool) -> Any:
    if not fused:
        return nullcontext()
    from tilefold.integrations.sentence_transformers import accelerate

    return accelerate(model)


def _regularizer_schedule(recipe: SpladeRecipe, loss: Any) -> Any:
    from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import (
        SpladeRegularizerWeightSchedulerCallback,
    )

    return SpladeRegularizerWeightSchedulerCallback(loss, warmup_ratio=recipe.regularizer_warmup_ratio)


def _arguments(recipe: SpladeRecipe, run: _run.TrainingRun, n_pairs: int, bf16: bool, verbose: bool) -> Any:
    import torch
    from sentence_transformers.sparse_encoder import SparseEncoderTrainingArguments

    steps = total_steps(recipe, n_pairs)
    return SparseEncoderTrainingArguments(
        output_dir=str(run.work_dir),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=int(recipe.warmup_ratio * steps),
        weight_decay=0.0,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        batch_sampler=length_grouped_batches if recipe.group_by_length else "no_duplicates",
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="steps",
        save_steps=recipe.save_steps,
        save_total_limit=2,
        logging_steps=max(1, min(10, steps)),
        report_to="none",
        disable_tqdm=not verbose,
        seed=recipe.seed,
    )
