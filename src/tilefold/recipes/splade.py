"""The SPLADE recipe, and the untrained SPLADE encoder on the packaged MiniLM."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.files import InUseError, atomic_directory
from tilefold._internal.typing import SparseEncoder
from tilefold._version import __version__
from tilefold.recipes import loading
from tilefold.recipes._settings import MODEL_NAME, NOT_NEGATIVE, POSITIVE, RATIO, checked, integer
from tilefold.recipes._training import TrainingJob, TrainResult, train
from tilefold.recipes.backbone import freeze_lower_layers, minilm_splade
from tilefold.recipes.lsr import LsrRecipe, RegularizerSpec, SparseRecipe, fit_sparse
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.datasets import default_cache_dir

__all__ = ["SpladeRecipe", "TrainResult", "train", "untrained_splade"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpladeRecipe(SparseRecipe):
    """Configuration of a SPLADE model with in-batch negatives and FLOPS penalties.

    The papers are arXiv 2004.05665 and 2107.05720.

    Attributes:
        base_model: ``"minilm"`` for the packaged MiniLM, else a folder or a Hugging Face name of a
            masked LM, or of a SparseEncoder, whose modules are kept.
        query_regularizer, document_regularizer: weights of the FLOPS penalties.
        regularizer_warmup_ratio: share of the steps over which these weights rise quadratically.
        frozen_layers: number of lowest encoder layers that are frozen, together with the embeddings
            (and a decoder tied to them); they have no backward pass. 0 trains everything.

    The other fields are described in :class:`SparseRecipe` and :class:`TrainingSettings`.
    """

    base_model: str = checked("minilm", MODEL_NAME)
    _: KW_ONLY
    learning_rate: float = checked(2e-4, POSITIVE)
    query_regularizer: float = checked(1e-2, NOT_NEGATIVE)
    document_regularizer: float = checked(1e-2, NOT_NEGATIVE)
    regularizer_warmup_ratio: float = checked(1 / 3, RATIO)
    frozen_layers: int = checked(0, integer(0))

    def as_lsr(self) -> LsrRecipe:
        """Return the same training as a :class:`LsrRecipe` with one encoder for both sides."""
        settings = self.to_dict()
        for name in (
            "query_regularizer",
            "document_regularizer",
            "regularizer_warmup_ratio",
            "frozen_layers",
        ):
            del settings[name]
        warmup_ratio = self.regularizer_warmup_ratio
        return LsrRecipe(
            "splade",
            query_regularizer=RegularizerSpec("flops", self.query_regularizer, warmup_ratio),
            document_regularizer=RegularizerSpec("flops", self.document_regularizer, warmup_ratio),
            **settings,
        )

    def start(self, texts: Sequence[str]) -> SparseEncoder:
        """Load the stock SparseEncoder that training starts from.

        Args:
            texts: documents of the collection.

        Raises:
            ValueError: if the base model has no masked-LM head.
        """
        if self.base_model == "minilm":
            return minilm_splade(
                texts,
                percentile=self.start_percentile,
                max_length=self.max_length,
                seed=self.seed,
            )
        from tilefold.modules import load_encoder

        kind = loading.saved_kind(self.base_model)
        if kind not in ("sparse", "backbone"):
            raise ArgumentError(
                "base_model",
                f"{self.base_model} is a {kind} model, without the masked-LM head that "
                "SPLADE trains. Take a masked LM, a SparseEncoder, or 'minilm'; colbert trains "
                "dense and multi-vector models.",
            )
        if kind == "backbone":
            loading.check_masked_lm(self.base_model)
        model = loading.load_complete(load_encoder, self.base_model)
        model.max_seq_length = min(self.max_length, model.max_seq_length or self.max_length)
        return loading.stay_offline(model)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place."""
        if self.frozen_layers:
            freeze_lower_layers(job.model, self.frozen_layers)
        return fit_sparse(self.as_lsr(), job, splade=True)


def untrained_splade(
    texts_sha256: str,
    texts: Callable[[], Mapping[str, str]] | None = None,
    *,
    cache_dir: str | Path | None = None,
) -> SparseEncoder:
    """The packaged MiniLM as ``SpladeRecipe(max_steps=0)`` makes it of the documents of a digest,
    in a cache.

    Its decoder bias is set from a sample of the documents: queries are encoded later by the very
    same weights, without them. `texts` gives id -> text, and is called only if the model is not in
    the cache.

    Raises:
        LookupError: the model is not in the cache, and there are no `texts`.
        ValueError: `texts` are others than those of the digest.
    """
    recipe = SpladeRecipe(max_steps=0)
    made_from = json.dumps([__version__, texts_sha256, recipe.to_dict()], sort_keys=True)
    parent = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = parent / "minilm-splade" / hashlib.sha256(made_from.encode()).hexdigest()[:32]
    with loading.quiet_libraries():
        if folder.is_dir():
            try:
                return loading.load_saved(str(folder), "sparse")
            except Exception as error:  # whatever a damaged file raises; it is made again
                _logger.warning(
                    "the cached model in %s is damaged and is made again: %s",
                    folder,
                    error,
                )
        with tempfile.TemporaryDirectory(prefix="tilefold-minilm-") as made:
            if texts is None:
                raise LookupError(
                    "the untrained start of these documents is not in the cache, and is made from "
                    "them.",
                )
            found = texts()
            if texts_digest(found) != texts_sha256:
                got = f"{len(found)} of another. Give those."
                raise ArgumentError(
                    "texts",
                    f"expected the documents of the digest {texts_sha256}, got {got}",
                )
            recipe.start(list(found.values())).save_pretrained(made)
            try:
                names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
                with atomic_directory(folder, own_names=names, overwrite=True) as cached:
                    shutil.copytree(made, cached, copy_function=shutil.copyfile, dirs_exist_ok=True)
            except (OSError, InUseError) as error:
                _logger.warning("the untrained start could not be cached: %s", error)
            return loading.load_saved(made, "sparse")
