"""The quicker parts of Triton's interpreter give what its own give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the interpreter is Triton's")

from tests.kernels import release, triton_interpreted
from tests.ops import quick_interpreter

pytestmark = [
    pytest.mark.skipif(not triton_interpreted(), reason="a test of the interpreter"),
    pytest.mark.skipif(release() != (3, 6), reason="the interpreter of this release is as it was"),
]
SHAPES = [((8,), 0), ((8, 16), 0), ((8, 16), 1), ((4, 8, 2), 1), ((8, 16), None)]


def blocks(shape: tuple[int, ...], count: int) -> tuple[Any, ...]:
    from triton.runtime import interpreter

    generator = np.random.default_rng(0)
    made = []
    for _ in range(count):
        data = generator.standard_normal(shape, dtype=np.float32)
        data.flat[3] = np.nan
        kind = interpreter.tl.block_type(interpreter.tl.float32, list(shape))
        made.append(interpreter.tl.core.tensor(interpreter.TensorHandle(data, interpreter.tl.float32), kind))
    return tuple(made)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_reductions_have_the_bits_of_those_that_go_number_by_number(
    shape: tuple[int, ...], axis: int | None, keep: bool
) -> None:
    from triton.runtime import interpreter

    from tests.ops.launching import add2, add3, nan_max

    for function, count in ((nan_max, 1), (add2, 2), (add3, 3))[: 3 if axis is not None else 1]:
        scope = interpreter._patch_lang(nan_max.fn)
        try:
            given = interpreter.ReduceOps(axis, function, keep), blocks(shape, count)
            assert [int(size) for size in given[1][0].shape] == list(shape)
            assert int(given[1][0].numel) == np.prod(shape)
            expected, found = (
                quick_interpreter.HONEST[quick_interpreter.reduce_in_rows](*given),
                quick_interpreter.reduce_in_rows(*given),
            )
        finally:
            scope.restore()
        for right, got in zip(expected, found, strict=True):
            assert got.type == right.type and got.handle.data.shape == right.handle.data.shape
            assert np.array_equal(got.handle.data, right.handle.data, equal_nan=True)


def test_a_kernel_leaves_the_language_as_it_was() -> None:
    import torch
    from triton import language

    from tilefold.ops import token_scatter

    before = language.load, language.reduce, language.core.tensor.__add__
    token_scatter(torch.ones(1, 4), torch.arange(4)[None], 8, impl="triton")
    assert (language.load, language.reduce, language.core.tensor.__add__) == before
