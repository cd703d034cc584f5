"""Several GPUs and no launcher: transformers' Trainer takes DataParallel, which accelerated models refuse."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder import SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from torch.nn.parallel import replicate
from transformers import TrainingArguments

from tests.integrations.multi_vector_models import build_colbert, needs_stock
from tests.integrations.splade_models import TEXTS
from tilefold.integrations.sentence_transformers import accelerate, restore
from tilefold.integrations.sentence_transformers._accelerate import ASKED
from tilefold.integrations.transformers import one_gpu
from tilefold.modules import StaticQuery

REFUSED = r"must run in one process for each GPU, got torch.nn.DataParallel.*torchrun --nproc-per-node \d+ SCRIPT"


def copied(network: nn.Module) -> list[nn.Module]:
    """What ``torch.nn.parallel.replicate`` asks every module for; the rest of it needs GPUs."""
    return [getattr(module, ASKED)() for module in network.modules()]


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - made here


def built(kind: str, folder: Path) -> Any:
    document = SparseEncoder(str(folder), device="cpu")
    if kind == "splade":
        return document
    queries = [document[0], SpladePooling()] if kind == "router" else [StaticQuery(document.tokenizer)]
    return SparseEncoder(modules=[Router.for_query_document(queries, list(document))], device="cpu")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["splade", "router", "static queries"])
def test_an_accelerated_sparse_encoder_refuses_to_be_copied(kind: str, packed: bool, tiny_folder: Path) -> None:
    model = built(kind, tiny_folder)
    accelerate(model, packed=packed)
    for found in (model, nn.Sequential(model), copy.deepcopy(model), through_pickle(model)):
        with pytest.raises(RuntimeError, match=REFUSED):
            copied(found)
    restore(model)
    assert ASKED not in vars(model) and len(copied(model)) == len(list(model.modules()))


@needs_stock
def test_a_multi_vector_encoder_refuses_where_it_is_packed_and_its_similarity_alone_forbids_nothing() -> None:
    model = build_colbert()
    assert accelerate(model).padded == {}
    with pytest.raises(RuntimeError, match=f"an accelerated MultiVectorEncoder {REFUSED}"):
        copied(model)
    accelerate(model, packed=False)
    assert len(copied(model)) == len(list(model.modules()))


def test_torch_still_asks_every_module() -> None:
    assert f".{ASKED}()" in inspect.getsource(inspect.getmodule(replicate))  # type: ignore[arg-type]
    assert getattr(nn.Linear(1, 1), ASKED)()._is_replica


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_on_two_gpus_raises_before_it_scatters_numbers(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cuda:0")
    accelerate(model)
    features = {
        key: value.cuda() if hasattr(value, "cuda") else value for key, value in model.preprocess(TEXTS).items()
    }
    with pytest.raises(RuntimeError, match=REFUSED):
        nn.DataParallel(model)(features)


@pytest.mark.parametrize("kind", [TrainingArguments, SparseEncoderTrainingArguments])
def test_arguments_for_one_gpu(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 3, "dataloader_pin_memory": False}
    both, one = kind(**options), one_gpu(kind)(**options)
    assert (both.n_gpu, both.train_batch_size) == (2, 6)
    assert (one.n_gpu, one.train_batch_size) == (1, 3)
    assert one_gpu(kind)(**options, use_cpu=True).n_gpu == 0
    assert one_gpu(kind) is one_gpu(kind) and isinstance(one, kind)
    assert type(through_pickle(one)) is kind
    assert one.to_dict().keys() == both.to_dict().keys()
    with pytest.raises(TypeError, match="arguments_class must be transformers"):
        one_gpu(dict)
