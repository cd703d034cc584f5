"""``tilefold index``, of encoded documents or of their words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilefold import retrieval
from tilefold._internal.files import lock_path
from tilefold.cli import _common, _options, _retrievers, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import (
    OF_BACKEND,
    Count,
    Number,
    Place,
    Text,
    argument,
    flag,
    option,
    preset,
    required,
)
from tilefold.retrieval.common.provenance import ids_to_delete
from tilefold.retrieval.data.passages import Passages, document_of
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import MANIFEST_NAME, read_description

# Measured with 120 terms per document on two cores: up to here exact search is as fast, smaller,
# and built in seconds.
SEISMIC_DOCUMENTS = 100_000
LONG_VECTOR = 256
BM25, QDRANT, LATE = "bm25", "qdrant", "late"
_BACKEND_HELP = (
    "exact (fastest and smallest up to 100,000 documents at least), bm25 (words, no model: give --data), seismic "
    "(approximate, for much larger collections; encode with --top-k 128 or so), qdrant (exact; to add to "
    "and delete from; in the folder, or on the server at --url), or late (late interaction: give --tokens)."
)


def index(
    output: Path = required("Folder for the index."),
    vectors: Place = option(
        "exact, seismic, qdrant: a folder of tilefold encode; exact takes dense vectors, too.",
    ),
    tokens: Place = option(
        "late: token vectors, a folder of tilefold encode, or a .safetensors or .npz file.",
    ),
    data: Text = option(
        "bm25: the documents; others: those of --vectors or --tokens, to keep their metadata. "
        + _common.DOCUMENTS_HELP,
    ),
    backend: str = preset("exact", _BACKEND_HELP, metavar="exact | seismic | qdrant | bm25 | late"),
    language: Text = option(
        "bm25: of Snowball stemmer and stop words, or none for neither; by default english.",
    ),
    k1: Number = option("bm25: saturation of term frequencies; by default 1.5."),
    b: Number = option("bm25: normalisation of document length, 0 to 1; by default 0.75."),
    identifiers: bool = flag(
        "bm25: split words at underscores and capitals, for programs.",
        "--identifiers",
    ),
    passages: Count = _retrievers.PASSAGES,
    stride: Count = _retrievers.STRIDE,
    cut: Text = _retrievers.CUT,
    n_postings: Count = option(
        "seismic: postings kept per term, on average; more for more documents by default.",
    ),
    centroid_fraction: Number = option(
        "seismic: clusters of a term, as a fraction of its documents (0.1).",
    ),
    min_cluster_size: Count = option("seismic: documents of the smallest cluster (10)."),
    summary_energy: Number = option(
        "seismic: fraction of a cluster's weight in its summary (0.4).",
    ),
    doc_cut: Count = option("seismic: heaviest terms of a document used to cluster (15)."),
    query_cut: Count = option(
        "seismic: query terms that choose clusters (20; 10 from a million documents on).",
    ),
    heap_factor: Number = option(
        "seismic: lower is slower and closer to exact (0.7; 0.8 from a million on).",
    ),
    num_threads: Count = option("seismic: threads, 0 for one per core (0).", "--threads"),
    storage: Text = option(
        "late: by default int8; int4 takes half as much.",
        metavar="int8|fp16|int4",
    ),
    pool_factor: Count = option(
        "late: keep a vector for so many tokens of a document, the mean of a cluster (1).",
    ),
    queries: Place = option(
        "late: token vectors of queries, to measure the recall of candidates on them.",
    ),
    url: Text = option(
        "qdrant: a server, such as http://localhost:6333; its key is in QDRANT_API_KEY.",
    ),
    collection: Text = option(
        "qdrant: name of the collection on the server; by default that of --output.",
    ),
    weights: Text = option(
        "qdrant: of what is searched; by default float32.",
        metavar="float32|float16",
    ),
    overwrite: bool = flag(
        "Replace the index at --output; qdrant: also other vectors in the collection of the server.",
        "--overwrite",
    ),
    update: bool = flag(
        "Put --vectors (bm25: --data, late: --tokens) into the index at --output, replacing documents of the same id.",
        "--update",
    ),
    delete: Place = option(
        "Remove documents, an id per line of this file, from the index at --output.",
    ),
    merge: bool = flag("Make one index of that at --output and what was added to it.", "--merge"),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Build an index: of encoded documents (exact, seismic, qdrant, late), or of the words of a
    collection (bm25).

    late scores all documents on a GPU; on a CPU it scores candidates, whose recall is printed. Of
    dense vectors, exact searches all of them on a GPU if there is one.

    With --update and --delete, the index at --output is changed, whatever its backend; it stays
    whole if that is interrupted.
    """
    asked = locals()
    options = {
        name: asked[name] for name in OF_BACKEND.get(backend, "").split() if name in _options.given
    }
    started = time.monotonic()
    if update or delete is not None or merge:
        changed = _change(asked)
        told = f"{changed['n_documents']} documents: {changed['written']} written, {changed['deleted']} removed"
        changed["seconds"] = round(time.monotonic() - started, 3)
        _common.print_result(changed, as_json, f"{told} in {changed['seconds']:.1f} s: {output}")
        return
    if not overwrite:
        _check_new(output)
    if backend == QDRANT:  # on the server, or in the folder
        options = (
            {"collection": output.resolve().name} if "url" in options else {"folder": output}
        ) | options
        options["overwrite"] = overwrite
    with lock_path(output), _common.heartbeat(f"indexing ({backend})"):
        words, of_words = backend == BM25, _retrievers.passages(asked)
        if backend == LATE:
            built: Any = _late(tokens, data, output, options | {"overwrite": overwrite})
        else:
            built = (
                _words(data, options, of_words)
                if words
                else _vectors(vectors, data, backend, options)
            )
        built.save(output, overwrite=overwrite)
        documents = built.n_documents
        if backend == QDRANT:
            built.close()
    seconds = round(time.monotonic() - started, 3)
    result = {
        "output": str(output),
        "backend": backend,
        "n_documents": documents,
        "seconds": seconds,
    }
    if cuts := built.provenance.passages:
        result["passages"] = cuts
    what = "passages" if cuts else "documents"
    said = f"{documents} {what} indexed ({backend}) in {seconds:.1f} s: {output}"
    if backend == LATE:
        result |= built.options
        found = ""
        if built.recall:
            found = f"; on a CPU it scores {built.n_candidates} candidates, of the ten best {built.recall:.1%}"
        said += f" ({_common.size(built.files.nbytes)} of {built.options['storage']}{found})"
    if built.metadata is not None:
        result["metadata"] = built.metadata.kinds
        kept = ", ".join(
            f"{name} ({' or '.join(kinds)})" for name, kinds in built.metadata.kinds.items()
        )
        said += f"; metadata: {kept}"
    model = () if words else ("--model", "MODEL")
    following = _common.next_command("search", "QUERY", "--index", output, *model)
    _common.print_result(result, as_json, said, following)


def _check_new(output: Path) -> None:
    """Raise CommandError if there is an index at --output, which a new one would replace."""
    if not (output / MANIFEST_NAME).exists():
        return  # whoever writes the index refuses other files
    try:
        described = read_description(output)
    except (DataError, OSError) as error:
        raise CommandError(
            f"--output: {output} holds an index that cannot be read, and was not overwritten: {error}",
        ) from error
    raise CommandError(
        f"--output: {output} holds an index already ({described['backend']}, "
        f"{described['n_documents']:,} documents). Give --update to put documents into it, "
        "--overwrite to replace it, or another folder; nothing was overwritten.",
    )


def _words(data: str | None, options: Values, cuts: Passages | None) -> Any:
    from tilefold.retrieval.index.bm25 import BM25Options, Tokenizer

    if data is None:
        raise UsageError("--backend bm25 indexes the words of a collection: give it with --data.")
    with _options.as_options("language", "k1", "b"):
        Tokenizer(BM25Options(**options))
    collection = _common.load_data(data, documents_only=True)
    texts = collection.contents() if cuts is None else cuts.of(collection.documents)
    return retrieval.BM25Index.build(texts, metadata=collection.metadata(), **options)


def _vectors(vectors: Path | None, data: str | None, backend: str, options: Values) -> Any:
    if backend == "seismic":
        from tilefold.retrieval.index.seismic import SeismicOptions

        with _options.as_options(*options):
            SeismicOptions.parse(options)
    read = _read(vectors, backend)
    options = {**options, "metadata": _metadata(data, vectors, read)}
    if not isinstance(read, retrieval.SparseVectors):
        if backend != "exact":
            raise UsageError(
                f"--backend: {vectors} holds dense vectors, which exact alone searches, got {backend}.",
            )
        return retrieval.DenseIndex.build(read, metadata=options["metadata"])
    if backend == QDRANT:
        return _build_qdrant(read, options)
    documents, terms = len(read), len(read.indices) / max(1, len(read))
    if backend == "seismic" and documents < SEISMIC_DOCUMENTS:
        note(
            f"{documents} documents are few for seismic: up to {SEISMIC_DOCUMENTS:,} at least, --backend exact is "
            "built in seconds, smaller, as fast, and misses nothing",
        )
    if backend == "seismic" and terms > LONG_VECTOR:
        note(
            f"{terms:.0f} terms per document are many for seismic, whose time and size grow with them: "
            "tilefold encode --top-k 128 keeps the heaviest",
        )
    return retrieval.build_index(read, backend, **options)


def _read(vectors: Path | None, backend: str) -> Any:
    if vectors is None:
        raise UsageError(
            f"--backend {backend} indexes encoded documents: give them with --vectors.",
        )
    return _retrievers.read_documents(vectors)


def _metadata(
    data: str | None,
    vectors: Path | None,
    read: Any,
) -> Mapping[str, Mapping[str, object]] | None:
    """The metadata of the documents of --data, which must be those of --vectors."""
    if data is None or vectors is None:
        return None
    collection, made = _common.load_data(data, documents_only=True), getattr(read, "manifest", read)
    _scores.check_texts(str(vectors), made.provenance, collection, _scores.texts_of(collection))
    found, cut = collection.metadata(), made.provenance.passages
    lacking = sum(
        (name if cut is None else document_of(name)) not in collection.documents
        for name in read.ids
    )
    if lacking:
        note(
            f"--data: {lacking} of the {len(read.ids)} of {vectors} are not in {data}, and have no metadata",
        )
    if not found:
        note(
            f"--data: the documents of {data} have no metadata: no fields but an id, a title and a text",
        )
    return found


def _late(tokens: Path | None, data: str | None, output: Path, options: Values) -> Any:
    if (queries := options.pop("queries", None)) is not None:
        store = retrieval.open_tokens(queries)
        if store.manifest.kind != "query" or store.manifest.storage == "int8":
            raise UsageError(
                f"--queries: expected vectors in fp16 of encode --queries, got others in {queries}.",
            )
        options["queries"] = store.read(list(store.ids)[:64])
    with _options.as_options("storage", "pool_factor", "queries", vectors="--tokens"):
        read = _retrievers.read_tokens(tokens)
        return retrieval.LateIndex.build(
            read,
            output,
            metadata=_metadata(data, tokens, read),
            **options,
        )


def _build_qdrant(read: Any, options: Values) -> Any:
    done = 0
    _common.kept.append(lambda: done > 0)
    with (
        _options.as_options("url", "weights", name="--collection"),
        _common.progress_bar("indexing") as update,
    ):

        def count(kept: int, total: int) -> None:
            nonlocal done
            done = kept
            update(kept, total)

        resumes = "indexing resumes: {:,} of {:,} were done before".format
        return retrieval.build_index(
            read,
            "qdrant",
            progress=count,
            resumes=lambda *of: note(resumes(*of)),
            **options,
        )


def _change(asked: Asked) -> Values:
    """Remove the documents of --delete, then put those of --vectors or --data in; how many, and
    what there is now.
    """
    from tilefold.retrieval.index.merging import merge_segments, update_index

    output, update = asked["output"], asked["update"]
    there = read_description(output)["backend"]
    if "backend" in _options.given and there not in (
        asked["backend"],
        {"exact": "dense"}.get(asked["backend"]),
    ):
        raise UsageError(
            f"--backend: {output} is an index of backend {there}, got {asked['backend']}.",
        )
    if asked["merge"] and there in (QDRANT, BM25):
        several = "exact, dense, seismic and late indexes"
        raise UsageError(f"--merge goes with {several}; {output} ({there}) is of one part.")
    listed = (
        ""
        if asked["delete"] is None
        else _options.read_text(asked["delete"], "--delete", "utf-8-sig")
    )
    names = [
        line for line in listed.split("\n") if line.strip()
    ]  # an id may hold what splitlines() splits at
    changed: Values = {"written": 0, "deleted": 0}
    if there == BM25:
        _options.refuse(
            ["vectors"],
            f"does nothing here: {output} is a BM25 index, which reads --data",
        )
        return {"output": str(output)} | _change_words(
            output,
            names,
            asked["data"] if update else None,
        )
    late = there == LATE
    _options.refuse(
        ["vectors" if late else "tokens"],
        f"does nothing here: {output} is an index of backend {there}",
    )
    where, read = asked["tokens" if late else "vectors"], None
    if update:
        read = _retrievers.read_tokens(where) if late else _read(where, there)
    metadata = _metadata(asked["data"], where, read)
    if there == QDRANT:
        return _change_qdrant(output, read, names, metadata)
    with _options.as_options(
        metadata="--data",
        vectors="--tokens" if late else "--vectors",
        index="--output",
        path="--output",
    ):
        if update or asked["delete"] is not None:
            changed = update_index(output, read, names, metadata=metadata)
        if asked["merge"]:
            changed["n_documents"] = merge_segments(output)
    return {"output": str(output)} | changed


def _change_words(output: Path, names: Sequence[str], data: str | None) -> Values:
    if data is None and "update" in _options.given:
        raise UsageError("--update: a BM25 index reads the new documents: give them with --data.")
    with lock_path(output), _options.as_options(index="--output", documents="--data"):
        index = retrieval.BM25Index.load(output)
        cut = index.provenance.passages
        collection = None if data is None else _common.load_data(data, documents_only=True)
        texts: Mapping[str, str] = {}
        if collection is not None:
            texts = (
                collection.contents()
                if cut is None
                else Passages.parse(cut).of(collection.documents)
            )
        deleted = len(ids_to_delete(index.ids, set(names), (), cut))
        changed = index.updated(texts, names, {} if collection is None else collection.metadata())
        changed.save(output, overwrite=True)
    return {"n_documents": changed.n_documents, "written": len(texts), "deleted": deleted}


def _change_qdrant(
    output: Path,
    read: Any,
    names: list[str],
    metadata: Mapping[str, Mapping[str, object]] | None,
) -> Values:
    from tilefold.retrieval.data.metadata import fields_by_id
    from tilefold.retrieval.index.qdrant import Documents
    from tilefold.retrieval.index.qdrant.index import QdrantIndex

    documents = None
    if read is not None:
        documents = Documents(
            read.ids,
            read,
            payloads=fields_by_id(metadata or {}, read.ids, read.provenance.passages),
        )
    try:
        index = QdrantIndex.load(output)
        with index.collection as collection:
            if documents is not None:
                documents.check(collection.layout, collection.place)  # before anything is removed
                if metadata is None and collection.has_metadata():
                    raise UsageError(
                        "--data: expected the fields of the new documents, because the index keeps "
                        "metadata, got none. Without them, filters would not find the documents.",
                    )
            if (
                collection.layout.passages is not None
            ):  # all those of a document, of which new ones may have others
                gone = {*names, *map(document_of, () if documents is None else documents.ids)}
                names = [name for name in collection.ids() if document_of(name) in gone]
            deleted = collection.delete(names)
            if documents is not None:
                with _common.progress_bar("writing") as update:
                    collection.upsert(documents, progress=update)
            index.save(output, overwrite=True)
            now = len(collection)
    except DataError as error:
        raise CommandError(f"--output: {error}") from error
    return {
        "output": str(output),
        "n_documents": now,
        "written": len(documents or ()),
        "deleted": deleted,
    }


def merge(
    folders: list[Path] = argument(
        "Folders of vectors of one kind, of the same model and settings.",
        ...,
    ),
    output: Path = required("Folder for all of them."),
    overwrite: bool = flag("Replace the vectors at --output.", "--overwrite"),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Write several folders of vectors as one: sparse, token or dense ones, whose texts differ."""
    from tilefold.retrieval.index.merging import merge_vectors

    with (
        _options.as_options(folders="FOLDERS:", output_dir="--output"),
        _common.heartbeat("merging"),
    ):
        made = merge_vectors(folders, output, overwrite=overwrite)
    result = {
        "output": str(output),
        "n": made.n_documents,
        "folders": [str(folder) for folder in folders],
    }
    _common.print_result(
        result,
        as_json,
        f"{made.n_documents} vectors of {len(folders)} folders: {output}",
    )
