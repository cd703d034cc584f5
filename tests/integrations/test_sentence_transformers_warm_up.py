"""Kernels of a model that are built ahead: which steps are listed, and what cannot be warmed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.splade_models import build_tiny_splade
from tilefold.integrations.sentence_transformers import accelerate, warm_up
from tilefold.integrations.sentence_transformers._warm_up import steps
from tilefold.ops._shared.impl import triton_interpreted


@pytest.mark.skipif(not triton_interpreted(), reason="lists a model on the CPU, where kernels would run")
def test_the_steps_of_a_model_list_its_head(tokenizer_folder: Path) -> None:
    from tilefold.ops._shared._triton.launch import listed

    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, impl="triton", check=False)
    found = []
    for training in (False, True):
        with listed() as launches:
            for step in steps(model, (8,), 4, inference=not training, training=training, dtype=None):
                step()
        found.append({launcher.name for launcher, _ in launches})
    assert found[0] == {"_copy_packed_kernel", "_max_forward_kernel"}
    assert found[1] > found[0] and "_dhidden_kernel" in found[1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what machines without a GPU say")
def test_what_cannot_be_warmed_up_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="torch sees none here"):
        warm_up(model)
    with pytest.raises(ValueError, match=r"lengths and batch_size must be at least 1, got lengths=\[\], batch_size=32"):
        warm_up(model, [])
    with pytest.raises(ValueError, match="inference or training must be true, got neither"):
        warm_up(model, inference=False, training=False)
