"""Options of the training benchmark, and the rows of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

CSV_KEY = ("model", "length", "checkpointing", "documents", "dtype", "memory_gib", "side")
DEFAULT_MODELS = ("bert-base", "xlmr-base")
DEFAULT_LENGTHS = (256, 512)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run.

    Attributes:
        device: the device of the steps.
        models: the names in ``MODEL_SIZES``.
        lengths: S, tokens of a document.
        checkpointing: whether gradient checkpointing is on, for each cell of a length.
        bf16: whether to autocast to bf16. By default it is done on a GPU.
        memory_gib: the limit of torch's allocator. By default it is the memory of the device.
        batch: the pairs of the common batch. By default it is the largest power of two that fits on
            both sides.
        max_batch: the largest batch to try.
        seconds: the time for the steps of one side at one batch.
        data: ``pydocs`` or a BEIR folder.
        tokenizer: the folder of a tokenizer. By default it is the packaged MiniLM's.
        natural: whether documents are left as they are, and padded to the longest. Otherwise they
            are extended to S tokens.
        seed: the seed of dropout.
    """

    device: torch.device
    models: Sequence[str] = DEFAULT_MODELS
    lengths: Sequence[int] = DEFAULT_LENGTHS
    checkpointing: Sequence[bool] = (False, True)
    bf16: bool | None = None
    memory_gib: float | None = None
    batch: int | None = None
    max_batch: int = 8192
    seconds: float = 2.0
    data: str = "pydocs"
    tokenizer: str | Path | None = None
    natural: bool = False
    seed: int = 0

    def check(self) -> None:
        """Check the sizes and the time.

        Raises:
            ValueError: if the batch is below 1, or the time is negative.
        """
        for name, value in (("batch", self.batch), ("max-batch", self.max_batch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not self.seconds >= 0:
            raise ValueError(f"seconds must be 0 or more, got {self.seconds}.")

    @property
    def autocasts(self) -> bool:
        """Whether steps run under bf16 autocast."""
        return self.device.type == "cuda" if self.bf16 is None else self.bf16


@dataclass
class TrainRow:
    """One side of one cell: a line of the table and of the CSV. ``None`` was not measured."""

    model: str
    vocab: int
    hidden: int
    layers: int
    length: int
    query_length: int
    checkpointing: str
    documents: str
    dtype: str
    memory_gib: float
    side: str
    valid_tokens: float
    tokenizer: str
    data: str
    status: str = "ok"
    note: str = ""
    batch: int | None = None
    step_p20_ms: float | None = None
    step_p50_ms: float | None = None
    step_p80_ms: float | None = None
    step_reps: int | None = None
    peak_gib: float | None = None
    loss: float | None = None
    largest_batch: int | None = None
    largest_capped: str = ""
    largest_peak_gib: float | None = None
    mib_a_pair: float | None = None
    largest_step_p50_ms: float | None = None
    largest_reps: int | None = None
    pairs_per_second: float | None = None
    gate_loss_error: float | None = None
    gate_gradient_error: float | None = None

    def record(self) -> dict[str, object]:
        """The row as CSV fields."""
        return {"op": "train-splade", **asdict(self)}
