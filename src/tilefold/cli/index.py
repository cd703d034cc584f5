"""``tilefold index``: builds an index of encoded documents."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tilefold.cli import _common


def index(
    vectors: Annotated[Path, typer.Option(help="Folder that tilefold encode wrote.")],
    output: Annotated[Path, typer.Option(help="Folder for the index.")],
    backend: Annotated[str, typer.Option(help="exact, or seismic (approximate, for large collections).")] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Build an index from encoded documents."""
    from tilefold.retrieval import build_index, read_manifest, read_vectors
    from tilefold.retrieval.index import BACKENDS

    if backend not in BACKENDS:
        raise _common.UsageError(f"--backend: expected one of {', '.join(BACKENDS)}, got {backend!r}.")
    kind = read_manifest(vectors).kind
    if kind != "document":
        raise _common.UsageError(f"--vectors: {vectors} holds {kind} vectors; encode documents without --queries.")
    started = time.monotonic()
    built = build_index(read_vectors(vectors), backend)
    built.save(output)
    result = {
        "output": str(output),
        "backend": backend,
        "n_documents": built.n_documents,
        "seconds": round(time.monotonic() - started, 3),
    }
    if as_json:
        _common.print_json(result)
        return
    typer.echo(f"{built.n_documents} documents indexed ({backend}) in {result['seconds']:.1f} s: {output}")
