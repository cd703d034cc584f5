"""The typed configurations of learned sparse models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from tilefold.recipes._settings import POSITIVE, Check, Settings, TrainingSettings, flag, number, whole
from tilefold.recipes.encoders import EncoderSpec

__all__ = ["LOSSES", "REGULARIZERS", "LsrRecipe", "RegularizerSpec", "SparseRecipe", "SpladeRecipe"]

LOSSES = ("infonce", "kl", "margin_mse", "pairwise_softmax", "term_recall")
DISTILLATION = ("kl", "margin_mse")  # these read teacher scores
MASKED_LM = EncoderSpec()
REGULARIZERS = ("flops", "l1", "l2", "df_flops", "anti_zero", "none")
_RATIO = number(lambda value: 0 < value <= 1, "in (0, 1]")


def _regularizer(name: str, value: object) -> None:
    if value not in REGULARIZERS:
        raise ValueError(f"{name} must be one of {', '.join(REGULARIZERS)}, got {value!r}.")


@dataclass(frozen=True)
class RegularizerSpec(Settings):
    """The sparsity penalty of one side.

    Attributes:
        kind: one of `REGULARIZERS`; ``"anti_zero"`` is added to FLOPS, as naver's trainer does.
        weight: its factor once the warm-up is over.
        warmup_ratio: share of the steps over which the factor rises quadratically.
        threshold: rows with at most so many terms are not penalised (the l0 mask of arXiv 2504.14839).
        per_position: of documents: the relevant ones, the first negatives and so on are penalised by themselves, and
            the values added (:class:`tilefold.losses.PositionSum`); False takes all documents of a batch together.
    """

    kind: str = "flops"
    weight: float = 0.1
    warmup_ratio: float = 1 / 3
    threshold: int | None = None
    per_position: bool = False

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "kind": _regularizer,
        "weight": number(lambda value: value >= 0, "of at least 0"),
        "warmup_ratio": _RATIO,
        "threshold": whole(optional=True),
        "per_position": flag,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "anti_zero" and self.threshold is not None:
            raise ValueError(f"threshold must be None for kind {self.kind!r}, got {self.threshold}.")
        if self.kind == "df_flops" and self.per_position:
            raise ValueError("per_position must be False for kind 'df_flops', whose frequencies are of all documents.")


@dataclass(frozen=True, kw_only=True)
class SparseRecipe(TrainingSettings):
    """The settings of every learned sparse model, on top of :class:`TrainingSettings`.

    Attributes:
        start_percentile: initial decoder bias of ``"minilm"``, see :func:`tilefold.recipes.minilm_splade`.
        start_deviations: the same bias with a value per term; ``None`` gives all terms the same, from
            `start_percentile`.
        group_by_length: batches of documents of similar length, with little padding.
    """

    start_percentile: float = 99.95
    start_deviations: float | None = None
    group_by_length: bool = False

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "start_percentile": number(lambda value: 0 < value < 100, "in (0, 100)"),
        "start_deviations": number(lambda value: value >= 0, "0 or more, or None", optional=True),
        "group_by_length": flag,
    }


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
        "query_regularizer": number(lambda value: value >= 0, "0 or more"),
        "document_regularizer": number(lambda value: value >= 0, "0 or more"),
        "regularizer_warmup_ratio": _RATIO,
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


@dataclass(frozen=True)
class LsrRecipe(SparseRecipe):
    """Configuration of a learned sparse model and its training; every field is checked on construction.

    Attributes:
        name: of the system, for messages; it changes nothing.
        base_model: of encoders that name none: ``"minilm"``, a folder or a Hugging Face name.
        query, document: the encoders; ``query=None`` shares the document's weights.
        loss: weights by name, out of `LOSSES`. ``"infonce"`` has in-batch negatives beside mined ones.
        query_regularizer, document_regularizer: penalties of both sides.
        negatives: mined negatives per query and step; 0 for in-batch negatives alone.
        idf_learning_rate: of the weights of an ``"idf"`` query encoder; ``None`` takes `learning_rate`.

    The others are those of :class:`SparseRecipe` and :class:`TrainingSettings`.
    """

    name: str = "custom"
    base_model: str = "minilm"
    query: EncoderSpec | None = None
    document: EncoderSpec = MASKED_LM
    loss: Mapping[str, float] = field(default_factory=lambda: {"infonce": 1.0})
    query_regularizer: RegularizerSpec = RegularizerSpec()
    document_regularizer: RegularizerSpec = RegularizerSpec()
    negatives: int = 0
    _: KW_ONLY
    batch_size: int = 32
    idf_learning_rate: float | None = None
    max_length: int = 256

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "negatives": whole(0),
        "idf_learning_rate": number(lambda value: value > 0, "greater than 0", optional=True),
    }

    def __post_init__(self) -> None:
        self._nest()
        super().__post_init__()
        if self.query_regularizer.per_position:
            raise ValueError("query_regularizer: per_position must be False, a group has one query.")
        if not isinstance(self.loss, Mapping) or not self.loss or set(self.loss) - set(LOSSES):
            raise ValueError(f"loss must map names out of {', '.join(LOSSES)} to weights, got {self.loss!r}.")
        for name, weight in self.loss.items():
            POSITIVE(f"loss[{name!r}]", weight)
        if self.needs_scores and not self.negatives:
            raise ValueError("negatives must be at least 1 for a loss that compares documents with a teacher, got 0.")
        if "pairwise_softmax" in self.loss and not self.negatives:
            raise ValueError("negatives must be at least 1 for the loss pairwise_softmax, got 0.")

    def _nest(self) -> None:
        """Turn specifications that came as dictionaries, from JSON, into objects."""
        kinds = {"query": EncoderSpec, "document": EncoderSpec}
        for name, cls in (
            kinds | dict.fromkeys(("query_regularizer", "document_regularizer"), RegularizerSpec)
        ).items():
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
        return any(name in DISTILLATION for name in self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return ("pairs",) + ("negatives",) * bool(self.negatives) + ("scores",) * self.needs_scores
