"""The RMSNorms of accelerated decoders run as one kernel on GPUs in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from torch import Tensor, nn

from tests.integrations.decoder_models import tiny_decoder
from tests.integrations.sentence_transformers.packing.test_packed_decoders import (
    BUDGET,
    TEXTS,
    assert_near,
    splade,
)
from tilefold.integrations.sentence_transformers import accelerate, restore
from tilefold.integrations.sentence_transformers.packing import norms
from tilefold.integrations.sentence_transformers.packing.inputs import padded_inputs
from tilefold.integrations.sentence_transformers.packing.norms import FusedRMSNorm, fused_rms_norm

WITH_RMS_NORM = ["llama", "mistral", "qwen2", "qwen3"]
# The norms of Gemma scale by 1 + weight, and ModernBERT has LayerNorms.
WITH_OTHER_NORMS = ["gemma2", "gemma3", "modernbert-decoder"]
# fp32 arithmetic before the result is rounded, relative to the result.
FP32_ERROR = 1e-6


def rms_norms(model: nn.Module) -> list[Any]:
    """Return all norms of a decoder."""
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def fused(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose forward is that of an RMSNorm in one kernel."""
    return [
        module
        for module in model.modules()
        if isinstance(vars(module).get("forward"), FusedRMSNorm)
    ]


def fuses_on_cpus(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Let a CPU take the path of GPUs in inference.

    Returns:
        A list to which each norm is appended that takes it.
    """
    called: list[nn.Module] = []

    def record_and_compute(norm: nn.Module, hidden_states: Tensor) -> Tensor:
        called.append(norm)
        return fused_rms_norm(norm, hidden_states)

    monkeypatch.setattr(norms, "runs_fused", lambda *_: not torch.is_grad_enabled())
    monkeypatch.setattr(norms, "fused_rms_norm", record_and_compute)
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", WITH_RMS_NORM)
def test_the_function_of_torch_rounds_the_norm_of_transformers_once(
    kind: str,
    dtype: torch.dtype,
) -> None:
    norm = rms_norms(tiny_decoder(kind))[0].to(dtype)
    dim = norm.weight.numel()
    with torch.inference_mode():
        norm.weight.copy_(torch.rand(dim) + 0.5)
        hidden_states = (3 * torch.randn(2, 5, dim)).to(dtype)
        hidden_states[0, 0] = 0
        result = fused_rms_norm(norm, hidden_states)
        exact = type(norm).forward(norm.double(), hidden_states.double())
    assert result.dtype == dtype and result.shape == hidden_states.shape
    # The forward of the class computes in fp32, whatever the dtype of its input.
    rounding = torch.finfo(dtype).eps / 2 + FP32_ERROR
    smallest = torch.finfo(dtype).smallest_normal
    assert bool(((result.double() - exact).abs() <= rounding * exact.abs() + smallest).all())


@pytest.mark.parametrize("kind", WITH_RMS_NORM)
def test_accelerate_fuses_all_norms_and_restore_undoes_it(
    kind: str,
    folders: Callable[..., str],
) -> None:
    model = splade(folders(kind))
    names = set(model.state_dict())
    accelerate(model)
    assert fused(model) == rms_norms(model) and len(fused(model)) > 0
    assert set(model.state_dict()) == names
    restore(model)
    assert not fused(model)


@pytest.mark.parametrize("kind", WITH_OTHER_NORMS)
def test_other_norms_stay(kind: str, folders: Callable[..., str]) -> None:
    model = splade(folders(kind))
    accelerate(model)
    assert not fused(model)


def test_a_norm_whose_forward_was_replaced_stays(folders: Callable[..., str]) -> None:
    model = splade(folders("llama"))
    changed = rms_norms(model)[0]
    changed.forward = lambda hidden_states: 2 * hidden_states
    accelerate(model)
    assert fused(model) == rms_norms(model)[1:]
    restore(model)
    assert "forward" in vars(changed)


def test_padded_models_keep_their_norms(folders: Callable[..., str]) -> None:
    model = splade(folders("llama"))
    accelerate(model, packed=False)
    assert not fused(model)


@pytest.mark.parametrize("kind", WITH_RMS_NORM)
def test_rows_of_fused_norms_equal_those_of_the_stock_model(
    kind: str,
    folders: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = splade(folders(kind))
    expected = model.encode(TEXTS[1:]).to_dense()
    accelerate(model)
    called = fuses_on_cpus(monkeypatch)
    assert_near(model.encode(TEXTS[1:]).to_dense(), expected, BUDGET)
    assert set(called) == set(rms_norms(model))


def test_training_compiled_code_and_padded_inputs_run_the_forward_of_the_class(
    folders: Callable[..., str],
) -> None:
    model = splade(folders("llama")).eval()
    accelerate(model)
    norm = fused(model)[0]

    class StatesOnGPU:
        """What the choice reads of hidden states on a GPU."""

        is_cuda = True
        dtype = torch.float32

    states: Any = StatesOnGPU()
    with torch.inference_mode():
        assert norms.runs_fused(norm, states)
        with padded_inputs():
            assert not norms.runs_fused(norm, states)
        assert not norms.runs_fused(norm, torch.ones(2, 32))  # on the CPU
        assert not norms.runs_fused(norm.half(), states)  # would change the dtype of the result
        norm.float().train()
        assert not norms.runs_fused(norm, states)
        norm.eval()
        compiled = torch.compile(norm, backend="eager", fullgraph=True)
        rows = torch.randn(3, 32)
        assert torch.equal(compiled(rows), norm(rows))
    assert not norms.runs_fused(norm, states)  # a gradient may be needed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", WITH_RMS_NORM)
def test_on_a_gpu_rows_of_fused_norms_are_as_exact_as_those_of_the_class(
    kind: str,
    dtype: torch.dtype,
    folders: Callable[..., str],
) -> None:
    texts = TEXTS[1:]
    exact = splade(folders(kind)).double().encode(texts).to_dense().float()

    def error_of(model: SparseEncoder) -> float:
        rows = model.to("cuda").encode(texts).to_dense().float().cpu()
        return float((rows - exact).norm() / exact.norm())

    stock = splade(folders(kind)).to(dtype)
    accelerated = splade(folders(kind)).to("cuda", dtype)
    assert accelerate(accelerated).padded == {}
    assert fused(accelerated)
    assert error_of(accelerated) <= 1.5 * error_of(stock) + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 2048, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_bits_of_a_row_do_not_depend_on_the_other_rows(
    dim: int,
    dtype: torch.dtype,
) -> None:
    norm: Any = rms_norms(tiny_decoder("llama", hidden_size=dim))[0].to("cuda", dtype)
    with torch.inference_mode():
        norm.weight.copy_(torch.rand(dim) + 0.5)
        rows = torch.randn(513, dim, device="cuda").to(dtype)
        together = fused_rms_norm(norm, rows)
        for n_rows in (1, 2, 7, 64, 255):
            assert torch.equal(fused_rms_norm(norm, rows[-n_rows:]), together[-n_rows:])
