"""The loss of a recipe: stock losses and penalties in a stock ``SpladeLoss``."""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported by the functions that need them

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilefold.recipes._lsr_recipe import LsrRecipe, RegularizerSpec

__all__ = ["make_loss", "regularizer_schedule"]


def make_loss(model: Any, recipe: LsrRecipe) -> Any:
    """``SpladeLoss`` of the recipe's loss and penalties; PROSPER's are on base weights."""
    from sentence_transformers.sparse_encoder import losses

    from tilefold.losses.base_splade import BaseSpladeLoss

    made = BaseSpladeLoss if recipe.document.kind == "prosper" else losses.SpladeLoss
    query, document = recipe.query_regularizer, recipe.document_regularizer
    return made(
        model,
        loss=_ranking_loss(model, recipe),
        document_regularizer_weight=document.weight,
        query_regularizer_weight=query.weight,
        document_regularizer=make_regularizer(document, positions=1 + recipe.negatives),
        query_regularizer=make_regularizer(query),
    )


def _ranking_loss(model: Any, recipe: LsrRecipe) -> Any:
    from tilefold.losses import WeightedLosses

    terms = [(_term(model, name, recipe), weight) for name, weight in recipe.loss.items()]
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    return WeightedLosses(terms)


def _term(model: Any, name: str, recipe: LsrRecipe) -> Any:
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

    class Schedule(SpladeRegularizerWeightSchedulerCallback):  # type: ignore[misc]
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
