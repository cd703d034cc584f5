"""One step of the stock trainer, and the check that both heads train the same model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilefold import testing

Side = Literal["stock", "tilefold"]
SIDES: tuple[Side, ...] = ("stock", "tilefold")

# Random weights give dense vectors, whose dot products grow with V. These factors, divided by V,
# keep the terms of the loss small, so that rounding does not decide the softmax.
SIMILARITY_SCALE = 30.0
REGULARIZER = 30.0

# In fp32, both sides sum the same products in different orders. Where two tokens tie, each side may
# choose another winner for the gradient. This concerns 1e-6 of all entries, or 1e-3 of the norm.
FP32_LOSS_BUDGET = 1e-5
FP32_GRADIENT_BUDGET = 5e-3
# In bf16, 12 layers of the encoder round sums to 8 bits. The allowed error of gradients is
# therefore relative to that of the stock head.
BF16_LOSS_BUDGET = 2e-2
BF16_GRADIENT_SLACK = 1.1
# the trainer's default
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class GateOutcome:
    """Errors of both heads on one small batch without dropout, relative to stock in fp32.

    Attributes:
        loss: relative error of the loss, by ``"<side> fp32"`` and ``"<side> step"``.
        gradient: the largest relative error among the checked gradients, by the same names.
        failures: messages about errors over their budget. Empty if the check passed.
    """

    loss: Mapping[str, float]
    gradient: Mapping[str, float]
    failures: tuple[str, ...]


class TrainingStep:
    """Forward, backward and optimiser step of ``SparseEncoderTrainer``, without its data loader.

    The trainer creates the loss, the AdamW optimizer, and the wrapper that autocasts and casts
    outputs to fp32. A call then does what the trainer's loop does for one batch. It computes the
    loss, propagates it backward, clips and applies gradients, and frees them. With a learning rate
    of 0, every step of both sides has the same weights.

    Args:
        encoder: a ``SparseEncoder``, which is prepared in place.
        bf16: whether to autocast to bf16, as ``SparseEncoderTrainingArguments(bf16=True)`` does.
        learning_rate: learning rate of AdamW.
    """

    def __init__(self, encoder: Any, *, bf16: bool, learning_rate: float = 0.0) -> None:
        """Create a stock trainer, of which only the model and the optimizer are used.

        Args:
            encoder: the model.
            bf16: whether to train under bf16 autocast.
            learning_rate: the learning rate. With 0, the weights do not change.
        """
        from datasets import Dataset
        from sentence_transformers.sparse_encoder import (
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
        )

        from tilefold.integrations.transformers import one_gpu

        self.encoder = encoder
        self._folder = tempfile.TemporaryDirectory(prefix="tilefold-bench-trainer-")
        if not encoder.model_card_data.widget:
            # The trainer would look for example texts, and show a progress bar.
            encoder.model_card_data.widget = [{"text": "a"}]
        self._trainer = SparseEncoderTrainer(
            model=encoder,
            args=one_gpu(SparseEncoderTrainingArguments)(
                output_dir=self._folder.name,
                bf16=bf16,
                use_cpu=encoder.device.type == "cpu",
                learning_rate=learning_rate,
                weight_decay=0.0,
                max_grad_norm=_MAX_GRAD_NORM,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"query": ["a"], "document": ["b"]}),
            loss=splade_loss(encoder),
        )
        self._trainer.create_optimizer()
        self._model, self._optimizer = self._trainer.accelerator.prepare(
            encoder,
            self._trainer.optimizer,
        )
        self._trainer.model_wrapped = self._model

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        """Train on a batch with the collator's columns, and return the detached loss."""
        trainer = self._trainer
        self._model.train()
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(self._model, inputs)
        del inputs
        trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(self._model.parameters(), _MAX_GRAD_NORM)
        self._optimizer.step()
        self._model.zero_grad(set_to_none=True)
        return loss.detach()

    def loss_and_gradients(
        self,
        inputs: dict[str, Any],
        watched: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute loss and gradients in the trainer's precision, without dropout.

        Args:
            inputs: a batch with the collator's columns.
            watched: parameters by name.

        Returns:
            The loss, and the gradients of the watched parameters in their order.
        """
        with _without_dropout(self.encoder):
            return _loss_and_gradients(
                partial(self._trainer.compute_loss, self._model, inputs),
                watched,
            )

    def forget(self) -> None:
        """Drop gradients, so that a step that ran out of memory leaves nothing behind."""
        self._model.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Remove the trainer's folder."""
        self._folder.cleanup()


def splade_loss(encoder: Any) -> Any:
    """Return ``SpladeLoss`` with in-batch negatives and FLOPS (arXiv 2107.05720, 2004.05665)."""
    from sentence_transformers.sparse_encoder import losses

    vocab = encoder[0].model.get_output_embeddings().weight.size(0)
    return losses.SpladeLoss(
        encoder,
        loss=losses.SparseMultipleNegativesRankingLoss(encoder, scale=SIMILARITY_SCALE / vocab),
        document_regularizer_weight=REGULARIZER / vocab,
        query_regularizer_weight=REGULARIZER / vocab,
    )


@contextmanager
def head_of(encoder: Any, side: Side, *, check: bool = False) -> Iterator[None]:
    """Give the encoder the stock head or the fused one, within a ``with`` block.

    Args:
        encoder: a stock SparseEncoder.
        side: the head.
        check: whether ``accelerate`` compares the fused head with the stock one.
    """
    from tilefold.integrations.sentence_transformers import accelerate, restore

    if side == "tilefold":
        # without packing, so that only the head differs
        accelerate(encoder, check=check, packed=False)
    try:
        yield
    finally:
        restore(encoder)


def set_checkpointing(encoder: Any, on: bool) -> None:
    """Turn checkpointing of the encoder's layers on or off, as the trainer's argument does."""
    network = encoder[0].model
    checkpointing_options = {"use_reentrant": False}
    # newer versions of transformers have other names
    if hasattr(network, "activation_checkpointing_enable"):
        if on:
            network.activation_checkpointing_enable(
                activation_checkpointing_kwargs=checkpointing_options,
            )
        else:
            network.activation_checkpointing_disable()
    elif on:
        network.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=checkpointing_options,
        )
    else:
        network.gradient_checkpointing_disable()


def check_sides(
    encoder: Any,
    inputs: dict[str, Any],
    make_step: Callable[[], TrainingStep],
) -> GateOutcome:
    """Compare the heads in fp32, then in the precision of the training step.

    Args:
        encoder: a stock SparseEncoder that no trainer has prepared.
        inputs: a small batch with the collator's columns.
        make_step: a function that creates the training step, which prepares the encoder. It is
            called after the computation in fp32.
    """
    watched = _watched(encoder)
    results: dict[str, tuple[Tensor, list[Tensor]]] = {}
    loss = splade_loss(encoder)
    for side in SIDES:
        with head_of(encoder, side, check=True), _without_dropout(encoder):
            results[f"{side} fp32"] = _loss_and_gradients(
                partial(_plain_loss, loss, inputs),
                watched,
            )
    step = make_step()
    for side in SIDES:
        with head_of(encoder, side):
            results[f"{side} step"] = step.loss_and_gradients(inputs, watched)
    true_loss, true_gradients = results["stock fp32"]
    losses = {
        name: testing.relative_error(value, true_loss) for name, (value, _) in results.items()
    }
    gradients = {
        name: max(
            testing.relative_error(gradient, true_gradient)
            for gradient, true_gradient in zip(values, true_gradients, strict=True)
        )
        for name, (_, values) in results.items()
    }
    return GateOutcome(losses, gradients, _failures(losses, gradients))


def _failures(loss: Mapping[str, float], gradient: Mapping[str, float]) -> tuple[str, ...]:
    """Return messages about the errors that are over their budget.

    Args:
        loss: relative errors of the loss, by side and precision.
        gradient: relative errors of the gradients, by the same names.
    """
    allowed = FP32_GRADIENT_BUDGET + BF16_GRADIENT_SLACK * gradient["stock step"]
    checks = (
        ("loss in fp32", loss["tilefold fp32"], FP32_LOSS_BUDGET),
        ("gradients in fp32", gradient["tilefold fp32"], FP32_GRADIENT_BUDGET),
        ("loss of a step", loss["tilefold step"], BF16_LOSS_BUDGET),
        ("gradients of a step", gradient["tilefold step"], allowed),
    )
    return tuple(
        f"{name}: error {error:.2e} > {budget:.1e}"
        for name, error, budget in checks
        if not error <= budget  # also for NaN
    )


def _plain_loss(loss: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the sum of the loss terms in the precision of the model.

    Args:
        loss: ``SpladeLoss``.
        inputs: a batch with the collator's columns, which begin with ``query_`` or ``document_``.
    """
    features = [
        {name[len(prefix) :]: value for name, value in inputs.items() if name.startswith(prefix)}
        for prefix in ("query_", "document_")
    ]
    return torch.stack(list(loss(features).values())).sum()


def _loss_and_gradients(
    compute: Callable[[], Tensor],
    watched: Mapping[str, Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Return a detached loss, and its gradients for the watched parameters."""
    loss = compute()
    gradients = torch.autograd.grad(loss, list(watched.values()))
    return loss.detach(), [gradient.detach() for gradient in gradients]


def _watched(encoder: Any) -> dict[str, Tensor]:
    """Return parameters to compare: those of the head, and a matrix of two layers.

    The layers are the first and the last one of the encoder.
    """
    network = encoder[0].model
    head = network.get_output_embeddings()
    matrices = {
        name: parameter
        for name, parameter in network.named_parameters()
        if ".layer." in name and parameter.ndim == 2
    }
    first, *_, last = matrices
    return {
        "head": head.weight,
        "head bias": head.bias,
        first: matrices[first],
        last: matrices[last],
    }


@contextmanager
def _without_dropout(encoder: nn.Module) -> Iterator[None]:
    """Put an encoder in eval mode, within a ``with`` block.

    The stock SpladePooling stays in training mode, since it has no backward pass in eval mode.
    """
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    for module in encoder.modules():
        if type(module).__name__ == "SpladePooling":
            module.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def time_steps(
    step: Callable[[], Any],
    device: torch.device,
    reps: int,
    warmup: int = 1,
) -> list[float]:
    """Return the milliseconds of consecutive steps.

    On a GPU they are between the ends of steps, and on a CPU by the wall clock.

    Args:
        step: a function that runs a step.
        device: the device of the steps.
        reps: the number of timed steps.
        warmup: the number of steps before.
    """
    for _ in range(warmup):
        step()
    if device.type != "cuda":
        samples = []
        for _ in range(reps):
            before = time.perf_counter()
            step()
            samples.append(1e3 * (time.perf_counter() - before))
        return samples
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    marks = [new_event() for _ in range(reps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(marks)]
