"""Builders of real SparseEncoder models, and the comparisons that the tests share."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SparseEncoder, SparseEncoderTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor

from tests.integrations.rounding_noise import exact_and_allowed
from tests.recipes.small import TEXTS, tiny_network
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.transformers import one_gpu

# fp32: both sides evaluate the same dot products of up to 384 terms in another order (about
# sqrt(384) eps = 2e-6 relative), and gradients sum some tens of them
FP32_BUDGET = 1e-5

CAUSAL_OPTIONS: dict[str, Any] = {
    "transformer_task": "text-generation",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
    "processing_kwargs": {"text": {"logits_to_keep": 0}},
}


def five_steps(folder: Path, **options: Any) -> Any:
    """Arguments of a short training run on the CPU that logs the loss of each step; ``options``
    take their place.
    """
    settings: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-5,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return one_gpu(SparseEncoderTrainingArguments)(str(folder), **settings | options)


def logged_losses(trainer: Any) -> list[float]:
    """The loss of each step of a run."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def build_tiny_splade(
    kind: str,
    tokenizer_folder: Path,
    pooling: SpladePooling | None = None,
    **options: Any,
) -> SparseEncoder:
    """A SparseEncoder around :func:`tiny_network`, on the CPU, with the real tokenizer."""
    return SparseEncoder(
        modules=[tiny_transformer(kind, tokenizer_folder, **options), pooling or SpladePooling()],
        device="cpu",
    )


def tiny_transformer(kind: str, tokenizer_folder: Path, **options: Any) -> Transformer:
    """The Transformer module of a tiny model, loaded from a checkpoint as a user would."""
    network = tiny_network(kind, **options)
    folder = tokenizer_folder.parent / f"{kind}-{abs(hash(tuple(sorted(options.items()))))}"
    network.save_pretrained(str(folder))
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    if kind not in ("llama", "granite", "gemma2"):
        return Transformer(str(folder), transformer_task="fill-mask")
    return Transformer(str(folder), processor_kwargs={"padding_side": "left"}, **CAUSAL_OPTIONS)


def fused_copy(stock: SparseEncoder, **options: Any) -> SparseEncoder:
    """An accelerated copy."""
    fused = copy.deepcopy(stock)
    accelerate(fused, **options)
    return fused


def without_dropout(model: Any) -> Any:
    """In train mode: in the other one stock SpladePooling has no backward."""
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def scores_and_gradients(
    model: SparseEncoder,
    decided: Tensor | None = None,
    texts: list[str] = TEXTS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores ``[B, V]``, and every parameter's gradient of a fixed weighted sum of those that are
    ``decided``.
    """
    model.zero_grad(set_to_none=True)
    scores = model(model.preprocess(texts))["sentence_embedding"]
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(7))
    if decided is not None:
        weights = weights * decided
    (scores * weights.to(scores.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return scores.detach(), gradients


def decided_columns(stock: SparseEncoder, texts: list[str] = TEXTS) -> Tensor:
    """``[B, V]`` bool: where rounding cannot choose the gradient's address.

    That is where one token wins, and no logit lies at the kink of relu, by more than 1e-4 of the
    logits, some hundred times what rounding makes of them. Elsewhere the evaluation order chooses,
    and stock itself does: log1p rounds unequal logits to equal ones.
    """
    with torch.no_grad():
        features = stock[0](stock.preprocess(texts))
        logits, outside = features["token_embeddings"], features["attention_mask"][:, :, None] == 0
        first, second = logits.masked_fill(outside, float("-inf")).topk(2, dim=1).values.unbind(1)
    margin = 1e-4 * (1 + first.abs())
    at_the_kink = (logits.abs() < margin[:, None]) & ~outside
    return (first - second > margin) & ~at_the_kink.any(dim=1)


def assert_close(got: Tensor, expected: Tensor, budget: float, name: str = "scores") -> None:
    """``got`` may differ from ``expected`` by ``budget`` times the largest magnitude in
    ``expected``.
    """
    assert got.shape == expected.shape and got.dtype == expected.dtype, name
    scale = expected.abs().max().item()
    error = (got.double() - expected.double()).abs().max().item()
    assert error <= budget * scale, f"{name}: error {error:.2e} over {budget:.0e} of {scale:.2e}"


def assert_same_training(stock: SparseEncoder, fused: SparseEncoder) -> None:
    """Scores and gradients of both models are those of an exact one but for rounding, for the same
    parameters in both.

    What rounding may do to each tensor is measured (:mod:`rounding_noise`). The stock model is held
    to it too: a model of rounding that a known implementation does not keep says nothing of
    another.
    """
    decided = decided_columns(stock)
    assert decided.float().mean() > 0.5

    def results(model: SparseEncoder) -> dict[str, Tensor]:
        scores, gradients = scores_and_gradients(model, decided)
        return {"scores": scores, **gradients}

    dtype = next(stock.parameters()).dtype
    wide = copy.deepcopy(stock).double()
    exact, allowed = exact_and_allowed(lambda: results(wide), dtype)
    assert (exact["scores"] > 0).any()
    for model in (stock, fused):
        result = results(model)
        assert result.keys() == exact.keys()
        for name, value in result.items():
            error = float((value.double() - exact[name]).norm())
            assert error <= allowed[name], f"{name}: error {error:.2e}, allowed {allowed[name]:.2e}"
