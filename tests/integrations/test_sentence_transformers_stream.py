"""Many texts through an accelerated SparseEncoder: the rows of stock encode, whatever is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder

from tests.integrations.splade_models import FP32_BUDGET, assert_close
from tests.ops.interpreter import NEEDS_INTERPRETER
from tests.processes import ROOT, environment
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.integrations.sentence_transformers.stream import SparseStream

TEXTS = [f"text number {i}: " + "cats sleep and dogs run " * (i % 9) for i in range(48)]


@pytest.fixture
def model(tiny_folder: Path) -> SparseEncoder:
    return SparseEncoder(str(tiny_folder), device="cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of a batch of each stream that runs."""
    seen: list[int] = []
    call = SparseStream.__call__

    def counted(self: SparseStream, windows: Any) -> Any:
        seen.append(self.batch_tokens)
        return call(self, windows)

    monkeypatch.setattr(SparseStream, "__call__", counted)
    yield seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 5},
        {"max_active_dims": 6},
        {"convert_to_sparse_tensor": False},
        {"convert_to_tensor": False, "save_to_cpu": True},
        {"prompt": "find: ", "show_progress_bar": True},
        {"task": "document"},
    ],
    ids=str,
)
def test_encode_gives_what_stock_gives(model: SparseEncoder, streams: list[int], options: dict[str, Any]) -> None:
    expected = model.encode(TEXTS, **options)
    model.train()
    accelerate(model)
    got = model.encode(TEXTS, **options)
    assert len(streams) == 1 and not model.training, "stock encode leaves the model in eval mode too"
    if isinstance(expected, list):
        assert isinstance(got, list)
        expected, got = torch.stack(expected), torch.stack(got)
    assert (got.layout, got.dtype, got.device, got.shape) == (
        expected.layout, expected.dtype, expected.device, expected.shape,
    )  # fmt: skip
    assert_close(got.to_dense(), expected.to_dense(), FP32_BUDGET)


def test_what_the_stream_does_not_serve_is_stock(model: SparseEncoder, streams: list[int]) -> None:
    accelerate(model)
    model.encode(TEXTS[:3])
    model.encode("one text")
    model.encode(TEXTS, processing_kwargs={"text": {"max_length": 8}})
    assert not streams
    model.encode_query(TEXTS)
    model.encode_document(TEXTS)
    assert len(streams) == 2


def test_errors_of_wrong_calls_are_those_of_stock(model: SparseEncoder) -> None:
    messages = []
    for _ in range(2):
        for wrong in ({"batch_size": 0}, {"nonsense": 1}, {"prompt_name": "missing"}):
            with pytest.raises(ValueError, match=r".") as error:
                model.encode(TEXTS, **wrong)
            messages.append(str(error.value))
        accelerate(model)
    assert messages[:3] == messages[3:]


def test_a_text_that_cannot_be_encoded_raises_what_it_raises_alone(model: SparseEncoder) -> None:
    accelerate(model)
    with pytest.raises((TypeError, UnicodeError)) as alone:
        model.encode_sparse_batch(["cats \ud800"])
    with pytest.raises((TypeError, UnicodeError)) as among:
        encode_sparse(model, [*TEXTS, "cats \ud800"])
    assert (type(among.value), str(among.value)) == (type(alone.value), str(alone.value))


@pytest.mark.parametrize("padded", [False, True])
def test_every_size_of_batch_gives_the_same_rows(model: SparseEncoder, padded: bool) -> None:
    expected = model.encode(TEXTS).to_dense()
    with accelerate(model, packed=not padded):
        for options in ({"batch_tokens": 1}, {"batch_tokens": 100, "batch_size": 3}, {"batch_tokens": 10**6}):
            with pytest.warns(UserWarning, match="batch_tokens does nothing") if padded else nullcontext():
                rows = encode_sparse(model, TEXTS, **options)
            assert_close(rows.to_dense(), expected, FP32_BUDGET)


KERNELS = """
import sys, tempfile, torch, transformers
from pathlib import Path
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, models, pre_tokenizers
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, stream
words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(78))]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
folder = Path(tempfile.mkdtemp())
special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
torch.manual_seed(0)
config = transformers.BertConfig(vocab_size=80, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=16, max_position_embeddings=32)
transformers.BertForMaskedLM(config).save_pretrained(folder)
transformer = Transformer(str(folder), transformer_task="fill-mask")
transformer.max_seq_length = 16
model = SparseEncoder(modules=[transformer, SpladePooling()], device="cpu")
texts = [" ".join(f"w{(3 * i + j) % 78}" for j in range(1 + i % 5)) for i in range(7)]
expected = model.encode(texts).to_dense()
accelerate(model, impl="triton", check=False)
for capacity, top_k in ((1024, None), (4, None), (1024, 5)):
    stream.CAPACITY, again = capacity, 0
    plain = stream.SparseStream._plain
    def counted(self, texts):
        global again
        again += 1
        return plain(self, texts)
    stream.SparseStream._plain = counted
    rows = encode_sparse(model, texts, batch_tokens=10, top_k=top_k)
    stream.SparseStream._plain = plain
    want = expected
    if top_k is not None:
        best = expected.topk(top_k, dim=1)
        want = torch.zeros_like(expected).scatter_(1, best.indices, best.values)
    torch.testing.assert_close(rows.to_dense(), want, rtol=1e-5, atol=1e-5)
    print(capacity, top_k, again > 0)
"""


@pytest.mark.skipif(NEEDS_INTERPRETER[0].args[0], reason="triton is not installed")
@pytest.mark.skipif(NEEDS_INTERPRETER[2].args[0], reason="numpy is too new for the interpreter")
def test_rows_of_fixed_capacity_are_those_of_stock_and_full_ones_are_encoded_again() -> None:
    given = environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["1024 None False", "4 None True", "1024 5 False"]
