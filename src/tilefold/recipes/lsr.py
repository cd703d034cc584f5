"""Training of learned sparse retrieval models: the recipe of most systems in the catalogue."""

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
from tilefold.recipes._trainer import run_trainer, sharded_job
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
KL_TEMPERATURE = 2.0  # temperature of student and teacher, as in sentence-transformers
MASKED_LM = MlmSpec()
FLOPS = RegularizerSpec()
# documents in memory when negatives are drawn for several passes: their positions take 128 MiB
MAX_DRAWN_DOCUMENTS = 2**24
IDF_WEIGHTS_PATTERN = r"sub_modules\.query\.0\.weight$"
"""Regular expression for the parameter name of the weights of ``"idf"`` queries."""


@dataclass(frozen=True)
class LsrRecipe(Recipe):
    """Configuration of a learned sparse model and of its training.

    ``get_recipe("splade")`` has the settings of SPLADE with in-batch negatives.

    Attributes:
        name: name of the system, for messages only.
        base_model: base model of encoders that have none of their own: ``"minilm"``, a folder or a
            Hugging Face name.
        query: encoder of queries; None uses the document encoder.
        document: encoder of documents.
        loss: weight of each loss; names are ``"infonce"`` (in-batch and mined negatives), ``"kl"``,
            ``"margin_mse"``, ``"pairwise_softmax"`` and ``"term_recall"``.
        query_regularizer, document_regularizer: sparsity penalties; a number is the weight of
            FLOPS.
        negatives: number of mined negatives per query and step; 0 for in-batch negatives only.
        idf_learning_rate: learning rate of the weights of ``"idf"`` queries; None for
            `learning_rate`.
        frozen_layers: number of lowest layers to freeze, together with the embeddings and an LM
            head that is tied to them. Frozen layers need no backward pass. 0 trains everything.
            Needs one encoder for both sides.
        start_percentile: percentile of the untrained logits from which the initial decoder bias of
            ``"minilm"`` is computed (:func:`tilefold.recipes.minilm_splade`).
        group_by_length: whether batches have documents of similar length, with little padding.
        split_vocabulary: whether a rank also computes only the scores of its part of the
            vocabulary, so that no rank ever has the whole head. Needs ``fsdp`` and ``fused``, and a
            decoder.

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
        rules.finite_number(lambda value: 0 < value < 100, "in (0, 100)"),
    )
    group_by_length: bool = rules.checked(False, rules.BOOLEAN)
    split_vocabulary: bool = rules.checked(False, rules.BOOLEAN)

    def __post_init__(self) -> None:
        """Convert encoders and regularizers from their JSON form, and check all fields."""
        specs: dict[str, object] = {
            "document": _parse_encoder("document", self.document),
            "query_regularizer": _parse_regularizer("query_regularizer", self.query_regularizer),
            "document_regularizer": _parse_regularizer(
                "document_regularizer",
                self.document_regularizer,
            ),
        }
        if self.query is not None:
            specs["query"] = _parse_encoder("query", self.query)
        for name, spec in specs.items():
            object.__setattr__(self, name, spec)  # the dataclass is frozen
        super().__post_init__()
        self._check_loss()
        self._check_negatives()
        self._check_encoders()
        self._check_split_vocabulary()

    def _check_encoders(self) -> None:
        """Raise an error for options that the encoders of the recipe do not have.

        Raises:
            ValueError: if queries have a penalty per position, PROSPER has mini-batches, or layers
                are frozen although there is a query encoder.
        """
        if self.query_regularizer.per_position:
            raise ArgumentError(
                "query_regularizer",
                "per_position must be False, because a training row has only one query.",
            )
        if self.mini_batch_size is not None and isinstance(self.document, ProsperSpec):
            raise ArgumentError(
                "mini_batch_size",
                "must be None for kind 'prosper': its penalties read vectors without the literal "
                "residual, which mini-batches do not store.",
            )
        if self.frozen_layers and self.query is not None:
            raise ArgumentError(
                "frozen_layers",
                "must be 0 with a query encoder, which has its own layers, got "
                f"{self.frozen_layers}; leave one of the two out.",
            )

    def _check_split_vocabulary(self) -> None:
        """Raise a ``ValueError`` for ``split_vocabulary`` without ``fsdp`` or without ``fused``.

        Only a model that is sharded over ranks, with a fused head, can divide the vocabulary.
        """
        if self.split_vocabulary and not (self.fsdp and self.fused):
            raise ArgumentError(
                ("split_vocabulary", "fsdp", "fused"),
                "a split vocabulary needs both others; set fsdp=True and leave fused=True.",
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
        """Raise an error if the loss reads mined negatives and the recipe has none.

        Raises:
            ValueError: if ``negatives`` is 0, and the loss is a distillation or a pairwise softmax.
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
        """The data that training reads: ``"pairs"``, ``"negatives"``, ``"scores"``."""
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
        """Return the number of negatives of each query in a step with this many pairs."""
        return (1 + self.negatives) * pairs - 1 if self.distinct_texts else self.negatives

    @property
    def adds_adapters(self) -> bool:
        """Whether training adds adapters to the base model, which are merged at the end."""
        specs = (self.query, self.document)
        return any(spec is not None and spec.adds_adapters for spec in specs)

    def preparation(self, data: str) -> list[str]:
        """Return the commands that create the training negatives.

        The commands need no network access: BM25 mines the negatives, and the packaged MiniLM and
        BM25 score them.

        Args:
            data: name or folder of the collection.

        Returns:
            The commands in their order; the last one writes the file. Empty if the recipe has no
            mined negatives.
        """
        if not self.negatives:
            return []
        commands = [
            f"tilefold index --backend bm25 --data {data} --output bm25-index",
            f"tilefold mine --data {data} --index bm25-index --output negatives.parquet",
        ]
        if self.needs_scores:
            commands.append(
                f"tilefold score negatives.parquet --data {data} --teacher minilm --teacher bm25 "
                "--output scores.parquet",
            )
        return commands

    def build_model(self, texts: Sequence[str]) -> SparseEncoder:
        """Build the untrained model of the recipe.

        Args:
            texts: documents, from which some encoders compute initial weights.
        """
        base = Base(  # what the query encoder and the document encoder have in common
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
        """Return the training rows.

        Args:
            collection: collection with the training pairs.
            negatives: mined negatives, or their file; ``None`` without negatives.
        """
        return make_examples(self, collection, negatives)

    def fit(self, job: TrainingJob) -> TrainResult:
        """Train the job's model in place, and return its result with losses and warnings."""
        from tilefold.modules import to_stock
        from tilefold.recipes.adapters import merge_adapters

        if self.frozen_layers:
            freeze_lower_layers(job.model, self.frozen_layers)
        with sharded_job(job) as training_job:
            result = _fit(self, training_job)
        if self.adds_adapters:
            merge_adapters(job.model)
        to_stock(job.model)
        return result


def _parse_encoder(name: str, value: object) -> EncoderSpec:
    """Return an encoder spec, converted from a dictionary if necessary.

    Args:
        name: name of the recipe's field, ``"query"`` or ``"document"``, for error messages.
        value: a spec, or a dictionary of its fields as in JSON.

    Raises:
        ValueError: if the value is something else, or the dictionary is not valid.
    """
    if isinstance(value, EncoderSpec):
        return value
    if not isinstance(value, Mapping):
        raise ArgumentError(
            name,
            "expected an EncoderSpec, such as MlmSpec(), or a dictionary of its fields, got "
            f"{value!r}.",
        )
    try:
        return EncoderSpec.from_dict(dict(value))
    except ValueError as error:
        raise ArgumentError(name, str(error)) from None


def _parse_regularizer(name: str, value: object) -> RegularizerSpec:
    """Return the spec of a penalty, converted from a dictionary or a number if necessary.

    Args:
        name: name of the recipe's field, such as ``"query_regularizer"``, for error messages.
        value: a spec, a dictionary of its fields as in JSON, or the weight of the FLOPS penalty.

    Raises:
        ValueError: if the value is something else, or the dictionary is not valid.
    """
    if isinstance(value, RegularizerSpec):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = {"kind": "flops", "weight": value}
    if not isinstance(value, Mapping):
        raise ArgumentError(
            name,
            "expected a RegularizerSpec, a dictionary of its fields or the weight of FLOPS, "
            f"got {value!r}.",
        )
    try:
        return RegularizerSpec.from_dict(dict(value))
    except ValueError as error:
        raise ArgumentError(name, str(error)) from None


def _fit(recipe: LsrRecipe, job: TrainingJob) -> TrainResult:
    """Train the job's model in place, with texts truncated to ``train_max_length`` tokens.

    Args:
        recipe: the recipe.
        job: the training job: its model, training rows and ranks.

    Returns:
        The job's result with the steps, losses and warnings of the training.
    """
    from sentence_transformers.sparse_encoder import (
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )

    from tilefold.recipes._watch import SparseWatch

    model = job.model
    max_length = model.max_seq_length
    model.max_seq_length = min(max_length, recipe.train_max_length or recipe.max_length)
    loss = make_loss(model, recipe, ranks=job.world.size)
    warmup_ratios = _warmup_ratios(recipe)
    watcher = SparseWatch(
        loss,
        warmup_ratios,
        has_term_limit=model.max_active_dims is not None,
        world=job.world,
    )
    # Alpha of entmax and the weights of the penalties rise during the first steps. Evaluations
    # begin afterwards, so that they compare models with the same settings.
    rising_share = max([recipe.anneal_alpha, *warmup_ratios.values()])
    # The other encoders of recipes have a head that can be fused, or need none. Whether a saved
    # SparseEncoder has one is known only now.
    must_fuse = isinstance(recipe.document, SparseEncoderSpec)
    with fused_head(model, required=must_fuse) if recipe.fused else nullcontext():
        if job.sharded is not None:
            job.sharded.shard(
                bf16=job.result.bf16,
                split_vocabulary=recipe.split_vocabulary,
            )
        result = run_trainer(
            job,
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
            loss,
            callbacks=[watcher],
            eval_delay=math.ceil(rising_share * job.result.steps),
            **_routing_arguments(recipe, job),
        )
    model.max_seq_length = max_length
    return replace(result, warnings=result.warnings + watcher.warnings())


def _warmup_ratios(recipe: LsrRecipe) -> dict[str, float]:
    """Return side, ``"query"`` or ``"document"`` -> warm-up ratio of its penalty, if it has one."""
    regularizers = {"query": recipe.query_regularizer, "document": recipe.document_regularizer}
    return {
        side: regularizer.warmup_ratio
        for side, regularizer in regularizers.items()
        if regularizer.kind != "none"
    }


def _routing_arguments(recipe: LsrRecipe, job: TrainingJob) -> dict[str, object]:
    """Return the trainer's arguments for a model with a query encoder and a document encoder.

    Args:
        recipe: the recipe.
        job: the training job, with the columns of its training rows.

    Returns:
        ``router_mapping``, column -> encoder; and ``learning_rate_mapping`` if the recipe sets a
        learning rate for IDF weights of queries. Empty if one encoder encodes queries and documents
        in the same way.
    """
    encodes_both_alike = recipe.query is None and not recipe.document.has_routes
    if encodes_both_alike:
        return {}
    routes = {}
    for column in job.examples.columns:
        if column == "query":
            routes[column] = "query"
        elif column != "label":  # "label" contains scores; all other columns contain documents
            routes[column] = "document"
    settings: dict[str, object] = {"router_mapping": routes}
    trains_idf = isinstance(recipe.query, IdfSpec) and recipe.query.trainable
    if trains_idf and recipe.idf_learning_rate is not None:
        settings["learning_rate_mapping"] = {IDF_WEIGHTS_PATTERN: recipe.idf_learning_rate}
    return settings


def fused_head(
    model: SparseEncoder,
    *,
    required: bool = False,
) -> AbstractContextManager[object]:
    """Create a context in which a model with an LM head runs the fused head.

    The fused head computes logits, activation and pooling together, and never stores the logits.
    The context does nothing if the model has no such head.

    Args:
        model: model to accelerate.
        required: whether a model without a head to fuse is an error.
    """
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tilefold.modules import FusedPooling

    has_head = any(isinstance(module, (SpladePooling, FusedPooling)) for module in model.modules())
    if not has_head and not required:
        return nullcontext()
    from tilefold.integrations.sentence_transformers import accelerate

    # The trainer adds CUDA graphs if the recipe asks for them.
    acceleration: AbstractContextManager[object] = accelerate(model, graphs=False)
    return acceleration


def make_loss(model: Model, recipe: LsrRecipe, *, ranks: int = 1) -> Module:
    """Create the loss of a recipe: a weighted sum of ranking losses, and sparsity penalties.

    Args:
        model: model that is trained.
        recipe: the recipe.
        ranks: number of ranks, which share in-batch negatives and penalties. Document vectors
            ``[B, V]`` are gathered, and their gradients scattered.

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
    """Return the class of the sum of ranking loss and penalties that a recipe trains with.

    Args:
        recipe: the recipe.

    Returns:
        The class, or a ``functools.partial`` that creates an instance.
    """
    from sentence_transformers.sparse_encoder.losses import SpladeLoss

    from tilefold.losses.base_splade import BaseSpladeLoss, JoinedSpladeLoss

    if isinstance(recipe.document, ProsperSpec):
        # PROSPER's literal residual adds weight to the terms that occur in a text. This loss
        # penalises the weights before the addition. PROSPER has no mini-batches.
        return BaseSpladeLoss
    if recipe.mini_batch_size is not None:
        # computes the vectors of a batch without gradients, and then each mini-batch again with
        # gradients (GradCache)
        return partial(JoinedSpladeLoss, mini_batch_size=recipe.mini_batch_size)
    return SpladeLoss  # type: ignore[no-any-return]


def _make_ranking_loss(name: str, model: Model, recipe: LsrRecipe, ranks: int) -> Module:
    """Create one of the ranking losses of a recipe.

    All options of the losses are passed, so that new defaults of sentence-transformers do not
    change what a recipe trains.

    Args:
        name: name of the loss, one of ``LOSSES``.
        model: model that is trained.
        recipe: the recipe. Its ``similarity_scale`` multiplies the scores of ``"infonce"``.
        ranks: number of ranks, which share in-batch negatives.

    Raises:
        ValueError: if the name is unknown.
    """
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.util import dot_score, pairwise_dot_score

    from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss

    if name == "infonce":
        return losses.SparseMultipleNegativesRankingLoss(
            model,
            scale=recipe.similarity_scale,
            similarity_fct=dot_of_all_ranks if ranks > 1 else dot_score,
            gather_across_devices=False,  # it would gather queries too, which is not needed
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
    if name == "term_recall":
        return TermRecallLoss()
    raise ArgumentError("loss", f"must be one of {', '.join(LOSSES)}, got {name!r}.")


def dot_of_all_ranks(queries: Tensor, documents: Tensor) -> Tensor:
    """Score this rank's queries with the documents of all ranks, for in-batch negatives.

    Args:
        queries: vectors ``[B, V]`` of this rank's queries.
        documents: vectors ``[B * (1 + negatives), V]`` of this rank's documents.

    Returns:
        Dot products ``[B, ranks * B * (1 + negatives)]``. ``gather_rows`` puts this rank's
        documents first.
    """
    from tilefold.distributed.process_group import gather_rows

    return queries @ gather_rows(documents).T


def make_regularizer(spec: RegularizerSpec, positions: int = 1) -> Module:
    """Create the module of a sparsity penalty, with a method ``compute_loss_from_embeddings``.

    Args:
        spec: configuration of the penalty.
        positions: number of documents per query: the relevant document and its negatives. With
            ``spec.per_position``, the penalty is computed for each position separately.
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
    ``negative_n``, and ``label`` if the loss reads teachers' scores. New negatives are drawn for
    each pass over the pairs, unless there are too many for the memory. A row repeats a negative
    only if the file has too few for its query.

    Args:
        recipe: the recipe.
        collection: collection of the pairs.
        file: file of mined negatives, with teachers' scores if the loss reads them; or a
            ``RowsAhead``, which reads such a file in a thread; or ``None``.

    Raises:
        ValueError: if the recipe does not read the file, or needs one. The message has the commands
            that create it.
    """
    if not recipe.negatives:
        if file is not None:
            raise ArgumentError(
                "negatives",
                f"the recipe {recipe.name!r} does not read mined negatives, because its field "
                "negatives is 0; omit the file, or set negatives to at least 1.",
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
        ValueError: if the file lacks scores that the loss reads, or has no row of a training query.
    """
    positions = rows.positions_in(collection)
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
    """Return how often negatives are drawn for each pair: once per pass over the pairs.

    There are fewer draws if their documents would take too much memory.

    Args:
        recipe: the recipe, with the number of passes and of negatives.
        n_pairs: number of training pairs.
    """
    n_passes = recipe.epochs
    if recipe.max_steps is not None:
        n_passes = recipe.max_steps * recipe.batch_size / n_pairs
    max_draws = MAX_DRAWN_DOCUMENTS // (n_pairs * (1 + recipe.negatives))
    return max(1, min(math.ceil(n_passes), max_draws))


def _missing_negatives_message(recipe: LsrRecipe, collection: Collection) -> str:
    """Return an error message with the commands that create the negatives of a recipe.

    Args:
        recipe: the recipe.
        collection: the collection, which the commands name.
    """
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

    Args:
        dataset: data set of the training rows.
        batch_size: number of rows of a full batch.
        settings: additional arguments that sentence-transformers passes.
    """
    name = "document" if "document" in dataset.column_names else "positive"
    lengths = [len(text) for text in dataset.select_columns([name])[name]]
    return _batches_of_texts(dataset, batch_size, lengths=lengths, **settings)


def filled_batches(dataset: Any, batch_size: int, **settings: Any) -> TrainingBatches:
    """Create a ``batch_sampler`` for sentence-transformers with full batches of distinct texts.

    The sampler of sentence-transformers makes short batches, down to a single pair, if a query or a
    document occurs in many rows. Here an epoch has ``ceil(rows / batch_size)`` batches, and short
    batches are filled with rows that the epoch has already had.

    Args:
        dataset: data set of the training rows.
        batch_size: number of rows of a batch.
        settings: additional arguments that sentence-transformers passes.
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
    """Create a sampler of batches, in each of which all texts are different.

    sentence-transformers passes all arguments except `lengths`, which fixes their names.

    Args:
        dataset: data set whose columns are texts, except for labels.
        batch_size: number of rows of a full batch.
        drop_last: True fills short batches with rows that the epoch has already had, and drops no
            batch. False leaves short batches as they are.
        seed: seed of the random order of rows, which differs between epochs.
        valid_label_columns: names of the columns that are not texts.
        generator: ignored, because the order depends only on the seed.
        lengths: length of each row's document, for batches of documents of similar length;
            ``None`` for batches of random rows.
    """
    import numpy as np

    from tilefold.recipes._batches import TrainingBatches
    from tilefold.retrieval.data.lazy_documents import id_key

    # sentence-transformers adds a column "dataset_name" if it trains with several data sets.
    not_texts = {"dataset_name", *(valid_label_columns or ())}
    # a 64-bit hash of each text, by which equal texts are recognized
    keys_by_column = [
        np.fromiter(map(id_key, dataset[name]), np.uint64, len(dataset))
        for name in dataset.column_names
        if name not in not_texts
    ]
    keys = np.column_stack(keys_by_column)  # [n_rows, n_columns]
    # The sampler reads the keys of a few rows at a time: those of other data sets may be in a file.
    return TrainingBatches(
        lambda row_numbers: keys[row_numbers],
        len(dataset),
        batch_size,
        fill_batches=drop_last,
        seed=seed,
        lengths=None if lengths is None else np.asarray(lengths, np.int64),
    )
