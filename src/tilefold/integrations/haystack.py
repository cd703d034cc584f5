"""Sparse embedders for Haystack, with a model in this process or through a server.

This module imports the package ``haystack-ai``. Haystack's own components for
text-embeddings-inference work with ``tilefold serve``, too. These components also accept a model,
and the other options of the server.
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
    """Base class of both components, which Haystack can save as part of a pipeline."""

    def __init__(
        self,
        model: Model | None = None,
        url: str | None = None,
        api_key: Secret | None = None,
        **options: Any,
    ) -> None:
        """Store the arguments. Texts are encoded by a model in this process, or by a server.

        Args:
            model: a ``SparseEncoder``, or the folder or Hugging Face name of one.
            url: the address of ``tilefold serve``, instead of a model.
            api_key: the key of the server.
            **options: other arguments of ``SparseSource``, such as ``top_k``.
        """
        # to_dict() saves the arguments. In place of the key, it saves the Secret, which names the
        # source of the key, such as an environment variable.
        self._arguments = {"model": model, "url": url, **options}
        self._api_key = api_key
        resolved_key = None if api_key is None else api_key.resolve_value()
        self._source = SparseSource(model, url, api_key=resolved_key, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dictionary, from which Haystack can save a pipeline.

        Raises:
            ValueError: if the model was given as an object, which cannot be saved.
        """
        if not isinstance(self._arguments["model"], str | None):
            raise ValueError(
                "model: expected a folder or a name, which a saved pipeline can store, got an "
                "object.",
            )
        api_key = None if self._api_key is None else self._api_key.to_dict()
        component_data: dict[str, Any] = default_to_dict(self, **self._arguments, api_key=api_key)
        return component_data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Create a component from the dictionary of :meth:`to_dict`."""
        arguments = dict(data.get("init_parameters", {}))
        if arguments.get("api_key") is not None:
            arguments["api_key"] = Secret.from_dict(arguments["api_key"])
        return default_from_dict(cls, {**data, "init_parameters": arguments})


@component
class TilefoldSparseTextEmbedder(_Embedder):
    """Computes the sparse embedding of a query, through the model's route for queries.

    The arguments are those of :class:`tilefold.integrations._sparse_source.SparseSource`, with
    ``api_key`` as a ``Secret``.
    """

    @component.output_types(sparse_embedding=SparseEmbedding)
    def run(self, text: str) -> dict[str, SparseEmbedding]:
        """Return the embedding of a query as ``"sparse_embedding"``."""
        ((indices, weights),) = self._source.encode([text], "query")
        return {"sparse_embedding": SparseEmbedding(indices=indices, values=weights)}


@component
class TilefoldSparseDocumentEmbedder(_Embedder):
    """Adds sparse embeddings to documents, through the model's route for documents.

    Documents without content get none. The arguments are those of
    :class:`TilefoldSparseTextEmbedder`.
    """

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return copies of the documents with ``sparse_embedding``, as ``"documents"``.

        Args:
            documents: the documents. Those without content are returned unchanged.
        """
        embedded = list(documents)
        positions = [position for position, document in enumerate(documents) if document.content]
        texts = [documents[position].content for position in positions]
        vectors = self._source.encode(texts, "document")
        for position, (indices, weights) in zip(positions, vectors, strict=True):
            embedded[position] = replace(
                documents[position],
                sparse_embedding=SparseEmbedding(indices=indices, values=weights),
            )
        return {"documents": embedded}
