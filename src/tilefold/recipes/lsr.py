"""Learned sparse retrieval: one typed configuration for the systems of the catalogue, trained with stock parts.

The trainer, ``SpladeLoss`` and the losses below it are those of sentence-transformers; encoders come from
:mod:`tilefold.recipes.encoders`, and what stock lacks from :mod:`tilefold.losses` and :mod:`tilefold.modules`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._typing import Model
from tilefold.recipes._cheaper import freeze_lower_layers, length_grouped_batches
from tilefold.recipes._sparse_recipes import LOSSES, REGULARIZERS, LsrRecipe, RegularizerSpec, SpladeRecipe
from tilefold.recipes._training import Losses, Progress, RunOptions, TrainingJob, TrainResult, run_trainer, run_training
from tilefold.recipes.encoders import Base, build_encoder
from tilefold.retrieval.provenance import texts_digest

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.collection import Collection

__all__ = [
    "LOSSES",
    "REGULARIZERS",
    "LsrRecipe",
    "RegularizerSpec",
    "fused_head",
    "load_base_model",
    "make_loss",
    "train",
]


def train(
    recipe: LsrRecipe,
    collection: Collection,
    output_dir: str | Path,
    *,
    negatives: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
) -> TrainResult:
    """Train on the pairs of the collection's ``"train"`` split and save a ``SparseEncoder`` in `output_dir`.

    Arguments, and the treatment of interrupted and finished runs, are those of :func:`tilefold.recipes.splade.train`.

    Args:
        negatives: mined negatives, or teacher scores, of the training queries: see
            :mod:`tilefold.retrieval.training_rows`.

    Raises:
        ValueError: data that the recipe needs are missing: the message has the command that makes them. Also for
            checkpoints of another recipe or data.
        FileExistsError: if `output_dir` holds something other than a model of this recipe and data.
        MissingPackageError: if sentence-transformers or the packaged model is not installed.
    """
    from tilefold.recipes.training_data import make_examples

    counts = [spec for spec in (recipe.query, recipe.document) if spec and spec.kind == "idf" and spec.idf is None]
    fitted = texts_digest(collection.contents()) if counts else ""
    return run_training(
        recipe,
        collection,
        output_dir,
        RunOptions(resume, overwrite, progress, verbose),
        load=lambda: load_base_model(recipe, list(collection.contents().values())),
        fit=lambda job: fit(recipe, job),
        examples=lambda: replace(make_examples(recipe, collection, negatives), documents=fitted),
    )


def load_base_model(recipe: LsrRecipe, texts: list[str]) -> SparseEncoder:
    """The untrained model of a recipe; `texts` are the documents of the collection."""
    base = Base(
        recipe.base_model,
        recipe.max_length,
        texts,
        seed=recipe.seed,
        start_percentile=recipe.start_percentile,
        start_deviations=recipe.start_deviations,
    )
    return build_encoder(recipe.query, recipe.document, base)


def fit(recipe: LsrRecipe | SpladeRecipe, job: TrainingJob) -> Losses:
    """Train the job's model in place."""
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments

    from tilefold.modules import to_stock
    from tilefold.recipes._watch import watch
    from tilefold.recipes.decoders import merge_adapters

    model, splade = job.model, isinstance(recipe, SpladeRecipe)
    if isinstance(recipe, SpladeRecipe) and recipe.frozen_layers:
        freeze_lower_layers(model, recipe.frozen_layers)
    length = model.max_seq_length
    model.max_seq_length = min(length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe)
    recipe = recipe.as_lsr() if isinstance(recipe, SpladeRecipe) else recipe
    watcher = watch(loss, bounded=not splade and model.max_active_dims is not None)
    sampler: Any = "no_duplicates" if "infonce" in recipe.loss else "batch_sampler"
    with fused_head(model, recipe.fused, needed=splade):
        last = run_trainer(
            job,
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
            loss,
            callbacks=[regularizer_schedule(recipe, loss), watcher],
            batch_sampler=length_grouped_batches if recipe.group_by_length else sampler,
            **_routes(recipe, job),
        )
    model.max_seq_length = length
    if any(side is not None and side.lora is not None for side in (recipe.query, recipe.document)):
        merge_adapters(model)
    if not splade:  # which keeps the modules of its base model
        to_stock(model)
    return replace(last, warnings=last.warnings + watcher.warnings())


def _routes(recipe: LsrRecipe, job: TrainingJob) -> dict[str, Any]:
    """Arguments of the trainer for a model of two routes, or one that reads queries in another form."""
    if recipe.query is None and recipe.document.kind not in ("echo", "splate"):
        return {}
    texts = [name for name in job.examples.columns if name != "label"]
    settings: dict[str, Any] = {"router_mapping": {name: "query" if name == "query" else "document" for name in texts}}
    if (
        recipe.query is not None
        and recipe.query.kind == "idf"
        and recipe.query.trainable
        and recipe.idf_learning_rate is not None
    ):
        settings["learning_rate_mapping"] = {r"sub_modules\.query\.0\.weight$": recipe.idf_learning_rate}
    return settings


def fused_head(model: SparseEncoder, fused: bool = True, *, needed: bool = False) -> Any:
    """A context in which `model` scores without the logits, where it has a head to fuse and `fused` asks for it.

    Raises:
        ValueError: for a model without such a head that is `needed`.
    """
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules import FusedPooling

    fusable = needed or any(isinstance(module, (SpladePooling, FusedPooling)) for module in model.modules())
    if not fused or not fusable:
        return nullcontext()  # encoders without a vocabulary-wide head have nothing to fuse
    from tilefold.integrations.sentence_transformers import accelerate

    return accelerate(model)


def make_loss(model: Model, recipe: LsrRecipe | SpladeRecipe) -> Any:
    """``SpladeLoss`` of the recipe's loss and penalties; PROSPER's are on base weights, a SpladeRecipe's are stock."""
    from sentence_transformers.sparse_encoder import losses

    from tilefold.losses.base_splade import BaseSpladeLoss

    stock = isinstance(recipe, SpladeRecipe)
    recipe = recipe.as_lsr() if isinstance(recipe, SpladeRecipe) else recipe
    made = BaseSpladeLoss if recipe.document.kind == "prosper" else losses.SpladeLoss
    query, document = recipe.query_regularizer, recipe.document_regularizer
    return made(
        model,
        loss=_ranking_loss(model, recipe),
        document_regularizer_weight=document.weight,
        query_regularizer_weight=query.weight,
        document_regularizer=None if stock else make_regularizer(document, positions=1 + recipe.negatives),
        query_regularizer=None if stock else make_regularizer(query),
    )


def _ranking_loss(model: Model, recipe: LsrRecipe) -> Any:
    from tilefold.losses import WeightedLosses

    terms = [(_term(model, name, recipe), weight) for name, weight in recipe.loss.items()]
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    return WeightedLosses(terms)


def _term(model: Model, name: str, recipe: LsrRecipe) -> Any:
    from sentence_transformers.sparse_encoder import losses

    from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss

    if name == "infonce":
        return losses.SparseMultipleNegativesRankingLoss(model, scale=recipe.similarity_scale)
    if name == "kl":
        return losses.SparseDistillKLDivLoss(model)
    if name == "margin_mse":
        return losses.SparseMarginMSELoss(model)
    return PairwiseSoftmaxLoss() if name == "pairwise_softmax" else TermRecallLoss()


def make_regularizer(spec: RegularizerSpec, positions: int = 1) -> Any:
    """The penalty as a module with ``compute_loss_from_embeddings``; a group has so many documents."""
    from tilefold import losses as ours

    if spec.kind == "none":
        return ours.NoPenalty()
    if spec.kind == "anti_zero":
        penalty: Any = ours.RegularizerSum([(ours.GlobalFlopsLoss(), 1.0), (ours.AntiZeroLoss(), 1.0)])
    else:
        kinds = {"flops": ours.GlobalFlopsLoss, "l1": ours.L1Loss, "l2": ours.L2Loss, "df_flops": ours.DFFlopsLoss}
        penalty = kinds[spec.kind](threshold=spec.threshold)
    return ours.PositionSum(penalty, positions) if spec.per_position else penalty


def regularizer_schedule(recipe: LsrRecipe, loss: Any) -> Any:
    """The stock callback that raises the weights of the penalties, with a warm-up for each side."""
    from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import (
        SpladeRegularizerWeightSchedulerCallback,
    )

    class Schedule(SpladeRegularizerWeightSchedulerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.total_steps is None:
                return

            def now(spec: RegularizerSpec) -> float:
                steps = max(1, int(self.total_steps * spec.warmup_ratio))
                return spec.weight * float(min(1.0, state.global_step / steps)) ** 2

            self._current_query_regularizer_weight = now(recipe.query_regularizer)
            self._current_document_regularizer_weight = now(recipe.document_regularizer)
            self.loss.query_regularizer_weight = self._current_query_regularizer_weight
            self.loss.document_regularizer_weight = self._current_document_regularizer_weight

    return Schedule(loss)
