"""ColBERT models (arXiv 2004.12832), trained with the trainer of sentence-transformers.

Models of page images, such as ColPali (arXiv 2407.01449), are trained in the same way, on pairs of
a query and a page.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.precision import Dtype, set_precision
from tilefold._internal.typing import Module, MultiVectorEncoder, Tensor, Tokenizer, Transformer
from tilefold.recipes import loading
from tilefold.recipes._settings import BOOLEAN, MODEL_NAME, checked, integer, is_integer, validator
from tilefold.recipes._trainer import run_trainer, sharded_job
from tilefold.recipes._training import Recipe, TrainingJob, TrainResult, train
from tilefold.recipes.adapters import merge_adapters
from tilefold.recipes.backbone import MINILM_NAME, minilm_path
from tilefold.retrieval.encoding.pages import add_image_tokens, encodes_images

__all__ = ["ColbertRecipe", "TrainResult", "train", "untrained_colbert"]

MAX_DIMENSION = 4096
DIMENSION_MULTIPLE = 8  # kernels load 8 elements of 16 bits at a time
# Parts of the names of the vision model in ColPali and ColModernVBERT, and in ColQwen2.
_VISION_PARTS = ("vision", "visual")
UNLIMITED_TOKENS = 2**30  # token limit of a model that has none


def _is_dimension(value: object) -> bool:
    """Return whether a value is a valid dimension of token vectors, or ``None``."""
    if value is None:
        return True
    if not is_integer(value, 1):
        return False
    return value % DIMENSION_MULTIPLE == 0 and value <= MAX_DIMENSION  # type: ignore[operator]


@dataclass(frozen=True)
class ColbertRecipe(Recipe):
    """Configuration of a ColBERT training run; every field is checked on construction.

    The base model may be any encoder, a SentenceTransformer, or a multi-vector model, whose
    projection, query length and skipped words are kept. A model of page images, such as ColPali,
    is trained as it is, on a collection of pages.

    Attributes:
        base_model: model that training starts from: ``"minilm"`` for the packaged MiniLM, a folder
            or a Hugging Face name.
        dimension: output dimension of the projection that is added to a model without one; None
            adds no projection.
        query_length: maximum number of tokens per query.
        expand_queries: whether to pad queries with mask tokens that are scored too, as ColBERT
            does.
        skip_punctuation: whether to drop the vectors of punctuation in documents.
        lora: rank of LoRA updates (arXiv 2106.09685) of the language model, which are merged at the
            end; the other weights of the network are not trained, except for the projection. None
            trains all weights.

    The other fields are described in :class:`TrainingSettings`.
    """

    late: ClassVar[bool] = True
    base_model: str = checked("minilm", MODEL_NAME)
    _: KW_ONLY
    dimension: int | None = checked(
        128,
        validator(
            _is_dimension, f"a multiple of {DIMENSION_MULTIPLE} up to {MAX_DIMENSION} or None"
        ),
    )
    query_length: int = checked(32, integer())
    expand_queries: bool = checked(False, BOOLEAN)
    skip_punctuation: bool = checked(True, BOOLEAN)
    lora: int | None = checked(None, integer())

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the base model, which are merged at the end."""
        return self.lora is not None

    def build_model(self, texts: Sequence[str] = ()) -> MultiVectorEncoder:
        """Load the base model as the ``MultiVectorEncoder`` that training starts from.

        A saved multi-vector model is used unchanged. To any other model, the modules of a ColBERT
        are added: a projection, a mask of punctuation and a normalization.

        Args:
            texts: ignored; other recipes compute initial weights from documents.

        Raises:
            ValueError: if the base model does not begin with a Transformer.
        """
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Transformer

        is_packaged = self.base_model == "minilm"
        path = str(minilm_path()) if is_packaged else self.base_model
        kind = loading.saved_kind(path)
        with loading.seeded(self.seed):
            model = loading.load_complete(MultiVectorEncoder, path)
            if not isinstance(model[0], Transformer):
                raise ArgumentError(
                    "base_model",
                    f"must begin with a Transformer, got {type(model[0]).__name__} in "
                    f"{self.base_model}; models with two encoders or static embeddings cannot be "
                    "trained as ColBERT.",
                )
            if kind != "multi-vector":
                # MultiVectorEncoder adds a projection to a model that has none. Only a saved one
                # is kept.
                saved_modules = loading.saved_modules(path)
                has_saved_projection = any(name.endswith(".Dense") for name in saved_modules)
                model = _as_colbert(
                    model,
                    self,
                    keep_projection=kind == "dense" and has_saved_projection,
                )
        transformer = model[0]
        # A processor of images decides how many tokens a page has. None may be truncated.
        if encodes_images(model):
            add_image_tokens(model)
        else:
            transformer.document_length = min(
                self.max_length,
                transformer.document_length or self.max_length,
                _max_tokens(model),
            )
        if self.lora is not None:
            with loading.seeded(self.seed):
                _add_lora(transformer, self.lora)
        if is_packaged:  # the configuration names the folder of the package
            transformer.model.config._name_or_path = MINILM_NAME
        return loading.stay_offline(model)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place, and return its result with losses and warnings."""
        with sharded_job(job) as training_job:
            result = self._fit(training_job)
        if self.adds_adapters:
            merge_adapters(job.model)
        return result

    def _fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place, with documents truncated to ``train_max_length`` tokens.

        Args:
            job: the training job: its model, training rows and ranks.

        Returns:
            The job's result with the steps, losses and warnings of the training.
        """
        from sentence_transformers import (
            MultiVectorEncoderTrainer,
            MultiVectorEncoderTrainingArguments,
        )

        from tilefold.integrations.sentence_transformers import accelerate

        model = job.model
        transformer = model[0]
        saved_length = transformer.document_length
        if saved_length is not None:
            transformer.document_length = min(
                saved_length,
                self.train_max_length or self.max_length,
            )
        loss = self._make_loss(job)
        # The network of a model of page images is not replaced: its inputs cannot be packed.
        accelerates_network = self.fused and not encodes_images(model)
        # The trainer adds CUDA graphs if the recipe asks for them.
        with accelerate(model, graphs=False) if accelerates_network else nullcontext():
            if job.sharded is not None:
                job.sharded.shard(bf16=job.result.bf16)
            result = run_trainer(
                job,
                MultiVectorEncoderTrainer,
                MultiVectorEncoderTrainingArguments,
                loss,
            )
        # Not restored after an error, because the error ends the run.
        transformer.document_length = saved_length
        return result

    def _make_loss(self, job: TrainingJob) -> Module:
        """Create the contrastive loss of MaxSim scores with in-batch negatives.

        Args:
            job: the training job: its model and its ranks, which share in-batch negatives.

        Returns:
            The loss of sentence-transformers, or its cached version (GradCache) if
            ``mini_batch_size`` is set.
        """
        from sentence_transformers.multi_vector_encoder import losses
        from sentence_transformers.multi_vector_encoder.scoring import (
            colbert_scores as unfused_scores,
        )

        from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores

        score_function = colbert_scores if self.fused else unfused_scores
        if job.world.size > 1:
            score_function = functools.partial(
                scores_of_all_ranks,
                score_function=score_function,
                # No document of any rank is longer. Pages have no limit.
                length=job.model[0].document_length,
            )
        if self.mini_batch_size is None:
            return losses.MultiVectorMultipleNegativesRankingLoss(
                job.model,
                scale=self.similarity_scale,
                similarity_fct=score_function,
                gather_across_devices=False,
            )
        return losses.CachedMultiVectorMultipleNegativesRankingLoss(
            job.model,
            scale=self.similarity_scale,
            similarity_fct=score_function,
            mini_batch_size=self.mini_batch_size,
            score_mini_batch_size=self.batch_size,  # scores all queries of a batch at once
            gather_across_devices=False,
        )


def scores_of_all_ranks(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor,
    documents_mask: Tensor,
    *,
    score_function: Callable[..., Tensor],
    length: int | None,
) -> Tensor:
    """Score this rank's queries with the documents of all ranks, for in-batch negatives.

    Documents are padded to a fixed length before they are gathered. The losses of
    sentence-transformers gather the longest length of all ranks first, which makes the CPU wait in
    every step.

    Args:
        queries: token vectors ``[B, Lq, D]`` of this rank's queries.
        documents: token vectors ``[B, N, Ld, D]`` of this rank's documents, N for each query.
        queries_mask: ``[B, Lq]``, True for tokens that are not padding.
        documents_mask: ``[B, N, Ld]``, True for tokens that are not padding.
        score_function: computes scores from token vectors and masks.
        length: length to which documents are padded, at least Ld; None gathers the longest length
            of all ranks.

    Returns:
        Scores ``[B, ranks * B, ...]`` as `score_function` returns them. ``gather_rows`` puts this
        rank's documents first.

    Raises:
        ValueError: if documents are longer than `length`.
    """
    from torch.nn.functional import pad

    from tilefold.distributed.process_group import gather_rows

    if length is None:
        length = _longest_of_all_ranks(documents)
    n_padding = length - documents.size(2)
    if n_padding < 0:  # the gathered shapes would differ between ranks
        raise ValueError(f"documents must have at most {length} tokens, got {documents.size(2)}.")
    all_masks = gather_rows(pad(documents_mask, (0, n_padding)))
    all_documents = gather_rows(pad(documents, (0, 0, 0, n_padding)))
    return score_function(
        queries,
        all_documents,
        queries_mask=queries_mask,
        documents_mask=all_masks,
    )


def _longest_of_all_ranks(documents: Tensor) -> int:
    """Return the largest number of tokens of the padded documents of any rank.

    Args:
        documents: token vectors ``[B, N, Ld, D]`` of this rank's documents.
    """
    import torch
    import torch.distributed as dist

    longest = torch.tensor(documents.size(2), device=documents.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return int(longest)


def _add_lora(transformer: Transformer, rank: int) -> None:
    """Add LoRA updates to the language model of a network, and freeze its other weights.

    In a model of page images, the vision model does not change, and the projection to token vectors
    has an update too, as in the recipe of ColPali.

    Args:
        transformer: module with the network, changed in place.
        rank: rank of the updates.
    """
    from tilefold.recipes.decoders import LORA_ALPHA_PER_RANK, add_lora

    add_lora(
        transformer,
        rank=rank,
        alpha=LORA_ALPHA_PER_RANK * rank,
        excluded_parts=_VISION_PARTS,
        other_targets=("embedding_proj_layer",),
    )


def _as_colbert(
    model: MultiVectorEncoder,
    recipe: ColbertRecipe,
    *,
    keep_projection: bool,
) -> MultiVectorEncoder:
    """Build a ColBERT from the Transformer of a model, with the recipe's other modules.

    The Transformer is followed by a projection, a mask of punctuation and a normalization.

    Args:
        model: a network or a dense SentenceTransformer, loaded as a ``MultiVectorEncoder``. Its
            Transformer is changed in place.
        recipe: the recipe, with the dimension of the projection, the query length, and whether
            punctuation is skipped.
        keep_projection: whether to keep the model's dense layers instead of adding a projection.
    """
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [module for module in model if not isinstance(module, (MultiVectorMask, Normalize))]
    transformer = modules[0]
    if not keep_projection:
        modules = [module for module in modules if not isinstance(module, Dense)]
        if recipe.dimension is not None:
            width = transformer.get_embedding_dimension()
            modules.append(_create_projection(width, recipe.dimension))
    skipped_words = _punctuation_tokens(model.tokenizer) if recipe.skip_punctuation else None
    modules.append(MultiVectorMask(skiplist_words=skipped_words, skiplist_tasks="document"))
    modules.append(Normalize(module_input_name="token_embeddings"))
    transformer.query_length = min(recipe.query_length, _max_tokens(model))
    if recipe.expand_queries:
        transformer.query_expansion = {
            "strategy": "fixed",
            "length": transformer.query_length,
            "attend": False,  # text tokens do not attend to the mask tokens, as in ColBERT
        }
    return MultiVectorEncoder(
        modules=modules,
        prompts=dict(model.prompts),
        device=str(model.device),
        similarity_fn_name=model.similarity_fn_name,
    )


def _create_projection(width: int, dimension: int) -> Module:
    """Create the linear layer from token states to token vectors, with an orthogonal weight.

    Untrained scores are then close to the similarities of the backbone's token states.

    Args:
        width: dimension of the token states.
        dimension: dimension of the token vectors.
    """
    import torch
    from sentence_transformers.base.modules import Dense

    weight = torch.empty(dimension, width)
    torch.nn.init.orthogonal_(weight)
    return Dense(
        width,
        dimension,
        bias=False,
        activation_function=torch.nn.Identity(),
        init_weight=weight,
        module_input_name="token_embeddings",
    )


def _punctuation_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the punctuation marks that are tokens of their own, which can be skipped."""
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    return [
        mark
        for mark in string.punctuation
        if tokenizer.convert_tokens_to_ids(mark) not in (None, unknown_id)
    ]


def _max_tokens(model: MultiVectorEncoder) -> int:
    """Return the maximum number of tokens of a model's Transformer."""
    length = model.max_seq_length
    return length if isinstance(length, int) and length > 0 else UNLIMITED_TOKENS


def untrained_colbert(dtype: Dtype = "auto") -> MultiVectorEncoder:
    """Return the packaged MiniLM as an untrained ColBERT, which computes normalized token states.

    ``ColbertRecipe(max_steps=0, dimension=None)`` saves this model.

    Args:
        dtype: the dtype in which the model computes, see
            :func:`tilefold.recipes.loading.load_saved`.
    """
    with loading.quiet_libraries():
        model = ColbertRecipe(max_steps=0, dimension=None).build_model()
        set_precision(model, dtype)
    return model
