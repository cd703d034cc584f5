"""The runner of tutorials notices output that a page does not show."""

from __future__ import annotations

import pytest

from tests.tutorials import missing_lines


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        pytest.param("600 pairs: pairs", "40 pairs: pairs", id="another number"),
        pytest.param("late (4.8 MB of int8)", "late (73.3 kB of int8)", id="another size"),
        pytest.param("trained in ... s, loss 1.2", "trained in 7 s, loss 0.9", id="left out"),
        pytest.param("...\n1 query", "a note\n400 query", id="lines left out"),
        pytest.param("│ a │ +0.10 │  0.01* │", "│ a   │ -0.3 │ 1.0 │", id="a row, not significant"),
        pytest.param(
            "3 of 90 documents were truncated at 64 tokens", "", id="no text was truncated"
        ),
        pytest.param("┏━━━┳━┓\n│ 1 │ d5 │", "┏━┳━┓\n│ 1 │ d7 │", id="a row with a rank"),
    ],
)
def test_output_may_differ_in_numbers_and_data(expected: str, printed: str) -> None:
    assert missing_lines(expected, printed) == []


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        pytest.param("600 pairs: pairs", "600 documents: pairs", id="another word"),
        pytest.param("│ nDCG@10 │ 0.5 │", "│ nDCG@20 │ 0.5 │", id="another measure"),
        pytest.param("│ late-int4 │ 0.5 │", "│ late-int8 │ 0.5 │", id="another run"),
        pytest.param("1 query", "", id="no output"),
    ],
)
def test_other_output_is_missing(expected: str, printed: str) -> None:
    assert missing_lines(expected, printed) == [expected]


def test_a_page_at_full_size_has_the_numbers_that_are_printed() -> None:
    shown = "│ dense │ 0.6576 ± 0.0191 │ 0.0008* │\n600 pairs"
    close = "│ dense │ 0.6571 ± 0.0190 │ 0.0012* │\n600 pairs"
    stale = "│ dense │ 0.5399 ± 0.0190 │ 0.0008* │\n600 pairs"
    assert missing_lines(shown, close, same_numbers=True) == []
    assert missing_lines(shown, stale, same_numbers=True) == [shown.splitlines()[0]]
    assert missing_lines("loss ...; 3 steps", "loss 1.5; 4 steps", same_numbers=True) != []
