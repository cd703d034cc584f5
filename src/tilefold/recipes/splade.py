"""SPLADE encoders, trained with the stock trainer, loss and checkpoints of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._typing import Model
from tilefold.recipes import lsr
from tilefold.recipes._settings import Check, number, whole
from tilefold.recipes._training import Losses, TrainingJob, TrainResult, train
from tilefold.recipes.backbone import freeze_lower_layers, minilm_splade
from tilefold.recipes.loading import check_masked_lm, check_tokenizer, saved_kind, stay_offline, whole_weights
from tilefold.recipes.lsr import RATIO, LsrRecipe, RegularizerSpec, SparseRecipe, fit_sparse
from tilefold.recipes.precision import supports_bf16

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

__all__ = ["SpladeRecipe", "TrainResult", "load_base_model", "make_loss", "supports_bf16", "train"]


@dataclass(frozen=True)
class SpladeRecipe(SparseRecipe):
    """A SPLADE model with in-batch negatives and FLOPS penalties, for thousands of pairs; fields are checked.

    Attributes:
        base_model: ``"minilm"`` for the packaged MiniLM, else a folder or a Hugging Face name of a masked LM, or of a
            SparseEncoder, whose modules are kept.
        query_regularizer, document_regularizer: weights of the FLOPS terms.
        regularizer_warmup_ratio: share of the steps over which those weights rise, quadratically.
        frozen_layers: number of lowest encoder layers that are frozen, together with the embeddings (and a decoder tied
            to them); they have no backward pass. 0 trains everything.

    The others are those of :class:`SparseRecipe` and :class:`TrainingSettings`.
    """

    base_model: str = "minilm"
    _: KW_ONLY
    learning_rate: float = 2e-4
    query_regularizer: float = 1e-2
    document_regularizer: float = 1e-2
    regularizer_warmup_ratio: float = 1 / 3
    frozen_layers: int = 0

    CHECKS: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("query_regularizer", "document_regularizer"), number(lambda value: value >= 0, "0 or more")),
        "regularizer_warmup_ratio": RATIO,
        "frozen_layers": whole(0),
    }

    def as_lsr(self) -> LsrRecipe:
        """This training as the general record: both sides share a masked language model."""
        own = ("query_regularizer", "document_regularizer", "regularizer_warmup_ratio", "frozen_layers")
        common = {name: value for name, value in self.to_dict().items() if name not in own}
        query, document = (
            RegularizerSpec("flops", weight, self.regularizer_warmup_ratio)
            for weight in (self.query_regularizer, self.document_regularizer)
        )
        return LsrRecipe("splade", query_regularizer=query, document_regularizer=document, **common)

    def start(self, texts: list[str]) -> SparseEncoder:
        """The stock SparseEncoder that training starts from; `texts` are the documents of the collection."""
        if self.base_model == "minilm":
            return minilm_splade(
                texts,
                percentile=self.start_percentile,
                deviations=self.start_deviations,
                max_length=self.max_length,
                seed=self.seed,
            )
        from tilefold.modules import load_encoder

        base = self.base_model
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
        model.max_seq_length = min(self.max_length, model.max_seq_length or self.max_length)
        return stay_offline(model)

    def fit(self, job: TrainingJob) -> Losses:
        """Train the job's model in place."""
        if self.frozen_layers:
            freeze_lower_layers(job.model, self.frozen_layers)
        return fit_sparse(self.as_lsr(), job, splade=True)


def load_base_model(recipe: SpladeRecipe, sample_texts: list[str]) -> SparseEncoder:
    """The stock SparseEncoder that a recipe starts from."""
    return recipe.start(sample_texts)


def make_loss(model: Model, recipe: SpladeRecipe) -> Any:
    """``SpladeLoss`` over in-batch negatives, with FLOPS penalties (arXiv 2004.05665 and 2107.05720)."""
    return lsr.make_loss(model, recipe.as_lsr(), stock=True)
