"""An index in Qdrant, for ``tilefold index``: where it is, how it is built, and how it is changed."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilefold.cli import _common


def place(output: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a Qdrant index: in the folder, or on a server."""
    if "url" in options:
        return {"collection": output.resolve().name, **options}
    return {"folder": output, **options}


def build(read: Any, options: dict[str, Any]) -> Any:
    """A Qdrant index of vectors."""
    from tilefold.retrieval import build_index

    done = 0
    _common.keeps(lambda: done > 0)
    options_of = _common.as_options(url="--url", name="--collection", weights="--weights")
    with options_of, _common.progress_bar("indexing") as update:

        def count(kept: int, total: int) -> None:
            nonlocal done
            done = kept
            update(kept, total, "")

        def resumes(kept: int, total: int) -> None:
            _common.note(f"indexing resumes: {kept:,} of {total:,} were done before")

        return build_index(read, "qdrant", progress=count, resumes=resumes, **options)


def change(output: Path, read: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the documents of --delete, then put those of --vectors in; how many of both, and what there is now.

    Raises:
        UsageError: a file of ids that cannot be read.
        CommandError: vectors of another vocabulary or model than the index.
    """
    from tilefold.retrieval.errors import DataError
    from tilefold.retrieval.index.qdrant import QdrantIndex
    from tilefold.retrieval.qdrant import Documents

    names = _ids(options["delete"]) if "delete" in options else []
    documents = None if read is None else Documents(read.ids, read)
    try:
        index = QdrantIndex.load(output)
        with index.collection as collection:
            if documents is not None:
                documents.check(collection.layout, collection.place)  # before anything is removed
            deleted = collection.delete(names)
            if documents is not None:
                with _common.progress_bar("writing") as update:
                    collection.upsert(documents, progress=lambda done, total: update(done, total, ""))
            index.save(output)
            now = len(collection)
    except DataError as error:
        raise _common.CommandError(f"--output: {error}") from error
    return {"output": str(output), "n_documents": now, "written": len(documents or ()), "deleted": deleted}


def _ids(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _common.UsageError(f"--delete: {file} cannot be read ({_common.first_line(error)}).") from error
    return [line for line in lines if line.strip()]
