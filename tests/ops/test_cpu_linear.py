"""Linear layers and tiles of the head by oneDNN: the same numbers, and who is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.ops.base import has_onednn_linear, onednn, onednn_linear, onednn_packed
from tilefold.ops import cpu_linear, lsr_head
from tilefold.ops.cpu_linear import fast_linear

ROWS = onednn.FEWEST_ROWS
pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this torch has no oneDNN")
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each product of the context that oneDNN made."""
    recorded: list[int] = []

    def counting(
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        recorded.append(rows.numel() // rows.size(-1))
        return onednn_linear(rows, weight, bias)

    monkeypatch.setattr(cpu_linear, "onednn_linear", counting)
    yield recorded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS, 40), (1, ROWS + 3, 40), (2, 3, ROWS, 40)])
def test_layers_give_the_same_numbers_in_the_order_of_sums(
    calls: list[int],
    bias: bool,
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(40, 24, bias), torch.randn(shape)
    with torch.inference_mode(), fast_linear(layer, CPU):
        actual = layer(rows)
    right = layer.double()(rows.double())
    assert calls == [rows.numel() // 40]
    assert actual.shape == right.shape and actual.dtype == torch.float32
    assert (actual - right).abs().max() <= 40 * torch.finfo(torch.float32).eps * rows.abs().max()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the flags of torch
def test_everything_else_is_left_to_torch(calls: list[int]) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(16, 8), torch.randn(ROWS, 16)
    with fast_linear(layer, CPU):
        layer(rows).sum().backward()  # gradients
        with torch.no_grad():
            layer(rows[:-1])
            layer(rows[0])
            nn.Linear(16, 8).double()(rows.double())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert layer(rows).dtype == torch.bfloat16
            with torch.backends.mkldnn.flags(enabled=False):
                layer(rows)
    assert calls == [] and layer.weight.grad is not None
    layer.compile()
    with torch.no_grad(), fast_linear(layer, CPU):
        nn.functional.linear(rows, layer.weight)
    assert calls == []


def _bias(kind: str) -> torch.Tensor:
    match kind:
        case "every second number":
            return torch.arange(16.0)[::2]
        case "one number repeated":
            return torch.tensor([3.0]).expand(8)
        case "one number":
            return torch.tensor([3.0])
        case "without a dimension":
            return torch.tensor(3.0)
        case "one row":
            return torch.arange(8.0)[None]
    raise ValueError(f"kind: expected one of the cases above, got {kind!r}.")


@pytest.mark.parametrize(
    "kind",
    ["every second number", "one number repeated", "one number", "without a dimension", "one row"],
)
def test_a_bias_that_is_no_row_of_numbers_is_added_as_torch_does(kind: str) -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(ROWS, 16), torch.randn(8, 16), _bias(kind)
    right = nn.functional.linear(rows, weight, bias)
    with torch.inference_mode(), fast_linear(nn.Linear(1, 1), CPU):
        torch.testing.assert_close(nn.functional.linear(rows, weight, bias), right)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        pytest.param(0, 8, id="no inputs"),
        pytest.param(16, 0, id="no outputs"),
        pytest.param(1, 8, id="one input"),
        pytest.param(16, 1, id="one output"),
    ],
)
def test_layers_of_few_or_no_features_are_those_of_torch(inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    rows, weight, bias = (
        torch.randn(ROWS, inputs),
        torch.randn(outputs, inputs),
        torch.ones(outputs),
    )
    right = nn.functional.linear(rows, weight, bias)
    with torch.inference_mode(), fast_linear(nn.Linear(1, 1), CPU):
        torch.testing.assert_close(nn.functional.linear(rows, weight, bias), right)


def test_a_nan_reaches_the_numbers_that_it_is_in() -> None:
    rows = torch.ones(ROWS, 16)
    rows[3, 5] = torch.nan
    actual = onednn_linear(rows, onednn_packed(torch.ones(8, 16), ROWS), None)
    assert actual[3].isnan().all() and actual.isnan().sum() == 8


@pytest.mark.parametrize("lengths", [[300, 20, 0, 20], [1500]])
def test_the_head_of_many_tokens_gives_scores_and_winners_of_the_reference(
    lengths: list[int],
) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(sum(lengths), 16), torch.randn(5000, 16), torch.randn(5000)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    hidden.requires_grad_()
    actual = lsr_head(hidden, weight, bias, cu_seqlens=cu_seqlens, impl="tiled")
    wide = hidden.detach().double().requires_grad_()
    right = lsr_head(wide, weight.double(), bias.double(), cu_seqlens=cu_seqlens, impl="reference")
    torch.testing.assert_close(actual.double(), right, atol=1e-5, rtol=1e-5)
    actual.sum().backward()
    right.sum().backward()
    assert hidden.grad is not None and wide.grad is not None
    torch.testing.assert_close(hidden.grad.double(), wide.grad, atol=1e-2, rtol=1e-4)
