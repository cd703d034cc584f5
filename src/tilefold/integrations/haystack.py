"""Sparse embedders for Haystack, of a model in this process or of a server.

Needs the package ``haystack-ai``, which is imported with this module. Haystack's own components for
text-embeddings-inference work with ``tilefold serve`` as they are; these take a model too, and the
server's own fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilefold._internal.typing import Model
from tilefold.integrations._sparse_source import ServerError, SparseSource

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import SparseEmbedding
    from haystack.utils import Secret
except ImportError as missing:
    raise ImportError(
        "tilefold.integrations.haystack needs haystack-ai: pip install haystack-ai",
    ) from missing

__all__ = ["ServerError", "TilefoldSparseDocumentEmbedder", "TilefoldSparseTextEmbedder"]


class _Embedder:
    """Base of both components; arguments as of :class:`TilefoldSparseTextEmbedder`."""

    def __init__(
        self,
        model: Model | None = None,
        url: str | None = None,
        api_key: Secret | None = None,
        **options: Any,
    ) -> None:
        self._given, self._secret = {"model": model, "url": url, **options}, api_key
        key = None if api_key is None else api_key.resolve_value()
        self._source = SparseSource(model, url, api_key=key, **options)

    def to_dict(self) -> dict[str, Any]:
        """For a pipeline on disk.

        Raises:
            ValueError: the model is an object, which a file cannot name.
        """
        if not isinstance(self._given["model"], str | None):
            raise ValueError(
                "model: expected a folder or a name to store the pipeline, got an object.",
            )
        secret = None if self._secret is None else self._secret.to_dict()
        stored: dict[str, Any] = default_to_dict(self, **self._given, api_key=secret)
        return stored

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """From :meth:`to_dict`."""
        options = dict(data.get("init_parameters", {}))
        if options.get("api_key") is not None:
            options["api_key"] = Secret.from_dict(options["api_key"])
        return default_from_dict(cls, {**data, "init_parameters": options})


@component
class TilefoldSparseTextEmbedder(_Embedder):
    """The sparse embedding of a query, by the model's route for queries.

    Arguments are those of :class:`tilefold.integrations._sparse_source.SparseSource`, `api_key` as
    a ``Secret``.
    """

    @component.output_types(sparse_embedding=SparseEmbedding)
    def run(self, text: str) -> dict[str, SparseEmbedding]:
        """``{"sparse_embedding"}``."""
        ((ids, weights),) = self._source.encode([text], "query")
        return {"sparse_embedding": SparseEmbedding(indices=ids, values=weights)}


@component
class TilefoldSparseDocumentEmbedder(_Embedder):
    """Documents with their sparse embeddings, by the model's route for documents; without content
    they stay bare.

    Arguments are those of :class:`TilefoldSparseTextEmbedder`.
    """

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """``{"documents"}``, copies with ``sparse_embedding``."""
        texts = {place: each.content for place, each in enumerate(documents) if each.content}
        rows = dict(zip(texts, self._source.encode(list(texts.values()), "document"), strict=True))
        found = {
            place: SparseEmbedding(indices=ids, values=weights)
            for place, (ids, weights) in rows.items()
        }
        embedded = [
            replace(each, sparse_embedding=found[place]) if place in found else each
            for place, each in enumerate(documents)
        ]
        return {"documents": embedded}
