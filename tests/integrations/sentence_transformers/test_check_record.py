"""Self-checks of ``accelerate``: a model that has passed them is recorded, and not checked again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from torch import nn

from tilefold.integrations.sentence_transformers import _check_record as check_record
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.transformers import packed as packed_attention

# Forward passes of the backbone in the self-checks of a SparseEncoder with one LM head: one for the
# head, two for its network on packed tokens, and two for its modules on packed texts.
FORWARDS_OF_CHECKS = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in an environment that does not ask for repeated checks."""
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(check_record.SELF_CHECK_VARIABLE)
    return tmp_path


class CountedForwards:
    """Counts the forward passes of a model's backbone.

    The method of the class is replaced, because a replaced method or a hook of the instance is code
    that no release identifies.
    """

    def __init__(self, model: SparseEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        layers = type(model[0].model.base_model.encoder)
        stock_forward = layers.forward

        def counted_forward(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return stock_forward(*args, **kwargs)

        monkeypatch.setattr(layers, "forward", counted_forward)

    def in_accelerate(self, model: SparseEncoder, **options: Any) -> int:
        """Return the number of forward passes of a call of ``accelerate``."""
        before = self.count
        accelerate(model, **options).restore()
        return self.count - before


@pytest.fixture
def forwards(tiny: SparseEncoder, monkeypatch: pytest.MonkeyPatch) -> CountedForwards:
    return CountedForwards(tiny, monkeypatch)


def records(cache: Path) -> list[Path]:
    return sorted(cache.glob("self-checks/*.json"))


def test_a_model_that_has_passed_is_not_checked_again(
    tiny: SparseEncoder,
    tiny_folder: Path,
    forwards: CountedForwards,
) -> None:
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    assert forwards.in_accelerate(tiny) == 0
    same_model = SparseEncoder(str(tiny_folder), device="cpu").eval()
    for module, same_module in zip(tiny.modules(), same_model.modules(), strict=True):
        if isinstance(module, nn.Dropout):  # the fixture has set it to 0
            same_module.p = module.p
    assert forwards.in_accelerate(same_model) == 0


def test_a_recorded_model_is_accelerated_in_the_same_way(tiny: SparseEncoder) -> None:
    texts = ["one text", "another text of more tokens"]
    first = accelerate(tiny)
    expected = tiny.encode(texts, convert_to_sparse_tensor=False)
    first.restore()
    second = accelerate(tiny)
    assert (second.heads, second.padded) == (first.heads, first.padded)
    assert torch.equal(tiny.encode(texts, convert_to_sparse_tensor=False), expected)


def train_one_weight(model: SparseEncoder) -> None:
    with torch.no_grad():
        model[0].model.get_output_embeddings().weight[0, 0] += 1e-3


def change_a_setting_of_a_layer(model: SparseEncoder) -> None:
    layer_norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    layer_norms[0].eps *= 2


def change_the_configuration(model: SparseEncoder) -> None:
    model[0].model.config.type_vocab_size += 1


def change_the_dtype(model: SparseEncoder) -> None:
    model.bfloat16()


def change_the_padding_side(model: SparseEncoder) -> None:
    """BERT counts positions from the left, so that its padded batches are wrong then."""
    model.tokenizer.padding_side = "left"


@pytest.mark.filterwarnings("ignore:BertForMaskedLM runs on padded batches")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(train_one_weight, id="weights"),
        pytest.param(change_a_setting_of_a_layer, id="attribute of a module"),
        pytest.param(change_the_configuration, id="configuration"),
        pytest.param(change_the_dtype, id="dtype"),
        pytest.param(change_the_padding_side, id="tokenizer"),
    ],
)
def test_a_changed_model_is_checked_again(
    change: Callable[[SparseEncoder], None],
    tiny: SparseEncoder,
    forwards: CountedForwards,
) -> None:
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    change(tiny)
    assert forwards.in_accelerate(tiny) >= FORWARDS_OF_CHECKS


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"impl": "reference"}, id="impl"),
        pytest.param({"packed": False}, id="packed"),
        pytest.param({"quantize": "fp8"}, id="quantize"),
        pytest.param({"screen": False}, id="screen"),
    ],
)
def test_other_arguments_are_checked_again(
    options: dict[str, Any],
    tiny: SparseEncoder,
    forwards: CountedForwards,
) -> None:
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    assert forwards.in_accelerate(tiny, **options) > 0
    assert forwards.in_accelerate(tiny, **options) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("_releases", {"torch": "99.0"}, id="release"),
        pytest.param("_device_name", "another processor", id="device"),
        pytest.param("_settings_of_torch", {"matmul_precision": "tf32"}, id="settings"),
    ],
)
def test_another_machine_or_release_checks_again(
    name: str,
    value: object,
    tiny: SparseEncoder,
    forwards: CountedForwards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    monkeypatch.setattr(check_record, name, lambda *_: value)
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="torch 2.8 has the old switches only",
)
def test_a_precision_set_by_the_new_switch_of_torch_is_recorded(tiny: SparseEncoder) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert check_record._settings_of_torch(tiny)["matmul_precision"] == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_the_files_of_the_package_belong_to_its_release(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("a = 1\n")
    before = check_record._digest_of_files(tmp_path)
    assert check_record._digest_of_files(tmp_path) == before
    module.write_text("a = 10\n")
    assert check_record._digest_of_files(tmp_path) != before


def test_an_argument_and_a_variable_repeat_the_checks(
    tiny: SparseEncoder,
    forwards: CountedForwards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    assert forwards.in_accelerate(tiny, check="always") == FORWARDS_OF_CHECKS
    monkeypatch.setenv(check_record.SELF_CHECK_VARIABLE, "always")
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS


def test_a_model_that_was_not_checked_is_not_recorded(
    tiny: SparseEncoder,
    forwards: CountedForwards,
    cache: Path,
) -> None:
    assert forwards.in_accelerate(tiny, check=False) == 0
    assert records(cache) == []
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS


def test_check_accepts_three_values(tiny: SparseEncoder) -> None:
    with pytest.raises(ValueError, match="check must be True, False or 'always', got 'once'"):
        accelerate(tiny, check="once")  # type: ignore[arg-type]


def test_a_model_that_fails_is_checked_every_time(tiny: SparseEncoder, cache: Path) -> None:
    tiny[0].model.get_output_embeddings().weight.data[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(ValueError, match="fused scores must equal stock scores"):
            accelerate(tiny)
    assert records(cache) == []


def test_a_network_that_fails_on_packed_tokens_is_checked_every_time(
    tiny: SparseEncoder,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong_attention(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.arange(query.numel(), dtype=query.dtype).view_as(query)

    monkeypatch.setattr(packed_attention, "packed_softmax_attention", wrong_attention)
    for _ in range(2):
        with pytest.warns(UserWarning, match="runs on padded batches") as warnings:
            acceleration = accelerate(tiny)
        assert warnings[0].filename == __file__
        assert "disagree" in acceleration.padded["BertForMaskedLM"]
        acceleration.restore()
    assert records(cache) == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"passed": ', id="cut off"),
        pytest.param(b"\xff\xfe", id="not a text"),
        pytest.param(b'{"passed": "another key"}', id="record of another model"),
    ],
)
def test_a_damaged_record_is_written_again(
    content: bytes,
    tiny: SparseEncoder,
    forwards: CountedForwards,
    cache: Path,
) -> None:
    forwards.in_accelerate(tiny)
    (record,) = records(cache)
    record.write_bytes(content)
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    assert forwards.in_accelerate(tiny) == 0


def test_a_cache_that_cannot_be_written_is_no_error(
    tiny: SparseEncoder,
    forwards: CountedForwards,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(file))  # no folder can be created in a file
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS
    assert forwards.in_accelerate(tiny) == FORWARDS_OF_CHECKS


def test_processes_may_save_a_record_at_the_same_time(cache: Path) -> None:
    record = check_record.CheckRecord("0" * 64)
    writers = [Thread(target=record.save) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert record.exists()
    assert len(records(cache)) == 1


class UserPooling(nn.Module):
    """A module whose code no release of a library identifies."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return features


def add_a_module_of_the_user(model: SparseEncoder) -> None:
    model.add_module("2", UserPooling())


def add_a_hook(model: SparseEncoder) -> None:
    model[0].model.register_forward_hook(lambda *_: None)


def replace_a_method(model: SparseEncoder) -> None:
    embeddings = model[0].model.get_input_embeddings()
    embeddings.forward = embeddings.forward


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(add_a_module_of_the_user, id="class of the user"),
        pytest.param(add_a_hook, id="hook"),
        pytest.param(replace_a_method, id="replaced method"),
    ],
)
def test_a_model_with_code_that_no_release_identifies_is_checked_every_time(
    change: Callable[[SparseEncoder], None],
    tiny: SparseEncoder,
    cache: Path,
) -> None:
    change(tiny)
    assert check_record.CheckRecord.of(tiny, {}) is None
    accelerate(tiny)
    assert records(cache) == []


def test_a_multi_vector_encoder_is_recorded(
    colbert: MultiVectorEncoder,
    cache: Path,
) -> None:
    with accelerate(colbert):
        pass
    assert len(records(cache)) == 1
