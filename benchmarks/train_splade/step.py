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

# Fresh weights give dense scores, whose dot products grow with V: these factors over V keep loss
# and FLOPS terms small, so that rounding does not decide the softmax. They change no amount of
# work.
SIMILARITY_SCALE = 30.0
REGULARIZER = 30.0

# fp32: both sides sum the same products in another order. Where two tokens tie to that precision,
# each side may send one entry's gradient to another token: a share of 1e-6 of all entries, 1e-3 in
# the norm.
FP32_LOSS_BUDGET = 1e-5
FP32_GRADIENT_BUDGET = 5e-3
# bf16: the encoder alone rounds 12 layers of sums to 8 bits: what the stock head's gradients are
# off by is the measure.
BF16_LOSS_BUDGET = 2e-2
BF16_GRADIENT_SLACK = 1.1
_MAX_GRAD_NORM = 1.0  # the trainer's default


@dataclass(frozen=True)
class GateOutcome:
    """Both heads on one small batch without dropout, against the stock head in fp32.

    Attributes:
        loss: relative error of the loss, by ``"<side> <precision>"``.
        gradient: largest relative error among the checked gradients, by the same names.
        failures: what is over its budget, for people; empty if the gate passed.
    """

    loss: Mapping[str, float]
    gradient: Mapping[str, float]
    failures: tuple[str, ...]


class TrainingStep:
    """Forward, backward and optimiser step of ``SparseEncoderTrainer``, without its data loader.

    The trainer makes the loss, its own AdamW and the wrapper that autocasts and turns the model's
    outputs to fp32; a call then does what its loop does for one batch: loss, backward, clipping,
    optimiser, gradients dropped. The learning rate is 0, so that every step of both sides works on
    the same weights.

    Args:
        encoder: a ``SparseEncoder``; it is prepared in place.
        bf16: bf16 autocast, as ``SparseEncoderTrainingArguments(bf16=True)`` does it.
        learning_rate: of AdamW.
    """

    def __init__(self, encoder: Any, *, bf16: bool, learning_rate: float = 0.0) -> None:
        from datasets import Dataset
        from sentence_transformers.sparse_encoder import (
            SparseEncoderTrainer,
            SparseEncoderTrainingArguments,
        )

        from tilefold.integrations.transformers import one_gpu

        self.encoder = encoder
        self._folder = tempfile.TemporaryDirectory(prefix="tilefold-bench-trainer-")
        encoder.model_card_data.widget = encoder.model_card_data.widget or [
            {"text": "a"},
        ]  # else it draws a bar
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
        """Train on ``inputs`` (columns named as the collator names them); the loss, detached."""
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
        """The loss and the gradients of ``watched`` parameters in the trainer's precision, without
        dropout.
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
    """``SpladeLoss`` over in-batch negatives with FLOPS terms (arXiv 2107.05720, 2004.05665)."""
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
    """Inside, the encoder has the stock head or the fused one."""
    from tilefold.integrations.sentence_transformers import accelerate, restore

    if side == "tilefold":
        accelerate(encoder, check=check, packed=False)  # what is compared is the head alone
    try:
        yield
    finally:
        restore(encoder)


def set_checkpointing(encoder: Any, on: bool) -> None:
    """Turn gradient checkpointing of the encoder's layers on or off, as the trainer's argument
    does.
    """
    network = encoder[0].model
    modern = hasattr(network, "activation_checkpointing_enable")
    prefix = "activation" if modern else "gradient"
    if on:
        arguments = {f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(network, f"{prefix}_checkpointing_enable")(**arguments)
    else:
        getattr(network, f"{prefix}_checkpointing_disable")()


def check_sides(
    encoder: Any,
    inputs: dict[str, Any],
    make_step: Callable[[], TrainingStep],
) -> GateOutcome:
    """Compare the heads in fp32, then in the precision of the step that ``make_step`` prepares.

    Args:
        encoder: not prepared by a trainer yet; ``make_step`` may do that.
        inputs: a small batch.
        make_step: called once the fp32 results are there.
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
            testing.relative_error(got, true)
            for got, true in zip(values, true_gradients, strict=True)
        )
        for name, (_, values) in results.items()
    }
    return GateOutcome(losses, gradients, _failures(losses, gradients))


def _failures(loss: Mapping[str, float], gradient: Mapping[str, float]) -> tuple[str, ...]:
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
        if not error <= budget
    )


def _plain_loss(loss: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The sum of the loss terms in the model's own precision, columns told apart as the trainer
    does.
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
    loss = compute()
    return loss.detach(), [
        gradient.detach() for gradient in torch.autograd.grad(loss, list(watched.values()))
    ]


def _watched(encoder: Any) -> dict[str, Tensor]:
    """The matrix and bias of the head, and matrices of the first and the last layer behind it."""
    network = encoder[0].model
    head = network.get_output_embeddings()
    found = {"head": head.weight, "head bias": head.bias}
    matrices = {
        name: parameter
        for name, parameter in network.named_parameters()
        if ".layer." in name and parameter.ndim == 2
    }
    first, *_, last = matrices
    return found | {first: matrices[first], last: matrices[last]}


@contextmanager
def _without_dropout(encoder: nn.Module) -> Iterator[None]:
    """Eval mode but for the pooling: in that mode stock SpladePooling has no backward."""
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
    """Milliseconds of each of ``reps`` steps in a row: on a GPU from one step's end to the next's,
    else wall time.
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
