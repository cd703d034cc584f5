"""Plans how much ``tilefold demo`` does in the given minutes, from the measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["FULL", "FULL_SIZE", "Plan", "Size", "Speed", "Texts", "Work", "make_plan", "refit", "size_plan"]

FULL = "full"
HEAD_BATCHES = (4, 8, 16)
HEAD_TOKENS = 128
# A comparison of heads runs two processes, with the operations of about this many forward passes per text of a batch.
HEAD_START_SECONDS, HEAD_PASSES = 10.0, 30
# Reading and sorting, BM25, search, fusion weights, tables: all that does not run the model.
OTHER_SECONDS = 30.0
MAX_CORRECTION = 2.0


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the model's products per token; a multiplication and an addition count as two.

    Attributes:
        encoder: all layers, forward.
        head: the LM head, forward; its backward has one product per active score, which is negligible.
    """

    encoder: float
    head: float

    @classmethod
    def of(cls, config: Any, length: float) -> Work:
        """Operations of a BERT-like configuration with attention over `length` tokens."""
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        weights = 4 * hidden * hidden + 2 * hidden * inner
        head = 2.0 * hidden * (config.vocab_size + hidden)
        return cls(layers * (2.0 * weights + 4.0 * length * hidden), head)

    @property
    def encoding(self) -> float:
        """Operations of encoding to a SPLADE vector."""
        return self.encoder + self.head

    @property
    def training(self) -> float:
        """Operations of a training step: the encoder's backward pass costs twice its forward pass."""
        return self.encoding + 2.0 * self.encoder


@dataclass(frozen=True)
class Speed:
    """Operations per second, measured with the real model: encoder only, encoding, training."""

    dense: float
    encoding: float
    training: float

    def slower(self, factor: float) -> Speed:
        """The speed when everything takes `factor` times as long."""
        return Speed(self.dense / factor, self.encoding / factor, self.training / factor)


@dataclass(frozen=True)
class Texts:
    """The sizes of a collection that a plan needs.

    Attributes:
        lengths: tokens per document, in the order in which a smaller collection takes the documents.
        judged: number of relevant documents; they come first, and are always taken.
        query_length: tokens per query, including the padding of a batch.
    """

    lengths: Sequence[int]
    judged: int
    query_length: float


@dataclass(frozen=True)
class Size:
    """The size of a demo. `documents` is None for all; steps lie between `fewest` and `most`."""

    documents: int | None
    max_length: int
    dense_length: int
    train_length: int
    batch_size: int
    learning_rate: float
    fewest: int
    most: int


FULL_SIZE = Size(None, 128, 256, 64, 64, 2e-4, 110, 110)
# From small to large, all trained as the full demo is. With 40 steps of the first, SPLADE was 5.1 standard errors above
# BM25 and 2.3 above dense retrieval (800 queries); with steps of half the pairs it did not rise clearly above dense.
SIZES = (
    Size(3000, 64, 64, 48, 64, 2e-4, 45, 90),
    Size(4500, 96, 96, 64, 64, 2e-4, 90, 100),
    Size(None, 128, 128, 64, 64, 2e-4, 110, 110),
)


@dataclass(frozen=True)
class Plan:
    """What a demo will do, with the operations and seconds expected for each stage.

    Attributes:
        minutes: as asked for, or ``"full"`` for the full size.
        size: see :class:`Size`.
        documents: of the collection.
        steps: of training.
        head_shapes: number of batch sizes at which the stock head is compared with the fused one.
        tokens, dense_tokens: of all documents, truncated at the lengths of the size.
        step_tokens: of one training step, queries included.
        work: see :class:`Work`.
        speed: what the seconds were computed with.
    """

    minutes: float | str
    size: Size
    documents: int
    steps: int
    head_shapes: int
    tokens: int
    dense_tokens: int
    step_tokens: float
    work: Work
    speed: Speed

    @property
    def operations(self) -> dict[str, float]:
        """Operations of every stage that runs the model."""
        head_rows = sum(HEAD_BATCHES[: self.head_shapes]) * HEAD_TOKENS * HEAD_PASSES
        return {
            "dense": self.dense_tokens * self.work.encoder,
            "training": self.steps * self.step_tokens * self.work.training,
            "encoding": self.tokens * self.work.encoding,
            "heads": head_rows * self.work.head,
        }

    @property
    def seconds(self) -> dict[str, float]:
        """Expected seconds of every stage; ``"other"`` is everything that does not run the model."""
        operations = self.operations
        return {
            "dense": operations["dense"] / self.speed.dense,
            "training": operations["training"] / self.speed.training,
            "encoding": operations["encoding"] / self.speed.encoding,
            "heads": HEAD_START_SECONDS * bool(self.head_shapes) + operations["heads"] / self.speed.encoding,
            "other": OTHER_SECONDS,
        }

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object; :meth:`from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        parts = {"size": Size(**values["size"]), "work": Work(**values["work"]), "speed": Speed(**values["speed"])}
        return cls(**values | parts)


def make_plan(minutes: float, speed: Speed, work: Work, texts: Texts, spent: float = 0.0) -> Plan:
    """The largest size that fits into `minutes`, with as many steps as fit; if none fits, the smallest plan.

    Args:
        minutes: for the whole demo.
        speed: of this machine.
        work: operations of the model per token.
        texts: sizes of the collection.
        spent: seconds already used.
    """
    left = 60.0 * minutes - spent
    for size in reversed(SIZES):
        plan = size_plan(minutes, size, speed, work, texts)
        if sum(plan.seconds.values()) <= left:
            return refit(plan, left)
    return replace(size_plan(minutes, SIZES[0], speed, work, texts), head_shapes=1)


def size_plan(minutes: float | str, size: Size, speed: Speed, work: Work, texts: Texts) -> Plan:
    """The plan of a size with its fewest steps; all head shapes for the full demo, else one."""
    count = len(texts.lengths) if size.documents is None else max(size.documents, texts.judged)
    chosen = texts.lengths[:count]
    tokens, dense, training = (
        sum(min(length, cut) for length in chosen) for cut in (size.max_length, size.dense_length, size.train_length)
    )
    step_tokens = size.batch_size * (training / max(1, len(chosen)) + min(texts.query_length, size.train_length))
    shapes = len(HEAD_BATCHES) if minutes == FULL else 1
    return Plan(minutes, size, len(chosen), size.fewest, shapes, tokens, dense, step_tokens, work, speed)


def refit(plan: Plan, left: float, done: Sequence[str] = (), slowdown: float = 1.0) -> Plan:
    """Reduce or raise the steps, then the head shapes, so that the stages not yet `done` fit into the `left` seconds.

    `slowdown` is how many times longer than expected the last stage took. The others are expected to slow down equally,
    by up to `MAX_CORRECTION` times, because a single stage may have been disturbed.
    There are never fewer steps than the size's fewest: the demo then takes longer, rather than show nothing.
    """
    believed = min(max(slowdown, 1 / MAX_CORRECTION), MAX_CORRECTION)
    plan = replace(plan, speed=plan.speed.slower(believed))
    if plan.minutes == FULL:
        return plan
    if "training" not in done:
        plan = replace(plan, steps=plan.size.fewest)
        spare = left - _remaining(plan, done)
        step = plan.seconds["training"] / plan.steps
        more = int(min(spare, left) / step) if spare > 0 else 0
        plan = replace(plan, steps=min(plan.size.most, plan.size.fewest + more))
    for shapes in range(len(HEAD_BATCHES), 0, -1):
        wider = replace(plan, head_shapes=shapes)
        if shapes == 1 or _remaining(wider, done) <= left:
            return wider
    return plan


def _remaining(plan: Plan, done: Sequence[str]) -> float:
    return sum(seconds for stage, seconds in plan.seconds.items() if stage not in done)
