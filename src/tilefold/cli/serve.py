"""``tilefold serve``: models and an index over HTTP."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

from tilefold import retrieval
from tilefold._internal.memory import drop_memory
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, option, positive, refuse_options
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.datasets import check_collection_exists
from tilefold.retrieval.index import DENSE, LATE
from tilefold.retrieval.index.protocol import read_description
from tilefold.serve.settings import Limits, check_origins
from tilefold.serve.threads import pausing_regularly

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tilefold.retrieval.data.collection import Document
    from tilefold.retrieval.vectors.tokens import TokenStore
    from tilefold.serve.document_log import DocumentLog
    from tilefold.serve.loading import Report
    from tilefold.serve.models import Kind, Served
    from tilefold.serve.searchable import Searchable
    from tilefold.serve.service import Service

KEY_VARIABLE = "TILEFOLD_API_KEY"
ADMIN_KEY_VARIABLE = "TILEFOLD_ADMIN_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")  # that the server needs


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
            "Index to search, with the --model that encoded it; BM25 needs no model.",
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
            "BM25 index of the same collection, for fused searches.",
            panel="Index",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        option(
            "Token vectors of the documents, or a multi-vector model, for reranking (as search "
            "--rerank).",
            panel="Index",
        ),
    ] = None
    tokens_model: Annotated[
        str | None,
        option(
            "Multi-vector model that encoded --tokens, if it has been moved.",
            panel="Index",
        ),
    ] = None
    name: Annotated[
        str | None,
        option(
            "Name of --index in URLs; by default the name of its folder.",
            panel="Index",
        ),
    ] = None
    watch_seconds: Annotated[
        float,
        option(
            "Seconds between checks for a change of --index, whose new state then takes over; 0 "
            "for no checks.",
            min=0,
            panel="Index",
        ),
    ] = 1.0
    max_length: Annotated[
        int | None,
        positive(
            "Maximum tokens per text; by default the maximum of the model.",
        ),
    ] = None
    invariant: Annotated[
        bool,
        option(
            "Compute the same bits for a text in every batch, on one device with one release of "
            "its libraries.",
            "--invariant",
        ),
    ] = False
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
            "How the root routes encode inputs: as queries or as documents.",
        ),
    ] = "document"
    api_key_file: Annotated[
        Path | None,
        option(
            "File with the API key that requests must carry; by default the environment variable "
            f"{KEY_VARIABLE}, if it is set.",
            panel="Access",
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        option(
            "File with the key of requests that change the index; by default the environment "
            f"variable {ADMIN_KEY_VARIABLE}. Without a key, they are refused.",
            panel="Access",
        ),
    ] = None
    cors_allow_origin: Annotated[
        list[str] | None,
        option(
            "Site whose pages may send requests from a browser; * for all; may be repeated.",
            panel="Access",
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int,
        option(
            "Maximum inputs that are processed or waiting; any further request gets a 429.",
            panel="Limits",
        ),
    ] = Limits.max_concurrent_requests
    max_batch_tokens: Annotated[
        int,
        option(
            "Maximum tokens per batch, including padding.",
            panel="Limits",
        ),
    ] = Limits.max_batch_tokens
    max_client_batch_size: Annotated[
        int,
        option(
            "Maximum inputs per request.",
            panel="Limits",
        ),
    ] = Limits.max_client_batch_size
    cached_queries: Annotated[
        int,
        option(
            "Number of cached responses to queries; 0 for no cache.",
            min=0,
            panel="Limits",
        ),
    ] = Limits.cached_queries
    payload_limit: Annotated[
        int,
        option(
            "Maximum bytes of a request body.",
            panel="Limits",
        ),
    ] = Limits.payload_limit
    max_image_pixels: Annotated[
        int,
        option(
            "Maximum pixels of an image.",
            panel="Limits",
        ),
    ] = Limits.max_image_pixels
    auto_truncate: Annotated[
        bool,
        option(
            "Truncate inputs that are too long, or refuse them.",
            "--auto-truncate/--no-auto-truncate",
            panel="Limits",
        ),
    ] = Limits.auto_truncate
    grace_seconds: Annotated[
        float,
        option(
            "Seconds after SIGTERM in which requests are still accepted, and /health returns 503.",
            min=0,
            panel="Limits",
        ),
    ] = Limits.grace_seconds

    def validate(self) -> None:
        """Raise ``UsageError`` for missing or conflicting options, and for options without effect.

        A model is loaded for ``--model``, for ``--tokens``, or for both.
        """
        super().validate()
        has_model = self.model is not None or self.tokens is not None
        if self.index is None:
            refuse_options(
                {
                    "--data": self.data,
                    "--vectors": self.vectors,
                    "--bm25": self.bm25,
                    "--name": self.name,
                    "--watch-seconds": self.watch_seconds != 1.0,
                    "--admin-key-file": self.admin_key_file,
                },
                "requires --index",
            )
            self.refuse_index_options("requires --index")
            if not has_model:
                raise UsageError("give a model with --model, or an index with --index.")
        elif not re.fullmatch(r"[\w.-]+", self.index_name):
            raise UsageError(
                f"--name: expected letters, digits, dots and dashes, got {self.index_name!r}; it "
                "becomes part of URLs.",
            )
        if not has_model:
            refuse_options(
                {
                    "--default-side": self.default_side != "document",
                    "--max-batch-tokens": self.max_batch_tokens != Limits.max_batch_tokens,
                    "--auto-truncate/--no-auto-truncate": not self.auto_truncate,
                    "--max-length": self.max_length,
                    "--dtype": self.dtype != "auto",
                },
                "has no effect without a model: leave it out",
            )
        if self.max_client_batch_size > self.max_concurrent_requests:
            raise UsageError(
                "--max-client-batch-size: expected at most --max-concurrent-requests "
                f"({self.max_concurrent_requests}), "
                f"got {self.max_client_batch_size}: such a request would never be accepted.",
            )
        if self.tokens is None:
            refuse_options({"--tokens-model": self.tokens_model}, "requires --tokens")

    @property
    def index_name(self) -> str:
        """The name of the index in URLs; empty without an index."""
        if self.index is None:
            return ""
        return self.name or self.index.resolve().name

    def limits(self) -> Limits:
        """Return the limits of the service.

        Raises:
            ArgumentError: if a value is out of range.
        """
        return Limits(
            max_concurrent_requests=self.max_concurrent_requests,
            max_batch_tokens=self.max_batch_tokens,
            max_client_batch_size=self.max_client_batch_size,
            cached_queries=self.cached_queries,
            payload_limit=self.payload_limit,
            max_image_pixels=self.max_image_pixels,
            auto_truncate=self.auto_truncate,
            grace_seconds=self.grace_seconds,
        )


def serve(request: ServeRequest) -> None:
    """Serve models and an index over HTTP, with the routes of text-embeddings-inference 1.9.

    POST /embed_sparse, /embed_all, /embed, /v1/embeddings, /rerank, /score, /tokenize and /decode;
    GET /info, /health, /live and /metrics. The same routes under /query and /document encode
    queries and documents, if the model distinguishes them. A model of page images takes images in
    /embed_all and /rerank.

    With --index, GET and POST /v1/NAME/search, GET /v1/NAME/doc/ID, and GET /v1/NAME/image/ID for
    page images. The admin key allows GET, PUT and DELETE /documents, and POST /admin/reload.

    The server listens at once, and answers 503 until everything is loaded. Ctrl-C stops it.

    Example:
        tilefold serve --index INDEX --model MODEL --data DATA
    """
    _check_packages()
    limits = request.limits()
    key = _read_key(request.api_key_file, "--api-key-file", KEY_VARIABLE)
    admin_key = _read_key(request.admin_key_file, "--admin-key-file", ADMIN_KEY_VARIABLE)
    origins = request.cors_allow_origin or []
    with _options.errors_name_options(origins="--cors-allow-origin"):
        check_origins(origins)
    _models.check_model_names(
        {
            "--model": request.model,
            "--tokens": request.tokens,
            "--tokens-model": request.tokens_model,
        },
    )
    _check_files(request)
    with _listen(request.host, request.port) as listening_socket:
        if request.host not in _LOOPBACK and key is None:
            note(
                f"--host: anyone who can reach {request.host} may use this server; set "
                "--api-key-file to require a key",
            )
        _run(request, limits, _Access(key, admin_key, origins), listening_socket)


class _Access(NamedTuple):
    """Who may send requests.

    Attributes:
        key: the key that requests must carry; None if they need no key.
        admin_key: the key of requests that change the index; None if they are refused.
        origins: the sites whose pages may send requests.
    """

    key: str | None
    admin_key: str | None
    origins: Sequence[str]


def _check_packages() -> None:
    """Raise ``CommandError`` if a package that the server needs is not installed.

    The packages are not imported, since FastAPI would delay the moment at which the server listens.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise CommandError(f'tilefold serve needs {package}: pip install "tilefold[serve]"')


def _check_files(request: ServeRequest) -> None:
    """Check the files that options name, before the models are loaded.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if options do not fit the index, or the index of ``--bm25`` is of vectors.
        DataError: if a folder is not what its option expects.
        FileNotFoundError: if there is no such file or folder.
    """
    if request.index is not None:
        backend = read_description(request.index)["backend"]
        _refuse_unused_options(request, request.index, backend)
        _retrievers.check_index_options(request, backend)
    if request.data is not None:
        check_collection_exists(request.data)
    if request.vectors is not None:
        retrieval.read_manifest(request.vectors)
    if request.bm25 is not None:
        _check_is_bm25(request.bm25, read_description(request.bm25)["backend"])


def _listen(host: str, port: int) -> socket.socket:
    """Bind a socket to ``--host`` and ``--port``.

    Args:
        host: a host name or an address.
        port: the port; 0 takes a free port.

    Raises:
        CommandError: if the port is taken, or the host is not an address of this machine.
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
    request: ServeRequest,
    limits: Limits,
    access: _Access,
    listening_socket: socket.socket,
) -> None:
    """Listen, load the models and the index, and serve until Ctrl-C or SIGTERM.

    Args:
        request: the options of the command.
        limits: the limits of the service.
        access: who may send requests.
        listening_socket: the socket of ``--host`` and ``--port``.
    """
    from tilefold.serve.server import load_and_run

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    # The log says when a changed index takes over.
    logging.getLogger("tilefold.serve.following").setLevel(logging.INFO)
    host = request.host
    host_in_url = f"[{host}]" if ":" in host else host  # as IPv6 addresses are written
    port = listening_socket.getsockname()[1]
    address = f"{host_in_url}:{port}"
    # Without a key, a private server refuses requests for the name of any other host. A page of
    # another site could otherwise reach it by DNS rebinding.
    is_private = host in _LOOPBACK and access.key is None

    def load(report: Report) -> FastAPI:
        """Load the models and the index in a thread of the server, and create its application."""
        from tilefold.serve.app import create_app

        service = _load_service(request, limits, report)
        return create_app(
            service,
            access.key,
            admin_key=access.admin_key,
            local=is_private,
            origins=access.origins,
        )

    def announce_listening() -> None:
        # Without "http://": programs that wait for the address begin their requests with it.
        note(f"listening on {address}; answers 503 until everything is loaded")

    def announce_ready(service: Service) -> None:
        note(f"{_name_what_is_served(service)} at http://{address}; Ctrl-C ends")

    was_loaded = load_and_run(
        load,
        listening_socket,
        limits,
        listening=announce_listening,
        ready=announce_ready,
    )
    if not was_loaded:  # Ctrl-C or SIGTERM came before
        _leave_while_loading()


def _leave_while_loading() -> NoReturn:
    """End the process with code 0, without waiting for the thread that loads.

    The thread cannot be stopped. If the interpreter were finalized while it imports a library or
    computes, it might crash.
    """
    note("ended before everything was loaded")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load_service(request: ServeRequest, limits: Limits, report: Report) -> Service:
    """Load the models and the index, encode short texts with each model, and search for a word.

    The first use of a model or an index takes longer, and shows whether it works.

    Args:
        request: the options of the command.
        limits: the limits of the service.
        report: function that is called with a description of the next stage.

    Raises:
        CommandError: if a model cannot encode, or the index cannot be searched.
    """
    report("loading the model" if request.index is None else "loading the index and its model")
    service = _load(request, limits)
    report("encoding a first word")
    try:
        service.warm_up()
    except Exception as error:  # a model may raise any
        raise CommandError(
            f"--model: {_name_what_is_served(service)} cannot encode a word "
            f"({_common.first_line(error)}).",
        ) from error
    if service.searchable is not None:
        report("searching for a first word")
        try:
            service.warm_up_search()
        except Exception as error:  # an index or a device may raise any
            raise CommandError(
                f"--index: {request.index} cannot be searched ({_common.first_line(error)}).",
            ) from error
    return service


def _name_what_is_served(service: Service) -> str:
    """Return the names of the models and of the index, for messages."""
    names = [model.name for model in service.models.values()]
    if service.searchable is not None:
        names.append(service.searchable.name)
    return " and ".join(names)


def _read_key(file: Path | None, option_name: str, variable: str) -> str | None:
    """Return a key that requests must carry, or None if no key is set.

    Args:
        file: the value of the option; None reads the key from an environment variable.
        option_name: the option that names the file.
        variable: the environment variable.

    Raises:
        UsageError: unless the file has exactly one line.
    """
    if file is None:
        return os.environ.get(variable) or None
    key = _options.read_text(file, option_name).strip()
    n_lines = len(key.splitlines())
    if n_lines != 1:
        got = f"{n_lines} lines" if key else "an empty file"
        raise UsageError(f"{option_name}: expected one line with the key in {file}, got {got}.")
    return key


class _Reranker(NamedTuple):
    """The multi-vector model of ``--tokens``, as it is served.

    Attributes:
        model: the served model; None without ``--tokens``.
        tokens: the stored token vectors of the documents; None if the model encodes their texts.
    """

    model: Served | None
    tokens: TokenStore | None


def _load(request: ServeRequest, limits: Limits) -> Service:
    """Load the models and the index of a server.

    Args:
        request: the options of the command.
        limits: the limits of the service.
    """
    from tilefold.serve.service import Service

    if request.index is None:
        return Service(_load_models(request), limits, request.default_side)
    return _load_index_service(request, request.index, limits)


def _load_index_service(request: ServeRequest, index_path: Path, limits: Limits) -> Service:
    """Load an index with its models, and let the server reload it when its folder changes.

    Each committed state of the folder is a generation, which has an id.

    Args:
        request: the options of the command.
        index_path: the value of ``--index``.
        limits: the limits of the service.
    """
    from tilefold.retrieval.index.generations import open_current, read_generation
    from tilefold.serve.document_log import DocumentLog
    from tilefold.serve.following import IndexFollower, IndexSource
    from tilefold.serve.service import Service
    from tilefold.serve.writing import DocumentWriter

    log = DocumentLog(index_path)  # of documents that were put or deleted over HTTP

    def reopen(served: Searchable, generation_id: str) -> Searchable:
        """Open a new generation, and use the models again that the served one has loaded."""
        return _open_generation(request, index_path, generation_id, log, served)

    generation = read_generation(index_path)
    searchable = _load_with_index(request, index_path, generation.id, log)
    if read_generation(index_path) != generation:
        # Another process has changed the index while the model was loaded.
        first_searchable = searchable
        searchable = open_current(
            index_path,
            lambda current: reopen(first_searchable, current.id),
        )
        generation = read_generation(index_path)
    service = Service(searchable.models, limits, request.default_side, searchable)
    source = IndexSource(index_path, reopen, request.watch_seconds)
    follower = IndexFollower(service, source, generation)
    # Documents that are put over HTTP are added to the index, but not to these folders.
    other_folders = (request.vectors, request.bm25, searchable.store)
    has_other_folders = any(folder is not None for folder in other_folders)
    if generation.backend != "qdrant" and not has_other_folders:
        DocumentWriter(service, follower, log)  # lets the service accept documents
    return service


def _load_models(request: ServeRequest) -> list[Served]:
    """Load the models of a server without an index.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if ``--model`` and ``--tokens`` both name a multi-vector model.
    """
    from tilefold.serve.models import Served

    models: list[Served] = []
    if request.model is not None:
        kinds = ("sparse", "multi-vector", "dense")
        model, kind = _models.load_model(
            request.model,
            kinds=kinds,
            fast=_models.FUSED,
            dtype=request.dtype,
            invariant=request.invariant,
        )
        _models.print_precision(request.model, model)
        _limit_length(model, request.max_length)
        models.append(Served(model, kind, request.model))  # type: ignore[arg-type]
    if request.tokens is not None:
        # Stored token vectors need an index: here only their model is served.
        reranker = _load_reranker(request, request.tokens, encodes_texts=True)
        if reranker.model is not None:
            models.append(reranker.model)
    if len({model.kind for model in models}) < len(models):
        raise UsageError(
            "--tokens already loads a multi-vector model, and so does --model: leave one out.",
        )
    return models


def _load_with_index(
    request: ServeRequest,
    index_path: Path,
    generation_id: str,
    log: DocumentLog,
) -> Searchable:
    """Load an index with its model, documents, vectors, BM25 index and reranker.

    Args:
        request: the options of the command.
        index_path: the value of ``--index``.
        generation_id: id of the committed state of the index folder that is opened.
        log: documents that were put or deleted over HTTP.
    """
    request = _with_recorded_model(request, index_path)
    loaded = _retrievers.load_index(request, fast=_models.FUSED)
    index = loaded.index
    _refuse_unused_options(request, index_path, index.backend)
    encoder = None
    if loaded.model is not None:
        if request.invariant:
            _models.make_invariant(loaded.model, str(request.model))
        _limit_length(loaded.model, request.max_length)
        encoder = _wrap_encoder(loaded.model, index.backend, str(request.model))
    reranking_model = None
    tokens = None
    if request.tokens is not None:
        reranking_model, tokens = _load_reranker(
            request,
            request.tokens,
            encodes_texts=request.data is not None,
        )
        if encoder is None and tokens is not None:
            refuse_options(
                {"--max-length": request.max_length},
                "has no effect with stored token vectors, whose model has a fixed query length: "
                "leave it out",
            )
    return _assemble_searchable(
        request,
        index_path,
        generation_id,
        log,
        loaded,
        encoder,
        _Reranker(reranking_model, tokens),
    )


def _with_recorded_model(request: ServeRequest, index_path: Path) -> ServeRequest:
    """Return the request with the model that encoded the index, if a migration has recorded it.

    A migration moves an index to another model. ``--model`` may then name the earlier one. Without
    a migration, the request is unchanged.

    Args:
        request: the options of the command.
        index_path: the value of ``--index``.
    """
    from tilefold.retrieval.index.migration import recorded_model

    if request.model is None or request.other_model:
        return request
    model = recorded_model(index_path)
    if model is None or model == request.model:
        return request
    was_moved = Path(model).is_absolute() and not Path(model).is_dir()
    if was_moved:
        return request
    note(f"--index: {model} has encoded {index_path}, as its migration says, and is loaded")
    return replace(request, model=model)


def _open_generation(
    request: ServeRequest,
    index_path: Path,
    generation_id: str,
    log: DocumentLog,
    served: Searchable,
) -> Searchable:
    """Open the new state of a changed index, with the models that are loaded.

    If another model encoded its documents, the model that a migration has recorded is loaded.
    Without a migration, ``--model`` is loaded again, since its folder may have been replaced, too.
    This thread pauses while it loads a model, so that requests are answered meanwhile.

    Args:
        request: the options of the command.
        index_path: the value of ``--index``.
        generation_id: id of the new committed state of the index folder (its generation).
        log: documents that were put or deleted over HTTP.
        served: the index as it is served until now, with its models.

    Raises:
        CommandError: if the index was made by another model than ``--model``.
        DataError: if a file is damaged, or the documents do not fit the index.
    """
    recorded = Provenance.from_dict(read_description(index_path))  # with the model's fingerprint
    # A known and an unknown model count as different: reusing a wrong one would give wrong hits.
    has_same_model = served.index.provenance.model_fingerprint == recorded.model_fingerprint
    if has_same_model:
        loaded = _retrievers.reopen_index(request, served.index)
        if loaded.index.backend == served.index.backend:
            tokens = None
            if served.store is not None:
                tokens = retrieval.open_tokens(Path(str(request.tokens)))
            return _assemble_searchable(
                request,
                index_path,
                generation_id,
                log,
                loaded,
                served.encoder,
                _Reranker(served.late, tokens),
            )
    elif request.other_model:
        raise CommandError(
            f"--other-model: expected {index_path} to keep its model, got a generation that "
            "another model has encoded, so the model of its queries is not known. Start "
            "another server with the new models.",
        )
    with pausing_regularly():
        return _load_with_index(request, index_path, generation_id, log)


def _assemble_searchable(
    request: ServeRequest,
    index_path: Path,
    generation_id: str,
    log: DocumentLog,
    loaded: _retrievers.LoadedIndex,
    encoder: Served | None,
    reranker: _Reranker,
) -> Searchable:
    """Open the documents, vectors and BM25 index that belong to an index, and combine all parts.

    Args:
        request: the options of the command.
        index_path: the value of ``--index``.
        generation_id: id of the committed state of the index folder that was opened.
        log: documents that were put or deleted over HTTP, which hits show, too.
        loaded: the index, with the options of its search.
        encoder: the model that encodes queries; None for a BM25 index.
        reranker: the model and token vectors of ``--tokens``.
    """
    from tilefold.serve.searchable import Searchable

    index = loaded.index
    documents: Mapping[str, Document] = {}
    if request.data is not None:
        collection_documents = _scores.open_documents(request.data, index_path, index.provenance)
        documents = log.documents(collection_documents, generation_id)
    vectors = None if request.vectors is None else retrieval.read_vectors(request.vectors)
    bm25_index = None if request.bm25 is None else _load_bm25(request.bm25)
    option_errors = _options.errors_name_options(
        vectors=f"--vectors: {request.vectors}",
        second=f"--bm25: {request.bm25}",
        tokens="--tokens",
        model="--tokens-model",
    )
    with option_errors, _common.precision_warnings_as_notes():
        return Searchable(
            request.index_name,
            index,
            encoder=encoder,
            documents=documents,
            vectors=vectors,
            words=bm25_index,
            late=reranker.model,
            store=reranker.tokens,
            query_top_k=request.query_top_k,
            options=loaded.search_options,
            generation=generation_id,
        )


def _refuse_unused_options(request: ServeRequest, index_path: Path, backend: str) -> None:
    """Raise ``UsageError`` for options that an index of a backend does not use.

    Args:
        request: the options of the command.
        index_path: the folder of the index, for messages.
        backend: the backend of the index.
    """
    if backend == "bm25":
        refuse_options(
            {"--vectors": request.vectors, "--bm25": request.bm25},
            f"has no effect: {index_path} is a BM25 index",
        )
        if request.tokens is None:
            refuse_options(
                {"--invariant": request.invariant},
                f"has no effect: {index_path} is a BM25 index, which has no model",
            )
    if backend == DENSE:
        refuse_options(
            {"--vectors": request.vectors},
            f"has no effect: {index_path} holds its own vectors",
        )
    if backend == LATE:
        refuse_options(
            {"--tokens": request.tokens},
            f"has no effect: {index_path} is an index of token vectors",
        )


def _wrap_encoder(model: Model, backend: str, name: str) -> Served:
    """Wrap the model that encodes queries for an index, so that the server also offers it.

    Args:
        model: the model.
        backend: the backend of the index, which determines the kind of the model.
        name: the value of ``--model``.
    """
    from tilefold.serve.models import Served

    kind: Kind = "sparse"
    if backend == DENSE:
        kind = "dense"
    elif backend == LATE:
        kind = "multi-vector"
    served = Served(model, kind, name)
    _free_with(served)
    return served


def _free_with(served: Served) -> None:
    """Let the memory of a model be freed when it is not served any more.

    Args:
        served: the model, which only this server uses.
    """
    finalizer = weakref.finalize(served, _free_model, served.model)
    finalizer.atexit = False


def _free_model(model: Model) -> None:
    """Free the memory of a model that is not served any more, in a thread.

    Python would not free it: models are in reference cycles, and the server exempts the objects
    that it has loaded at its start from garbage collection.

    Args:
        model: the model, which nothing uses any more.
    """
    from tilefold.integrations.sentence_transformers import restore

    def free() -> None:
        """Delete the CUDA graphs of the model, and then its weights."""
        restore(model)
        drop_memory(itertools.chain(model.parameters(), model.buffers()))

    # Not a daemon thread: torch might crash if the interpreter ended before the thread does.
    threading.Thread(target=free, name="tilefold-free-model").start()


def _load_bm25(path: Path) -> Any:
    """Open the BM25 index of ``--bm25``.

    Raises:
        UsageError: if the index is of vectors.
    """
    from tilefold.retrieval.index.opening import open_index

    index = open_index(path)
    _check_is_bm25(path, index.backend)
    return index


def _check_is_bm25(path: Path, backend: str) -> None:
    """Raise ``UsageError`` unless the index of ``--bm25`` is a BM25 index.

    Args:
        path: the folder of the index, for the message.
        backend: the backend of the index.
    """
    if backend != "bm25":
        raise UsageError(
            f"--bm25: {path} is an index of vectors; try tilefold index --backend bm25.",
        )


def _limit_length(model: Model, max_length: int | None) -> None:
    """Limit how many tokens a model reads per query and per document.

    Args:
        model: the model, which is changed in place.
        max_length: the value of ``--max-length``; None changes nothing.
    """
    from tilefold.retrieval.encoding.truncation import limit_length

    for side in ("query", "document"):
        limit_length(model, side, max_length)


def _load_reranker(request: ServeRequest, source: str, *, encodes_texts: bool) -> _Reranker:
    """Load the multi-vector model of ``--tokens``, with the stored token vectors if it names them.

    Args:
        request: the options of the command.
        source: the value of ``--tokens``: a folder of token vectors, or a multi-vector model.
        encodes_texts: whether the model may encode texts, because the server has the documents or
            has no index to rerank.
    """
    from tilefold.serve.models import Served

    model, tokens = _retrievers.load_reranking_model(
        source,
        request.tokens_model,
        request.dtype,
        has_texts=encodes_texts,
        option="--tokens",
        fast=_models.FUSED,
    )
    if request.invariant:
        _models.make_invariant(model, source)
    # A query must be encoded with the length that was set when the token vectors were made.
    reranks_stored_vectors = tokens is not None and request.index is not None
    if not reranks_stored_vectors:
        _limit_length(model, request.max_length)
    name = source
    if tokens is not None:
        name = request.tokens_model or str(tokens.manifest.model_source)
    served = Served(model, "multi-vector", name)
    _free_with(served)
    return _Reranker(served, tokens)
