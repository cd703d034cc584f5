"""Routes that change what a server serves; they need a key of their own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, field_validator, model_validator

from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.data.collection import Document
from tilefold.serve.bodies import ServeError, StrictBody, invalid_input_error, to_json
from tilefold.serve.document_log import Change
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.service import Follower, Service, Writer

__all__ = ["ADMIN_PATHS", "MAX_DOCUMENTS", "admin_router"]

MAX_DOCUMENTS = 1000
"""Largest number of documents of a request."""
_MAX_ID_CHARACTERS = 512
_RELOAD_PATH = "/admin/reload"
_DOCUMENTS_PATH = "/documents"
# Paths that need the admin key.
ADMIN_PATHS = frozenset({_RELOAD_PATH, _DOCUMENTS_PATH})
_ACCEPTED = 202  # HTTP status: the changes are stored, and searches will see them later


def _checked_id(document_id: str) -> str:
    """Return the id of a document, or raise ``ValueError`` if an index cannot store it."""
    if not document_id.strip():
        raise ValueError("expected an id, got an empty one")
    if len(document_id) > _MAX_ID_CHARACTERS:
        raise ValueError(f"expected at most {_MAX_ID_CHARACTERS} characters")
    if len(document_id.splitlines()) > 1 or document_id != document_id.strip():
        raise ValueError("expected an id without line breaks, and without spaces at its ends")
    check_text_ids("id", [document_id])
    return document_id


class DocumentBody(StrictBody):
    """A document to put."""

    id: str
    title: str = ""
    text: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    _check_id = field_validator("id")(_checked_id)

    @model_validator(mode="before")
    @classmethod
    def _refuse_field_named_like_in_files(cls, fields: Any) -> Any:
        """Raise ``ValueError`` if the id is called ``_id``, as in files of documents."""
        if isinstance(fields, dict) and "_id" in fields and "id" not in fields:
            raise ValueError("expected the id as `id`, got `_id`; rename the field")
        return fields

    def to_document(self) -> Document:
        """Return the document.

        Raises:
            ServeError: if it has neither a title nor a text.
        """
        if not self.title.strip() and not self.text.strip():
            raise invalid_input_error(f"document {self.id!r} has neither a title nor a text")
        return Document(self.id, self.title, self.text, self.metadata)


class PutBody(StrictBody):
    """Body of a request to put documents. A document with the same id is replaced."""

    documents: list[DocumentBody] = Field(min_length=1, max_length=MAX_DOCUMENTS)


class DeleteBody(StrictBody):
    """Body of a request to delete documents. Unknown ids are no error."""

    ids: list[str] = Field(min_length=1, max_length=MAX_DOCUMENTS)

    @field_validator("ids")
    @classmethod
    def _check_ids(cls, ids: list[str]) -> list[str]:
        return [_checked_id(document_id) for document_id in ids]


def admin_router(service: Service) -> APIRouter:
    """Create the routes that change what a service serves.

    Args:
        service: the service.
    """
    return _AdminRoutes(service).router()


class _AdminRoutes:
    """Routes that change what a service serves.

    Attributes:
        service: the service.
    """

    def __init__(self, service: Service) -> None:
        """Create the routes of a service."""
        self.service = service

    def router(self) -> APIRouter:
        """Create the router with all routes."""
        router = APIRouter()
        add_route(
            router,
            self.service,
            _RELOAD_PATH,
            self.reload,
            "Open the current generation of the index, which takes over between two requests",
            method="POST",
        )
        add_route(
            router,
            self.service,
            _DOCUMENTS_PATH,
            self.put,
            "Add documents to the index, or replace those with the same ids",
            PutBody,
            method="PUT",
        )
        add_route(
            router,
            self.service,
            _DOCUMENTS_PATH,
            self.delete,
            "Remove documents from the index",
            DeleteBody,
            method="DELETE",
        )
        add_route(
            router,
            self.service,
            _DOCUMENTS_PATH,
            self.describe,
            "Documents that are pending or failed",
        )
        return router

    async def reload(self, request: Request) -> Response:
        """Open the current generation of the index, and answer with a description of it."""
        searchable = await _follower_of(self.service).reload()
        answer = {
            "index": searchable.name,
            "generation": searchable.generation,
            "documents": searchable.index.n_documents,
        }
        return Response(to_json(answer), media_type=JSON)

    async def put(self, body: PutBody, request: Request) -> Response:
        """Add documents to the index, or replace documents."""
        documents = [document.to_document() for document in body.documents]
        changes = [Change(document.id, document) for document in documents]
        return await self._accept(changes, request)

    async def delete(self, body: DeleteBody, request: Request) -> Response:
        """Remove documents from the index."""
        return await self._accept([Change(document_id, None) for document_id in body.ids], request)

    async def describe(self, request: Request) -> Response:
        """Answer with the state of pending and failed changes."""
        return Response(to_json(_writer_of(self.service).info()), media_type=JSON)

    async def _accept(self, changes: list[Change], request: Request) -> Response:
        """Accept changes, and answer with the receipt.

        Args:
            changes: the changes of the request.
            request: the request, with the parameter ``wait``.
        """
        wait = _wait_parameter(request)
        receipt = await _writer_of(self.service).accept(changes, wait=wait)
        status = 200 if receipt.visible else _ACCEPTED
        return Response(to_json(asdict(receipt)), status, media_type=JSON)


def _wait_parameter(request: Request) -> bool:
    """Return the query parameter ``wait``: whether to answer when searches see the changes.

    Raises:
        ServeError: if it is neither ``true`` nor ``false``, or there is another parameter.
    """
    values = {"true": True, "false": False}
    unknown = [name for name in request.query_params if name != "wait"]
    if unknown:
        raise invalid_input_error(f"unknown query parameter {unknown[0]!r}, expected wait")
    value = request.query_params.get("wait", "false")
    if value not in values:
        raise invalid_input_error(f"`wait` expected true or false, got {value!r}")
    return values[value]


def _follower_of(service: Service) -> Follower:
    """Return the follower of a service.

    Raises:
        ServeError: if the service has no index in a folder.
    """
    if service.follower is None:
        raise ServeError(
            "Validation",
            "this server has no index folder: start it with --index",
            status=404,
        )
    return service.follower


def _writer_of(service: Service) -> Writer:
    """Return the writer of a service.

    Raises:
        ServeError: if the index of the service takes no documents.
    """
    if service.writer is None:
        raise ServeError(
            "Validation",
            "this server takes no documents: start it with an --index folder of another backend "
            "than qdrant, and without --vectors, --bm25 and stored --tokens, which would lack the "
            "new documents",
            status=409,
        )
    return service.writer
