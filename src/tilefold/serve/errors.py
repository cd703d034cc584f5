"""Errors that a client sees: a kind of text-embeddings-inference with its HTTP code, and a text without paths."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ClientGoneError", "ServeError", "empty", "invalid", "wrong_model"]

# kind -> HTTP code, and the label of te_request_failure
_KINDS = {
    "Unhealthy": (503, "unhealthy"),
    "Backend": (424, "inference"),
    "Overloaded": (429, "overloaded"),
    "Validation": (422, "validation"),
    "Tokenizer": (422, "tokenization"),
    "Empty": (400, "validation"),
}
_SHOWN = 300  # characters of a message


class ClientGoneError(Exception):
    """The client closed its connection before the answer was there."""


class ServeError(Exception):
    """An error of a request, or of the service, with the code of its kind and its label among metrics, or others."""

    def __init__(self, kind: str, message: str, *, status: int | None = None, label: str | None = None) -> None:
        super().__init__(message)
        own_status, own_label = _KINDS[kind]
        self.kind, self.status, self.label = kind, status or own_status, label or own_label
        self.message = message if len(message) <= _SHOWN else message[:_SHOWN] + " ..."

    def body(self) -> bytes:
        """The answer in the form of text-embeddings-inference."""
        return _json({"error": self.message, "error_type": self.kind})

    def openai_body(self) -> bytes:
        """The answer of its OpenAI route."""
        return _json({"message": self.message, "code": self.status, "type": self.kind})


def invalid(message: str, **options: Any) -> ServeError:
    """A request that means nothing here: 422."""
    return ServeError("Validation", f"Input validation error: {message}", **options)


def empty(name: str) -> ServeError:
    """A text, or a list of token ids, without anything in it: 400."""
    return ServeError("Empty", f"Input validation error: `{name}` cannot be empty", label="tokenization")


def wrong_model(message: str) -> ServeError:
    """The service has no model of the kind that a route needs: 424."""
    return ServeError("Backend", message, label="model_type")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
