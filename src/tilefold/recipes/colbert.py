"""ColBERT encoders (arXiv 2004.12832), trained with the stock trainer, loss and checkpoints."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from tilefold._internal.typing import MultiVectorEncoder, Tensor
from tilefold.recipes import loading
from tilefold.recipes._settings import BOOLEAN, MODEL_NAME, checked, integer, is_integer, rule
from tilefold.recipes._trainer import run_trainer
from tilefold.recipes._training import Recipe, TrainingJob, TrainResult, train
from tilefold.recipes.backbone import MINILM_NAME, minilm_path

__all__ = ["ColbertRecipe", "TrainResult", "train", "untrained_colbert"]

MAX_DIMENSION = 4096


@dataclass(frozen=True)
class ColbertRecipe(Recipe):
    """Configuration of a ColBERT training run; every field is checked on construction.

    The base model is ``"minilm"`` for the packaged MiniLM, else a folder or a Hugging Face name: of
    any encoder, of a SentenceTransformer, or of a multi-vector model, whose projection, query
    length and skipped words are kept.

    Attributes:
        base_model: the model to start from.
        dimension: of the projection that is put on a backbone without one; None puts none, and
            keeps the backbone's width.
        query_length: maximum tokens per query.
        expand_queries: pad queries with mask tokens that are scored too, as ColBERT does.
        skip_punctuation: keep no vectors of punctuation in documents.

    The others are those of :class:`TrainingSettings`.
    """

    late: ClassVar[bool] = True
    base_model: str = checked("minilm", MODEL_NAME)
    _: KW_ONLY
    dimension: int | None = checked(
        128,
        rule(
            lambda value: (
                value is None
                or (is_integer(value, 1) and value % 8 == 0 and value <= MAX_DIMENSION)
            ),
            f"a multiple of 8 up to {MAX_DIMENSION} or None",  # for the kernels
        ),
    )
    query_length: int = checked(32, integer())
    expand_queries: bool = checked(False, BOOLEAN)
    skip_punctuation: bool = checked(True, BOOLEAN)

    def start(self, texts: Sequence[str] = ()) -> MultiVectorEncoder:
        """The stock MultiVectorEncoder that training starts from, whatever the texts."""
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Transformer

        packaged = self.base_model == "minilm"
        base = str(minilm_path()) if packaged else self.base_model
        kind = loading.saved_kind(base)
        with loading.seeded(self.seed):
            model = loading.load_complete(MultiVectorEncoder, base)
            if not isinstance(model[0], Transformer):
                first = type(model[0]).__name__
                got = f"{first} in {self.base_model}; the recipe trains no routes or static embeddings."
                raise ValueError(f"base_model must begin with a Transformer, got {got}")
            if kind != "multi-vector":
                projected = kind == "dense" and any(
                    module.endswith(".Dense") for module in loading.saved_modules(base)
                )
                model = _with_own_modules(model, self, keep_projection=projected)
        model[0].document_length = min(
            self.max_length,
            model[0].document_length or self.max_length,
            _positions(model),
        )
        if packaged:
            model[0].model.config._name_or_path = MINILM_NAME
        return loading.stay_offline(model)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place."""
        from sentence_transformers import (
            MultiVectorEncoderTrainer,
            MultiVectorEncoderTrainingArguments,
        )
        from sentence_transformers.multi_vector_encoder import losses
        from sentence_transformers.multi_vector_encoder.scoring import (
            colbert_scores as stock_scores,
        )

        from tilefold.integrations.sentence_transformers import accelerate
        from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores

        model = job.model
        length = model[0].document_length
        model[0].document_length = min(length, self.train_max_length or self.max_length)
        made, cached = losses.MultiVectorMultipleNegativesRankingLoss, {}
        if self.mini_batch_size is not None:
            made = losses.CachedMultiVectorMultipleNegativesRankingLoss
            cached = {
                "mini_batch_size": self.mini_batch_size,
                "score_mini_batch_size": self.batch_size,
            }
        scores = colbert_scores if self.fused else stock_scores
        if job.world.size > 1:
            scores = functools.partial(
                scores_of_all_ranks,
                scores=scores,
                length=model[0].document_length,
            )
        loss = made(
            model,
            scale=self.similarity_scale,
            similarity_fct=scores,
            gather_across_devices=False,
            **cached,
        )
        with accelerate(model) if self.fused else nullcontext():
            last = run_trainer(
                job,
                MultiVectorEncoderTrainer,
                MultiVectorEncoderTrainingArguments,
                loss,
            )
        model[0].document_length = length
        return last


def scores_of_all_ranks(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor,
    documents_mask: Tensor,
    *,
    scores: Any,
    length: int,
) -> Tensor:
    """`scores` of a rank's queries with the documents of all ranks, its own first: ``[B, N, T,
    D]``, T <= `length`.

    The losses' own gathering asks for the longest document of all ranks, for which the host waits
    in every step.
    """
    from torch.nn.functional import pad

    from tilefold.distributed.process_group import gather_rows

    if documents.size(2) > length:  # other ranks would wait for tokens that never come
        raise ValueError(f"documents must have at most {length} tokens, got {documents.size(2)}.")
    room = length - documents.size(2)
    masks, every = (
        gather_rows(pad(documents_mask, (0, room))),
        gather_rows(pad(documents, (0, 0, 0, room))),
    )
    found: Tensor = scores(queries, every, queries_mask=queries_mask, documents_mask=masks)
    return found


def _with_own_modules(
    model: MultiVectorEncoder,
    recipe: ColbertRecipe,
    *,
    keep_projection: bool,
) -> MultiVectorEncoder:
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    modules = [module for module in model if not isinstance(module, (MultiVectorMask, Normalize))]
    transformer = modules[0]
    if not keep_projection:
        modules = [module for module in modules if not isinstance(module, Dense)]
        if recipe.dimension is not None:
            width = transformer.get_embedding_dimension()
            weight = torch.empty(recipe.dimension, width)
            torch.nn.init.orthogonal_(
                weight,
            )  # untrained scores follow those of the backbone's own token states
            plain = torch.nn.Identity()
            modules.append(
                Dense(
                    width,
                    recipe.dimension,
                    False,
                    plain,
                    weight,
                    module_input_name="token_embeddings",
                ),
            )
    unknown, id_of = (
        getattr(model.tokenizer, "unk_token_id", None),
        model.tokenizer.convert_tokens_to_ids,
    )
    single = [
        mark for mark in string.punctuation if id_of(mark) not in (None, unknown)
    ]  # only those can be skipped
    skipped = single if recipe.skip_punctuation else None
    modules += [
        MultiVectorMask(skiplist_words=skipped, skiplist_tasks="document"),
        Normalize(module_input_name="token_embeddings"),
    ]
    transformer.query_length = min(recipe.query_length, _positions(model))
    if recipe.expand_queries:
        transformer.query_expansion = {
            "strategy": "fixed",
            "length": transformer.query_length,
            "attend": False,
        }
    return MultiVectorEncoder(
        modules=modules,
        prompts=dict(model.prompts),
        device=str(model.device),
        similarity_fn_name=model.similarity_fn_name,
    )


def _positions(model: MultiVectorEncoder) -> int:
    """Maximum number of tokens of the backbone."""
    length = model.max_seq_length
    return length if isinstance(length, int) and length > 0 else 1 << 30


def untrained_colbert() -> MultiVectorEncoder:
    """The model that ``ColbertRecipe(max_steps=0, dimension=None)`` saves: the token states of
    MiniLM.
    """
    with loading.quiet_libraries():
        model = ColbertRecipe(max_steps=0, dimension=None).start()
        loading.run_fast(model)
    return model
