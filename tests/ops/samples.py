"""Calls of every operator, for the contracts that hold for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tilefold.ops import (
    entmax,
    entmax_attention,
    lsr_head,
    maxsim,
    quantize_tokens,
    quantize_weight,
    token_scatter,
)
from tilefold.ops.entmax.api import ENTMAX
from tilefold.ops.entmax_attention.api import ATTENTION
from tilefold.ops.lsr_head.api import HEAD
from tilefold.ops.maxsim.api import MAXSIM
from tilefold.ops.maxsim.xtr import XTR
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk
from tilefold.ops.sparse_search.api import SEARCH
from tilefold.ops.token_scatter.api import SCATTER
from tilefold.testing.maxsim import maxsim_inputs

ROOMS: dict[str, Any] = {
    room.name: room for room in (ENTMAX, ATTENTION, HEAD, MAXSIM, XTR, SEARCH, SCATTER)
}
DEVICE = "cpu" if triton_interpreted() else "cuda"
Shape = tuple[int, ...]
FP32 = torch.float32
OFFSETS = [0, 11, 11, 32]  # three sequences, one of them empty
MASK = (
    torch.arange(42).view(2, 21) % 3 * torch.tensor([[1], [0]])
).tolist()  # holes, and a sequence without a token
LAYOUTS: list[tuple[Shape, dict[str, Any]]] = [
    ((), {}),
    ((2, 21, 16), {"attention_mask": MASK}),
    ((32, 16), {"cu_seqlens": OFFSETS}),
]
IDS = (torch.arange(42).view(2, 21) * 7 % 38).tolist()  # some of them more than once in a sequence


def forget() -> None:
    """Let no operator remember a call, or the gradients of one."""
    for room in ROOMS.values():
        room.calls.clear()


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """What a plan looks at of a tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Sample:
    """A call of an operator, named as warnings name it: a function of leaves, options and ``impl``.

    Lists among the options become tensors; an inference call differentiates nothing.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = FP32
    inference: bool = False

    def leaves(self, device: str = DEVICE, seed: int = 0) -> list[Tensor]:
        """Leaves with values of their own for every seed."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [value.to(device, self.dtype).requires_grad_(not self.inference) for value in values]

    def given(self, device: str = DEVICE) -> dict[str, Any]:
        """Options with their tensors."""
        kinds = {
            name: torch.int32 if name.startswith("cu_seqlens") else None for name in self.options
        }
        return {
            name: torch.tensor(x, device=device, dtype=kinds[name]) if isinstance(x, list) else x
            for name, x in self.options.items()
        }


def dout(scores: Tensor) -> Tensor:
    """A gradient for ``scores``, the same in every call, made where they lie: a graph may be
    captured.
    """
    return (
        torch.linspace(-1, 1, scores.numel(), device=scores.device)
        .view(scores.shape)
        .to(scores.dtype)
    )


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """All results are there, with the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def allocations(call: Callable[[], Any]) -> list[int]:
    """Bytes of what is allocated on the CPU while ``call`` runs, in that order, and below zero of
    what is released.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
    ) as profile:
        kept = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del kept
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def saved_for_backward(call: Callable[[], Any]) -> list[Tensor]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return saved


def unaligned(tensor: Tensor) -> Tensor:
    """A copy one element past a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor.detach())


def head(
    pooling: str = "max",
    *shape: int,
    vocab: int = 40,
    dtype: torch.dtype = FP32,
    **options: Any,
) -> Sample:
    """The LSR head; rows of 16 values and 16 tokens are read through TMA descriptors where there
    are some.
    """
    shapes = (shape or (2, 16, 16), (vocab, shape[-1] if shape else 16), (vocab,))
    return Sample("lsr_head", lsr_head, shapes, {"pooling": pooling} | options, dtype)


def late(queries: Shape, documents: Shape, dtype: torch.dtype = FP32, **options: Any) -> Sample:
    return Sample("maxsim", maxsim, (queries, documents), options, dtype)


def paired(
    pairing: str,
    layout: str,
    *sizes: int,
    dtype: torch.dtype = FP32,
    function: Callable[..., Any] = maxsim,
    **more: Any,
) -> Sample:
    """MaxSim of such sizes, or ``function`` of the same arguments."""
    inputs = maxsim_inputs(*(sizes or (3, 4, 5, 9, 16)), pairing=pairing, layout=layout)
    place = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in inputs.layout.items()}
    if function is not maxsim:
        del place["pairing"]
    return Sample(
        function.__name__,
        function,
        (inputs.queries.shape, inputs.documents.shape),
        place | more,
        dtype,
    )


def quantized_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return lsr_head(hidden, quantize_weight(weight), **options)


def quantized_documents(queries: Tensor, documents: Tensor, **options: Any) -> Tensor:
    return maxsim(queries, quantize_tokens(documents, "int8"), **options)


def attention(keys: int = 21, learned: bool = False, **options: Any) -> Sample:
    batch = 2 if "key_padding_mask" in options else 1
    shapes = [
        (32, 1, 16) if "cu_seqlens_k" in options else (batch, 1, n, 16) for n in (7, keys, keys)
    ]
    return Sample("entmax_attention", attend, (*shapes, *([(1,)] if learned else [])), options)


def attend(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None, **options: Any) -> Any:
    """Entmax attention; dropout drops the same weights in every call."""
    if "dropout_p" in options:
        options["generator"] = torch.Generator(q.device).manual_seed(0)
    if theta is not None:
        options["alpha"] = 1 + theta.sigmoid()
    return entmax_attention(q, k, v, **options)


def scatter(**options: Any) -> Sample:
    """The token scatter; packed tokens are the first padded ones in a row."""
    packed = "cu_seqlens" in options
    options |= {"input_ids": [*IDS[0], *IDS[1]][:32] if packed else IDS}
    return Sample("token_scatter", scattered, ((32,) if packed else (2, 21),), options)


def scattered(weights: Tensor, input_ids: Tensor, vocab_size: int = 40, **options: Any) -> Tensor:
    return token_scatter(weights, input_ids, vocab_size, **options)


def rows(*more: Shape, **options: Any) -> Sample:
    return Sample("entmax", entmax_rows, ((2, 21), *more), options)


def entmax_rows(x: Tensor, theta: Tensor | None = None, **options: Any) -> Any:
    return entmax(x, **(options if theta is None else options | {"alpha": 1 + theta.sigmoid()}))


@functools.cache
def postings_on(device: torch.device) -> BlockedPostings:
    """Every document has two of ten terms."""
    offsets, documents = (
        torch.arange(0, 61, 6),
        (torch.arange(60).view(10, 6) * 7 % 30).sort(dim=1).values.flatten(),
    )
    return BlockedPostings.of(offsets, documents.int(), torch.linspace(0.1, 1, 60), 30, device)


def searched(weights: Tensor, impl: str = "auto") -> Tensor:
    """Scores of sparse queries of the first terms."""
    terms = torch.arange(weights.size(1), dtype=torch.int32, device=weights.device).expand_as(
        weights,
    )
    return sparse_topk(postings_on(weights.device), terms, weights.detach().abs(), 5, impl=impl)[0]
