"""Training of learned sparse retrieval: the recipe of most systems of the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import ArgumentError, list_of_texts
from tilefold._internal.typing import Model, Module, SparseEncoder, Tensor
from tilefold.recipes import _settings as rules
from tilefold.recipes._rows import (
    Examples,
    Pairs,
    PairsWithNegatives,
    examples_of,
    pair_examples,
    training_pairs,
)
from tilefold.recipes._settings import REGULARIZERS, RegularizerSpec
from tilefold.recipes._trainer import run_trainer
from tilefold.recipes._training import Recipe, TrainingJob, TrainResult, train
from tilefold.recipes.backbone import freeze_lower_layers
from tilefold.recipes.encoders import (
    Base,
    EncoderSpec,
    IdfSpec,
    MlmSpec,
    ProsperSpec,
    SparseEncoderSpec,
    build_encoder,
)
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.training_data.rows import RowsAhead, TrainingRows, read_training_rows

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
KL_TEMPERATURE = 2.0  # of student and teacher; the default of sentence-transformers
MASKED_LM = MlmSpec()
FLOPS = RegularizerSpec()
# positions of documents in memory when negatives are drawn for several passes, 128 MiB in int64
MAX_DRAWN_DOCUMENTS = 2**24


@dataclass(frozen=True)
class LsrRecipe(Recipe):
    """Configuration of a learned sparse model and of its training.

    ``get_recipe("splade")`` has the settings of SPLADE with in-batch negatives.

    Attributes:
        name: name of the system, for messages; it changes nothing.
        base_model: base model of encoders that name none: ``"minilm"``, a folder or a Hugging Face
            name.
        query: encoder of queries; None shares the document encoder.
        document: encoder of documents.
        loss: weight of each loss, out of ``"infonce"`` (in-batch and mined negatives), ``"kl"``,
            ``"margin_mse"``, ``"pairwise_softmax"`` and ``"term_recall"``.
        query_regularizer, document_regularizer: sparsity penalties; a number is the weight of
            FLOPS.
        negatives: number of mined negatives per query and step; 0 for in-batch negatives only.
        idf_learning_rate: learning rate of the weights of ``"idf"`` queries; None takes
            `learning_rate`.
        frozen_layers: number of lowest layers that are frozen, together with the embeddings (and a
            decoder tied to them); they have no backward pass. 0 trains everything. Needs one
            encoder for both sides.
        start_percentile: initial decoder bias of ``"minilm"``, see
            :func:`tilefold.recipes.minilm_splade`.
        group_by_length: batch documents of similar length, with little padding.

    The other fields are described in :class:`TrainingSettings`.
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
    frozen_layers: int = rules.checked(0, rules.integer(0))
    start_percentile: float = rules.checked(
        99.95,
        rules.number(lambda value: 0 < value < 100, "in (0, 100)"),
    )
    group_by_length: bool = rules.checked(False, rules.BOOLEAN)

    def __post_init__(self) -> None:
        """Replace dictionaries of encoders and regularizers by specs, and check all fields."""
        self._parse_encoder("query", optional=True)
        self._parse_encoder("document")
        self._parse_regularizer("query_regularizer")
        self._parse_regularizer("document_regularizer")
        super().__post_init__()
        self._check_loss()
        self._check_negatives()
        if self.query_regularizer.per_position:
            raise ArgumentError(
                "query_regularizer",
                "per_position must be False, a group has one query.",
            )
        if self.mini_batch_size is not None and isinstance(self.document, ProsperSpec):
            raise ArgumentError(
                "mini_batch_size",
                "must be None for kind 'prosper', whose penalties are on other vectors.",
            )
        if self.frozen_layers and self.query is not None:
            raise ArgumentError(
                "frozen_layers",
                "must be 0 with a query encoder, which has layers of its own, got "
                f"{self.frozen_layers}; leave one of the two out.",
            )

    def _check_loss(self) -> None:
        """Check names and weights of the losses, and copy the mapping."""
        if not isinstance(self.loss, Mapping) or not self.loss or set(self.loss) - set(LOSSES):
            raise ArgumentError(
                "loss",
                f"must map names out of {', '.join(LOSSES)} to weights, got {self.loss!r}.",
            )
        for name, weight in self.loss.items():
            rules.POSITIVE(f"loss[{name!r}]", weight)
        # a copy that the caller cannot change, and a dictionary for JSON
        object.__setattr__(self, "loss", dict(self.loss))

    def _check_negatives(self) -> None:
        """Refuse a loss that reads mined negatives if the recipe has none.

        Raises:
            ValueError: if ``negatives`` is 0 and the loss is a distillation or a pairwise softmax.
        """
        if self.negatives:
            return
        if self.needs_scores:
            raise ArgumentError(
                "negatives",
                "must be at least 1 for a loss that compares documents with a teacher, got 0.",
            )
        if "pairwise_softmax" in self.loss:
            raise ArgumentError(
                "negatives",
                "must be at least 1 for the loss pairwise_softmax, got 0.",
            )

    def _parse_encoder(self, name: str, optional: bool = False) -> None:
        """Replace a field's dictionary, as in JSON, by an encoder spec.

        Args:
            name: name of the field, ``"query"`` or ``"document"``. A spec in it stays.
            optional: whether ``None`` is valid, too.

        Raises:
            ValueError: if the field has another value, or the dictionary is not valid.
        """
        value = getattr(self, name)
        if isinstance(value, EncoderSpec) or (optional and value is None):
            return
        if not isinstance(value, Mapping):
            raise ArgumentError(
                name,
                "expected an EncoderSpec, such as MlmSpec(), or a dictionary of its fields, got "
                f"{value!r}.",
            )
        try:
            spec = EncoderSpec.from_dict(dict(value))
        except ValueError as error:
            raise ArgumentError(name, str(error)) from None
        object.__setattr__(self, name, spec)  # the dataclass is frozen

    def _parse_regularizer(self, name: str) -> None:
        """Replace a field's dictionary, as in JSON, or number by the spec of a penalty.

        Args:
            name: name of the field, such as ``"query_regularizer"``. A spec in it stays. A number
                is the weight of the FLOPS penalty.

        Raises:
            ValueError: if the field has another value, or the dictionary is not valid.
        """
        value = getattr(self, name)
        if isinstance(value, RegularizerSpec):
            return
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = {"kind": "flops", "weight": value}
        if not isinstance(value, Mapping):
            raise ArgumentError(
                name,
                "expected a RegularizerSpec, a dictionary of its fields or the weight of FLOPS, "
                f"got {value!r}.",
            )
        try:
            spec = RegularizerSpec.from_dict(dict(value))
        except ValueError as error:
            raise ArgumentError(name, str(error)) from None
        object.__setattr__(self, name, spec)  # the dataclass is frozen

    @property
    def reads_negatives(self) -> bool:
        """Whether training reads mined negatives."""
        return self.negatives > 0

    @property
    def needs_scores(self) -> bool:
        """Whether the loss reads teacher scores."""
        return "kl" in self.loss or "margin_mse" in self.loss

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training reads."""
        names = ["pairs"]
        if self.negatives:
            names.append("negatives")
        if self.needs_scores:
            names.append("scores")
        return tuple(names)

    @property
    def distinct_texts(self) -> bool:
        """Whether a text may occur only once in a batch, because of in-batch negatives."""
        return "infonce" in self.loss

    def negatives_among(self, pairs: int) -> int:
        """Return the number of negatives of each query in a step of ``pairs`` pairs."""
        return (1 + self.negatives) * pairs - 1 if self.distinct_texts else self.negatives

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the base model, which are merged at the end."""
        specs = (self.query, self.document)
        return any(spec is not None and spec.adds_adapters for spec in specs)

    def preparation(self, data: str) -> list[str]:
        """Return the commands that make the file of negatives that training reads.

        The commands need no access to the network: BM25 mines the negatives, and the packaged
        MiniLM and BM25 score them.

        Args:
            data: name or folder of the collection.

        Returns:
            Commands in their order. The last one writes the file. None for a recipe without mined
            negatives.
        """
        if not self.negatives:
            return []
        commands = [
            f"tilefold index --backend bm25 --data {data} --output bm25-index",
            f"tilefold mine --data {data} --index bm25-index --output negatives.parquet",
            f"tilefold score negatives.parquet --data {data} --teacher minilm --teacher bm25 "
            "--output scores.parquet",
        ]
        if not self.needs_scores:
            del commands[-1]
        return commands

    def build_model(self, texts: Sequence[str]) -> SparseEncoder:
        """Build the untrained model of the recipe.

        Args:
            texts: documents of the collection. Some encoders compute initial weights from them.
        """
        base = Base(
            base_model=self.base_model,
            max_length=self.max_length,
            texts=list_of_texts("texts", texts),
            seed=self.seed,
            start_percentile=self.start_percentile,
        )
        return build_encoder(self.query, self.document, base)

    def examples(
        self,
        collection: Collection,
        negatives: str | Path | RowsAhead | None,
    ) -> Examples:
        """Return the rows that training reads."""
        return make_examples(self, collection, negatives)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place."""
        from tilefold.modules import to_stock

        if self.frozen_layers:
            freeze_lower_layers(job.model, self.frozen_layers)
        result = _fit(self, job)
        to_stock(job.model)
        return result


def _fit(recipe: LsrRecipe, job: TrainingJob) -> TrainResult:
    """Train the job's model in place, with the token limit of training.

    Args:
        recipe: the recipe.
        job: the training: its model, training rows and ranks.

    Returns:
        The job's result with the steps, losses and warnings of the training.
    """
    from sentence_transformers.sparse_encoder import (
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )

    from tilefold.recipes._watch import SparseWatch
    from tilefold.recipes.adapters import merge_adapters

    model = job.model
    max_length = model.max_seq_length
    model.max_seq_length = min(max_length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe, ranks=job.world.size)
    warmups: dict[str, float] = {}
    if recipe.query_regularizer.kind != "none":
        warmups["query"] = recipe.query_regularizer.warmup_ratio
    if recipe.document_regularizer.kind != "none":
        warmups["document"] = recipe.document_regularizer.warmup_ratio
    watcher = SparseWatch(
        loss,
        warmups,
        has_term_limit=model.max_active_dims is not None,
        world=job.world,
    )
    # Evaluations compare models, and begin when alpha of entmax and the weights of the penalties
    # no longer rise.
    rising_share = max([recipe.anneal_alpha, *warmups.values()])
    # A saved SparseEncoder may lack a head to fuse, which its recipe does not know.
    needs_head = isinstance(recipe.document, SparseEncoderSpec)
    with fused_head(model, recipe.fused, needed=needs_head):
        result = run_trainer(
            job,
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
            loss,
            callbacks=[watcher],
            eval_delay=math.ceil(rising_share * job.result.steps),
            **_route_settings(recipe, job),
        )
    model.max_seq_length = max_length
    if recipe.adds_adapters:
        merge_adapters(model)
    return replace(result, warnings=result.warnings + watcher.warnings())


def _route_settings(recipe: LsrRecipe, job: TrainingJob) -> dict[str, object]:
    """Return the trainer's arguments for a model that encodes queries and documents differently.

    Args:
        recipe: the recipe.
        job: the training, whose rows name the columns of texts.

    Returns:
        The route of each column and, if it is set, the learning rate of the IDF weights; empty for
        a model with one route.
    """
    if recipe.query is None and not recipe.document.has_routes:
        return {}
    routes = {}
    for column in job.examples.columns:
        if column != "label":  # scores
            routes[column] = "query" if column == "query" else "document"
    settings: dict[str, object] = {"router_mapping": routes}
    trains_idf = isinstance(recipe.query, IdfSpec) and recipe.query.trainable
    if trains_idf and recipe.idf_learning_rate is not None:
        # regular expression for the name of a parameter -> learning rate
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
    """Create a context in which a model with an LM head runs the fused head.

    The fused head computes logits, activation and pooling together, and never stores the logits.
    Nothing changes in the context if the model has no such head.

    Args:
        model: model to accelerate.
        fused: whether to fuse at all.
        needed: whether a model without a head to fuse is an error.
    """
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules import FusedPooling

    has_head = any(isinstance(module, (SpladePooling, FusedPooling)) for module in model.modules())
    if not fused or not (has_head or needed):
        return nullcontext()
    from tilefold.integrations.sentence_transformers import accelerate

    return accelerate(model)


def make_loss(model: Model, recipe: LsrRecipe, *, ranks: int = 1) -> Module:
    """Create the loss of a recipe: a weighted sum of ranking losses, and sparsity penalties.

    Args:
        model: model that is trained.
        recipe: the recipe.
        ranks: number of ranks. Several ranks share negatives and penalties: document vectors
            ``[B, V]`` are gathered, and their gradients scattered. The option of the stock loss
            would gather queries, too, and then use this rank's only.

    Returns:
        A ``SpladeLoss`` of sentence-transformers, or a subclass of it.
    """
    from tilefold.losses import WeightedLosses

    weighted_losses = [
        (_make_ranking_loss(name, model, recipe, ranks), weight)
        for name, weight in recipe.loss.items()
    ]
    ranking_loss, first_weight = weighted_losses[0]
    if len(weighted_losses) > 1 or first_weight != 1:
        ranking_loss = WeightedLosses(weighted_losses)
    document_regularizer = make_regularizer(
        recipe.document_regularizer,
        positions=1 + recipe.negatives,  # the relevant document and the negatives
    )
    query_regularizer = make_regularizer(recipe.query_regularizer)
    create_loss = _splade_loss_class(recipe)
    return create_loss(
        model,
        loss=ranking_loss,
        document_regularizer_weight=recipe.document_regularizer.weight,
        query_regularizer_weight=recipe.query_regularizer.weight,
        document_regularizer=document_regularizer,
        query_regularizer=query_regularizer,
    )


def _splade_loss_class(recipe: LsrRecipe) -> Callable[..., Module]:
    """Return the variant of ``SpladeLoss`` that a recipe trains with.

    PROSPER's penalties read the weights without its literal residual. Mini-batches need a loss that
    computes all vectors first, and again for their gradients (GradCache).
    """
    from sentence_transformers.sparse_encoder import losses

    from tilefold.losses.base_splade import BaseSpladeLoss, JoinedSpladeLoss

    if isinstance(recipe.document, ProsperSpec):
        return BaseSpladeLoss
    if recipe.mini_batch_size is not None:
        return partial(JoinedSpladeLoss, mini_batch_size=recipe.mini_batch_size)
    stock_class: Callable[..., Module] = losses.SpladeLoss
    return stock_class


def _make_ranking_loss(name: str, model: Model, recipe: LsrRecipe, ranks: int) -> Module:
    """Create one of the ranking losses of a recipe.

    Every option that changes a value is passed, so that a new default of sentence-transformers does
    not change what a recipe trains.

    Args:
        name: name of the loss: ``"infonce"``, ``"kl"``, ``"margin_mse"``, ``"pairwise_softmax"``
            or ``"term_recall"``.
        model: model that is trained.
        recipe: its ``similarity_scale`` is the factor on the scores of ``"infonce"``.
        ranks: number of ranks, which share in-batch negatives.
    """
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.util import dot_score, pairwise_dot_score

    from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss

    if name == "infonce":
        return losses.SparseMultipleNegativesRankingLoss(
            model,
            scale=recipe.similarity_scale,
            similarity_fct=dot_of_all_ranks if ranks > 1 else dot_score,
            gather_across_devices=False,
            directions=("query_to_doc",),
            partition_mode="joint",
            hardness_mode=None,
        )
    if name == "kl":
        return losses.SparseDistillKLDivLoss(
            model,
            similarity_fct=pairwise_dot_score,
            temperature=KL_TEMPERATURE,
        )
    if name == "margin_mse":
        return losses.SparseMarginMSELoss(model, similarity_fct=pairwise_dot_score)
    if name == "pairwise_softmax":
        return PairwiseSoftmaxLoss()
    return TermRecallLoss()


def dot_of_all_ranks(queries: Tensor, documents: Tensor) -> Tensor:
    """Score this rank's queries with the documents of all ranks, for in-batch negatives.

    Args:
        queries: vectors ``[B, V]`` of this rank's queries.
        documents: vectors ``[B * (1 + negatives), V]`` of this rank's documents.

    Returns:
        Dot products ``[B, ranks * B * (1 + negatives)]``. This rank's documents come first.
    """
    from tilefold.distributed.process_group import gather_rows

    return queries @ gather_rows(documents).T


def make_regularizer(spec: RegularizerSpec, positions: int = 1) -> Module:
    """Create the module of a sparsity penalty, with a method ``compute_loss_from_embeddings``.

    Args:
        spec: configuration of the penalty.
        positions: number of documents of a query: the relevant one and its negatives. A penalty
            per position is computed for each of them separately.
    """
    from tilefold import losses

    if spec.kind == "none":
        return losses.NoPenalty()
    penalty: Module
    if spec.kind == "anti_zero":
        penalty = losses.RegularizerSum(
            [(losses.GlobalFlopsLoss(), 1.0), (losses.AntiZeroLoss(), 1.0)],
        )
    else:
        penalty_classes = {
            "flops": losses.GlobalFlopsLoss,
            "l1": losses.L1Loss,
            "l2": losses.L2Loss,
            "df_flops": losses.DFFlopsLoss,
        }
        penalty = penalty_classes[spec.kind](threshold=spec.threshold)
    if spec.per_position:
        return losses.PositionSum(penalty, positions)
    return penalty


def make_examples(
    recipe: LsrRecipe,
    collection: Collection,
    file: str | Path | RowsAhead | None,
) -> Examples:
    """Create the training rows of a recipe.

    The columns are ``query`` and ``positive``. Mined negatives add ``negative_1`` to
    ``negative_n``, and ``label`` if the loss reads teachers' scores. A query's negatives are drawn
    anew for each pass over the pairs, as far as memory allows. A row has no negative twice if the
    file has enough of them.

    Args:
        recipe: the recipe.
        collection: collection of the pairs.
        file: file of mined negatives, with teachers' scores if the loss reads them, or a
            ``RowsAhead``, which reads such a file in a thread. ``None`` for no mined negatives.

    Raises:
        ValueError: for a file that the recipe does not read, or a missing one. The message has the
            commands that make it.
    """
    if not recipe.negatives:
        if file is not None:
            raise ArgumentError(
                "negatives",
                f"{recipe.name!r} takes none from a file (its negatives are 0); leave "
                "the file out, or set negatives to at least 1.",
            )
        return pair_examples(collection, "positive")
    pairs = training_pairs(collection)
    if file is None:
        raise ValueError(_missing_negatives_message(recipe, collection))
    rows = file.take() if isinstance(file, RowsAhead) else read_training_rows(file)
    return _mined_examples(recipe, collection, pairs, rows, str(file))


def _mined_examples(
    recipe: LsrRecipe,
    collection: Collection,
    pairs: Pairs,
    rows: TrainingRows,
    file: str,
) -> Examples:
    """Create training rows with mined negatives, and with teachers' scores if the loss reads them.

    Args:
        recipe: the recipe.
        collection: collection of the pairs.
        pairs: all training pairs.
        rows: content of the file of negatives.
        file: name of the file, for messages.

    Raises:
        ValueError: if the file has no scores that are needed, or none of the training queries.
    """
    positions = rows.check_collection(collection)
    if recipe.needs_scores and not rows.scored:
        raise ArgumentError(
            "negatives",
            f"{file} has no teachers' scores; {_missing_negatives_message(recipe, collection)}",
        )
    mined = PairsWithNegatives(pairs, rows, positions, scored=recipe.needs_scores)
    content = "negatives and scored relevant documents" if recipe.needs_scores else "negatives"
    n_pairs = len(pairs.query_ids)
    n_mined_pairs = len(mined.pairs.query_ids)
    if not n_mined_pairs:
        raise ArgumentError(
            "negatives",
            f"{file} has no {content} of the training queries of {collection.name!r}; "
            f"{_missing_negatives_message(recipe, collection)}",
        )
    notes = []
    if n_mined_pairs < n_pairs:
        notes.append(
            f"{n_pairs - n_mined_pairs} of {n_pairs} training pairs were left out: {file} has no "
            f"{content} for them.",
        )
    if recipe.needs_scores:
        notes += rows.narrow_teacher_warnings()
    n_draws = _number_of_draws(recipe, n_mined_pairs)
    columns = mined.columns(recipe.negatives, n_draws, recipe.seed)
    return examples_of(collection, n_mined_pairs, columns, tuple(notes))


def _number_of_draws(recipe: LsrRecipe, n_pairs: int) -> int:
    """Return how often negatives are drawn: once for each pass, as far as memory allows."""
    n_passes = recipe.epochs
    if recipe.max_steps is not None:
        n_passes = recipe.max_steps * recipe.batch_size / n_pairs
    max_draws = MAX_DRAWN_DOCUMENTS // (n_pairs * (1 + recipe.negatives))
    return max(1, min(math.ceil(n_passes), max_draws))


def _missing_negatives_message(recipe: LsrRecipe, collection: Collection) -> str:
    """Return a message with the commands that make the file that a recipe reads."""
    data = "mined negatives with teachers' scores" if recipe.needs_scores else "mined negatives"
    commands = recipe.preparation(collection.name)
    file = commands[-1].split()[-1]
    return (
        f"the recipe {recipe.name!r} needs {data}: make them with {', then '.join(commands)}, and "
        f"give it the file: --negatives {file}, in Python negatives={file}"
    )


def length_grouped_batches(dataset: Any, batch_size: int, **settings: Any) -> TrainingBatches:
    """Create a ``batch_sampler`` for sentence-transformers that groups documents by length.

    No text occurs twice in a batch, and an epoch has ``ceil(rows / batch_size)`` batches.
    """
    name = "document" if "document" in dataset.column_names else "positive"
    lengths = [len(text) for text in dataset.select_columns([name])[name]]
    return _batches_of_texts(dataset, batch_size, lengths=lengths, **settings)


def filled_batches(dataset: Any, batch_size: int, **settings: Any) -> TrainingBatches:
    """Create a ``batch_sampler`` for sentence-transformers with full batches of distinct texts.

    The stock sampler makes short batches, down to a single pair, if a query or a document occurs
    in many rows. Here an epoch has ``ceil(rows / batch_size)`` batches, and short batches are
    filled with rows that the epoch has already had.
    """
    settings["drop_last"] = True
    return _batches_of_texts(dataset, batch_size, **settings)


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
    """Create batches in which no text of a data set occurs twice.

    sentence-transformers calls this as a ``batch_sampler``, with all arguments except `lengths`.

    Args:
        dataset: data set whose columns are texts, except for labels.
        batch_size: number of rows of a full batch.
        drop_last: whether all batches must be full. Short batches are filled, not dropped.
        seed: seed of the random order of rows, which differs between epochs.
        valid_label_columns: names of the columns that are not texts.
        generator: ignored, because the order depends only on the seed.
        lengths: length of each row's document, for batches of documents of similar length;
            ``None`` for batches of random rows.
    """
    import numpy as np

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.retrieval.data.lazy_documents import id_key

    excluded = {"dataset_name", *(valid_label_columns or ())}
    # a 64-bit hash of each text, by which equal texts are recognized
    keys_by_column = [
        np.fromiter(map(id_key, dataset[name]), np.uint64, len(dataset))
        for name in dataset.column_names
        if name not in excluded
    ]
    keys = np.column_stack(keys_by_column)  # [n_rows, n_columns]
    return TrainingBatches(
        lambda rows: keys[rows],
        len(dataset),
        batch_size,
        fill_batches=drop_last,
        seed=seed,
        lengths=None if lengths is None else np.asarray(lengths, np.int64),
    )
