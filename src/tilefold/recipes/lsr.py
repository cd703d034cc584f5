"""Learned sparse retrieval: one typed configuration for the systems of the catalogue, trained with stock parts.

The trainer, ``SpladeLoss`` and the losses below it are those of sentence-transformers; encoders come from
:mod:`tilefold.recipes.encoders`, and what stock lacks from :mod:`tilefold.losses` and :mod:`tilefold.modules`.
"""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported by the functions that need them

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.recipes._lsr_recipe import LOSSES, REGULARIZERS, LsrRecipe, RegularizerSpec
from tilefold.recipes._training import Losses, Progress, RunOptions, TrainingJob, TrainResult, run_trainer, run_training
from tilefold.recipes.encoders import Base, build_encoder
from tilefold.retrieval.provenance import texts_digest

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.collection import Collection

__all__ = ["LOSSES", "REGULARIZERS", "LsrRecipe", "RegularizerSpec", "fused_head", "load_base_model", "train"]


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
        fit=lambda job: _fit(recipe, job),
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


def _fit(recipe: LsrRecipe, job: TrainingJob) -> Losses:
    """Train the job's model in place."""
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments

    from tilefold.modules import to_stock
    from tilefold.recipes._cheaper import length_grouped_batches
    from tilefold.recipes._lsr_loss import make_loss, regularizer_schedule
    from tilefold.recipes._watch import watch
    from tilefold.recipes.decoders import merge_adapters

    model = job.model
    length = model.max_seq_length
    model.max_seq_length = min(length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe)
    watcher = watch(loss, bounded=model.max_active_dims is not None)
    sampler: Any = "no_duplicates" if "infonce" in recipe.loss else "batch_sampler"
    with fused_head(model, recipe.fused):
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


def fused_head(model: SparseEncoder, fused: bool = True) -> Any:
    """A context in which `model` scores without the logits, where it has a head to fuse and `fused` asks for it."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules import FusedPooling

    if not fused or not any(isinstance(module, (SpladePooling, FusedPooling)) for module in model.modules()):
        return nullcontext()  # encoders without a vocabulary-wide head have nothing to fuse
    from tilefold.integrations.sentence_transformers import accelerate

    return accelerate(model)
