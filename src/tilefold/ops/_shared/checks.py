"""Checks of the operators' arguments.

Every error names the argument, what was expected, what was given and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` -> ``"float16"``."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, value: object) -> Tensor:
    """Return ``value`` if it is a dense tensor, else raise ``TypeError``."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; convert it first.",
        )
    if value.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one; pad it, or pack it with cu_seqlens.",
        )
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got layout {value.layout}; use {name}.to_dense().",
        )
    return value


def check_shape(name: str, value: Tensor, spec: str, **sizes: int) -> None:
    """Raise ``ValueError`` unless ``value`` has the expected shape.

    Args:
        name: name of the argument.
        value: the argument.
        spec: names of the dimensions, such as ``"B S D"``.
        **sizes: sizes of dimensions by name. A dimension that is not among them may have any size.
    """
    dims = spec.split()
    has_shape = value.dim() == len(dims) and all(
        value.size(i) == sizes[dim] for i, dim in enumerate(dims) if dim in sizes
    )
    if not has_shape:
        # Only here, since formatting a size makes torch.compile take it for a constant.
        expected = f"[{', '.join(dims)}]"
        expected_sizes = ", ".join(f"{dim}={sizes[dim]}" for dim in dims if dim in sizes)
        if expected_sizes:
            expected = f"{expected} with {expected_sizes}"
        raise ValueError(f"{name} must have shape {expected}, got {list(value.shape)}.")


def check_dtype(name: str, value: Tensor, allowed: Sequence[torch.dtype], remedy: str) -> None:
    """Raise ``TypeError`` unless ``value.dtype`` is one of ``allowed``."""
    if value.dtype not in allowed:
        names = ", ".join(dtype_name(dtype) for dtype in allowed)
        raise TypeError(f"{name} must have dtype {names}, got {dtype_name(value.dtype)}; {remedy}")


def check_same_device(
    reference_name: str,
    reference: Tensor,
    others: Mapping[str, Tensor | None],
) -> None:
    """Raise ``ValueError`` unless every tensor in ``others`` is on the device of ``reference``.

    Args:
        reference_name: name of the argument ``reference``.
        reference: tensor that chooses the device.
        others: other arguments by name; ``None`` is ignored.
    """
    for name, value in others.items():
        if value is not None and value.device != reference.device:
            raise ValueError(
                f"{name} must be on the device of {reference_name} ({reference.device}), got "
                f"{value.device}; move it with .to({reference_name}.device).",
            )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_out_dtype(out_dtype: object) -> None:
    """Raise ``TypeError`` unless scores can have this dtype."""
    if out_dtype not in FLOAT_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
        raise TypeError(f"out_dtype must be one of {names} or None, got {out_dtype!r}.")


def check_tokens(
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    length: int,
) -> None:
    """Check the mask of padded tokens, or the offsets of packed tokens, without reading values.

    Args:
        attention_mask: ``[B, S]``, nonzero = keep, or ``None``.
        cu_seqlens: offsets ``[B + 1]`` of packed sequences, or ``None``.
        batch: B of padded tokens.
        length: S of padded tokens.

    Raises:
        TypeError: if an argument is not a tensor, the mask is complex, or the offsets are not
            integers.
        ValueError: if both are given, or a shape is wrong.
    """
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
        if cu_seqlens is not None:
            raise ValueError(
                "attention_mask must be None with packed input, got a tensor; cu_seqlens already "
                "says which tokens belong to which sequence.",
            )
        check_shape("attention_mask", attention_mask, "B S", B=batch, S=length)
        if attention_mask.is_complex():
            raise TypeError(
                f"attention_mask must be bool, integer or floating, got {attention_mask.dtype}.",
            )
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, "[B + 1]")


def check_offsets(name: str, offsets: Tensor, shape: str) -> None:
    """Check that packed offsets are integers in one dimension, without reading values.

    Args:
        name: name of the argument.
        offsets: the argument.
        shape: the expected shape, such as ``"[B + 1]"``, for the error's text.

    Raises:
        TypeError: if they are not an integer tensor.
        ValueError: if the shape is wrong.
    """
    check_tensor(name, offsets)
    check_dtype(name, offsets, (torch.int32, torch.int64), f"use {name}.int().")
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(f"{name} must have shape {shape}, got {list(offsets.shape)}.")


def check_cu_seqlens(
    name: str,
    cu_seqlens: Tensor,
    rows: int,
    owner: str,
    unit: str = "rows",
) -> None:
    """Raise ``ValueError`` unless offsets start with 0, never decrease, and end at ``rows``.

    This reads the values, and so synchronises with a GPU.

    Args:
        name: name of the argument.
        cu_seqlens: offsets ``[B + 1]``.
        rows: number of packed rows.
        owner: name of the packed argument, for the error's text.
        unit: what the rows are, for the error's text.
    """
    values = cu_seqlens.tolist()
    decreases = (i for i in range(1, len(values)) if values[i] < values[i - 1])
    first_decrease = next(decreases, None)
    if values[0] != 0:
        problem = f"{name}[0] = {values[0]}"
    elif first_decrease is not None:
        value = values[first_decrease]
        problem = f"{name}[{first_decrease}] = {value} after {values[first_decrease - 1]}"
    elif values[-1] != rows:
        problem = f"{name}[-1] = {values[-1]} with {rows} {unit} in {owner}"
    else:
        return
    raise ValueError(
        f"{name} must start with 0, never decrease and end at the number of {unit} of {owner}, got "
        f"{problem}; build it as the cumulative sum of the sequence lengths with a 0 in front.",
    )
