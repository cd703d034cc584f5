"""Errors about arguments carry the names of the arguments, also in a copy in another process."""

from __future__ import annotations

import copy

import pytest

from tilefold._internal.arguments import ArgumentError, check_choice, check_count
from tilefold.cli._common import CommandError, UsageError
from tilefold.cli._options import errors_name_options
from tilefold.retrieval.errors import ArgumentDataError, DataError, MissingDocumentError


def test_the_message_begins_with_the_names() -> None:
    error = ArgumentError(("like", "scale"), "expected one of them, got both.")
    assert str(error) == "like, scale: expected one of them, got both."
    assert error.arguments == ("like", "scale")


def test_checks_name_their_argument() -> None:
    with pytest.raises(ArgumentError, match=r"k: expected an integer of at least 1") as count:
        check_count("k", 0)
    with pytest.raises(ArgumentError, match=r"mode: expected one of a, b") as choice:
        check_choice("mode", "c", ("a", "b"))
    assert (count.value.arguments, choice.value.arguments) == (("k",), ("mode",))


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ArgumentError("k", "expected at least 1, got 0."), id="one name"),
        pytest.param(ArgumentError(("like", "scale"), "got both."), id="two names"),
        pytest.param(ArgumentDataError("vectors", "expected others."), id="data"),
        pytest.param(MissingDocumentError("vectors", "d7"), id="a missing document"),
    ],
)
def test_errors_are_restored_from_what_pickle_stores(error: ArgumentError) -> None:
    restored = copy.copy(error)  # by the protocol of pickle
    assert type(restored) is type(error)
    assert str(restored) == str(error)
    assert vars(restored) == vars(error)


def test_the_command_line_writes_options_for_names() -> None:
    with (
        pytest.raises(UsageError, match=r"^--like, --scale: got both\.$"),
        errors_name_options(like="--like", scale="--scale"),
    ):
        raise ArgumentError(("like", "scale"), "got both.")


def test_wrong_data_are_a_failure_and_no_wrong_usage() -> None:
    with (
        pytest.raises(CommandError, match=r"^--bm25: INDEX was made from others$") as failure,
        errors_name_options(second="--bm25: INDEX"),
    ):
        raise ArgumentDataError("second", "was made from others")
    assert not isinstance(failure.value, UsageError)


def test_an_error_about_another_argument_passes() -> None:
    with (
        pytest.raises(ArgumentError, match=r"^depth: got 0$"),
        errors_name_options(weight="--weight"),
    ):
        raise ArgumentError("depth", "got 0")


def test_text_that_begins_like_an_argument_is_not_rewritten() -> None:
    with (
        pytest.raises(DataError, match=r"^data: no such file$"),
        errors_name_options(data="--data"),
    ):
        raise DataError("data: no such file")
