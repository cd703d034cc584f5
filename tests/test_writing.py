"""The writing rules of the documents for users, as CONTRIBUTING.md states them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
USER_PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

MAX_WORDS = 30
MAX_NUMBERS = 4

FENCE = re.compile(r"^ *```")
MARKER = re.compile(r"^ *(?:[-*+]|\d+\.) +")
NO_PROSE = re.compile(r"^ *(?:#|\||!\[|<|$)")
CODE = re.compile(r"(`+).+?\1")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A sentence ends at a stop, with brackets and quotes that it closes, before a capital, code, or a
# name in lower case.
END_OF_SENTENCE = re.compile(
    r"(?<=[a-z\d%)\]`][.!?])[\"')\]]* +"
    r"(?=[A-Z(\"`]|(?:tilefold|sentence-transformers|transformers|colpali-engine|torch|pydocs|nDCG)\b)",
)
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|et al)\.$")
NUMBER = re.compile(r"(?<![\w.])\.?\d[\d,.]*")

# What is wrong, and the plain wording.
WORDS = {
    r"as it does no more|no longer": "state what is; history belongs in the changelog",
    r"in an earlier|earlier code|ever since|before the last changes": (
        "state what is; history belongs in the changelog"
    ),
    r"so many|so much of|as many as hold": "name the number",
    r"which is said|says which it is|is said\b": "name what is printed, and where",
    r"is looked (?:at|through)|are looked (?:at|through)|looks into": "'check', 'compare' or 'read'",
    r"nobody|somebody|whoever|who(?: [a-z]+){1,3} meanwhile": "'you', or the program's name",
    r"by chance only|to chance": "'not significant'",
    r"the host|its host|hosts": "'CPU', 'machine' or 'server'",
    r"\bbeside\b": "'next to', 'compared with', 'in addition to' or 'on'",
    r"\bunasked\b|\bmended\b|\bin work\b|\btakes part\b": "the usual word",
    r"\bstands?\b(?! for)|\blies\b|\blie\b": "'is'",
    r"\bput before\b|\bled to\b|\bas they come\b": "the usual word",
    r"\bwith what to do\b|\bis there already\b": "say what the error names",
}
# Sentences begin with what the reader does or gets, not with a relative clause.
RELATIVE_CLAUSE = re.compile(r"^(?:Who|Whose|Whom|Whoever|What|Whatever|Of which|That which)\b")


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and the text of lines of prose: no code, tables, headings or pictures."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code and not NO_PROSE.match(line):
            yield number, line


def plain(line: str) -> str:
    """Return a line without its list marker, with one word for each piece of code and link."""
    return LINK.sub(r"\1", CODE.sub("`code`", MARKER.sub("", line))).strip()


def sentences(line: str) -> list[str]:
    """Return the sentences of a line of prose."""
    text = plain(line)
    result: list[str] = []
    start = 0
    for end in END_OF_SENTENCE.finditer(text):
        sentence = text[start : end.end()].strip()
        in_brackets = sentence.count("(") > sentence.count(")")
        if ABBREVIATION.search(text[start : end.start()]) or in_brackets:
            continue
        result.append(sentence)
        start = end.end()
    return [*result, text[start:]]


def lines_of_several_sentences(text: str) -> list[str]:
    """Return lines with a second sentence, and lines that end within a sentence."""
    lines = list(prose_lines(text))
    several = [f"{number}: {line}" for number, line in lines if len(sentences(line)) > 1]
    line_of = dict(lines)
    broken = [
        f"{number}: {line}"
        for number, line in lines
        if number + 1 in line_of
        and not MARKER.match(line_of[number + 1])
        and not re.search(r"[.!?:;,][\"')\]*_]*$", line.rstrip())
    ]
    return several + broken


def long_sentences(text: str) -> list[str]:
    """Return sentences of more than MAX_WORDS words; a piece of code counts as one."""
    return [
        f"{number}: {sentence}"
        for number, line in prose_lines(text)
        for sentence in sentences(line)
        if len(sentence.split()) > MAX_WORDS
    ]


def sentences_of_many_numbers(text: str) -> list[str]:
    """Return sentences with more than MAX_NUMBERS numbers, pieces of code aside."""
    return [
        f"{number}: {sentence}"
        for number, line in prose_lines(text)
        for sentence in sentences(line)
        if len(NUMBER.findall(sentence)) > MAX_NUMBERS
    ]


def relative_clauses(text: str) -> list[str]:
    """Return sentences that begin with a relative clause."""
    return [
        f"{number}: {sentence}"
        for number, line in prose_lines(text)
        for sentence in sentences(line)
        if RELATIVE_CLAUSE.match(sentence) and not sentence.endswith(("?", "?**"))
    ]


def private_words(text: str) -> list[str]:
    """Return words of the list ``WORDS``, each with the plain wording."""
    return [
        f"{number}: {match[0]!r}: write {remedy}"
        for number, line in prose_lines(text)
        for pattern, remedy in WORDS.items()
        for match in re.finditer(pattern, plain(line), re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_a_line_of_the_source_holds_one_sentence(page: Path) -> None:
    assert lines_of_several_sentences(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "violations",
    [
        pytest.param(long_sentences, id="at most 30 words in a sentence"),
        pytest.param(sentences_of_many_numbers, id="at most 4 numbers in a sentence"),
        pytest.param(relative_clauses, id="no relative clause at the start"),
        pytest.param(private_words, id="the words of the field"),
    ],
)
@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_pages_keep_the_writing_rules(
    page: Path,
    violations: Callable[[str], list[str]],
) -> None:
    violated = violations(page.read_text(encoding="utf-8"))
    assert violated == [], f"{page.name} breaks the rule:\n" + "\n".join(violated)


@pytest.mark.parametrize(
    ("violations", "bad", "good"),
    [
        pytest.param(
            lines_of_several_sentences,
            "It ends here. Another begins.",
            "It runs, e.g. `a. B`, on (see [Page](p.md)) a line.",
            id="two sentences in a line",
        ),
        pytest.param(
            lines_of_several_sentences,
            "A sentence that\nends on the next line.",
            "A sentence.\nAnother one.\n- An item\n- A second",
            id="a sentence on two lines",
        ),
        pytest.param(
            long_sentences,
            "word " * (MAX_WORDS + 1),
            "`a b c` " * MAX_WORDS,
            id="too many words",
        ),
        pytest.param(
            sentences_of_many_numbers,
            "It took 1, 2, .3, 4,000 and 5.5 ms.",
            "It took 1, 2, .3 and 4,000 ms, as `1 2 3` shows.",
            id="too many numbers",
        ),
        pytest.param(
            relative_clauses,
            "Who serves a model waits.",
            "Which index do you need?",
            id="a relative clause",
        ),
        pytest.param(
            private_words,
            "The launches take the host longer.",
            "Give `--host` an address; the CPU waits.",
            id="a private word",
        ),
    ],
)
def test_rules_find_what_they_forbid(
    violations: Callable[[str], list[str]],
    bad: str,
    good: str,
) -> None:
    assert violations(bad)
    assert not violations(good)
