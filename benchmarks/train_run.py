"""Runs of a stock trainer: a few steps whose losses are compared, and steps that are timed."""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

GATE_STEPS = 3
WARM_STEPS = 5
GRAPH_WARM_STEPS = (
    80  # nearly all sizes have been met twice by then; a capture takes as long as five to ten steps
)
GRAPHS = ("graphs", "compiled")  # sides with graphs
PROFILED_STEPS = 3
# Fresh weights give dense scores, whose dot products grow with V: these factors over V keep loss
# and FLOPS terms small, so that rounding does not decide the softmax. They change no amount of
# work.
SIMILARITY_SCALE = 30.0
REGULARIZER = 30.0


@dataclass
class Measured:
    """Measurements of a run.

    Attributes:
        losses: of the first steps, without dropout, in the precision of the others.
        step_ms: mean time of a timed step, device included.
        p20_ms, median_ms, p80_ms, slowest_ms: of the times between the ends of two timed steps that
            the host saw.
        peak_gib: memory of the device that was allocated during them, weights included; 0 on a CPU.
        reserved_gib: what torch held of it, graphs' own included.
        busy: share of the time of some further steps in which a kernel ran on the GPU; None on a
            CPU.
    """

    losses: list[float]
    step_ms: float
    p20_ms: float
    median_ms: float
    p80_ms: float
    slowest_ms: float
    peak_gib: float
    reserved_gib: float
    busy: float | None


def train(
    kind: str,
    model: Any,
    side: str,
    rows: Mapping[str, list[str]],
    batch: int,
    steps: int,
    device: torch.device,
) -> Measured:
    """Train a copy of ``model`` with the stock trainer of its kind, under bf16 autocast on a GPU.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: as :func:`benchmarks.train_data.make_encoder` made it.
        side: ``"stock"``; ``"padded"``, accelerated but for packed inputs; ``"packed"``,
            accelerated, with batches made ahead; ``"graphs"``, with CUDA graphs, too;
            ``"compiled"``, with graphs of compiled layers.
        rows: queries and documents, ``batch`` of each for every step.
        batch: pairs of a step.
        steps: timed steps.
        device: where the copy is trained.
    """
    return run(kind, model, side, rows, batch, steps, device, device.type == "cuda").measured()


def exact_losses(
    kind: str,
    model: Any,
    side: str,
    rows: Mapping[str, list[str]],
    batch: int,
    device: torch.device,
) -> list[float]:
    """Losses of the first steps of a copy in fp32 without dropout.

    In bf16 they say little: each side's rounding chooses other winners among the tokens of a fresh
    model, and the stock side's gradients alone are some 20% off those in fp32.
    """
    return [float(loss) for loss in run(kind, model, side, rows, batch, 0, device, False).losses]


def run(
    kind: str,
    model: Any,
    side: str,
    rows: Mapping[str, list[str]],
    batch: int,
    steps: int,
    device: torch.device,
    bf16: bool,
    watch_type: type[Watch] | None = None,
) -> Watch:
    """Train a copy of the model, and return what was seen.

    A second trainer of one model runs in the precision of the first: each has a copy.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from tilefold.integrations.sentence_transformers import accelerate, collate_ahead

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.end(state.global_step)

    model = copy.deepcopy(model).to(device)
    watch = (watch_type or Watch)(
        model,
        steps,
        GRAPH_WARM_STEPS if side in GRAPHS and bf16 else WARM_STEPS,
    )
    if side != "stock":
        accelerate(model, packed=side != "padded")
    loss = make_loss(kind, model, side)
    loss.register_forward_hook(lambda _, __, out: watch.saw(out))
    try:
        with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
            trainer = make_trainer(
                kind,
                model,
                loss,
                folder,
                batch,
                Dataset.from_dict(dict(rows)),
                watch.total,
                bf16,
            )
            trainer.add_callback(Callback())
            trainer.remove_callback(PrinterCallback)
            if side in {"packed", *GRAPHS}:
                collate_ahead(trainer, graphs=side in GRAPHS, compiled=side == "compiled")
            trainer.train()
    finally:
        watch.close()
        del model, loss
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if watch.bf16 != bf16:
        raise RuntimeError(
            f"the trainer must multiply with bf16 = {bf16}, got bf16 = {watch.bf16}.",
        )
    return watch


def make_loss(kind: str, model: Any, side: str) -> Any:
    """The stock loss of a kind; the scores of ColBERT are fused but on the stock side."""
    if kind == "splade":
        from sentence_transformers.sparse_encoder import losses

        vocab = model[0].model.config.vocab_size
        ranking = losses.SparseMultipleNegativesRankingLoss(
            model=model,
            scale=SIMILARITY_SCALE / vocab,
        )
        weight = REGULARIZER / vocab
        return losses.SpladeLoss(
            model=model,
            loss=ranking,
            document_regularizer_weight=weight,
            query_regularizer_weight=weight,
        )
    from sentence_transformers.multi_vector_encoder.losses import (
        MultiVectorMultipleNegativesRankingLoss,
    )

    from tilefold.integrations.sentence_transformers.multi_vector import colbert_scores

    fused = {} if side == "stock" else {"similarity_fct": colbert_scores}
    return MultiVectorMultipleNegativesRankingLoss(model, **fused)


def make_trainer(
    kind: str,
    model: Any,
    loss: Any,
    folder: str,
    batch: int,
    dataset: Any,
    steps: int,
    bf16: bool,
) -> Any:
    """The stock trainer of a kind, which saves and reports nothing."""
    if kind == "splade":
        from sentence_transformers.sparse_encoder import SparseEncoderTrainer as Trainer
        from sentence_transformers.sparse_encoder import (
            SparseEncoderTrainingArguments as Arguments,
        )
    else:
        from sentence_transformers.multi_vector_encoder import MultiVectorEncoderTrainer as Trainer
        from sentence_transformers.multi_vector_encoder import (
            MultiVectorEncoderTrainingArguments as Arguments,
        )
    from tilefold.integrations.transformers import one_gpu

    cpu = model.device.type == "cpu"
    arguments = one_gpu(Arguments)(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        bf16=bf16,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    return Trainer(model=model, args=arguments, train_dataset=dataset, loss=loss)


@dataclass
class Watch:
    """Sees the steps of a run begin and end."""

    model: Any
    steps: int
    warm_steps: int
    losses: list[torch.Tensor] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0
    busy: float | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        self.dropouts = [
            (module, module.p)
            for module in self.model.modules()
            if isinstance(module, torch.nn.Dropout)
        ]
        self.on_gpu = self.model.device.type == "cuda"
        self.first = GATE_STEPS + self.warm_steps  # the first timed step
        profiled = PROFILED_STEPS if self.on_gpu else 0
        self.total = self.first + self.steps + profiled if self.steps else GATE_STEPS
        self.profiler: Any = None
        self.profiled_from = 0.0
        self.hook = list(self.model)[1].register_forward_hook(self._sees_precision)

    def _sees_precision(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            device = "cuda" if self.on_gpu else "cpu"
            self.bf16 = (
                torch.is_autocast_enabled(device)
                and torch.get_autocast_dtype(device) == torch.bfloat16
            )

    def close(self) -> None:
        """Let go of the model."""
        self.hook.remove()
        self.model, self.dropouts = None, []

    def saw(self, loss: Any) -> None:
        """The output of the loss; nothing waits for the device."""
        if len(self.losses) < GATE_STEPS:
            parts = loss.values() if isinstance(loss, dict) else [loss]
            self.losses.append(torch.stack([part.detach().float() for part in parts]).sum())

    def begin(self, step: int) -> None:
        """Before step number ``step``, from 0."""
        if step == 0:
            for module, _ in self.dropouts:
                module.p = 0.0
        elif step == GATE_STEPS:
            self.restore()

    def restore(self) -> None:
        """Dropout as it was."""
        for module, p in self.dropouts:
            module.p = p

    def end(self, step: int) -> None:
        """After step number ``step``, from 1. The time of a step includes the wait for its batch."""
        if self.on_gpu and step == GATE_STEPS:
            torch.cuda.empty_cache()  # what other runs left
        if self.on_gpu and step in (self.first, self.first + self.steps, self.total):
            torch.cuda.synchronize()
        if self.first <= step <= self.first + self.steps:
            self.ends.append(time.perf_counter())
        if not self.on_gpu or not self.steps:  # nothing is timed where losses alone are compared
            return
        if step == self.first:
            torch.cuda.reset_peak_memory_stats()
        elif step == self.first + self.steps:
            self.peak, self.reserved = (
                torch.cuda.max_memory_allocated(),
                torch.cuda.max_memory_reserved(),
            )
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
            )
            self.profiler.start()
            self.profiled_from = time.perf_counter()
        elif step == self.total:
            seconds = time.perf_counter() - self.profiled_from
            self.profiler.stop()
            self.busy = busy_seconds(self.profiler) / seconds

    def measured(self) -> Measured:
        """The measurements of the steps that were seen."""
        gaps = [
            1e3 * (after - before)
            for before, after in zip(self.ends[:-1], self.ends[1:], strict=True)
        ]
        fifths = statistics.quantiles(gaps, n=5) if len(gaps) > 1 else gaps * 4
        return Measured(
            [float(loss) for loss in self.losses],
            1e3 * (self.ends[-1] - self.ends[0]) / len(gaps),
            fifths[0],
            statistics.median(gaps),
            fifths[3],
            max(gaps),
            self.peak / 2**30,
            self.reserved / 2**30,
            self.busy,
        )


def busy_seconds(profiler: Any) -> float:
    """Seconds in which at least one kernel or copy ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    total = reached = 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6
