"""``tilefold serve``: models and an index over HTTP."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilefold import retrieval
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, option, positive, refuse_options
from tilefold.retrieval.index import DENSE, LATE
from tilefold.serve.settings import Limits, check_origins

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Document
    from tilefold.retrieval.vectors.tokens import TokenStore
    from tilefold.serve.models import Kind, Served
    from tilefold.serve.searchable import Searchable
    from tilefold.serve.service import Service

KEY_VARIABLE = "TILEFOLD_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ServeRequest(_retrievers.IndexOptions, DocumentFieldOptions):
    """Options of ``tilefold serve``."""

    model: Annotated[
        str | None,
        option(
            "Folder or Hugging Face name of a sparse, multi-vector or dense model; or minilm.",
        ),
    ] = None
    index: Annotated[
        Path | None,
        option(
            "Index to search, with the --model that made it; BM25 needs none.",
            panel="Index",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The collection of --index, to show documents.",
            panel="Index",
        ),
    ] = None
    vectors: Annotated[
        Path | None,
        option(
            "The encoded documents of --index, for explanations and feedback; kept in memory.",
            panel="Index",
        ),
    ] = None
    bm25: Annotated[
        Path | None,
        option(
            "BM25 index of the same collection, to fuse with.",
            panel="Index",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        option(
            "Token vectors or a multi-vector model that reranks (as search --rerank).",
            panel="Index",
        ),
    ] = None
    tokens_model: Annotated[
        str | None,
        option(
            "Multi-vector model that made --tokens, where it has moved.",
            panel="Index",
        ),
    ] = None
    name: Annotated[
        str | None,
        option(
            "Name of --index in addresses; by default that of its folder.",
            panel="Index",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        positive(
            "Tokens read of a text, at most; by default as many as the model reads.",
        ),
    ] = None
    host: Annotated[
        str,
        option(
            "Interface to listen on; 0.0.0.0 for all.",
            panel="Access",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        option(
            "Port; 0 takes a free one.",
            min=0,
            max=65535,
            panel="Access",
        ),
    ] = 8080
    default_side: Annotated[
        Literal["query", "document"],
        option(
            "How to encode inputs posted to the root routes.",
        ),
    ] = "document"
    api_key_file: Annotated[
        Path | None,
        option(
            f"File with the key that requests must carry; or {KEY_VARIABLE} in the environment.",
            panel="Access",
        ),
    ] = None
    cors_allow_origin: Annotated[
        list[str] | None,
        option(
            "Site whose pages may ask this server in a browser; * for all; may be repeated.",
            panel="Access",
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int,
        option(
            "Inputs in work or waiting; the next gets a 429.",
            panel="Limits",
        ),
    ] = Limits.max_concurrent_requests
    max_batch_tokens: Annotated[
        int,
        option(
            "Tokens of a batch, padding included.",
            panel="Limits",
        ),
    ] = Limits.max_batch_tokens
    max_client_batch_size: Annotated[
        int,
        option(
            "Inputs of a request.",
            panel="Limits",
        ),
    ] = Limits.max_client_batch_size
    cached_queries: Annotated[
        int,
        option(
            "Answers kept for queries asked again; 0 keeps none.",
            min=0,
            panel="Limits",
        ),
    ] = Limits.cached_queries
    payload_limit: Annotated[
        int,
        option(
            "Bytes of a body.",
            panel="Limits",
        ),
    ] = Limits.payload_limit
    auto_truncate: Annotated[
        bool,
        option(
            "Cut inputs that are too long, or refuse them.",
            "--auto-truncate/--no-auto-truncate",
            panel="Limits",
        ),
    ] = Limits.auto_truncate
    grace_seconds: Annotated[
        float,
        option(
            "Seconds after SIGTERM in which requests are still taken, while /health answers 503.",
            min=0,
            panel="Limits",
        ),
    ] = Limits.grace_seconds

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.index is None:
            refuse_options(
                {
                    "--data": self.data,
                    "--vectors": self.vectors,
                    "--bm25": self.bm25,
                    "--name": self.name,
                },
                "goes with --index",
            )
            self.refuse_index_options("goes with --index")
            if self.model is None and self.tokens is None:
                raise UsageError(
                    "--model: expected a model, or --index with an index; got neither."
                )
        elif not re.fullmatch(r"[\w.-]+", self.index_name):
            raise UsageError(
                f"--name: expected letters, digits, dots and dashes, got {self.index_name!r}; it "
                "is part of addresses.",
            )
        if self.index is not None and self.model is None and self.tokens is None:
            refuse_options(
                {
                    "--default-side": self.default_side != "document",
                    "--max-batch-tokens": self.max_batch_tokens != Limits.max_batch_tokens,
                    "--auto-truncate/--no-auto-truncate": not self.auto_truncate,
                    "--max-length": self.max_length,
                },
                "does nothing for an index of words alone, without a model: leave it out",
            )
        if self.max_client_batch_size > self.max_concurrent_requests:
            raise UsageError(
                "--max-client-batch-size: expected at most --max-concurrent-requests "
                f"({self.max_concurrent_requests}), "
                f"got {self.max_client_batch_size}: such a request would never be taken.",
            )
        if self.tokens is None:
            refuse_options({"--tokens-model": self.tokens_model}, "goes with --tokens")

    @property
    def index_name(self) -> str:
        """Name of the index in addresses; empty without one."""
        if self.index is None:
            return ""
        return self.name or self.index.resolve().name

    def limits(self) -> Limits:
        """Return the limits of the service.

        Raises:
            UsageError: for a value out of range.
        """
        with _options.option_errors(
            max_concurrent_requests="--max-concurrent-requests",
            max_batch_tokens="--max-batch-tokens",
            max_client_batch_size="--max-client-batch-size",
            cached_queries="--cached-queries",
            payload_limit="--payload-limit",
            grace_seconds="--grace-seconds",
        ):
            return Limits(
                max_concurrent_requests=self.max_concurrent_requests,
                max_batch_tokens=self.max_batch_tokens,
                max_client_batch_size=self.max_client_batch_size,
                cached_queries=self.cached_queries,
                payload_limit=self.payload_limit,
                auto_truncate=self.auto_truncate,
                grace_seconds=self.grace_seconds,
            )


def serve(request: ServeRequest) -> None:
    """Serve a model and an index over HTTP, as text-embeddings-inference 1.9 does.

    POST /embed_sparse, /embed_all, /embed, /rerank, /score, /tokenize and /decode; GET /info,
    /health and /metrics. The same routes below /query and /document encode queries and documents,
    where a model tells them apart. With --index, GET and POST /v1/NAME/search and GET
    /v1/NAME/doc/ID. Ctrl-C ends the server.

    Example:
        tilefold serve --index INDEX --model MODEL --data DATA
    """
    _check_packages()
    limits = request.limits()
    key = _read_key(request.api_key_file)
    origins = request.cors_allow_origin or []
    with _options.option_errors(origins="--cors-allow-origin"):
        check_origins(origins)
    _models.find_models(
        {
            "--model": request.model,
            "--tokens": request.tokens,
            "--tokens-model": request.tokens_model,
        },
    )
    # The port is bound first: loading the models takes long, and would be lost for a taken port.
    with _bind(request.host, request.port) as bound:
        from tilefold.serve.service import Service

        models, searchable = _load(request)
        service = Service(models, limits, request.default_side, searchable)
        if request.host not in _LOOPBACK and key is None:
            note(
                f"--host: anyone who can reach {request.host} may use this server; set "
                "--api-key-file to require a key",
            )
        _run(service, key, bound, request.host, origins)


def _check_packages() -> None:
    """Raise ``CommandError`` if a package that the server needs is not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f'tilefold serve needs {error.name}: pip install "tilefold[serve]"',
        ) from error


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket to ``--host`` and ``--port``.

    Args:
        host: name or address.
        port: port; 0 takes any free one.

    Raises:
        CommandError: if the port is taken, or the host is none of this machine.
    """
    from tilefold.serve.server import bind

    try:
        return bind(host, port)
    except OSError as error:
        reason = error.strerror or _common.first_line(error)
        raise CommandError(
            f"--host, --port: cannot listen on {host}:{port} ({reason}); try --port 0.",
        ) from error


def _run(
    service: Service,
    key: str | None,
    bound: socket.socket,
    host: str,
    origins: Sequence[str],
) -> None:
    """Encode a word with every model, and serve until Ctrl-C or SIGTERM.

    Args:
        service: models and index.
        key: that requests must carry; None requires none.
        bound: socket of :func:`_bind`.
        host: value of ``--host``.
        origins: sites whose pages may send requests.
    """
    from tilefold.serve.app import create_app
    from tilefold.serve.server import run

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    names = [model.name for model in service.models.values()]
    if service.searchable is not None:
        names.append(service.searchable.name)
    served_names = " and ".join(names)
    try:
        service.warm_up()
    except Exception as error:  # a model may raise any
        raise CommandError(
            f"--model: {served_names} cannot encode a word ({_common.first_line(error)}).",
        ) from error
    # Requests that name another host are refused, so that pages of other sites have no access.
    is_private = host in _LOOPBACK and key is None
    app = create_app(service, key, local=is_private, origins=origins)
    host_in_url = f"[{host}]" if ":" in host else host  # as IPv6 addresses are written
    port = bound.getsockname()[1]

    def announce() -> None:
        note(f"{served_names} at http://{host_in_url}:{port}; Ctrl-C ends")
        for model in service.models.values():
            note(f"{model.name} computes in {model.precision}")

    run(app, service, bound, announce)


def _read_key(file: Path | None) -> str | None:
    """Return the key that requests must carry, or None if no key is set.

    Args:
        file: value of ``--api-key-file``; None reads the key from an environment variable.

    Raises:
        UsageError: for a file without one line.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    key = _options.read_text(file, "--api-key-file").strip()
    n_lines = len(key.splitlines())
    if n_lines != 1:
        got = f"{n_lines} lines" if key else "an empty one"
        raise UsageError(f"--api-key-file: expected one line with the key in {file}, got {got}.")
    return key


def _load(request: ServeRequest) -> tuple[list[Served], Searchable | None]:
    """Load the models, each once, and the index with its documents and vectors.

    Args:
        request: options of the command.

    Returns:
        The models, at most one of each kind, and the index; None without ``--index``.
    """
    from tilefold.serve.models import Served

    if request.index is not None:
        return _load_with_index(request, request.index)
    models: list[Served] = []
    if request.model is not None:
        kinds = ("sparse", "multi-vector", "dense")
        model, kind = _models.load_model(request.model, kinds=kinds)
        _limit_length(model, request)
        models.append(Served(model, kind, request.model))  # type: ignore[arg-type]
    if request.tokens is not None:
        # Without an index, nothing reads the token vectors: only their model is served.
        late, _ = _load_late(request, has_texts=True)
        models.append(late)
    if len({model.kind for model in models}) < len(models):
        raise UsageError(
            "--tokens: --model is a multi-vector model itself, which reranks: leave one out.",
        )
    return models, None


def _load_with_index(
    request: ServeRequest,
    index_path: Path,
) -> tuple[list[Served], Searchable]:
    """Load the index with its model, documents, vectors, second ranking and reranker.

    Args:
        request: options of the command.
        index_path: value of ``--index``.

    Returns:
        The models to serve (that of the index, and that of ``--tokens``), and the index.
    """
    from tilefold.serve.searchable import Searchable

    loaded = _retrievers.load_index(request, _common.texts_of(request.data))
    index = loaded.index
    model = loaded.model
    documents: Mapping[str, Document] = {}
    if request.data is not None:
        documents = _scores.open_documents(request.data, index_path, index.provenance)
    encoder = None
    if model is None:
        refuse_options(
            {"--vectors": request.vectors, "--bm25": request.bm25},
            f"does nothing here: {index_path} is a BM25 index",
        )
    else:
        encoder = _served_encoder(request, index_path, index.backend, model)
    vectors = None if request.vectors is None else retrieval.read_vectors(request.vectors)
    late = None
    store = None
    if request.tokens is not None:
        late, store = _load_late(request, has_texts=request.data is not None)
        if model is None and store is not None:
            refuse_options(
                {"--max-length": request.max_length},
                "does nothing with token vectors, whose queries are read as they were: leave it "
                "out",
            )
    words = None if request.bm25 is None else _load_bm25(request.bm25)
    option_errors = _options.option_errors(
        vectors=f"--vectors: {request.vectors}",
        second=f"--bm25: {request.bm25}",
        tokens="--tokens",
        model="--tokens-model",
    )
    with option_errors, _common.noting_precisions():
        searchable = Searchable(
            request.index_name,
            index,
            encoder=encoder,
            documents=documents,
            vectors=vectors,
            words=words,
            late=late,
            store=store,
            query_top_k=request.query_top_k,
            options=loaded.search_options,
        )
    models = [served for served in (encoder, late) if served is not None]
    return models, searchable


def _served_encoder(
    request: ServeRequest,
    index_path: Path,
    backend: str,
    model: Model,
) -> Served:
    """Return the served model of an index of vectors, and refuse options of other indexes.

    Args:
        request: options of the command.
        index_path: folder of the index.
        backend: backend of the index, which decides the kind of the model.
        model: encodes queries for the index.
    """
    from tilefold.serve.models import Served

    _limit_length(model, request)
    kind: Kind = "sparse"
    if backend == DENSE:
        kind = "dense"
        refuse_options(
            {"--vectors": request.vectors},
            f"does nothing here: {index_path} holds its own vectors",
        )
    if backend == LATE:
        kind = "multi-vector"
        refuse_options(
            {"--tokens": request.tokens},
            f"does nothing here: {index_path} is an index of token vectors",
        )
    return Served(model, kind, str(request.model))


def _load_bm25(path: Path) -> Any:
    """Open the BM25 index of ``--bm25``.

    Raises:
        UsageError: for an index of vectors.
    """
    from tilefold.retrieval.index.opening import open_index

    index = open_index(path)
    if index.backend != "bm25":
        raise UsageError(
            f"--bm25: {path} is an index of vectors; try tilefold index --backend bm25.",
        )
    return index


def _limit_length(model: Model, request: ServeRequest) -> None:
    """Let a model read at most ``--max-length`` tokens of a text."""
    from tilefold.retrieval.encoding.truncation import limit_length

    with _options.option_errors(max_length="--max-length"):
        for side in ("query", "document"):
            limit_length(model, side, request.max_length)


def _load_late(
    request: ServeRequest,
    has_texts: bool,
) -> tuple[Served, TokenStore | None]:
    """Load the multi-vector model of ``--tokens``, and its token vectors if the option names them.

    Args:
        request: options of the command.
        has_texts: whether the server has the texts of documents, which a model without token
            vectors encodes.

    Returns:
        The model, and the token vectors; None in their place if ``--tokens`` is a model.
    """
    from tilefold.serve.models import Served

    model, store = _retrievers.load_late(
        str(request.tokens),
        request.tokens_model,
        has_texts=has_texts,
        option="--tokens",
    )
    # Queries for token vectors are read as they were when the vectors were made.
    if store is None or request.index is None:
        _limit_length(model, request)
    name = request.tokens
    if store is not None:
        name = request.tokens_model or store.manifest.model_source
    return Served(model, "multi-vector", str(name)), store
