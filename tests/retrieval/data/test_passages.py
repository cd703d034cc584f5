"""Where texts are cut into passages, and how passages are named and recorded."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.retrieval.long_documents import CONTENTS, DOCUMENTS, PASSAGES, SENTENCES
from tilefold import retrieval as r
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.errors import DataError

TEXT = 'He said: "Stop here!" Then he left. One two three four five six seven eight. End.'


def cut_text(passages: r.Passages, text: str) -> list[str]:
    """The texts of the passages of ``text``."""
    return [text[start:stop] for start, stop in passages.ranges(text)]


@given(
    st.text(st.sampled_from("ab1.!?。日本語 \n\"')(é-"), max_size=120),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["sentences", "words"]),
)
def test_passages_move_on_and_contain_every_word_within_the_length(
    text: str,
    length: int,
    stride: int,
    cut: Any,
) -> None:
    words = [match.span() for match in re.finditer(r"[日本語]{1,2}|[ab1é]{1,32}", text)]

    ranges = r.Passages(length, min(length, stride), cut).ranges(text)

    words_by_passage = []
    for start, stop in ranges:
        words_by_passage.append([word for word in words if start <= word[0] and word[1] <= stop])
    assert set().union(*words_by_passage) == set(words)
    n_words = [len(words_of_passage) for words_of_passage in words_by_passage]
    assert max(n_words) <= length
    if words:
        assert min(n_words) >= 1
    for (start, stop), (next_start, next_stop) in pairwise(ranges):
        assert start < next_start
        assert stop < next_stop
    if cut == "words" and stride >= length:
        assert all(count == length for count in n_words[:-1])


def test_a_text_is_cut_after_sentences_and_long_sentences_between_words() -> None:
    assert cut_text(r.Passages(5), TEXT) == [
        'He said: "Stop here!"',
        "Then he left. One two",
        "three four five six seven",
        "eight. End.",
    ]


def test_passages_overlap_by_whole_sentences_only() -> None:
    assert cut_text(r.Passages(8, 4), TEXT) == [
        'He said: "Stop here!" Then he left.',
        "One two three four five six seven eight.",
        "End.",
    ]


def test_a_text_without_words_is_one_passage() -> None:
    assert r.Passages(3).ranges("  ... \n") == [(0, 5)]
    assert r.Passages(3).ranges("") == [(0, 0)]


def test_a_word_of_more_than_32_letters_counts_as_several() -> None:
    lengths = [stop - start for start, stop in r.Passages(2).ranges("x" * 200)]
    assert lengths == [64, 64, 64, 8]


def test_the_id_of_a_passage_names_its_document_and_range() -> None:
    texts = PASSAGES.of(DOCUMENTS)
    assert {Passage.of(name).document for name in texts} == set(DOCUMENTS)
    for name, text in texts.items():
        passage = Passage.of(name)
        document = DOCUMENTS[passage.document]
        part = document.text[passage.start : passage.stop]
        assert passage.id == name
        assert text == r.Document("", document.title, part).contents


def test_passages_record_their_options_and_the_texts_that_were_cut() -> None:
    provenance = PASSAGES.of(DOCUMENTS).provenance
    assert provenance == Provenance(
        texts_sha256=texts_digest(CONTENTS),
        passages="6/3/sentences",
    )
    assert str(PASSAGES) == "6/3/sentences"
    assert r.Passages.parse("6/3/sentences") == PASSAGES
    assert Provenance.from_tag(provenance.tag).passages == "6/3/sentences"


@pytest.mark.parametrize("name", ["a", "a#", "a#1", "#1:2-"])
def test_an_id_that_names_no_range_is_not_that_of_a_passage(name: str) -> None:
    with pytest.raises(DataError, match="ids: expected a passage id"):
        Passage.of(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param((0,), "length: expected an integer of at least 1", id="length of 0"),
        pytest.param((5, 0), "stride: expected an integer of at least 1", id="stride of 0"),
        pytest.param(
            (5, 6),
            r"stride: expected at most the length of a passage \(5\)",
            id="stride above the length",
        ),
        pytest.param(
            (5, 5, "lines"),
            "cut: expected one of sentences, words",
            id="unknown cut",
        ),
    ],
)
def test_wrong_options_of_passages_are_refused(options: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        r.Passages(*options)


def test_options_of_passages_that_cannot_be_parsed_are_refused() -> None:
    with pytest.raises(DataError, match="expected a text such as '128/64/sentences', got '5'"):
        r.Passages.parse("5")


def test_training_takes_the_passage_of_a_relevant_document_that_has_the_words() -> None:
    collection = r.Collection(
        "c",
        DOCUMENTS,
        {"q": "read queues", "none": "zebra"},
        {"train": {"q": {"a#1:0-3": 2, "b c": 0}, "none": {"a": 1}}},
    )

    of_passages = r.training_passages(r.Passages(9), collection)

    assert of_passages.contents() == r.Passages(9).of(DOCUMENTS)
    qrels = of_passages.qrels["train"]
    assert qrels.keys() == {"q", "none"}
    ((passage, grade),) = qrels["q"].items()
    assert grade == 2
    assert of_passages.documents[passage].text == "Functions that read and write queues are here."
    (first_passage,) = qrels["none"]
    assert of_passages.documents[first_passage].text == SENTENCES[0]
