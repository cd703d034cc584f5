"""Documents of a collection: texts, or pages of PDFs and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.errors import DataError

__all__ = ["Content", "Document", "text_of"]

Content = str | Page  # what a model encodes of a document: its title and text, or its page


@dataclass(frozen=True)
class Document:
    """A document of a corpus.

    Attributes:
        id: unique id.
        title: title, which may be empty.
        text: text without the title.
        metadata: field -> value. An index may store them, so that ``where`` can filter by them.
        page: the page that a model of images encodes in place of the text; None for a text.

    Raises:
        TypeError: if id, title or text is not a string.

    Examples:
        >>> document = Document("cards", "Lost cards", "Block a lost card.", {"lang": "en"})
        >>> document.contents.splitlines()
        ['Lost cards', 'Block a lost card.']
    """

    id: str
    title: str
    text: str
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)
    page: Page | None = None

    def __post_init__(self) -> None:
        """Raise ``TypeError`` if id, title or text is not a string."""
        for name, value in (("id", self.id), ("title", self.title), ("text", self.text)):
            if not isinstance(value, str):
                raise TypeError(
                    f"{name}: expected a string, got {value!r} ({type(value).__name__}) in "
                    f"document {self.id!r}. Give str({value!r}), or '' for none.",
                )

    @property
    def contents(self) -> str:
        """Title and text, separated by a line break, which encoders and BM25 read."""
        if self.title and self.text:
            return f"{self.title}\n{self.text}"
        return self.title or self.text

    @property
    def content(self) -> Content:
        """Input of a model: the page, or title and text of a document without one."""
        return self.contents if self.page is None else self.page


def text_of(document: Document) -> str:
    """Return title and text of a document, for a purpose that needs a text.

    Raises:
        DataError: if the document is a page without a text.
    """
    if document.page is not None and not document.contents:
        raise DataError(
            f"documents: expected texts, got the page image {document.id!r}. Encode pages with a "
            "MultiVectorEncoder of images, such as ColPali, and search an index of their token "
            "vectors.",
        )
    return document.contents
