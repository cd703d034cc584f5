"""What the token scatter says about arguments that do not fit: the name, what was expected, what came, what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tilefold.ops import token_scatter, token_scatter_sparse

WEIGHTS, IDS, MASK = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
PACKED = {"weights": torch.zeros(6), "input_ids": torch.zeros(6, dtype=torch.int64)}
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
ELSEWHERE = "{} must be on the device of weights (cpu), got meta; move it with .to(weights.device)."

SHAPES = [
    ({"input_ids": IDS[0]}, "input_ids must have shape [B, S], got [3]."),
    ({"input_ids": IDS, "cu_seqlens": OFFSETS}, "input_ids must have shape [T], got [2, 3]."),
    ({"weights": WEIGHTS[0]}, "weights must have shape [B, S] with B=2, S=3, got [3]."),
    ({"weights": WEIGHTS.T}, "weights must have shape [B, S] with B=2, S=3, got [3, 2]."),
    ({"weights": torch.zeros(2, 3, 2)}, "weights must have shape [B, S] with B=2, S=3, got [2, 3, 2]."),
    (PACKED | {"cu_seqlens": OFFSETS, "weights": torch.zeros(5)}, "weights must have shape [T] with T=6, got [5]."),
    ({"attention_mask": torch.ones(2, 4)}, "attention_mask must have shape [B, S] with B=2, S=3, got [2, 4]."),
    (
        PACKED | {"attention_mask": MASK, "cu_seqlens": OFFSETS},
        "attention_mask must be None with packed input, got a tensor; cu_seqlens already says which tokens belong to "
        "which sequence.",
    ),
    (PACKED | {"cu_seqlens": OFFSETS[:0]}, "cu_seqlens must have shape [B + 1], got [0]."),
    (PACKED | {"cu_seqlens": OFFSETS[None]}, "cu_seqlens must have shape [B + 1], got [1, 3]."),
    ({"input_ids": IDS.to("meta")}, ELSEWHERE.format("input_ids")),
    ({"attention_mask": MASK.to("meta")}, ELSEWHERE.format("attention_mask")),
    ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0."),
    ({"vocab_size": -5}, "vocab_size must be a positive integer, got -5."),
    ({"vocab_size": 2.0}, "vocab_size must be a positive integer, got 2.0."),
    ({"vocab_size": True}, "vocab_size must be a positive integer, got True."),
    ({"reduce": "mean"}, "reduce must be one of 'max', 'sum', got 'mean'."),
    (
        {"activation": "gelu"},
        "activation must be one of 'log1p_relu', 'log1p_log1p_relu', 'relu', 'softplus', 'none', got 'gelu'.",
    ),
    (
        {"ignore_ids": range(65)},
        "ignore_ids must be at most 64 ids, got 65; mask more of them: attention_mask = mask * ~torch.isin(input_ids, "
        "ids).",
    ),
]
FLOATS = "float16, bfloat16, float32, float64"
TYPES = [
    ({"weights": [[1.0]]}, "weights must be a torch.Tensor, got list; convert it first."),
    ({"input_ids": [[1]]}, "input_ids must be a torch.Tensor, got list; convert it first."),
    ({"attention_mask": [[1]]}, "attention_mask must be a torch.Tensor, got list; convert it first."),
    (PACKED | {"cu_seqlens": [0, 6]}, "cu_seqlens must be a torch.Tensor, got list; convert it first."),
    (
        {"weights": WEIGHTS.int()},
        f"weights must have dtype {FLOATS}, got int32; cast it with .to(torch.float32) or another of these.",
    ),
    ({"input_ids": IDS.float()}, "input_ids must have dtype int32, int64, got float32; use input_ids.long()."),
    (
        PACKED | {"cu_seqlens": OFFSETS.float()},
        "cu_seqlens must have dtype int32, int64, got float32; use cu_seqlens.int().",
    ),
    (
        {"attention_mask": MASK.to(torch.complex64)},
        "attention_mask must be bool, integer or floating, got torch.complex64.",
    ),
    ({"out_dtype": torch.int8}, f"out_dtype must be one of {FLOATS} or None, got torch.int8."),
    ({"ignore_ids": IDS[0]}, "ignore_ids must be Python integers, got a Tensor; use ignore_ids.tolist()."),
    (
        {"ignore_ids": [0, None]},
        "ignore_ids must be integers, got None among them; leave out what the tokenizer lacks.",
    ),
]


@pytest.mark.parametrize(
    ("error", "changed", "message"), [(ValueError, *each) for each in SHAPES] + [(TypeError, *each) for each in TYPES]
)
@pytest.mark.parametrize("function", [token_scatter, token_scatter_sparse])
def test_arguments_that_do_not_fit(
    function: Any, error: type[Exception], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**{"weights": WEIGHTS, "input_ids": IDS, "vocab_size": 9} | changed)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(wrong: int, impl: str) -> None:
    ids = IDS.clone()
    ids[1, 2] = wrong
    message = (
        f"input_ids must lie between 0 and vocab_size - 1 = 8, got {wrong} at [1, 2]; pass the vocab_size of the "
        "tokenizer, or mask that token."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        token_scatter(WEIGHTS, ids, 9, impl=impl)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert not token_scatter(WEIGHTS, ids, 9, attention_mask=mask, impl=impl).any()
    assert not token_scatter(WEIGHTS, ids, 9, ignore_ids=[wrong], impl=impl).any()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1, 2, 6], "cu_seqlens[0] = 1"),
        ([0, 4, 2, 6], "cu_seqlens[2] = 2 after 4"),
        ([0, 2, 5], "cu_seqlens[-1] = 5 with 6 tokens in weights"),
        ([0], "cu_seqlens[-1] = 0 with 6 tokens in weights"),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_offsets_that_are_no_cumulative_lengths(impl: str, values: list[int], problem: str) -> None:
    expected = (
        "cu_seqlens must start with 0, never fall and end at the number of tokens T of weights, got "
        f"{problem}; build it as the cumulative sum of the sequence lengths with a 0 in front."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        token_scatter(**PACKED, vocab_size=9, cu_seqlens=torch.tensor(values), impl=impl)
