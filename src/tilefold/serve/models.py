"""The models of a service, each loaded once: what they are called, what they take, and how they encode a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.retrieval.encoding import encode_batch
from tilefold.retrieval.truncation import cut_texts
from tilefold.retrieval.vectors import SparseVectors
from tilefold.serve.errors import invalid
from tilefold.serve.text import TextTokens

__all__ = ["Kind", "Served", "Side", "Way"]

Kind = Literal["sparse", "multi-vector", "dense"]
Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
_UNLIMITED = 1 << 30  # transformers says 1e30 where a tokenizer has no limit


class Way(NamedTuple):
    """How a text is encoded: texts that share a way share batches.

    Attributes:
        kind: of the model.
        side: whether it is a query or a document.
        prompt: name of a prompt to use instead of the side's own, or None.
        direction: from which end a text that is too long is cut.
    """

    kind: Kind
    side: Side
    prompt: str | None = None
    direction: Literal["left", "right"] = "right"


@dataclass
class Served:
    """A model and what the service knows of it.

    Attributes:
        model: a ``SparseEncoder``, ``MultiVectorEncoder`` or ``SentenceTransformer``; accelerated where that helps.
        kind: which of them.
        name: what clients are told; a folder's own name, without the way to it.
    """

    model: Any
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        path = Path(self.name)
        self.name = path.resolve().name if path.is_dir() or path.is_absolute() else self.name
        self.text = TextTokens(self.model.tokenizer)
        self.prompts: dict[str, str] = {key: value or "" for key, value in (self.model.prompts or {}).items()}
        self.model.eval()

    @property
    def device(self) -> str:
        """Where the model computes."""
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        """Dtype of its weights, in the words of text-embeddings-inference."""
        found = next((tensor.dtype for tensor in self.model.parameters()), torch.float32)
        return str(found).removeprefix("torch.")

    def limit(self, side: Side) -> int:
        """The most tokens that the model reads of a text."""
        first = next(iter(self.model.children()), None)
        known = [getattr(first, f"{side}_length", None), getattr(self.model, "max_seq_length", None)]
        known += [getattr(self.model.tokenizer, "model_max_length", None)]
        given = [int(limit) for limit in known if isinstance(limit, int | float) and 0 < limit < _UNLIMITED]
        return min(given, default=512)

    def way(self, side: Side, prompt_name: str | None, direction: Literal["left", "right"] = "right") -> Way:
        """The way of a request; ``prompt_name`` of "query" or "document" chooses the side.

        Raises:
            ServeError: the model has no prompt of that name.
        """
        if prompt_name in SIDES:
            return Way(self.kind, prompt_name, None, direction)
        if prompt_name is not None and prompt_name not in self.prompts:
            known = ", ".join(dict.fromkeys([*SIDES, *self.prompts]))
            raise invalid(f"`prompt_name` expected one of {known}; got {prompt_name!r}")
        return Way(self.kind, side, prompt_name, direction)

    def prompt(self, way: Way) -> str:
        """What stands before every text of a way."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus")}[way.side]
        named = [way.prompt] if way.prompt else [*names, self.model.default_prompt_name]
        return next((self.prompts[name] for name in named if name in self.prompts), "")

    def encode(self, way: Way, texts: Sequence[str]) -> list[Any]:
        """One row per text: sparse ``(indices, weights)``, a matrix of token vectors, or a dense vector, on the CPU.

        To be called in one thread only, since truncation on the left is a state of the tokenizer.

        Raises:
            DataError, ValueError: a row that is not finite.
        """
        tokenizer = self.model.tokenizer
        stock = tokenizer.truncation_side
        tokenizer.truncation_side = way.direction
        ways: dict[Kind, Callable[[Way, Sequence[str]], list[Any]]]
        ways = {"sparse": self._sparse, "multi-vector": self._tokens, "dense": self._dense}
        try:
            return ways[self.kind](way, texts)
        finally:
            tokenizer.truncation_side = stock

    def _sparse(self, way: Way, texts: Sequence[str]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
        if way.prompt is None:
            rows = encode_batch(self.model, texts, way.side)
        else:
            cut = cut_texts(self.model, texts)
            rows = encode_sparse(self.model, cut, task=way.side, prompt_name=way.prompt, batch_size=len(cut))
        vectors = SparseVectors.from_torch([str(row) for row in range(len(texts))], rows)
        return [vectors.row(row) for row in range(len(texts))]

    def _tokens(self, way: Way, texts: Sequence[str]) -> list[torch.Tensor]:
        rows = [row.detach().float().cpu() for row in self._encoded(way, texts)]
        if not all(bool(row.isfinite().all()) for row in rows):
            raise ValueError("texts: expected finite token vectors, got others.")
        return rows

    def _dense(self, way: Way, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        rows: torch.Tensor = self._encoded(way, texts, convert_to_tensor=True).detach().float().cpu()
        if not bool(rows.isfinite().all()):
            raise ValueError("texts: expected finite vectors, got others.")
        return list(rows.numpy())

    def _encoded(self, way: Way, texts: Sequence[str], **options: Any) -> Any:
        cut = cut_texts(self.model, texts)
        options |= {"batch_size": len(cut), "show_progress_bar": False}
        if way.prompt is not None:
            return self.model.encode(cut, prompt_name=way.prompt, task=way.side, **options)
        encode = self.model.encode_query if way.side == "query" else self.model.encode_document
        return encode(cut, **options)
