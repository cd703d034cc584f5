"""Learned sparse retrieval: one typed configuration for the systems of the catalogue, trained with
stock parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._internal.arguments import list_of_texts
from tilefold._internal.typing import Model, Module, SparseEncoder, Tensor
from tilefold.recipes import _settings as rules
from tilefold.recipes._rows import Examples, Mined, examples_of, pair_examples, training_pairs
from tilefold.recipes._settings import REGULARIZERS, EncoderSpec, RegularizerSpec, Settings
from tilefold.recipes._trainer import run_trainer
from tilefold.recipes._training import Recipe, TrainingJob, TrainResult, train
from tilefold.recipes.encoders import Base, build_encoder
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.training_data.rows import RowsAhead, read_training_rows

if TYPE_CHECKING:
    from tilefold.recipes._batches import TrainingBatches

__all__ = [
    "LOSSES",
    "REGULARIZERS",
    "LsrRecipe",
    "RegularizerSpec",
    "TrainResult",
    "filled_batches",
    "fused_head",
    "length_grouped_batches",
    "make_examples",
    "make_loss",
    "train",
]

LOSSES = ("infonce", "kl", "margin_mse", "pairwise_softmax", "term_recall")
KL_TEMPERATURE = 2.0  # of student and teacher, that of sentence-transformers
MASKED_LM, FLOPS = EncoderSpec(), RegularizerSpec()
MAX_TEXTS = 1 << 24  # of the documents of all rows, where there are several draws of negatives


@dataclass(frozen=True, kw_only=True)
class SparseRecipe(Recipe):
    """The settings of every learned sparse model, on top of :class:`TrainingSettings`.

    Attributes:
        start_percentile: initial decoder bias of ``"minilm"``, see
            :func:`tilefold.recipes.minilm_splade`.
        group_by_length: batches of documents of similar length, with little padding.
    """

    start_percentile: float = rules.checked(
        99.95,
        rules.number(lambda value: 0 < value < 100, "in (0, 100)"),
    )
    group_by_length: bool = rules.checked(False, rules.BOOLEAN)


@dataclass(frozen=True)
class LsrRecipe(SparseRecipe):
    """Configuration of a learned sparse model and its training; every field is checked on
    construction.

    Attributes:
        name: of the system, for messages; it changes nothing.
        base_model: of encoders that name none: ``"minilm"``, a folder or a Hugging Face name.
        query: encoder of queries; None shares the document's weights.
        document: encoder of documents.
        loss: weights by name, out of ``"infonce"`` (in-batch negatives beside mined ones),
            ``"kl"``, ``"margin_mse"``, ``"pairwise_softmax"`` and ``"term_recall"``.
        query_regularizer, document_regularizer: penalties of the two sides.
        negatives: mined, per query and step; 0 for in-batch negatives alone.
        idf_learning_rate: of the weights of ``"idf"`` queries; None takes `learning_rate`.

    The others are those of :class:`SparseRecipe` and :class:`TrainingSettings`.
    """

    name: str = "custom"
    base_model: str = rules.checked("minilm", rules.MODEL_NAME)
    query: EncoderSpec | None = None
    document: EncoderSpec = MASKED_LM
    loss: Mapping[str, float] = field(default_factory=lambda: {"infonce": 1.0})
    query_regularizer: RegularizerSpec = FLOPS
    document_regularizer: RegularizerSpec = FLOPS
    negatives: int = rules.checked(0, rules.integer(0))
    _: KW_ONLY
    batch_size: int = rules.checked(32, rules.integer(2))
    idf_learning_rate: float | None = rules.checked(None, rules.POSITIVE)
    max_length: int = rules.checked(256, rules.integer())

    reads_negatives: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for side in ("query", "document"):
            self._nest(side, EncoderSpec)
            self._nest(f"{side}_regularizer", RegularizerSpec)
        super().__post_init__()
        if self.query_regularizer.per_position:
            raise ValueError(
                "query_regularizer: per_position must be False, a group has one query.",
            )
        if not isinstance(self.loss, Mapping) or not self.loss or set(self.loss) - set(LOSSES):
            raise ValueError(
                f"loss must map names out of {', '.join(LOSSES)} to weights, got {self.loss!r}.",
            )
        object.__setattr__(
            self,
            "loss",
            dict(self.loss),
        )  # which nobody else changes, and which files can keep
        for name, weight in self.loss.items():
            rules.POSITIVE(f"loss[{name!r}]", weight)
        compares = self.needs_scores or "pairwise_softmax" in self.loss
        if self.mini_batch_size is not None and self.document.kind == "prosper":
            raise ValueError(
                "mini_batch_size must be None for kind 'prosper', whose penalties are on other vectors.",
            )
        if compares and not self.negatives:
            of = (
                "a loss that compares documents with a teacher"
                if self.needs_scores
                else "the loss pairwise_softmax"
            )
            raise ValueError(f"negatives must be at least 1 for {of}, got 0.")

    def _nest(self, name: str, cls: type[Settings]) -> None:
        """Turn a specification that came as a dictionary, from JSON, into an object."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            try:
                object.__setattr__(self, name, cls.from_dict(dict(value)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif not isinstance(value, cls) and not (name == "query" and value is None):
            raise ValueError(f"{name} must be an instance of {cls.__name__}, got {value!r}.")

    @property
    def needs_scores(self) -> bool:
        """Whether the loss reads teacher scores."""
        return "kl" in self.loss or "margin_mse" in self.loss

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes."""
        return ("pairs",) + ("negatives",) * bool(self.negatives) + ("scores",) * self.needs_scores

    @property
    def distinct_texts(self) -> bool:
        """Whether no text may occur twice in a batch, whose documents are negatives of each other."""
        return "infonce" in self.loss

    def negatives_among(self, pairs: int) -> int:
        """Documents that a step of so many pairs compares each query with, beside its own."""
        return (1 + self.negatives) * pairs - 1 if self.distinct_texts else self.negatives

    @property
    def adds_adapters(self) -> bool:
        """Whether training puts adapters into the base model, which are merged at the end."""
        sides = (self.query, self.document)
        return any(side is not None and side.lora is not None for side in sides)

    def preparation(self, data: str) -> list[str]:
        """Commands that make the negatives and scores that training needs, offline; the last writes
        the file.
        """
        commands = [
            f"tilefold index --backend bm25 --data {data} --output bm25-index",
            f"tilefold mine --data {data} --index bm25-index --output negatives.parquet",
            f"tilefold score negatives.parquet --data {data} --teacher minilm --teacher bm25 --output scores.parquet",
        ]
        return commands[: len(self.needs)] if self.negatives else []

    def start(self, texts: Sequence[str]) -> SparseEncoder:
        """The untrained model; `texts` are the documents of the collection."""
        base = Base(
            self.base_model,
            self.max_length,
            list_of_texts("texts", texts),
            self.seed,
            self.start_percentile,
        )
        return build_encoder(self.query, self.document, base)

    def examples(
        self,
        collection: Collection,
        negatives: str | Path | RowsAhead | None,
    ) -> Examples:
        """The rows that training reads."""
        return make_examples(self, collection, negatives)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place."""
        from tilefold.modules import to_stock

        losses = fit_sparse(self, job)
        to_stock(job.model)
        return losses


def fit_sparse(recipe: LsrRecipe, job: TrainingJob, *, splade: bool = False) -> TrainResult:
    """Train the job's model in place; a SPLADE recipe's has stock penalties, and a head to fuse."""
    from sentence_transformers.sparse_encoder import (
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )

    from tilefold.recipes._watch import SparseWatch
    from tilefold.recipes.adapters import merge_adapters

    model, length = job.model, job.model.max_seq_length
    model.max_seq_length = min(length, recipe.train_max_length or recipe.max_length)
    ranks = job.world.size
    loss = make_loss(
        model,
        recipe,
        stock=splade and ranks == 1,
        ranks=ranks,
    )  # stock penalties are of one rank's rows
    penalties = {"query": recipe.query_regularizer, "document": recipe.document_regularizer}
    warmups = {side: spec.warmup_ratio for side, spec in penalties.items() if spec.kind != "none"}
    watcher = SparseWatch(
        loss,
        warmups,
        bounded=not splade and model.max_active_dims is not None,
        world=job.world,
    )
    with fused_head(model, recipe.fused, needed=splade):
        last = run_trainer(
            job,
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
            loss,
            callbacks=[watcher],
            eval_delay=math.ceil(max([recipe.anneal_alpha, *warmups.values()]) * job.result.steps),
            **_routes(recipe, job),
        )
    model.max_seq_length = length
    if recipe.adds_adapters:
        merge_adapters(model)
    return replace(last, warnings=last.warnings + watcher.warnings())


def _routes(recipe: LsrRecipe, job: TrainingJob) -> dict[str, object]:
    """Arguments of the trainer for a model of two routes, or one that reads queries in another
    form.
    """
    if recipe.query is None and recipe.document.kind not in ("echo", "splate"):
        return {}
    routes = {
        name: "query" if name == "query" else "document"
        for name in job.examples.columns
        if name != "label"
    }
    settings: dict[str, object] = {"router_mapping": routes}
    learned = recipe.query is not None and recipe.query.kind == "idf" and recipe.query.trainable
    if learned and recipe.idf_learning_rate is not None:
        settings["learning_rate_mapping"] = {
            r"sub_modules\.query\.0\.weight$": recipe.idf_learning_rate,
        }
    return settings


def fused_head(
    model: SparseEncoder,
    fused: bool = True,
    *,
    needed: bool = False,
) -> AbstractContextManager[object]:
    """A context in which `model` scores without the logits, where it has a head to fuse and `fused`
    asks for it.
    """
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules import FusedPooling

    fusable = needed or any(
        isinstance(module, (SpladePooling, FusedPooling)) for module in model.modules()
    )
    if not fused or not fusable:
        return nullcontext()  # encoders without a vocabulary-wide head have nothing to fuse
    from tilefold.integrations.sentence_transformers import accelerate

    return accelerate(model)


def make_loss(model: Model, recipe: LsrRecipe, *, stock: bool = False, ranks: int = 1) -> Module:
    """``SpladeLoss`` of the recipe's loss and penalties, which may be stock ones; PROSPER's are on
    base weights.

    Several `ranks` share negatives and penalties: documents are gathered as ``[B, V]``, their
    gradients scattered back. The loss's own gathering does so with queries, too, of which it then
    takes this rank's.
    """
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.util import dot_score, pairwise_dot_score

    from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss, WeightedLosses
    from tilefold.losses.base_splade import BaseSpladeLoss, JoinedSpladeLoss

    # every option that changes a value is passed, so that no release changes what a recipe trains
    made_by: dict[str, Callable[[], Module]] = {
        "infonce": lambda: losses.SparseMultipleNegativesRankingLoss(
            model,
            scale=recipe.similarity_scale,
            similarity_fct=dot_of_all_ranks if ranks > 1 else dot_score,
            gather_across_devices=False,
            directions=("query_to_doc",),
            partition_mode="joint",
            hardness_mode=None,
        ),
        "kl": lambda: losses.SparseDistillKLDivLoss(
            model,
            similarity_fct=pairwise_dot_score,
            temperature=KL_TEMPERATURE,
        ),
        "margin_mse": lambda: losses.SparseMarginMSELoss(
            model,
            similarity_fct=pairwise_dot_score,
        ),
        "pairwise_softmax": PairwiseSoftmaxLoss,
        "term_recall": TermRecallLoss,
    }
    terms = [(made_by[name](), weight) for name, weight in recipe.loss.items()]
    made, cached = losses.SpladeLoss, {}
    if recipe.mini_batch_size is not None:
        made, cached = JoinedSpladeLoss, {"mini_batch_size": recipe.mini_batch_size}
    if recipe.document.kind == "prosper":
        made = BaseSpladeLoss
    query, document = recipe.query_regularizer, recipe.document_regularizer
    return made(
        model,
        loss=terms[0][0] if len(terms) == 1 and terms[0][1] == 1 else WeightedLosses(terms),
        document_regularizer_weight=document.weight,
        query_regularizer_weight=query.weight,
        document_regularizer=None
        if stock
        else make_regularizer(document, positions=1 + recipe.negatives),
        query_regularizer=None if stock else make_regularizer(query),
        **cached,
    )


def dot_of_all_ranks(queries: Tensor, documents: Tensor) -> Tensor:
    """Scores of a rank's queries with the documents of all ranks, its own first."""
    from tilefold.distributed.process_group import gather_rows

    return queries @ gather_rows(documents).T


def make_regularizer(spec: RegularizerSpec, positions: int = 1) -> Module:
    """The penalty as a module with ``compute_loss_from_embeddings``; a group has so many documents."""
    from tilefold import losses as ours

    if spec.kind == "none":
        return ours.NoPenalty()
    if spec.kind == "anti_zero":
        penalty: Module = ours.RegularizerSum(
            [(ours.GlobalFlopsLoss(), 1.0), (ours.AntiZeroLoss(), 1.0)],
        )
    else:
        kinds = {
            "flops": ours.GlobalFlopsLoss,
            "l1": ours.L1Loss,
            "l2": ours.L2Loss,
            "df_flops": ours.DFFlopsLoss,
        }
        penalty = kinds[spec.kind](threshold=spec.threshold)
    return ours.PositionSum(penalty, positions) if spec.per_position else penalty


def make_examples(
    recipe: LsrRecipe,
    collection: Collection,
    file: str | Path | RowsAhead | None,
) -> Examples:
    """The columns ``query``, ``positive``, ``negative_1`` to ``negative_n``, and ``label``: the
    teachers' scores.

    A query's negatives are drawn anew for each pass over the pairs, as far as memory allows,
    without repetition within a row where the file has enough of them.
    """
    if not recipe.negatives:
        if file is not None:
            remedy = "leave the file out, or set negatives to at least 1."
            raise ValueError(
                f"negatives: {recipe.name!r} takes none from a file (its negatives are 0); {remedy}",
            )
        return pair_examples(collection, "positive")
    pairs, count = training_pairs(collection), recipe.negatives
    if file is None:
        raise ValueError(_how_to_make(recipe, collection))
    rows = file.take() if isinstance(file, RowsAhead) else read_training_rows(file)
    places = rows.check_collection(collection)
    if recipe.needs_scores and not rows.scored:
        raise ValueError(
            f"negatives: {file} has no teachers' scores; {_how_to_make(recipe, collection)}",
        )
    mined = Mined(pairs, rows, places, scored=recipe.needs_scores)
    what = "negatives and scored relevant documents" if recipe.needs_scores else "negatives"
    kept, in_all = len(mined.pairs.names), len(pairs.names)
    if not kept:
        of = f"the training queries of {collection.name!r}"
        raise ValueError(
            f"negatives: {file} has no {what} of {of}; {_how_to_make(recipe, collection)}",
        )
    notes = []
    if kept < in_all:
        notes.append(
            f"{in_all - kept} of {in_all} training pairs were left out: {file} has no {what} for "
            "them.",
        )
    passes = (
        recipe.epochs if recipe.max_steps is None else recipe.max_steps * recipe.batch_size / kept
    )
    draws = max(1, min(math.ceil(passes), MAX_TEXTS // (kept * (1 + count))))
    if recipe.needs_scores:
        notes += rows.narrow_teacher_warnings()
    return examples_of(
        collection,
        kept,
        mined.columns(count, draws, recipe.seed),
        tuple(notes),
    )


def _how_to_make(recipe: LsrRecipe, collection: Collection) -> str:
    what = "mined negatives with teachers' scores" if recipe.needs_scores else "mined negatives"
    commands = ", then ".join(recipe.preparation(collection.name))
    made = commands.rpartition(" ")[2]
    return (
        f"the recipe {recipe.name!r} needs {what}: make them with {commands}, and give it the file: "
        f"--negatives {made}, in Python negatives={made}"
    )


def length_grouped_batches(dataset: Any, batch_size: int, **settings: Any) -> TrainingBatches:
    """A ``batch_sampler`` for trainers of sentence-transformers: documents of similar length.

    No text occurs twice in a batch, and an epoch has ``ceil(rows / batch_size)`` batches.
    """
    name = "document" if "document" in dataset.column_names else "positive"
    lengths = [len(text) for text in dataset.select_columns([name])[name]]
    return _batches_of_texts(dataset, batch_size, lengths=lengths, **settings)


def filled_batches(dataset: Any, batch_size: int, **settings: Any) -> TrainingBatches:
    """A ``batch_sampler`` for trainers of sentence-transformers: full batches of distinct texts.

    The stock sampler makes short batches, down to a single pair, where a query or a document
    occurs in many rows. Here an epoch has ``ceil(rows / batch_size)`` batches, and rows that the
    epoch has already had fill those that would be short.
    """
    return _batches_of_texts(dataset, batch_size, **settings | {"drop_last": True})


def _batches_of_texts(
    dataset: Any,
    batch_size: int,
    *,
    drop_last: bool = False,
    seed: int = 0,
    valid_label_columns: Sequence[str] | None = None,
    generator: object = None,
    lengths: Sequence[int] | None = None,
) -> TrainingBatches:
    """The batches of a data set whose columns, but for labels, are texts.

    `generator` is accepted for the trainer's sake: `seed` and epoch alone determine the order.
    """
    import numpy as np

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.retrieval.data.lazy_documents import id_key

    excluded = {"dataset_name", *(valid_label_columns or ())}
    columns = [
        np.fromiter(map(id_key, dataset[name]), np.uint64, len(dataset))
        for name in dataset.column_names
        if name not in excluded
    ]
    keys = np.column_stack(columns)
    return TrainingBatches(
        lambda rows: keys[rows],
        len(dataset),
        batch_size,
        drop_last=drop_last,
        seed=seed,
        lengths=None if lengths is None else np.asarray(lengths, np.int64),
    )
