"""Explanations of late interaction: the document token that matched each token of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilefold.retrieval.common.files import Json
from tilefold.retrieval.encoding.scored_tokens import (
    ScoredTokens,
    content_positions,
    scored_tokens,
)
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.search.heat_maps import (
    Box,
    PatchGrid,
    draw_heat_map,
    draw_matches,
    patch_grid,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from tilefold._internal.typing import Model

__all__ = ["ExplainedQuery", "Explanation", "TokenMatch"]


@dataclass(frozen=True)
class TokenMatch:
    """A token of a query, and the token of the document that is most similar to it.

    Attributes:
        query_position: position of the query token among the scored tokens of the query.
        query_token: the query token, as the tokenizer spells it.
        is_content: whether the query token spells a word of the query. Markers, special tokens and
            expansion tokens have matches too, which count in the score.
        document_position: position of the document token among the document's vectors.
        document_token: the document token, as the tokenizer spells it.
        similarity: inner product of the two vectors. The score of the document is the sum of these
            numbers, or their mean for a model that is trained with it.
        box: part of the page image that the document token covers; None for a text, and for a
            token of a page that is not a patch.
        is_prompt: whether the document token is part of the prompt with which the model reads a
            page image. Always False for texts.
    """

    query_position: int
    query_token: str
    is_content: bool
    document_position: int
    document_token: str
    similarity: float
    box: Box | None = None
    is_prompt: bool = False

    def as_json(self) -> Json:
        """Return the match as a JSON object.

        Only matches on page images have a ``box``, or ``prompt`` with the value true.
        """
        record: Json = {
            "query_token": self.query_token,
            "content": self.is_content,
            "document_token": self.document_token,
            "document_position": self.document_position,
            "similarity": self.similarity,
        }
        if self.box is not None:
            record["box"] = list(self.box)
        if self.is_prompt:
            record["prompt"] = True
        return record


@dataclass(frozen=True)
class Explanation:
    """The score of a document by late interaction, token by token.

    Attributes:
        matches: one match per scored token of the query, in the order of the query.
        similarities: similarity of each query token with each document token, ``[Lq, Ld]`` fp32.
        grid: cells of the page image that the document tokens cover; None for a text.
    """

    matches: list[TokenMatch]
    similarities: Tensor
    grid: PatchGrid | None = None

    def heat(self, query_position: int | None = None) -> Tensor:
        """Return the heat of the cells of a page image: how similar page tokens on a cell are.

        Args:
            query_position: position of the query token; None sums over the tokens that spell words
                of the query, or over all tokens if none does.

        Returns:
            The heat, ``[n_rows, n_columns]``. Cells that no token covers are -inf.

        Raises:
            ValueError: if the document is a text.
        """
        if self.grid is None:
            raise ValueError("explanation: expected that of a page image, got that of a text.")
        if query_position is not None:
            return self.grid.heat(self.similarities[query_position, None])[0]
        return self.grid.heat(self.similarities[self._content_positions()]).sum(dim=0)

    def draw(self, image: Image, query_position: int | None = None) -> Image:
        """Draw the heat map over the page, with the best patch of each query token.

        Args:
            image: the page, as it was encoded.
            query_position: position of the query token; None draws all tokens that spell words of
                the query.

        Returns:
            A new RGB image of the same size.
        """
        positions = self._content_positions() if query_position is None else [query_position]
        matches = [self.matches[position] for position in positions]
        boxes = [(match.query_token, match.box) for match in matches if match.box is not None]
        return draw_matches(draw_heat_map(image, self.heat(query_position)), boxes)

    def _content_positions(self) -> list[int]:
        """Return the query tokens that spell words, or all tokens if none does."""
        positions = [match.query_position for match in self.matches if match.is_content]
        return positions or list(range(len(self.matches)))


class ExplainedQuery:
    """A query whose late-interaction scores are explained.

    Args:
        model: the ``MultiVectorEncoder`` that encoded the query and the documents.
        query: text of the query.
        vectors: token vectors of the query, ``[Lq, D]``.

    Raises:
        DataError: if the model returns another number of tokens than there are vectors.
    """

    def __init__(self, model: Model, query: str, vectors: Tensor) -> None:
        self._model = model
        self._vectors = vectors.float().cpu()
        tokens = scored_tokens(model, query, "query")
        _check_count("the query", tokens, self._vectors)
        self._tokens = tokens.names
        self._content = set(content_positions(model, query, tokens))

    def explain(self, document_id: str, item: str | Image, vectors: Tensor) -> Explanation:
        """Explain the score of a document.

        Args:
            document_id: id of the document, for errors.
            item: text or page image that was encoded.
            vectors: token vectors of the document, ``[Ld, D]``, at least one.

        Raises:
            DataError: if the model returns another number of tokens than there are vectors.
        """
        tokens = scored_tokens(self._model, item, "document")
        document_vectors = vectors.float().cpu()
        _check_count(repr(document_id), tokens, document_vectors)
        grid = None
        if not isinstance(item, str):
            grid = patch_grid(self._model, item, tokens)
        similarities = self._vectors @ document_vectors.T
        best_similarities, best_positions = similarities.max(dim=1)
        matches = self._create_matches(
            tokens.names,
            best_positions.tolist(),
            best_similarities.tolist(),
            grid,
        )
        return Explanation(matches, similarities, grid)

    def _create_matches(
        self,
        document_tokens: Sequence[str],
        best_positions: Sequence[int],
        best_similarities: Sequence[float],
        grid: PatchGrid | None,
    ) -> list[TokenMatch]:
        """Create one match per query token: the document token that is most similar to it.

        A match with a page image has the part of the image that the document token covers.

        Args:
            document_tokens: tokens of the document.
            best_positions: for each query token, the position of the most similar document token.
            best_similarities: for each query token, its similarity with that document token.
            grid: which cells of the page image each document token covers; None for a text.
        """
        matches = []
        for query_position, (query_token, position, similarity) in enumerate(
            zip(self._tokens, best_positions, best_similarities, strict=True),
        ):
            box = None if grid is None else grid.box(position)
            # Tokens of a page that cover no part of the image are those of the model's prompt.
            is_prompt = grid is not None and box is None
            match = TokenMatch(
                query_position=query_position,
                query_token=query_token,
                is_content=query_position in self._content,
                document_position=position,
                document_token=document_tokens[position],
                similarity=similarity,
                box=box,
                is_prompt=is_prompt,
            )
            matches.append(match)
        return matches


def _check_count(description: str, tokens: ScoredTokens, vectors: Any) -> None:
    """Raise ``ArgumentDataError`` if a model returns more or fewer tokens than there are vectors.

    Args:
        description: what the tokens are, for the error.
        tokens: the tokens.
        vectors: their token vectors.
    """
    if len(tokens.ids) != len(vectors):
        raise ArgumentDataError(
            "explain",
            f"expected one vector per token of {description}, got {len(vectors)} vectors "
            f"for {len(tokens.ids)} tokens. The vectors were pooled, or encoded with another "
            "--max-length or --dpi, or from another text. Build the index with the defaults of "
            "encode to explain its hits.",
        )
