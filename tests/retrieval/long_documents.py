"""Documents of several sentences, to be encoded and searched by their passages."""

from __future__ import annotations

from tests.recipes.small import SUBJECTS
from tilefold import retrieval as r

SENTENCES = [f"Functions that read and write {subject} are here." for subject in SUBJECTS]
PASSAGES = r.Passages(6, 3)


def _document(name: str, title: str, first_sentence: int, end: int) -> r.Document:
    """A document of consecutive sentences."""
    return r.Document(name, title, " ".join(SENTENCES[first_sentence:end]))


# Texts of no to six sentences, and ids that look like those of passages.
DOCUMENTS = {
    "a": _document("a", "First", 0, 6),
    "a#1:0-3": _document("a#1:0-3", "", 6, 10),
    "b c": _document("b c", "Third", 10, 15),
    "#": _document("#", "", 15, 16),
    "e": _document("e", "Only", 0, 0),
}
CONTENTS = {name: document.contents for name, document in DOCUMENTS.items()}
