"""Token vectors of several texts in memory: one packed tensor with ids and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops import QuantizedTokens, quantize_tokens
from tilefold.retrieval._arrays import check_offsets
from tilefold.retrieval._sparse import check_ids
from tilefold.retrieval.errors import DataError

STORAGES = ("fp16", "int8")


@dataclass
class TokenVectors:
    """The token vectors of N texts in memory, packed.

    Attributes:
        ids: N unique, non-empty strings.
        offsets: int64 ``[N + 1]``; text `i` has rows ``offsets[i]`` to ``offsets[i + 1]``, possibly none.
        values: ``[T, D]`` fp16, fp32 or int8.
        scales: ``[T]`` fp32 factors of int8 values, else None.

    Raises:
        DataError: shapes or dtypes that do not fit, offsets that do not rise from 0 to T, an empty or repeated id.
    """

    ids: list[str]
    offsets: Tensor
    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        check_ids(self.ids)
        n, offsets, values = len(self.ids), self.offsets, self.values
        if values.dim() != 2 or values.dtype not in (torch.float16, torch.float32, torch.int8):
            raise DataError(f"values: expected [T, D] in fp16, fp32 or int8, got {_described(values)}.")
        if offsets.dtype != torch.int64 or tuple(offsets.shape) != (n + 1,):
            raise DataError(f"offsets: expected {n + 1} int64 offsets for {n} ids, got {_described(offsets)}.")
        check_offsets(offsets.cpu().numpy(), values.size(0), "offsets")
        if (self.scales is not None) != (values.dtype == torch.int8):
            raise DataError(f"scales: expected for int8 values only, got values in {values.dtype}.")
        if self.scales is not None and (
            self.scales.dtype != torch.float32 or tuple(self.scales.shape) != (values.size(0),)
        ):
            raise DataError(f"scales: expected [{values.size(0)}] in fp32, got {_described(self.scales)}.")

    @classmethod
    def pack(cls, ids: Sequence[str], vectors: Sequence[Tensor], dimension: int, storage: str) -> TokenVectors:
        """From one ``[n_i, D]`` tensor per text, on any device; the result is on the CPU.

        Raises:
            ValueError: an unknown `storage`.
            DataError: a tensor of another shape, or an entry that is not finite in `storage`; the message names the id.
        """
        if storage not in STORAGES:
            raise ValueError(f"storage: expected one of {', '.join(STORAGES)}, got {storage!r}.")
        for name, rows in zip(ids, vectors, strict=True):
            if rows.dim() != 2 or rows.size(1) != dimension:
                raise DataError(f"vectors: expected [n, {dimension}] for {name!r}, got shape {list(rows.shape)}.")
        lengths = [rows.size(0) for rows in vectors]
        offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        packed = torch.cat([rows.detach().float() for rows in vectors]) if vectors else torch.zeros(0, dimension)
        half = packed.half()
        finite = (packed if storage == "int8" else half).isfinite().all(dim=1).cpu()
        check_finite(ids, offsets, finite, storage, packed)
        if storage == "fp16":
            return cls(list(ids), offsets, half.cpu())
        quantized = quantize_tokens(packed, "int8")
        return cls(list(ids), offsets, quantized.values.cpu(), quantized.scales.cpu())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dimension(self) -> int:
        """D."""
        return int(self.values.size(1))

    def rows(self, i: int) -> Tensor:
        """The vectors of text `i`, ``[n, D]`` fp32."""
        low, high = int(self.offsets[i]), int(self.offsets[i + 1])
        values = self.values[low:high].float()
        return values if self.scales is None else values * self.scales[low:high, None]

    def packed(self) -> Tensor | QuantizedTokens:
        """The document argument of :func:`tilefold.ops.maxsim`, with ``offsets`` as its ``cu_seqlens_d``."""
        return self.values if self.scales is None else QuantizedTokens(self.values, self.scales)

    def take(self, chosen: Sequence[int]) -> TokenVectors:
        """The given texts, in the given order, copied."""
        index = torch.as_tensor(chosen, dtype=torch.int64)
        lengths = self.offsets.diff()[index]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        at = torch.repeat_interleave(self.offsets[index] - offsets[:-1], lengths) + torch.arange(int(offsets[-1]))
        scales = None if self.scales is None else self.scales[at]
        return TokenVectors([self.ids[i] for i in index.tolist()], offsets, self.values[at], scales)

    @classmethod
    def concatenate(cls, parts: Sequence[TokenVectors]) -> TokenVectors:
        """All texts of `parts`, at least one, of one dimension and storage, in order."""
        lengths = torch.cat([part.offsets.diff() for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        with torch.autocast("cpu", enabled=False):  # numpy, because torch lacks the operation for fp16 on the CPU
            values = torch.cat([part.values for part in parts])
        return cls(
            [name for part in parts for name in part.ids],
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            values,
            torch.cat(scales) if scales else None,
        )


def check_finite(ids: Sequence[str], offsets: Tensor, finite: Tensor, storage: str, numbers: Tensor) -> None:
    """Raise ``DataError``, with an id and one of its `numbers`, unless all are `finite`, bool ``[T]``, as stored."""
    if not bool(finite.all()):
        got = named(ids, offsets, numbers, ~(numbers.half() if storage == "fp16" else numbers).isfinite())
        raise DataError(f"vectors: expected finite numbers within the range of {storage}, got {got}. Check the model.")


def named(ids: Sequence[str], offsets: Tensor, numbers: Tensor, wrong: Tensor) -> str:
    """The first of the `numbers` of some tokens that is `wrong`, and the id of its text."""
    at = wrong.nonzero()[0].tolist()
    owner = ids[int(torch.searchsorted(offsets, at[0], right=True)) - 1]
    return f"{numbers[tuple(at)].item()} for {owner!r}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
