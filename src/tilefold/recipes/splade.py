"""Train a SPLADE encoder with the stock trainer, loss and checkpoints of sentence-transformers.

The loss is ``SpladeLoss`` (FLOPS regularisers, arXiv 2004.05665 and 2107.05720) over in-batch negatives; only the LM
head is replaced while training runs, so that the ``[B, S, V]`` logits never exist. What is saved is stock.
"""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported by the functions that need them

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.recipes._attention import AttentionChoice
from tilefold.recipes._cheaper import freeze_lower_layers, length_grouped_batches
from tilefold.recipes._checks import check_count, check_flag, check_number, check_training
from tilefold.recipes._fields import DictMixin
from tilefold.recipes._training import Losses, Progress, RunOptions, TrainingJob, TrainResult, run_trainer, run_training
from tilefold.recipes._watch import watch
from tilefold.recipes.precision import supports_bf16

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.collection import Collection

__all__ = ["SpladeRecipe", "TrainResult", "load_base_model", "supports_bf16", "train"]


@dataclass(frozen=True)
class SpladeRecipe(AttentionChoice, DictMixin):
    """Configuration of a SPLADE training run; every field is checked on construction.

    Attributes:
        base_model: ``"minilm"`` for the packaged MiniLM, else a folder or a Hugging Face name of a masked LM.
        max_steps: optimiser steps; ``None`` uses ``epochs``, 0 leaves the untrained start, which needs no pairs.
        epochs: passes over the training pairs when ``max_steps`` is ``None``.
        batch_size: pairs per step, at least 2; every other document of a batch is a negative.
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
        graphs: repeat forward and backward of the encoder as CUDA graphs, see :func:`collate_ahead`. Needs a GPU and
            ``fused``. A resumed run draws other numbers for dropout than one that was not interrupted.
        save_steps: steps between checkpoints, from which an interrupted run is resumed.
        save_minutes: time between checkpoints at the latest.
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
    graphs: bool = False
    save_steps: int = 25
    save_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_attention()
        check_training(self)
        for name in ("query_regularizer", "document_regularizer"):
            check_number(name, getattr(self, name), lambda value: value >= 0, "0 or more")
        check_number(
            "regularizer_warmup_ratio", self.regularizer_warmup_ratio, lambda value: 0 < value <= 1, "in (0, 1]"
        )
        check_number("start_percentile", self.start_percentile, lambda value: 0 < value < 100, "in (0, 100)")
        if self.start_deviations is not None:
            check_number("start_deviations", self.start_deviations, lambda value: value >= 0, "0 or more, or None")
        if self.frozen_layers != 0:
            check_count("frozen_layers", self.frozen_layers, optional=False)
        check_flag("group_by_length", self.group_by_length)


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
    return run_training(
        recipe,
        collection,
        output_dir,
        RunOptions(resume, overwrite, progress, verbose),
        load=lambda: load_base_model(recipe, [document.contents for document in collection.documents.values()]),
        fit=lambda job: _fit(recipe, job),
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
    from tilefold.modules import load_encoder
    from tilefold.recipes.loading import check_masked_lm, check_tokenizer, saved_kind, whole_weights

    base = recipe.base_model
    kind = saved_kind(base)
    if kind not in ("sparse", "backbone"):
        raise ValueError(
            f"base_model: {base} is a {kind} model, without the masked-LM head that SPLADE trains. Take a masked "
            "language model, a SparseEncoder, or 'minilm'; the method colbert trains from dense and multi-vector "
            "models."
        )
    if kind == "backbone":
        check_masked_lm(base)
    with whole_weights(base):
        model = load_encoder(base, trust_remote_code=False, local_files_only=Path(base).is_dir())
    check_tokenizer(model, base)
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


def _fit(recipe: SpladeRecipe, job: TrainingJob) -> Losses:
    """Train the job's model in place."""
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments

    model = job.model
    if recipe.frozen_layers:
        freeze_lower_layers(model, recipe.frozen_layers)
    length = model.max_seq_length
    model.max_seq_length = min(length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe)
    watcher = watch(loss)
    sampler = length_grouped_batches if recipe.group_by_length else "no_duplicates"
    with _head(model, recipe.fused):
        last = run_trainer(
            job,
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
            loss,
            callbacks=[_regularizer_schedule(recipe, loss), watcher],
            batch_sampler=sampler,
        )
    model.max_seq_length = length
    return replace(last, warnings=last.warnings + watcher.warnings())


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
