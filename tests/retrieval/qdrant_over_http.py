"""The local mode of qdrant-client behind HTTP, with faults on request: for what happens on the
wire.

It is no Qdrant server, and says nothing of what one answers. A suite over it tests that requests
are well formed for the client's own implementation, and what the adapter does when answers are
late, missing or refusals.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qdrant_client import QdrantClient, models

Fault = Callable[[str, str], int | None]


class OverHttp(ThreadingHTTPServer):
    """Listens on the loopback address until :meth:`stop`.

    Attributes:
        key: which a request must have as ``api-key``, or None.
        fault: called with method and path before each request; a status to answer with, 0 to close
            the connection; 200 is an answer that makes no sense.
        seen: method and path of every request.
    """

    daemon_threads = True

    def __init__(self, client: QdrantClient | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.client = client or QdrantClient(":memory:")
        self.lock, self.key, self.fault = threading.Lock(), None, None
        self.seen: list[tuple[str, str]] = []
        threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        ).start()

    key: str | None
    fault: Fault | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that left are no news."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, method: str, path: str, body: Any) -> Any:
        """The result of a request, as the client gives it."""
        _, _, name, *rest = path.split("/")
        client, what = self.client, (method, "/".join(rest))
        if what == ("GET", "exists"):
            return {"exists": client.collection_exists(name)}
        if what == ("PUT", ""):
            made = models.CreateCollection.model_validate(body)
            if client.collection_exists(name):
                raise FileExistsError(name)
            return client.create_collection(
                name,
                made.vectors,
                made.sparse_vectors,
                metadata=made.metadata,
            )
        if not client.collection_exists(name):
            raise FileNotFoundError(name)
        if what == ("POST", "points"):
            request = models.PointRequest.model_validate(body)
            return client.retrieve(
                name,
                request.ids,
                request.with_payload or False,
                request.with_vector or False,
            )
        if what == ("POST", "points/scroll"):
            page = models.ScrollRequest.model_validate(body)
            result, following = client.scroll(
                name,
                limit=page.limit or 10,
                offset=page.offset,
                with_payload=True,
            )
            return {"points": result, "next_page_offset": following}
        routes: dict[tuple[str, str], Callable[[], Any]] = {
            ("GET", ""): lambda: client.get_collection(name),
            ("PATCH", ""): lambda: client.update_collection(name, metadata=body["metadata"]),
            ("DELETE", ""): lambda: client.delete_collection(name),
            ("PUT", "index"): lambda: {
                "operation_id": 0,
                "status": "completed",
            },  # the local mode has none
            ("PUT", "points"): lambda: client.upsert(
                name,
                models.PointsList.model_validate(body).points,
            ),
            ("POST", "points/delete"): lambda: client.delete(
                name,
                models.PointIdsList.model_validate(body),
            ),
            ("POST", "points/count"): lambda: client.count(
                name,
                models.CountRequest.model_validate(body).filter,
            ),
            ("POST", "points/query/batch"): lambda: client.query_batch_points(
                name,
                models.QueryRequestBatch.model_validate(body).searches,
            ),
        }
        return routes[what]()


class _Handler(BaseHTTPRequestHandler):
    server: OverHttp
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, path))
        status = self.server.fault(self.command, path) if self.server.fault else None
        if status == 0:
            self.connection.close()
            self.close_connection = True
            return
        if self.server.key is not None and self.headers.get("api-key") != self.server.key:
            status = 401
        if status is not None:
            self._send(
                status,
                {"status": {"error": f"refused, with {self.headers.get('api-key')}"}, "time": 0.0},
            )
            return
        try:
            with self.server.lock, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = self.server.answer(self.command, path, json.loads(body) if body else None)
        except (FileNotFoundError, FileExistsError, ValueError) as error:
            code = {FileNotFoundError: 404, FileExistsError: 409}.get(type(error), 400)
            self._send(code, {"status": {"error": str(error)}, "time": 0.0})
            return
        self._send(200, {"result": _plain(result), "status": "ok", "time": 0.0})

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _send(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
