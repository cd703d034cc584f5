"""``tilefold serve``: models and an index behind HTTP."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold import retrieval
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import Count, Place, Text, Words, option, positive, preset
from tilefold.retrieval.index import DENSE, LATE
from tilefold.serve.settings import Limits, check_origins

if TYPE_CHECKING:
    from tilefold.retrieval.vectors.tokens import TokenStore
    from tilefold.serve.models import Kind, Served
    from tilefold.serve.searchable import Searchable
    from tilefold.serve.service import Service

KEY_VARIABLE = "TILEFOLD_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@_options.with_options(_retrievers.of_index)
def serve(
    model: Text = option(
        "Folder or Hugging Face name of a sparse, multi-vector or dense model; or minilm.",
    ),
    index: Place = option("Index to search, with the --model that made it; BM25 needs none."),
    data: Text = option("The collection of --index, to show documents."),
    vectors: Place = option(
        "The encoded documents of --index, for explanations and feedback; kept in memory.",
    ),
    bm25: Place = option("BM25 index of the same collection, to fuse with."),
    tokens: Text = option(
        "Token vectors or a multi-vector model that reranks (as search --rerank).",
    ),
    tokens_model: Text = option("Multi-vector model that made --tokens, where it has moved."),
    name: Text = option("Name of --index in addresses; by default that of its folder."),
    max_length: Count = positive(
        "Tokens read of a text, at most; by default as many as the model reads.",
    ),
    host: str = preset("127.0.0.1", "Interface to listen on; 0.0.0.0 for all."),
    port: int = preset(8080, "Port; 0 takes a free one.", min=0, max=65535),
    default_side: str = preset(
        "document",
        "How to encode inputs posted to the root routes.",
        metavar="query|document",
    ),
    api_key_file: Place = option(
        f"File with the key that requests must carry; or {KEY_VARIABLE} in the environment.",
    ),
    cors_allow_origin: Words = option(
        "Site whose pages may ask this server in a browser; * for all; may be repeated.",
    ),
    max_concurrent_requests: int = preset(
        Limits.max_concurrent_requests,
        "Inputs in work or waiting; the next gets a 429.",
    ),
    max_batch_tokens: int = preset(Limits.max_batch_tokens, "Tokens of a batch, padding included."),
    max_client_batch_size: int = preset(Limits.max_client_batch_size, "Inputs of a request."),
    cached_queries: int = preset(
        Limits.cached_queries,
        "Answers kept for queries asked again; 0 keeps none.",
        min=0,
    ),
    payload_limit: int = preset(Limits.payload_limit, "Bytes of a body."),
    auto_truncate: bool = preset(
        Limits.auto_truncate,
        "Cut inputs that are too long, or refuse them.",
        "--auto-truncate/--no-auto-truncate",
    ),
    grace_seconds: float = preset(
        Limits.grace_seconds,
        "Seconds after SIGTERM in which requests are still taken, while /health answers 503.",
        min=0,
    ),
    **more: Any,
) -> None:
    """Serve a model and an index over HTTP, wire-compatible with text-embeddings-inference 1.9;
    Ctrl-C ends it.

    POST /embed_sparse, /embed_all, /embed, /rerank, /score, /tokenize and /decode; GET /info,
    /health and /metrics. The same routes below /query and /document encode queries and documents,
    where a model tells them apart. With --index, GET and POST /v1/NAME/search and GET
    /v1/NAME/doc/ID.
    """
    asked = locals() | more
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f'tilefold serve needs {error.name}: pip install "tilefold[serve]"',
        ) from error
    from tilefold.serve.server import bind

    index_name = _index_name(asked)
    given = {each.name: asked[each.name] for each in fields(Limits) if each.name in asked}
    with _options.as_options(*given):
        limits = Limits(**given)
    key, origins = _key(api_key_file), cors_allow_origin or []
    with _options.as_options(origins="--cors-allow-origin"):
        check_origins(origins)
    _models.find_models({"--model": model, "--tokens": tokens, "--tokens-model": tokens_model})
    try:  # before the model is loaded, which takes longer than finding out that a port is taken
        opened = bind(host, port)
    except OSError as error:
        why = error.strerror or _common.first_line(error)
        raise CommandError(
            f"--host, --port: cannot listen on {host}:{port} ({why}); try --port 0.",
        ) from error
    with opened:
        from tilefold.serve.service import Service

        models, searchable = _load(index_name, asked)
        service = Service(models, limits, default_side, searchable)  # type: ignore[arg-type]
        if host not in _LOOPBACK and key is None:
            note(
                f"--host: anyone who can reach {host} may use this server; set --api-key-file to require a key",
            )
        _run(service, key, opened, host, origins)


def _run(
    service: Service,
    key: str | None,
    opened: socket.socket,
    host: str,
    origins: Sequence[str],
) -> None:
    from tilefold.serve.app import create_app
    from tilefold.serve.server import run

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    served = [model.name for model in service.models.values()]
    names = " and ".join([*served, service.searchable.name] if service.searchable else served)
    shown = f"[{host}]" if ":" in host else host
    port = opened.getsockname()[1]
    try:
        service.warm_up()
    except Exception as error:  # of any model, before anybody asks it
        raise CommandError(
            f"--model: {names} cannot encode a word ({_common.first_line(error)}).",
        ) from error
    app = create_app(service, key, local=host in _LOOPBACK and key is None, origins=origins)

    def announce() -> None:
        note(f"{names} at http://{shown}:{port}; Ctrl-C ends")
        for model in service.models.values():
            note(f"{model.name} computes in {model.precision}")

    run(app, service, opened, announce)


def _key(file: Path | None) -> str | None:
    """The key of --api-key-file, else that of the environment, else None."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    if not (key := _options.read_text(file, "--api-key-file").strip()) or len(key.splitlines()) > 1:
        got = f"{len(key.splitlines())} lines" if key else "an empty one"
        raise UsageError(f"--api-key-file: expected one line with the key in {file}, got {got}.")
    return key


def _index_name(asked: Asked) -> str:
    """The name of the index in addresses; refuses one that is no part of them, and nothing to
    serve.
    """
    name = asked["name"] or (asked["index"].resolve().name if asked["index"] else "")
    if asked["index"] is None:
        if asked["model"] is None and asked["tokens"] is None:
            raise UsageError("--model: expected a model, or --index with an index; got neither.")
    elif not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(
            f"--name: expected letters, digits, dots and dashes, got {name!r}; it is part of addresses.",
        )
    return str(name)


def _load(name: str, asked: Asked) -> tuple[list[Served], Searchable | None]:
    """The models, each loaded once, and the index with what belongs to it."""
    from tilefold.serve.models import Served

    if asked["index"] is not None:
        return _with_index(name, asked)
    served = []
    if asked["model"] is not None:
        model, kind = _models.load_model(asked["model"], kinds=("sparse", "multi-vector", "dense"))
        _limit(model, asked)
        served.append(Served(model, kind, asked["model"]))  # type: ignore[arg-type]
    if asked["tokens"] is not None:
        served.append(_late(asked, texts=True)[0])  # its model is of use alone
    if len({each.kind for each in served}) < len(served):
        raise UsageError(
            "--tokens: --model is a multi-vector model itself, which reranks: leave one out.",
        )
    return served, None


def _with_index(name: str, asked: Asked) -> tuple[list[Served], Searchable]:
    from tilefold.retrieval.index.opening import open_index
    from tilefold.serve.models import Served
    from tilefold.serve.searchable import Searchable

    index, encoder, options = _retrievers.load_index(asked, _common.texts_of(asked["data"]))
    parts: Values = {"query_top_k": asked["query_top_k"], "options": options}
    if asked["data"] is not None:
        parts["documents"] = _scores.open_documents(asked["data"], asked["index"], index.provenance)
    if encoder is None:
        _options.refuse(("vectors", "bm25"), f"does nothing here: {asked['index']} is a BM25 index")
    else:
        _limit(encoder, asked)
        kind: Kind = {DENSE: "dense", LATE: "multi-vector"}.get(index.backend, "sparse")  # type: ignore[assignment]
        if kind == "multi-vector":
            _options.refuse(
                ["tokens"],
                f"does nothing here: {asked['index']} is an index of token vectors",
            )
        parts["encoder"] = Served(encoder, kind, str(asked["model"]))
        if kind == "dense":
            _options.refuse(
                ["vectors"],
                f"does nothing here: {asked['index']} holds its own vectors",
            )
        parts["vectors"] = (
            None if asked["vectors"] is None else retrieval.read_vectors(asked["vectors"])
        )
    if asked["tokens"] is not None:
        parts["late"], parts["store"] = _late(asked, texts=asked["data"] is not None)
        if encoder is None and parts["store"] is not None:
            _options.refuse_useless(
                ["max_length"],
                "with token vectors, whose queries are read as they were",
            )
    if asked["bm25"] is not None:
        parts["words"] = words = open_index(asked["bm25"])
        if words.backend != "bm25":
            raise UsageError(
                f"--bm25: {asked['bm25']} is an index of vectors; try tilefold index --backend bm25.",
            )
    names = {
        "vectors": f"--vectors: {asked['vectors']}",
        "second": f"--bm25: {asked['bm25']}",
        "tokens": "--tokens",
    }
    with _options.as_options(**names, model="--tokens-model"):
        searchable = Searchable(name, index, **parts)
    return [
        model for model in (searchable.encoder, searchable.late) if model is not None
    ], searchable


def _limit(model: Model, asked: Asked) -> None:
    """Let a model read as many tokens as --max-length says."""
    from tilefold.retrieval.encoding.truncation import limit_length

    with _options.as_options("max_length"):
        for side in ("query", "document"):
            limit_length(model, side, asked["max_length"])


def _late(asked: Asked, texts: bool) -> tuple[Served, TokenStore | None]:
    """The multi-vector model of --tokens, and its token vectors if those are what is there."""
    from tilefold.serve.models import Served

    model, store = _retrievers.load_late(
        str(asked["tokens"]),
        asked["tokens_model"],
        texts,
        "--tokens",
    )
    if store is None or asked["index"] is None:
        _limit(model, asked)
    name = (
        asked["tokens"] if store is None else asked["tokens_model"] or store.manifest.model_source
    )
    return Served(model, "multi-vector", str(name)), store
