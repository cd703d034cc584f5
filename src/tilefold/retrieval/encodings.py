"""Records of what texts are encoded into, which can be sent to other processes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tilefold._typing import Model
from tilefold.pipeline.rows import say_unused_batch_tokens
from tilefold.retrieval._made import Maker, PlainStream
from tilefold.retrieval._rank_shards import write_folder
from tilefold.retrieval._streamed import Job, Output
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.truncation import cut_texts

__all__ = ["Encoding", "Kind", "Output", "encode_to_folder"]

Kind = Literal["document", "query"]


@dataclass(frozen=True, kw_only=True)
class Encoding(ABC):
    """Options of encoding texts, apart from the model.

    Attributes:
        kind: ``"document"`` or ``"query"``: the model's prompt and route.
        batch_size: texts encoded at a time, at most.
        batch_tokens: tokens that an accelerated model encodes at a time.
    """

    kind: Kind = "document"
    batch_size: int | None = None
    batch_tokens: int | None = None

    def check(self) -> None:
        """Raise ``ValueError`` for a value that it cannot have."""
        if self.kind not in ("document", "query"):
            raise ValueError(f"kind: expected 'document' or 'query', got {self.kind!r}.")
        for name in ("batch_size", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")

    @abstractmethod
    def job(self, model: Model, texts: Mapping[str, str], output: Output, texts_sha256: Callable[[], str]) -> Job[Any]:
        """The work of `model`, which is looked at, so that a wrong one is an error.

        Args:
            model: a sentence-transformers model.
            texts: id -> text, in a fixed order.
            output: where the vectors go.
            texts_sha256: what identifies the texts; called when the folder is opened.
        """

    @abstractmethod
    def plain(self, model: Model) -> PlainStream:
        """Batches of a model that is not accelerated."""

    def _job(
        self,
        model: Model,
        texts: Mapping[str, str],
        output: Output,
        open_writer: Callable[[bool], Any],
        look: Callable[[], object],
        maker: Maker[Any],
        stream: Callable[..., Any] | None,
    ) -> Job[Any]:
        """The work, by the `stream` of an accelerated model, or without one by :meth:`plain`."""
        if stream is None and self.batch_tokens is not None:
            say_unused_batch_tokens()
        limits = {"batch_size": self.batch_size, "batch_tokens": self.batch_tokens}
        return Job(
            texts=texts,
            output=output,
            open_writer=open_writer,
            look=look,
            stream=self.plain(model) if stream is None else functools.partial(stream, task=self.kind, **limits),
            prepare=functools.partial(cut_texts, model),
            maker=maker,
            ahead=stream is not None,
        )


def encode_to_folder(
    encoding: Encoding, model: Model, texts: Mapping[str, str], output: Output, group: object = None
) -> Any:
    """Encode texts with a model of this process, or with those of all ranks of a group; the complete manifest.

    Arguments and errors are those of :func:`tilefold.retrieval.encode_collection`.
    """
    encoding.check()
    output.check()
    if not texts:
        raise ValueError("texts: expected at least one, got an empty mapping.")
    return write_folder(encoding.job(model, texts, output, lambda: texts_digest(texts)), group)
