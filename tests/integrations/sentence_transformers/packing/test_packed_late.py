"""Late interaction on decoders: trainings, folders of vectors, checkpoints and PyLate's format."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from torch import Tensor

from tests.integrations.decoder_models import DECODERS
from tests.integrations.sentence_transformers.packing.test_packed_decoders import (
    BUDGET,
    MAX_LENGTH,
    TEXTS,
    assert_near,
    colbert,
)
from tests.integrations.splade_models import five_steps, logged_losses
from tilefold.integrations.sentence_transformers import accelerate, is_accelerated, restore
from tilefold.integrations.sentence_transformers._trainer import (
    AHEAD_BATCHES,
    FUSED_SCORES,
    PACKED_TOKENS,
)
from tilefold.retrieval import encode_tokens, open_tokens

NONEMPTY = TEXTS[1:]
MANY_TEXTS = NONEMPTY * 9  # more than one batch, so that a stream encodes them
PAIRS = Dataset.from_dict(
    {
        "anchor": ["what is a list", "x", "the sum", "sorting numbers, one by one", "a"],
        "positive": NONEMPTY,
    },
)
MOST_KINDS = [
    pytest.param(kind, marks=() if kind == "llama" else pytest.mark.slow) for kind in DECODERS
]


def assert_vectors_near(vectors: list[Any], expected: list[Any]) -> None:
    """Compare the token vectors of texts, which have the same numbers of tokens."""
    assert len(vectors) == len(expected)
    for vector, expected_vector in zip(vectors, expected, strict=True):
        assert vector.shape == expected_vector.shape
        assert_near(torch.as_tensor(vector), torch.as_tensor(expected_vector), BUDGET)


def add_lora(model: MultiVectorEncoder) -> None:
    """Add an adapter to attention and MLP of a model."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    model.add_adapter(
        LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False),
    )


@pytest.mark.parametrize(
    ("kind", "side", "settings", "is_cached", "change"),
    [
        pytest.param("llama", "left", {}, False, None, id="llama, left"),
        pytest.param(
            "modernbert-decoder",
            "right",
            {},
            False,
            None,
            id="modernbert, right",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            "right",
            {},
            True,
            None,
            id="cached loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3",
            "left",
            {"gradient_checkpointing": True},
            False,
            None,
            id="checkpointing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma3",
            "left",
            {"gradient_accumulation_steps": 2},
            False,
            None,
            id="accumulation",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen2", "left", {}, False, add_lora, id="lora", marks=pytest.mark.slow),
        pytest.param(
            "llama",
            "left",
            {"bf16": True},
            False,
            None,
            id="bf16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_has_the_stock_losses(
    kind: str,
    side: str,
    settings: dict[str, Any],
    is_cached: bool,
    change: Callable[[MultiVectorEncoder], None] | None,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    losses = []
    for is_fast in (False, True):
        model = colbert(folders(kind), side)
        if change is not None:
            change(model)
        loss: torch.nn.Module = MultiVectorMultipleNegativesRankingLoss(model)
        if is_cached:
            loss = CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=2)
        arguments = five_steps(tmp_path / str(is_fast), **settings)
        trainer = MultiVectorEncoderTrainer(
            model=model,
            args=MultiVectorEncoderTrainingArguments(**arguments.to_dict()),
            train_dataset=PAIRS,
            loss=loss,
        )
        if is_fast:
            assert accelerate(trainer).active == (FUSED_SCORES, PACKED_TOKENS, AHEAD_BATCHES)
        losses.append(logged_losses(trainer))
    tolerance = 2e-2 if "bf16" in settings else 1e-4
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize("kind", MOST_KINDS)
def test_restore_undoes_everything_and_checkpoints_are_stock(
    kind: str,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    model = colbert(folders(kind), "left")
    attention = model[0].model.config._attn_implementation
    expected = model.encode_document(MANY_TEXTS)
    accelerate(model)
    vectors = model.encode_document(MANY_TEXTS)
    model.save_pretrained(str(tmp_path), create_model_card=False)
    reloaded = MultiVectorEncoder(str(tmp_path), device="cpu")
    saved_files = [*tmp_path.rglob("*.json")]
    assert all("tilefold" not in file.read_text() for file in saved_files)
    assert_vectors_near(reloaded.encode_document(MANY_TEXTS), vectors)
    restore(model)
    assert not is_accelerated(model)
    assert model[0].model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in model.modules())
    for vector, before in zip(model.encode_document(MANY_TEXTS), expected, strict=True):
        assert (vector == before).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MOST_KINDS)
def test_vectors_in_16_bits_are_as_near_to_exact_ones_as_those_of_the_stock_model(
    kind: str,
    dtype: torch.dtype,
    folders: Callable[..., str],
) -> None:
    model = colbert(folders(kind), "left")
    exact = all_vectors(model)
    model.to(dtype)
    stock_error = (all_vectors(model) - exact).norm()
    assert accelerate(model).padded == {}
    assert (all_vectors(model) - exact).norm() <= 1.5 * stock_error


def all_vectors(model: MultiVectorEncoder) -> Tensor:
    """Return the token vectors of all texts, ``[T, D]`` in fp32."""
    vectors = model.encode_document(NONEMPTY, convert_to_numpy=False)
    return torch.cat([vector.float() for vector in vectors])


@pytest.mark.parametrize("n_tokens", [1, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1])
@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_lengths_at_the_limit_have_the_stock_vectors(
    side: str,
    n_tokens: int,
    folders: Callable[..., str],
) -> None:
    model = colbert(folders("llama"), side)
    text = "x" * n_tokens
    assert len(model.tokenizer(text)["input_ids"]) == n_tokens
    texts = [text, "a", text]
    expected = model.encode_document(texts)
    accelerate(model)
    vectors = model.encode_document(texts)
    assert len(vectors[0]) == min(n_tokens, MAX_LENGTH)
    assert_vectors_near(vectors, expected)


@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_a_collection_has_the_stock_vectors_and_none_for_an_empty_text(
    storage: str,
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    model = colbert(folders("llama"), "left")
    texts = {f"d{number}": text for number, text in enumerate(MANY_TEXTS)}
    encode_tokens(model, texts, tmp_path / "stock", storage=storage)
    accelerate(model)
    texts["empty"] = ""
    folder = tmp_path / "packed"
    encode_tokens(model, texts, folder, storage=storage, batch_tokens=100)
    stock = open_tokens(tmp_path / "stock").read(name for name in texts if name != "empty")
    vectors = open_tokens(folder).read(texts)
    n_tokens = int(stock.offsets[-1])
    assert vectors.offsets.tolist() == [*stock.offsets.tolist(), n_tokens]
    step = {"fp16": 2**-10, "int8": 1.0}[storage]  # rounding may decide between two numbers
    assert float((vectors.values.float() - stock.values.float()).abs().max()) <= step


def save_as_pylate(model: MultiVectorEncoder, folder: Path, **settings: Any) -> None:
    """Save a model in the format of PyLate 3: two modules, and the settings of ColBERT.

    Args:
        model: a model of a Transformer, a Dense, a mask and a normalization.
        folder: the folder, which is created.
        **settings: further entries of the configuration, such as ``do_query_expansion``.
    """
    model.save_pretrained(str(folder), create_model_card=False)
    modules_file = folder / "modules.json"
    transformer, projection, *_ = json.loads(modules_file.read_text())
    projection["type"] = "pylate.models.Dense.Dense"
    transformer["type"] = "sentence_transformers.models.Transformer"
    modules_file.write_text(json.dumps([transformer, projection]))
    config_file = folder / "config_sentence_transformers.json"
    config = {
        "model_type": "ColBERT",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 12,
        "document_length": MAX_LENGTH - 4,
        "skiplist_words": [",", "."],
        "similarity_fn_name": "MaxSim",
        **settings,
    }
    config_file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"do_query_expansion": False}, id="queries as they are"),
        pytest.param({"attend_to_expansion_tokens": False}, id="expanded queries"),
        pytest.param({"attend_to_expansion_tokens": True}, id="expanded queries are attended to"),
    ],
)
@pytest.mark.parametrize("side", [pytest.param("left", marks=pytest.mark.slow), "right"])
def test_a_checkpoint_of_pylate_has_the_stock_vectors(
    side: str,
    settings: dict[str, Any],
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    save_as_pylate(colbert(folders("llama"), side), tmp_path / "pylate", **settings)
    model = MultiVectorEncoder(str(tmp_path / "pylate"), device="cpu").eval()
    assert type(model[2]).__name__ == "MultiVectorMask"
    expected_documents = model.encode_document(MANY_TEXTS)
    expected_queries = model.encode_query(MANY_TEXTS)
    assert accelerate(model).padded == {}
    assert_vectors_near(model.encode_document(MANY_TEXTS), expected_documents)
    assert_vectors_near(model.encode_query(MANY_TEXTS), expected_queries)
    assert_vectors_near(model.encode_query(NONEMPTY), expected_queries[: len(NONEMPTY)])
    assert_vectors_near([model.encode_query("x")], [expected_queries[0]])


def test_a_step_of_expanded_queries_has_the_stock_loss(
    folders: Callable[..., str],
    tmp_path: Path,
) -> None:
    save_as_pylate(colbert(folders("llama"), "right"), tmp_path / "pylate")
    stock = MultiVectorEncoder(str(tmp_path / "pylate"), device="cpu").eval()
    packed = copy.deepcopy(stock)
    accelerate(packed)
    losses = []
    for model in (stock, packed):
        columns = [
            {**model.preprocess(list(PAIRS[name]), task=task), "task": task}
            for name, task in (("anchor", "query"), ("positive", "document"))
        ]
        losses.append(MultiVectorMultipleNegativesRankingLoss(model)(columns, None).item())
    assert losses[1] == pytest.approx(losses[0], rel=BUDGET)
