"""Scratch of plans: several pieces of it in one allocation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="launchers need triton")

from tilefold.ops._shared._triton.tensors import PIECE_ALIGNMENT, Pieces

CPU = torch.device("cpu")


def test_pieces_lie_apart_in_one_buffer() -> None:
    parts = (((3, 5), torch.bfloat16), ((), torch.int64), ((0,), torch.int32), ((77,), torch.float32))
    pieces = Pieces(CPU, *parts)
    assert pieces._like.untyped_storage().nbytes() == 0
    made, again = pieces(), pieces()
    tensors = [piece.tensor() for piece in made]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == list(parts)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    full = [(piece, tensor) for piece, tensor in zip(made, tensors, strict=True) if tensor.numel()]
    assert all(piece.data_ptr() == tensor.data_ptr() for piece, tensor in full)
    assert all((piece.data_ptr() - made[0].data_ptr()) % PIECE_ALIGNMENT == 0 for piece in made)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert made[0].data_ptr() != again[0].data_ptr()


def test_pieces_without_an_element_are_made_once() -> None:
    pieces = Pieces(CPU, ((0,), torch.float32), ((0, 4), torch.int32))
    assert pieces() is pieces()
    assert [piece.tensor().shape for piece in pieces()] == [(0,), (0, 4)]
