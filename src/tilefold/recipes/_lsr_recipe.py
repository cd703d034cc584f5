"""The typed configuration of learned sparse models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilefold.recipes._attention import AttentionChoice
from tilefold.recipes._checks import check_count, check_flag, check_number, check_training
from tilefold.recipes._fields import DictMixin
from tilefold.recipes.encoders import EncoderSpec

__all__ = ["LOSSES", "REGULARIZERS", "LsrRecipe", "RegularizerSpec"]

LOSSES = ("infonce", "kl", "margin_mse", "pairwise_softmax", "term_recall")
DISTILLATION = ("kl", "margin_mse")  # these read teacher scores
MASKED_LM = EncoderSpec()
REGULARIZERS = ("flops", "l1", "l2", "df_flops", "anti_zero", "none")


@dataclass(frozen=True)
class RegularizerSpec(DictMixin):
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

    def __post_init__(self) -> None:
        if self.kind not in REGULARIZERS:
            raise ValueError(f"kind must be one of {', '.join(REGULARIZERS)}, got {self.kind!r}.")
        check_number("weight", self.weight, lambda value: value >= 0, "of at least 0")
        check_number("warmup_ratio", self.warmup_ratio, lambda value: 0 < value <= 1, "in (0, 1]")
        check_count("threshold", self.threshold, optional=True)
        if self.kind == "anti_zero" and self.threshold is not None:
            raise ValueError(f"threshold must be None for kind {self.kind!r}, got {self.threshold}.")
        check_flag("per_position", self.per_position)
        if self.kind == "df_flops" and self.per_position:
            raise ValueError("per_position must be False for kind 'df_flops', whose frequencies are of all documents.")


@dataclass(frozen=True)
class LsrRecipe(AttentionChoice, DictMixin):
    """Configuration of a learned sparse model and its training; every field is checked on construction.

    Attributes:
        name: of the system, for messages; it changes nothing.
        query, document: the encoders; ``query=None`` shares the document's weights.
        loss: weights by name, out of `LOSSES`. ``"infonce"`` has in-batch negatives beside mined ones.
        query_regularizer, document_regularizer: penalties of both sides.
        negatives: mined negatives per query and step; 0 for in-batch negatives alone.
        idf_learning_rate: of the weights of an ``"idf"`` query encoder; ``None`` takes `learning_rate`.
        base_model, max_steps, epochs, batch_size, learning_rate, warmup_ratio, similarity_scale, max_length,
        train_max_length, start_percentile, start_deviations, group_by_length, bf16, fused, graphs, save_steps,
        save_minutes, seed: see :class:`tilefold.recipes.SpladeRecipe`.
        attention, alpha, anneal_alpha: see :class:`AttentionChoice`.
    """

    name: str = "custom"
    base_model: str = "minilm"
    query: EncoderSpec | None = None
    document: EncoderSpec = MASKED_LM
    loss: Mapping[str, float] = field(default_factory=lambda: {"infonce": 1.0})
    query_regularizer: RegularizerSpec = RegularizerSpec()
    document_regularizer: RegularizerSpec = RegularizerSpec()
    negatives: int = 0
    max_steps: int | None = None
    epochs: float = 4.0
    batch_size: int = 32
    learning_rate: float = 1e-4
    idf_learning_rate: float | None = None
    warmup_ratio: float = 0.1
    similarity_scale: float = 1.0
    max_length: int = 256
    train_max_length: int | None = None
    start_percentile: float = 99.95
    start_deviations: float | None = None
    group_by_length: bool = False
    bf16: bool | None = None
    fused: bool = True
    graphs: bool = False
    save_steps: int = 25
    save_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._nest()
        self.check_attention()
        check_training(self)
        check_number("start_percentile", self.start_percentile, lambda value: 0 < value < 100, "in (0, 100)")
        if self.start_deviations is not None:
            check_number("start_deviations", self.start_deviations, lambda value: value >= 0, "0 or more, or None")
        if self.idf_learning_rate is not None:
            check_number("idf_learning_rate", self.idf_learning_rate, lambda value: value > 0, "greater than 0")
        check_count("negatives", self.negatives, optional=False, least=0)
        check_flag("group_by_length", self.group_by_length)
        if self.query_regularizer.per_position:
            raise ValueError("query_regularizer: per_position must be False, a group has one query.")
        self._check_loss()

    def _nest(self) -> None:
        """Specifications that came as dictionaries, from JSON, become objects."""
        for name, cls in (
            ("query", EncoderSpec),
            ("document", EncoderSpec),
            ("query_regularizer", RegularizerSpec),
            ("document_regularizer", RegularizerSpec),
        ):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                try:
                    object.__setattr__(self, name, cls.from_dict(dict(value)))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif not isinstance(value, cls) and not (name == "query" and value is None):
                raise ValueError(f"{name} must be an instance of {cls.__name__}, got {value!r}.")

    def _check_loss(self) -> None:
        if not isinstance(self.loss, Mapping) or not self.loss or set(self.loss) - set(LOSSES):
            raise ValueError(f"loss must map names out of {', '.join(LOSSES)} to weights, got {self.loss!r}.")
        for name, weight in self.loss.items():
            check_number(f"loss[{name!r}]", weight, lambda value: value > 0, "greater than 0")
        if self.needs_scores and not self.negatives:
            raise ValueError("negatives must be at least 1 for a loss that compares documents with a teacher, got 0.")
        if "pairwise_softmax" in self.loss and not self.negatives:
            raise ValueError("negatives must be at least 1 for the loss pairwise_softmax, got 0.")

    @property
    def needs_scores(self) -> bool:
        """Whether the loss reads teacher scores."""
        return any(name in DISTILLATION for name in self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return ("pairs",) + ("negatives",) * bool(self.negatives) + ("scores",) * self.needs_scores
