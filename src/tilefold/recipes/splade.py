"""Train a SPLADE encoder with the stock trainer, loss and checkpoints of sentence-transformers.

The loss is ``SpladeLoss`` (FLOPS regularisers, arXiv 2004.05665 and 2107.05720) over in-batch negatives; only the LM
head is replaced while training runs, so that the ``[B, S, V]`` logits never exist. What is saved is stock.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilefold.recipes._sparse_recipes import SpladeRecipe
from tilefold.recipes._training import Progress, RunOptions, TrainResult, run_training
from tilefold.recipes.lsr import fit, make_loss
from tilefold.recipes.precision import supports_bf16

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.collection import Collection

__all__ = ["SpladeRecipe", "TrainResult", "load_base_model", "make_loss", "supports_bf16", "train"]


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
        fit=lambda job: fit(recipe, job),
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
    from tilefold.recipes.loading import check_masked_lm, check_tokenizer, saved_kind, stay_offline, whole_weights

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
    return stay_offline(model)
