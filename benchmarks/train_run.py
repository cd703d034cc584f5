"""Runs of a stock trainer: a few steps whose losses are compared, and steps that are timed."""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# first steps of a run, whose losses are compared
GATE_STEPS = 3
# steps after them that are not timed
WARM_STEPS = 5
# the same with graphs: a capture takes as long as five to ten steps, and by then nearly all sizes
# have occurred twice
GRAPH_WARM_STEPS = 80
# sides with CUDA graphs
GRAPHS = ("model", "trainer", "graphs", "compiled")
# sides that ``collate_ahead`` accelerates
COLLATED = ("packed", "graphs", "compiled")
# sides whose model stays stock until its trainer is accelerated
STOCK_MODELS = ("stock", "trainer")
# steps under a profiler, after the timed ones
PROFILED_STEPS = 3
LEARNING_RATE = 2e-5
GIB = 2**30
# Fresh weights give dense scores, whose dot products grow with V: these factors over V keep loss
# and FLOPS terms small, so that rounding does not decide the softmax. They change no amount of
# work.
SIMILARITY_SCALE = 30.0
REGULARIZER = 30.0


@dataclass
class Measured:
    """Measurements of a run.

    Attributes:
        losses: the losses of the first steps, without dropout, in the precision of the timed steps.
        step_ms: mean time of a timed step, until the device has finished the last one.
        p20_ms: 20th percentile of the times between the ends of two timed steps on the CPU.
        median_ms: the median of these times.
        p80_ms: 80th percentile of these times.
        slowest_ms: the longest of these times.
        peak_gib: the largest allocated memory of the device in the timed steps, including weights;
            0 on a CPU.
        reserved_gib: the largest memory that torch reserved, with that of graphs.
        busy: the share of the time of the profiled steps in which a kernel ran on the GPU; None on
            a CPU.
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
    """Time the training of a copy of ``model`` by its stock trainer, with bf16 autocast on a GPU.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: a model of :func:`benchmarks.train_data.make_encoder`.
        side: how the model is trained: ``"stock"``; ``"model"``, by ``accelerate(model)``;
            ``"trainer"``, by ``accelerate(trainer)``; ``"padded"``, accelerated without packed
            inputs; ``"packed"``, with batches that are collated ahead and without graphs;
            ``"graphs"``, with CUDA graphs, too; ``"compiled"``, with graphs of compiled layers.
        rows: queries and documents, ``batch`` of each for every step.
        batch: the pairs per step.
        steps: the number of timed steps.
        device: the device of the copy.
    """
    bf16 = device.type == "cuda"
    return run(kind, model, side, rows, batch, steps, device, bf16).measured()


def exact_losses(
    kind: str,
    model: Any,
    side: str,
    rows: Mapping[str, list[str]],
    batch: int,
    device: torch.device,
) -> list[float]:
    """Compute the losses of the first steps of a copy in fp32, without dropout.

    Losses in bf16 cannot be compared: the rounding of each side chooses other tokens as winners of
    a fresh model, and the gradients of the stock side alone are some 20% off those in fp32.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: the model.
        side: how the model is trained, as in :func:`train`.
        rows: queries and documents.
        batch: the pairs per step.
        device: the device of the copy.
    """
    watch = run(kind, model, side, rows, batch, steps=0, device=device, bf16=False)
    return [float(loss) for loss in watch.losses]


def run(
    kind: str,
    model: Any,
    side: str,
    rows: Mapping[str, list[str]],
    batch: int,
    steps: int,
    device: torch.device,
    bf16: bool,
) -> StepWatch:
    """Train a copy of a model, and watch its steps.

    It must be a copy, because a second trainer of one model runs in the precision of the first.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: the model.
        side: how the model is trained, as in :func:`train`.
        rows: queries and documents.
        batch: the pairs per step.
        steps: the number of timed steps. With 0, only the steps of the gate run.
        device: the device of the copy.
        bf16: whether to train under bf16 autocast.

    Raises:
        RuntimeError: if the trainer used another precision.
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
    # without autocast no step is timed
    warm_steps = GRAPH_WARM_STEPS if side in GRAPHS and bf16 else WARM_STEPS
    watch = StepWatch(model, steps, warm_steps)
    if side not in STOCK_MODELS:
        accelerate(model, packed=side != "padded", graphs=side == "model")
    loss = make_loss(kind, model, side)
    loss.register_forward_hook(lambda module, inputs, output: watch.add_loss(output))
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
            if side in COLLATED:
                collate_ahead(
                    trainer,
                    graphs=side in {"graphs", "compiled"},
                    compiled=side == "compiled",
                )
            elif side == "trainer":
                print(accelerate(trainer), file=sys.stderr)
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
    """Create the stock loss of a kind of model.

    ColBERT's scores are computed by tilefold's operator, except on the stock side and if
    accelerating the trainer replaces them.
    """
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

    if side in STOCK_MODELS:
        return MultiVectorMultipleNegativesRankingLoss(model)
    return MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=colbert_scores)


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
    """Create the stock trainer of a kind of model, which saves and reports nothing.

    Args:
        kind: ``"splade"`` or ``"colbert"``.
        model: the model to train.
        loss: its loss.
        folder: an empty folder.
        batch: the pairs per step.
        dataset: queries and documents.
        steps: the number of all steps.
        bf16: whether to train under bf16 autocast.
    """
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

    on_cpu = model.device.type == "cpu"
    arguments = one_gpu(Arguments)(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        bf16=bf16,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    return Trainer(model=model, args=arguments, train_dataset=dataset, loss=loss)


@dataclass
class StepWatch:
    """Times the steps of a run, and collects the losses of its first ones.

    A run has :data:`GATE_STEPS` without dropout, whose losses are compared; then steps that warm
    up; then timed steps; then, on a GPU, profiled ones.

    Attributes:
        model: the model that is trained.
        steps: the number of timed steps. With 0, only the steps of the gate run.
        warm_steps: the number of steps that warm up.
        losses: the losses of the steps of the gate.
        ends: the times at which the last step before the timed ones, and each timed step, ended.
        peak_bytes: the largest allocated memory of the device in the timed steps.
        reserved_bytes: the largest reserved memory of the device in the timed steps.
        busy: the share of the time of the profiled steps in which a kernel ran, or None.
        bf16: whether the last step ran under bf16 autocast.
    """

    model: Any
    steps: int
    warm_steps: int
    losses: list[torch.Tensor] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    reserved_bytes: int = 0
    busy: float | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        """Count the steps of each part of the training, and watch the precision of the pooling."""
        self._dropouts = [
            (module, module.p)
            for module in self.model.modules()
            if isinstance(module, torch.nn.Dropout)
        ]
        self._on_gpu = self.model.device.type == "cuda"
        profiled_steps = PROFILED_STEPS if self._on_gpu else 0
        # number of the last step before the timed ones, of the last timed one, and of the last one
        self._before_timed = GATE_STEPS + self.warm_steps
        self._last_timed = self._before_timed + self.steps
        self.total = self._last_timed + profiled_steps if self.steps else GATE_STEPS
        self._profiler: Any = None
        self._profile_start = 0.0
        pooling = list(self.model)[1]
        self._hook = pooling.register_forward_hook(self._note_precision)

    def _note_precision(self, *_: Any) -> None:
        """Note whether a forward pass with gradients ran under bf16 autocast."""
        if torch.is_grad_enabled():
            device = "cuda" if self._on_gpu else "cpu"
            self.bf16 = (
                torch.is_autocast_enabled(device)
                and torch.get_autocast_dtype(device) == torch.bfloat16
            )

    def close(self) -> None:
        """Release the model."""
        self._hook.remove()
        self.model = None
        self._dropouts = []

    def add_loss(self, loss: Any) -> None:
        """Collect the output of the loss, without waiting for the device.

        Args:
            loss: a tensor, or a dictionary of the parts of the loss.
        """
        if len(self.losses) < GATE_STEPS:
            parts = loss.values() if isinstance(loss, dict) else [loss]
            self.losses.append(torch.stack([part.detach().float() for part in parts]).sum())

    def begin(self, step: int) -> None:
        """Switch dropout off before the steps of the gate, and on after them.

        Args:
            step: the number of the step that begins, from 0.
        """
        if step == 0:
            for module, _ in self._dropouts:
                module.p = 0.0
        elif step == GATE_STEPS:
            for module, probability in self._dropouts:
                module.p = probability

    def end(self, step: int) -> None:
        """Note the time of the end of a step, which includes the wait for its batch.

        Args:
            step: the number of steps that have ended, from 1.
        """
        if self._on_gpu and step == GATE_STEPS:
            # memory of other runs
            torch.cuda.empty_cache()
        if self._on_gpu and step in (self._before_timed, self._last_timed, self.total):
            torch.cuda.synchronize()
        if self._before_timed <= step <= self._last_timed:
            self.ends.append(time.perf_counter())
        if self._on_gpu and self.steps:
            self._measure_gpu(step)

    def _measure_gpu(self, step: int) -> None:
        """Measure memory in the timed steps, and profile the steps after them."""
        if step == self._before_timed:
            torch.cuda.reset_peak_memory_stats()
        elif step == self._last_timed:
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA],
            )
            self._profiler.start()
            self._profile_start = time.perf_counter()
        elif step == self.total:
            seconds = time.perf_counter() - self._profile_start
            self._profiler.stop()
            self.busy = busy_seconds(self._profiler) / seconds

    def measured(self) -> Measured:
        """Return the measurements of the run."""
        step_times = [
            1e3 * (end - previous_end)
            for previous_end, end in zip(self.ends[:-1], self.ends[1:], strict=True)
        ]
        if len(step_times) > 1:
            p20, _, _, p80 = statistics.quantiles(step_times, n=5)
        else:
            p20 = p80 = step_times[0]
        return Measured(
            losses=[float(loss) for loss in self.losses],
            step_ms=1e3 * (self.ends[-1] - self.ends[0]) / len(step_times),
            p20_ms=p20,
            median_ms=statistics.median(step_times),
            p80_ms=p80,
            slowest_ms=max(step_times),
            peak_gib=self.peak_bytes / GIB,
            reserved_gib=self.reserved_bytes / GIB,
            busy=self.busy,
        )


def busy_seconds(profiler: Any) -> float:
    """Return the seconds in which at least one kernel or copy ran.

    Args:
        profiler: a torch profiler that recorded CUDA, and was stopped.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    microseconds = 0.0
    covered_until = 0.0
    for start, end in spans:
        # spans of several CUDA streams may overlap
        microseconds += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return microseconds / 1e6
