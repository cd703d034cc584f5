"""Which tests belong to ``make test-full`` alone: those marked ``slow``.

A test gets the mark by hand, or as a further combination of values: a test with several
parametrizations runs every value of each of them in ``make test``, beside the first values of the
others, and the remaining combinations in ``make test-full``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import triton_interpreted

# The arguments of a parametrization, and the objects that a case has for them.
Value = tuple[tuple[str, ...], tuple[int, ...]]
ROOT = Path(__file__).resolve().parent
# Folders and files whose tests take long; elsewhere a case takes milliseconds. The operators do in
# Triton's interpreter.
PATHS_OF_COMBINATIONS: tuple[str, ...] = (
    "distributed",
    "integrations",
    "ops/entmax/test_rows.py",
    "ops/entmax_attention/test_implementations.py",
    "ops/entmax_attention/test_sparsity.py",
    "ops/lsr_head/test_implementations.py",
    "ops/lsr_head/test_library.py",
    "ops/maxsim/test_library.py",
    "recipes",
    "retrieval/encoding/test_folder_encoder.py",
    "retrieval/encoding/test_truncation.py",
    "retrieval/index/qdrant/test_collection.py",
    "retrieval/index/test_backends.py",
    "retrieval/index/test_late.py",
    "retrieval/test_integrity.py",
)
if triton_interpreted():
    PATHS_OF_COMBINATIONS += ("ops",)


def mark_further_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as ``slow`` the cases of a test all of whose values an earlier case has."""
    tested: dict[tuple[Path, str], set[Value]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if not _has_many_combinations(item.path):
            continue
        if item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        values = _parametrized_values(item)
        tested_values = tested.setdefault((item.path, item.originalname), set())
        if values <= tested_values:
            item.add_marker(pytest.mark.slow)
        tested_values |= values


def _has_many_combinations(path: Path) -> bool:
    """Whether a test file is one of those above, or in one of the folders."""
    relative = path.relative_to(ROOT)
    names = {relative.as_posix(), *(folder.as_posix() for folder in relative.parents)}
    return not names.isdisjoint(PATHS_OF_COMBINATIONS)


def _parametrized_values(item: pytest.Function) -> set[Value]:
    """The value that a case has of each parametrization of its test.

    All cases share the objects of a parametrization, so an object stands for its value.
    """
    parameters = item.callspec.params
    argument_lists = [_argument_names(mark) for mark in item.iter_markers("parametrize")]
    listed = {name for names in argument_lists for name in names}
    argument_lists += [(name,) for name in parameters if name not in listed]  # of fixtures
    return {(names, tuple(id(parameters[name]) for name in names)) for names in argument_lists}


def _argument_names(parametrize: pytest.Mark) -> tuple[str, ...]:
    """The arguments that a parametrization sets together."""
    names = (
        parametrize.kwargs["argnames"] if "argnames" in parametrize.kwargs else parametrize.args[0]
    )
    if isinstance(names, str):
        names = names.replace(" ", "").strip(",").split(",")
    return tuple(names)
